"""Power loss at every sync of a real LevelDB: what was answered is there,
a group in flight is whole or not there.
"""

import random
import shutil
from functools import partial
from pathlib import Path

import pytest

from storage.leveldb import LevelDB
from storage.mvcc import percolator, raw
from storage.mvcc.engine import Command, Engine
from storage.mvcc.prewrite import Mutation, Op, Prewrite, prewrite
from storage.mvcc.raw import RawPair

State = dict[bytes, bytes]


def group(number: int, rng: random.Random) -> list[Command]:
    """Commands of several transactions, every way to write."""
    commands: list[Command] = []
    for part in range(rng.randint(1, 4)):
        start_ts = 100 * number + 10 * part + 1
        keys = [b"%d-%d-%d" % (number, part, at) for at in range(rng.randint(1, 3))]
        mutations = [Mutation(Op.PUT, key, rng.randbytes(rng.choice([1, 400]))) for key in keys]
        how = {"one_pc": True} if part == 1 else {"async_commit": True} if part == 2 else {}
        txn = Prewrite(
            mutations=mutations,
            primary=keys[0],
            start_ts=start_ts,
            ttl_ms=1,
            secondaries=keys[1:],
            **how,
        )
        commands.append(partial(prewrite, txn=txn))
        if part == 0 and rng.random() < 0.5:
            commands.append(
                partial(percolator.commit, keys=keys, start_ts=start_ts, commit_ts=start_ts + 5)
            )
        elif part == 0:
            commands.append(partial(percolator.rollback, keys=keys, start_ts=start_ts))
        elif part == 3:
            commands.append(partial(raw.put, pairs=[RawPair(key, b"raw", 9) for key in keys]))
    return commands


def log_of(directory: Path) -> Path:
    """The write-ahead log that takes the next batch."""
    return max(directory.glob("*.log"), key=lambda path: int(path.stem))


def content(directory: Path) -> State:
    db = LevelDB(directory)
    try:
        return dict(db.scan(b""))
    finally:
        db.close()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_answered_is_lost_and_no_group_is_torn(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    live = tmp_path / "live"
    db = LevelDB(live)
    engine = Engine(db)
    before: State = {}
    synced = 0
    for number in range(1, 7):
        results = engine.apply(group(number, rng)).results
        engine.fence.release()
        assert not [result for result in results if isinstance(result, Exception)]
        after = dict(db.scan(b""))
        written = log_of(live).stat().st_size
        assert written > synced, "a group that is answered is in the log"
        for length in {synced, written, *(rng.randrange(synced, written) for _ in range(4))}:
            clone = tmp_path / f"clone-{number}-{length}"
            shutil.copytree(live, clone)
            with log_of(clone).open("r+b") as log:
                log.truncate(length)  # the rest never reached the disk
            assert content(clone) == (after if length == written else before)
        before, synced = after, written
    db.close()
    assert content(live) == before
