"""GC: what a snapshot at or after the safepoint reads never changes, and what nobody can read goes."""

from hypothesis import given
from hypothesis import strategies as st

from storage.kv import WriteBatch
from storage.mvcc.gc import RangeGC
from storage.mvcc.history import key_history
from storage.mvcc.snapshot import Snapshot
from tests.unit.storage.mvcc.histories import TXNS, History, played


def collect(history: History, safe_point: int) -> None:
    kv = history.engine.kv
    for keys in list(RangeGC(kv.snapshot(), b"", b"", safe_point).batches()):
        batch = WriteBatch()
        for key in keys:
            batch.delete(key)
        kv.write(batch, sync=True)


@given(TXNS.map(played), st.lists(st.integers(0, 160), min_size=1, max_size=3))
def test_reads_at_or_after_the_safepoint_stay_as_they_were(history: History, safe_points: list[int]) -> None:
    for safe_point in safe_points:
        collect(history, safe_point)
    for ts in range(max(safe_points), history.end_ts + 10):
        snapshot = Snapshot(history.engine.kv, ts, ignore_locks=True)
        for key in history.versions:
            assert snapshot.get(key) == history.value(key, ts)


@given(TXNS.map(played), st.integers(0, 160))
def test_one_version_at_most_is_left_before_the_safepoint(history: History, safe_point: int) -> None:
    collect(history, safe_point)
    for key in history.versions:
        state = key_history(history.engine.kv, key)
        old = [write for commit_ts, write in state.writes if commit_ts <= safe_point]
        assert len(old) == (history.value(key, safe_point) is not None)
        kept = {write.start_ts for _, write in state.writes} | ({state.lock.start_ts} if state.lock else set())
        assert {start_ts for start_ts, _ in state.values} <= kept
