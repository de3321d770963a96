from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.kv import KV, WriteBatch
from storage.leveldb import LevelDB
from storage.pump.gc import BATCH_KEYS, BATCHES_PER_ROUND, Sweep
from storage.pump.index import commit_key, prewrite_key
from tests.memory_kv import MemoryKV

POINTER = bytes(16)


def filled(kv: KV, commits: int) -> KV:
    """Transactions with start_ts 2n-1 and commit_ts 2n."""
    batch = WriteBatch()
    for number in range(1, commits + 1):
        batch.put(prewrite_key(2 * number - 1), POINTER)
        batch.put(commit_key(2 * number, 2 * number - 1), POINTER)
    kv.write(batch, sync=False)
    return kv


def left(kv: KV) -> list[bytes]:
    return [key for key, _ in kv.scan(b"")]


def the_loop_of_the_seed(kv: KV, gc_ts: int, batch_keys: int, batches_per_round: int) -> None:
    """`for iter.Next() && batches < limit`, its iterator kept for the next round;
    tidb-binlog #728 fixed it.
    """
    keys: Iterator[tuple[bytes, bytes]] = kv.scan(b"c", commit_key(gc_ts + 1, 0))
    ended = False
    while not ended:
        batch, batches = WriteBatch(), 0
        while True:
            item = next(keys, None)
            ended = item is None
            if item is None or not batches < batches_per_round:
                break
            batch.delete(item[0])
            if len(batch) == batch_keys:
                kv.write(batch, sync=False)
                batch, batches = WriteBatch(), batches + 1
        kv.write(batch, sync=False)


def swept(kv: KV, gc_ts: int, batch_keys: int = BATCH_KEYS) -> int:
    sweep = Sweep(kv, gc_ts, batch_keys=batch_keys)
    deleted = 0
    while count := sweep.delete_batch():
        assert count <= batch_keys
        deleted += count
    return deleted


def test_the_loop_of_the_seed_leaks_a_key_for_each_full_round_and_ours_none() -> None:
    batch_keys, batches, commits = 4, 3, 40
    theirs, ours = filled(MemoryKV(), commits), filled(MemoryKV(), commits)
    the_loop_of_the_seed(theirs, 2 * commits, batch_keys, batches)
    leaked = [key for key in left(theirs) if key.startswith(b"c")]
    assert leaked == [commit_key(2 * number, 2 * number - 1) for number in (13, 26, 39)]
    assert swept(ours, 2 * commits, batch_keys) == 2 * commits
    assert left(ours) == []


@given(st.integers(0, 60), st.integers(0, 130), st.integers(2, 20))
def test_a_sweep_deletes_exactly_the_commits_up_to_gc_ts_and_their_prewrites(
    commits: int, gc_ts: int, batch_keys: int
) -> None:
    kv = filled(MemoryKV(), commits)
    deleted = swept(kv, gc_ts, batch_keys)
    kept = range(gc_ts // 2 + 1, commits + 1)
    assert left(kv) == [
        *(commit_key(2 * number, 2 * number - 1) for number in kept),
        *(prewrite_key(2 * number - 1) for number in kept),
    ]
    assert deleted == 2 * (commits - len(kept))


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_real_round_of_102400_keys_leaves_nothing_behind(tmp_path: Path, extra: int) -> None:
    commits = BATCH_KEYS * BATCHES_PER_ROUND // 2 + extra
    kv = filled(LevelDB(tmp_path), commits)
    assert swept(kv, 2 * commits) == 2 * commits
    assert left(kv) == []
    kv.close()
