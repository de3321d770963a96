import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.kv import WriteBatch
from storage.pump.binlog import Kind
from storage.pump.index import START, Commit, Entry, Index, IndexVersionError
from storage.value_log import Pointer
from tests.memory_kv import MemoryKV

GOLDEN = Path(__file__).parents[3] / "golden" / "pump_index.json"
P, C, R = Kind.PREWRITE.value, Kind.COMMIT.value, Kind.ROLLBACK.value


def at(position: int, fid: int = 0) -> Pointer:
    return Pointer(fid, 100 * position, 100)


def applied(index: Index, *entries: Entry, first: int = 0, fid: int = 0) -> Index:
    index.apply(entries, [at(first + position, fid) for position in range(len(entries))])
    return index


def test_the_keys_are_the_documented_ones() -> None:
    kv = MemoryKV()
    index = applied(Index(kv), (P, 1, 0), (P, 2, 0), (R, 2, 0), (P, 3, 0))
    applied(index, (C, 1, 5), (R, 7, 7), fid=1)
    applied(index, (R, 3, 0), first=2, fid=1)
    assert index.advance_gc_ts(6)
    assert {key.hex(): value.hex() for key, value in kv.scan(b"")} == json.loads(GOLDEN.read_text())


def test_a_golden_index_stays_readable() -> None:
    pairs = {
        bytes.fromhex(key): bytes.fromhex(value)
        for key, value in json.loads(GOLDEN.read_text()).items()
    }
    index = Index(MemoryKV(pairs))
    assert (index.handle, index.head, index.max_commit_ts, index.gc_ts) == (
        Pointer(1, 300, 0),
        Pointer(1, 300, 0),
        7,
        6,
    )
    assert index.commits((0, 0), 10, 9, 1 << 20) == [
        Commit(5, 1, at(0, 1), at(0)),
        Commit(7, 7, at(1, 1), None),
    ]
    assert index.droppable({0: 3, 1: 7}) == [0]


def test_an_unknown_version_is_refused() -> None:
    kv = MemoryKV()
    applied(Index(kv), (R, 7, 7))
    batch = WriteBatch()
    batch.put(b"s", b"\x02" + (kv.get(b"s") or b"")[1:])
    kv.write(batch, sync=False)
    with pytest.raises(IndexVersionError, match="version 2, this tidemark knows 1"):
        Index(kv)


def test_a_restart_would_replay_from_the_oldest_wait() -> None:
    index = applied(Index(MemoryKV()), (P, 1, 0), (P, 2, 0), (C, 1, 5), (C, 9, 10))
    assert (index.handle[:2], index.head[:2], index.max_commit_ts) == ((0, 100), (0, 400), 0)
    applied(index, (C, 2, 6), first=4)
    assert (index.handle, index.max_commit_ts) == (index.head, 10)


def test_a_chunk_ends_by_number_by_bytes_or_at_the_last_complete_commit() -> None:
    index = Index(MemoryKV())
    for number in range(10):
        applied(
            index, (P, 10 * number + 1, 0), (C, 10 * number + 1, 10 * number + 5), first=2 * number
        )
    assert [commit.commit_ts for commit in index.commits((0, 0), 95, 3, 1 << 20)] == [5, 15, 25]
    assert [commit.commit_ts for commit in index.commits((15, 11), 95, 99, 400)] == [25, 35]
    assert [commit.commit_ts for commit in index.commits((75, 0), 85, 99, 1 << 20)] == [75, 85]


def test_a_late_commit_is_counted_a_repeated_one_is_not() -> None:
    index = applied(Index(MemoryKV()), (R, 20, 20))
    applied(index, (C, 3, 4), (C, 3, 4), first=1)
    assert index.late_commits == 1


@given(st.data())
def test_a_segment_that_a_reader_or_a_restart_can_ask_for_is_never_droppable(
    data: st.DataObject,
) -> None:
    """Random transactions, one record a segment: after GC every commit left still finds itself and
    its prewrite.
    """
    index = Index(MemoryKV())
    running: list[int] = []
    max_ts: dict[int, int] = {}
    for clock in range(1, data.draw(st.integers(1, 40))):
        if running and data.draw(st.booleans()):
            start_ts = running.pop(data.draw(st.integers(0, len(running) - 1)))
            entry = (C, start_ts, clock) if data.draw(st.booleans()) else (R, start_ts, 0)
        else:
            running.append(clock)
            entry = (P, clock, 0)
        max_ts[clock] = entry[2] or entry[1]
        index.apply([entry], [Pointer(clock, 0, 10)])
    index.advance_gc_ts(data.draw(st.integers(0, 40)))
    kept = max_ts.keys() - set(index.droppable(max_ts))
    for commit in index.commits((index.gc_ts, 1 << 60), 100, 1000, 1 << 20):
        assert commit.prewrite is not None
        assert {commit.pointer.fid, commit.prewrite.fid} <= kept
    assert index.handle == START or {fid for fid in max_ts if fid >= index.handle.fid} <= kept
