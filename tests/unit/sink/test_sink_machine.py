"""Any interleaving of pullers, workers and a reader: what is staged is what the sorter has, whatever happens meanwhile.

The scheduler is deterministic: there are no threads, tasks are taken and run by rules of the machine, and between two
batches of a task whatever the machine has drawn happens: rows come, the reader reads and acknowledges.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sink.manager import SinkManager
from sorter import Sorter
from storage.model.event import INSERT, Position, raw_batch
from storage.model.span import Span

SPANS = [Span(number, b"t%d" % number, b"") for number in range(2)]
Row = tuple[int, int, bytes]
tables = st.integers(0, len(SPANS) - 1)


def mount(raw: pa.RecordBatch) -> pa.RecordBatch:
    ts, start_ts = (raw.column(name).cast(pa.int64()) for name in ("commit_ts", "start_ts"))
    return pa.record_batch(
        {"_commit_ts": ts, "_start_ts": start_ts, "key": raw.column("key"), "v": raw.column("value")}
    )


class Interrupted(Sorter):
    """A sorter that lets something happen before each batch it gives to a task."""

    happen: Callable[[], None] = staticmethod(lambda: None)

    def fetch(self, span: Span, lower: Position, upper: Position) -> Iterator[pa.RecordBatch]:
        for batch in super().fetch(span, lower, upper):
            self.happen()
            yield batch


class SinkMachine(RuleBasedStateMachine):
    """A changefeed of two tables, step by step."""

    @initialize(quota=st.sampled_from([1, 2000, 6000, 1 << 20]), split_txn=st.booleans())
    def begin(self, quota: int, split_txn: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.sorter = Interrupted(
            self.directory, memory_bytes=3000, block_bytes=400, segment_bytes=4000, shards=1, clean_interval_s=0
        )
        self.manager = SinkManager(self.sorter, memory_quota_bytes=quota, workers=1, split_txn=split_txn)
        self.quota, self.split_txn, self.largest = quota, split_txn, 0
        self.rows: dict[Span, set[Row]] = {span: set() for span in SPANS}
        self.resolved = dict.fromkeys(SPANS, 0)
        self.dispatcher = self.manager._dispatcher
        self.manager._quota.block_acquire = self.wait_for_memory
        for span in SPANS:
            self.sorter.add_table(span, 0)
            self.manager.add_table(span, 0, self.measured_mount)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.ack(min(self.resolved.values()))
            for span in SPANS:
                self.manager.remove_table(span)
            assert self.manager.stats().used_bytes == 0
            self.sorter.close()
            shutil.rmtree(self.directory)

    @rule(table=tables, changes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=40))
    def add(self, table: int, changes: list[tuple[int, int]]) -> None:
        span = SPANS[table]
        commit = [self.resolved[span] + after for after, _ in changes]
        started = [min(start_ts, ts - 1) for ts, (_, start_ts) in zip(commit, changes, strict=True)]  # always before
        rows = {(ts, start_ts, b"%04d" % n) for n, (ts, start_ts) in enumerate(zip(commit, started, strict=True))}
        self.rows[span] |= rows
        commit_ts, starts, keys = zip(*rows, strict=True)
        count = len(rows)
        values, none = [b"v" * 60] * count, [None] * count
        self.sorter.add(span, raw_batch(commit_ts, starts, [INSERT] * count, keys, values, none))

    @rule(table=tables, by=st.integers(1, 4))
    def resolve(self, table: int, by: int) -> None:
        span = SPANS[table]
        self.resolved[span] += by
        self.sorter.resolve(span, self.resolved[span])

    @rule(
        between=st.lists(st.tuples(st.sampled_from(["read", "ack", "add", "resolve"]), st.integers(1, 9)), max_size=8)
    )
    def work(self, between: list[tuple[str, int]]) -> None:
        self.dispatcher._short_of_memory = False
        task = self.dispatcher._take_slowest()
        if task is None:
            return
        waiting = list(between)
        self.sorter.happen = lambda: self.happen_next(waiting)
        self.dispatcher._work_on(task)
        self.sorter.happen = lambda: None
        assert not self.dispatcher.failures()

    @rule(table=tables, start=st.integers(0, 4), length=st.integers(0, 8))
    def read(self, table: int, start: int, length: int) -> None:
        span = SPANS[table]
        kept, upper_ts = self.manager._tables.one(span).cleaned_ts, self.resolved[span]
        start_ts = min(kept + start, upper_ts)
        end_ts = min(start_ts + length, upper_ts)
        found = [
            tuple(row.values())[:3] for batch in self.manager.read(span, start_ts, end_ts) for row in batch.to_pylist()
        ]
        assert found == sorted(row for row in self.rows[span] if start_ts < row[0] <= end_ts)

    @rule(share=st.integers(1, 9))
    def ack(self, share: int) -> None:
        checkpoint_ts, upper_ts = self.manager.checkpoint_ts(), min(self.resolved.values())
        ts = checkpoint_ts + (upper_ts - checkpoint_ts) * share // 9
        assert self.manager.ack(ts) == max(ts, checkpoint_ts)

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "manager") and self.split_txn:
            assert self.manager.stats().used_bytes <= max(self.quota, self.largest)

    @invariant()
    def minima_are_those_of_the_tables(self) -> None:
        if hasattr(self, "manager"):
            assert self.manager.resolved_ts() == min(self.resolved.values())
            assert self.manager.checkpoint_ts() == min(self.manager.checkpoint_ts(span) for span in SPANS)

    def happen_next(self, waiting: list[tuple[str, int]]) -> None:
        if not waiting:
            return
        what, number = waiting.pop()
        happen, self.sorter.happen = self.sorter.happen, lambda: None
        if what == "ack":
            self.ack(number)
        elif what == "read":
            self.read(number % 2, 0, number)
        elif what == "add":
            self.add(number % 2, [(number, 0)])
        else:
            self.resolve(number % 2, number)
        self.sorter.happen = happen

    def wait_for_memory(self, size: int) -> None:
        """The reader reads on and acknowledges, as far as the tables are complete; then there must be room."""
        for span in SPANS:
            self.manager.ack(self.resolved[span], span)
        assert self.manager._quota._ledger.has_room(size)
        self.manager._quota.force_acquire(size)

    def measured_mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        batch = mount(raw)
        self.largest = max(self.largest, batch.nbytes)
        return batch


TestSink = SinkMachine.TestCase
TestSink.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
