"""The sink manager: any resolved range, again and again the same rows,
from memory or from the sorter.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from sink.errors import AckAboveResolvedError, RangeError, SinkRowsLostError
from sink.manager import SinkManager
from sink.progress import ResolvedTs
from sorter import Sorter, SorterSettings
from sorter.errors import NotResolvedError, RangeCleanedError, TableExistsError, TableNotFoundError
from storage.model.event import INSERT, raw_batch
from storage.model.span import Span

SPANS = [Span(table, b"t%d" % table, b"") for table in range(3)]
Row = tuple[int, int, bytes]


def mount(raw: pa.RecordBatch) -> pa.RecordBatch:
    commit_ts, start_ts = (raw.column(name).cast(pa.int64()) for name in ("commit_ts", "start_ts"))
    transactions = list(zip(commit_ts.to_pylist(), start_ts.to_pylist(), strict=True))
    seq = [transactions[:n].count(transaction) for n, transaction in enumerate(transactions)]
    return pa.record_batch(
        {
            "_commit_ts": commit_ts,
            "_start_ts": start_ts,
            "_seq": pa.array(seq, pa.int64()),
            "key": raw.column("key"),
            "value": raw.column("value"),
        }
    )


def raw(rows: list[Row]) -> pa.RecordBatch:
    count = len(rows)
    commit_ts, start_ts, keys = zip(*rows, strict=True)
    return raw_batch(
        commit_ts, start_ts, [INSERT] * count, keys, [b"v" * 40] * count, [None] * count
    )


def read(manager: SinkManager, span: Span, start_ts: int, end_ts: int) -> list[tuple]:
    return [
        tuple(row.values())[:4]
        for batch in manager.read(span, start_ts, end_ts)
        for row in batch.to_pylist()
    ]


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.005)


class Capture:
    """A sorter and a sink manager with tables, as a capture has them."""

    def __init__(
        self,
        directory: Path,
        *,
        quota: int = 1 << 20,
        split_txn: bool = True,
        stage_after_s: float = 0.0,
    ) -> None:
        sizes = {"memory_bytes": 4000, "block_bytes": 500, "segment_bytes": 4000}
        self.sorter = Sorter(directory, SorterSettings(**sizes, shards=1, clean_interval_s=0))
        self.manager = SinkManager(
            self.sorter,
            memory_quota_bytes=quota,
            workers=2,
            split_txn=split_txn,
            stage_after_s=stage_after_s,
        )
        for span in SPANS:
            self.sorter.add_table(span, 0)
            self.manager.add_table(span, 0, mount)

    def resolve(self, ts: int) -> None:
        for span in SPANS:
            self.sorter.resolve(span, ts)

    def close(self) -> None:
        self.manager.stop()
        self.sorter.close()


@pytest.fixture
def capture(tmp_path: Path) -> Iterator[Capture]:
    opened = Capture(tmp_path)
    yield opened
    opened.close()


def test_resolved_ts_is_the_least_of_the_tables_and_of_the_barrier(capture: Capture) -> None:
    manager = capture.manager
    capture.resolve(5)
    capture.sorter.resolve(SPANS[0], 9)
    assert (manager.resolved_ts(), manager.resolved_ts(SPANS[0])) == (5, 9)
    manager.update_barrier_ts(7)
    assert (manager.resolved_ts(), manager.resolved_ts(SPANS[0])) == (5, 7)
    capture.resolve(20)
    assert manager.resolved_ts() == 7
    manager.update_barrier_ts(6)
    assert manager.resolved_ts() == 7
    with pytest.raises(NotResolvedError):
        manager.read(SPANS[0], 0, 8)
    manager.update_barrier_ts(30)
    assert manager.resolved_ts() == 20


def test_waiting_ends_with_news_or_with_time(capture: Capture) -> None:
    assert capture.manager.wait_resolved(0, 0.01) == 0
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(capture.manager.wait_resolved(0, 20)))
    waiter.start()
    capture.resolve(3)
    waiter.join()
    assert got == [3]


def test_a_cut_never_splits_a_commit_ts(capture: Capture) -> None:
    manager = capture.manager
    capture.sorter.add(
        SPANS[0], raw([(1, 0, b"a"), (5, 0, b"a"), (5, 0, b"b"), (5, 1, b"c"), (9, 0, b"a")])
    )
    capture.sorter.add(SPANS[1], raw([(1, 0, b"a"), (5, 0, b"a")]))
    capture.resolve(10)
    assert manager.cut(0) == 10
    assert manager.cut(0, max_rows=1) == 1
    assert manager.cut(0, max_rows=5) == 4
    assert manager.cut(4, max_rows=1) == 5
    assert manager.cut(0, max_rows=6) == 8
    assert manager.cut(0, max_rows=100) == 10
    assert manager.cut(0, max_rows=1, span=SPANS[2]) == 10
    assert manager.cut(0, max_bytes=1) == 1
    assert manager.cut(10) == 10


def test_what_is_acknowledged_can_be_replayed_until_the_next_acknowledgement(
    capture: Capture,
) -> None:
    manager = capture.manager
    for span in SPANS:
        capture.sorter.add(span, raw([(ts, 0, b"k") for ts in range(1, 31)]))
    capture.resolve(30)
    first = read(manager, SPANS[0], 0, 10)
    assert manager.ack(10) == 10
    assert read(manager, SPANS[0], 0, 10) == first
    assert manager.ack(20) == 20
    assert read(manager, SPANS[0], 10, 20) == [(ts, 0, 0, b"k") for ts in range(11, 21)]
    with pytest.raises(RangeCleanedError):
        manager.read(SPANS[0], 9, 20)
    with pytest.raises(RangeCleanedError):
        manager.cut(9)
    assert manager.ack(15) == 20


def test_the_checkpoint_waits_for_every_table_and_every_range(capture: Capture) -> None:
    manager = capture.manager
    capture.resolve(30)
    assert manager.ack(30, SPANS[0]) == 30
    assert manager.checkpoint_ts() == 0
    manager.ack(30, SPANS[1])
    assert manager.ack(20, SPANS[2], start_ts=10) == 0
    assert manager.ack(10, SPANS[2], start_ts=0) == 20
    assert manager.checkpoint_ts() == 20


def test_bad_calls_are_named(capture: Capture) -> None:
    manager, stranger = capture.manager, Span(99, b"x", b"")
    capture.resolve(10)
    with pytest.raises(AckAboveResolvedError):
        manager.ack(11)
    with pytest.raises(RangeError):
        manager.read(SPANS[0], 5, 4)
    with pytest.raises(NotResolvedError):
        manager.read(SPANS[0], 5, 11)
    with pytest.raises(TableExistsError):
        manager.add_table(SPANS[0], 0, mount)
    for call in (manager.resolved_ts, manager.checkpoint_ts):
        with pytest.raises(TableNotFoundError):
            call(stranger)
    manager.remove_table(stranger)
    assert manager.checkpoint_ts() == 0


def test_staged_rows_are_served_from_memory_and_freed_by_acknowledging(capture: Capture) -> None:
    manager = capture.manager
    manager.start()
    capture.sorter.add(SPANS[0], raw([(ts, 0, b"k") for ts in range(1, 31)]))
    capture.resolve(30)
    eventually(lambda: manager._tables.one(SPANS[0]).staged_rows(0, 30) is not None)
    assert read(manager, SPANS[0], 0, 30) == [(ts, 0, 0, b"k") for ts in range(1, 31)]
    assert manager.stats().reads_staged == 1
    manager.ack(30)
    eventually(lambda: manager.stats().used_bytes == 0)


def add_to_parked(capture: Capture, ts: int) -> None:
    """A row of the first table, when the dispatcher has seen that there was nothing before."""
    capture.manager.start()
    heap = capture.manager._dispatcher._heap
    eventually(lambda: heap.is_parked(SPANS[0]))
    capture.sorter.add(SPANS[0], raw([(ts, 0, b"k")]))
    capture.resolve(ts)


def test_rows_that_nobody_reads_are_staged_after_a_while(tmp_path: Path) -> None:
    with closing(Capture(tmp_path, stage_after_s=0.01)) as capture:
        add_to_parked(capture, 3)
        table = capture.manager._tables.one(SPANS[0])
        eventually(lambda: table.staged_rows(0, 3) is not None)


def test_a_reader_that_keeps_up_gets_its_rows_from_the_sorter_and_nothing_is_staged(
    tmp_path: Path,
) -> None:
    """Each small transaction was staged by itself, at the price of a thousand rows."""
    with closing(Capture(tmp_path, stage_after_s=3600.0)) as capture:
        add_to_parked(capture, 3)
        manager, dispatcher = capture.manager, capture.manager._dispatcher
        assert read(manager, SPANS[0], 0, 3) == [(3, 0, 0, b"k")]
        _, checkpoint_ts = dispatcher._fresh[SPANS[0]]
        manager.ack(3)
        # The time is over.
        dispatcher._fresh[SPANS[0]] = 0.0, checkpoint_ts
        dispatcher.memory_freed()
        eventually(lambda: not dispatcher._fresh)
        assert dispatcher._heap.is_parked(SPANS[0])
        assert manager.stats().reads_sorter == 1
        # And again: rows above an acknowledgement wait as the first did.
        capture.sorter.add(SPANS[0], raw([(5, 0, b"k")]))
        capture.resolve(5)
        assert dispatcher._fresh[SPANS[0]][1] == 3


def test_a_removed_table_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    with closing(Capture(tmp_path, stage_after_s=3600.0)) as capture:
        add_to_parked(capture, 3)
        capture.manager.remove_table(SPANS[0])
        assert not capture.manager._dispatcher._fresh


def test_a_table_that_cannot_be_mounted_tells_its_reader(capture: Capture) -> None:
    def broken(_: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("bad row")

    manager = capture.manager
    manager.remove_table(SPANS[0])
    manager.add_table(SPANS[0], 0, broken)
    manager.start()
    for span in SPANS:
        capture.sorter.add(span, raw([(1, 0, b"k")]))
    capture.resolve(5)
    eventually(lambda: manager._tables.one(SPANS[1]).staged_rows(0, 5) is not None)
    with pytest.raises(ValueError, match="bad row"):
        read(manager, SPANS[0], 0, 5)
    assert read(manager, SPANS[1], 0, 5) == [(1, 0, 0, b"k")]


def test_a_failed_table_holds_nobody_back_and_comes_back_when_its_reader_got_past_it(
    capture: Capture,
) -> None:
    failing = [True]

    def fragile(raw: pa.RecordBatch) -> pa.RecordBatch:
        if failing and threading.current_thread().name.startswith("sink-worker"):
            raise OSError("no more of it")
        return mount(raw)

    manager = capture.manager
    manager.remove_table(SPANS[0])
    manager.add_table(SPANS[0], 0, fragile)
    manager.start()
    for span in SPANS:
        capture.sorter.add(span, raw([(ts, 0, b"k") for ts in range(1, 30)]))
    capture.resolve(9)
    eventually(lambda: manager._tables.one(SPANS[1]).staged_rows(0, 9) is not None)
    eventually(lambda: list(manager.stats().failures) == [SPANS[0]])
    assert "no more of it" in manager.stats().failures[SPANS[0]]
    assert len(read(manager, SPANS[0], 0, 9)) == 9
    failing.clear()
    capture.resolve(29)
    manager.ack(9)
    eventually(lambda: manager._tables.one(SPANS[0]).staged_rows(9, 29) is not None)
    eventually(lambda: not manager.stats().failures)


@pytest.mark.parametrize("started", [True, False])
def test_a_table_that_lost_rows_gives_none_and_takes_no_acknowledgement(
    capture: Capture, started: bool
) -> None:
    manager = capture.manager
    manager.remove_table(SPANS[0])
    manager.add_table(SPANS[0], 0, lambda raw: mount(raw).slice(1))
    if started:
        manager.start()
    for span in SPANS:
        capture.sorter.add(span, raw([(ts, 0, b"k") for ts in range(1, 30)]))
    capture.resolve(9)
    if started:
        eventually(lambda: SPANS[0] in manager.stats().failures)
    with pytest.raises(SinkRowsLostError, match="table 0, commit_ts 1 to"):
        read(manager, SPANS[0], 0, 9)
    with pytest.raises(SinkRowsLostError):
        manager.ack(9)
    with pytest.raises(SinkRowsLostError):
        read(manager, SPANS[0], 0, 1)
    assert [manager.checkpoint_ts(span) for span in SPANS] == [0, 9, 9]
    manager.remove_table(SPANS[0])
    assert manager.ack(9) == 9


def test_a_row_lost_in_the_staging_is_noticed(capture: Capture) -> None:
    manager = capture.manager
    manager.start()
    capture.sorter.add(SPANS[0], raw([(ts, 0, b"k") for ts in range(1, 30)]))
    capture.resolve(30)
    table = manager._tables.one(SPANS[0])
    eventually(lambda: table.staged_rows(0, 30) is not None)
    table._staging._staged.pop()
    with pytest.raises(SinkRowsLostError, match="table 0, commit_ts 1 to 30"):
        manager.read(SPANS[0], 0, 30)
    with pytest.raises(SinkRowsLostError):
        manager.ack(30)


@pytest.mark.parametrize("split_txn", [True, False])
def test_tasks_that_are_given_up_do_not_hide_a_lost_row(tmp_path: Path, split_txn: bool) -> None:
    capture = Capture(tmp_path, quota=4000, split_txn=split_txn)
    manager, span = capture.manager, SPANS[0]
    dispatcher = manager._dispatcher
    capture.sorter.add(span, raw([(ts, 0, b"%03d" % ts) for ts in range(1, 200)]))
    capture.sorter.resolve(span, 1 << 29)
    # As if a row had been added, and lost since.
    capture.sorter._table(span)._thaw().checksums.add(raw([(50, 0, b"lost")]))
    tasks = 0
    while manager._tables.one(span).lost is None:
        dispatcher._short_of_memory = False
        task = dispatcher._take_slowest()
        assert task is not None
        dispatcher._work_on(task)
        tasks += 1
        manager._quota.release(span, ResolvedTs(1 << 60))
    assert tasks > 1
    with pytest.raises(SinkRowsLostError, match="table 0"):
        manager.ack(100, span)
    capture.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("split_txn", [True, False])
@pytest.mark.parametrize("quota", [1, 3000, 1 << 20])
def test_every_row_is_read_once_whatever_the_memory(
    tmp_path: Path, quota: int, split_txn: bool, seed: int
) -> None:
    capture, rng = Capture(tmp_path, quota=quota, split_txn=split_txn), random.Random(seed)
    manager, checkpoint_ts = capture.manager, 0
    expected: dict[Span, list[Row]] = {span: [] for span in SPANS}
    got: dict[Span, list[tuple]] = {span: [] for span in SPANS}
    manager.start()
    for base in range(0, 240, 20):
        for span in SPANS:
            keys = rng.sample(range(200), rng.randrange(1, 60))
            rows = [
                (base + 5 + rng.randrange(16) // 7 * 7, rng.randrange(4), b"%03d" % key)
                for key in keys
            ]
            expected[span] += rows
            capture.sorter.add(span, raw(rows))
            capture.sorter.resolve(span, base + 20)
        if rng.random() < 0.6:
            end_ts = manager.cut(checkpoint_ts, max_rows=rng.choice([None, 1, 50, 500]))
            for span in SPANS:
                once = read(manager, span, checkpoint_ts, end_ts)
                assert read(manager, span, checkpoint_ts, end_ts) == once
                assert sum(
                    part.rows for part in manager.plan_tables([span], checkpoint_ts, end_ts)
                ) == len(once)
                got[span] += once
            checkpoint_ts = manager.ack(end_ts)
    for span in SPANS:
        got[span] += read(manager, span, checkpoint_ts, 240)
        assert [(row[0], row[1], row[3]) for row in got[span]] == sorted(expected[span])
        transactions = [row[:2] for row in got[span]]
        assert [row[2] for row in got[span]] == [
            transactions[:n].count(row) for n, row in enumerate(transactions)
        ]
    manager.ack(240)
    manager.stop()
    assert manager.stats().used_bytes == 0
    capture.close()


def test_stopping_ends_a_worker_that_waits_for_memory(tmp_path: Path) -> None:
    capture = Capture(tmp_path, quota=2000)
    capture.manager.start()
    capture.sorter.add(SPANS[0], raw([(5, 1, b"%03d" % key) for key in range(100)]))
    capture.resolve(10)
    table = capture.manager._tables.one(SPANS[0])
    eventually(lambda: table._staging is not None and table._staging.covered_to == 4)
    capture.close()
    assert capture.manager.stats().used_bytes == 0
