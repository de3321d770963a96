"""Any interleaving of pullers, workers, schema changes and a reader:
what is staged is what the sorter has.

The scheduler is deterministic: there are no threads, tasks are taken and run by rules of the
machine, and between two batches of a task whatever the machine has drawn happens: rows come, the
reader reads and acknowledges. The sorter may end a batch with any transaction, and memory may be
short at any time: so tasks are given up in the middle of a commit_ts.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sink.errors import RangeCrossesDdlError
from sink.manager import SinkManager
from sink.mounts import Mount
from sorter import Sorter, SorterSettings
from storage.model.event import INSERT, Position, raw_batch
from storage.model.span import Span

SPANS = [Span(number, b"t%d" % number, b"") for number in range(2)]
Row = tuple[int, int, bytes]
Task = tuple[
    list[tuple[str, int]], int, bool
]  # what happens between, batches before memory is short, by transaction
tables = st.integers(0, len(SPANS) - 1)
changes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=6, max_size=40)
happenings = st.lists(
    st.tuples(st.sampled_from(["read", "ack", "add", "resolve"]), st.integers(1, 9)), max_size=4
)
tasks = st.lists(st.tuples(happenings, st.integers(0, 5), st.booleans()), min_size=1, max_size=4)


class Interrupted(Sorter):
    """A sorter that lets something happen before each batch it gives to a task,
    and may end one with a transaction.
    """

    happen: Callable[[], None] = staticmethod(lambda: None)
    by_transaction = False

    def fetch(self, span: Span, lower: Position, upper: Position) -> Iterator[pa.RecordBatch]:
        for whole in super().fetch(span, lower, upper):
            for batch in _transactions(whole) if self.by_transaction else [whole]:
                self.happen()
                yield batch


def _transactions(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    names = list(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
    ends = [n for n in range(1, len(names)) if names[n] != names[n - 1]] + [len(names)]
    for begin, end in zip([0, *ends], ends, strict=False):
        yield batch.slice(begin, end - begin)


class Model:
    """What a table should be."""

    def __init__(self) -> None:
        self.rows: set[Row] = set()
        self.resolved = self.acked = self.began = 0
        self.end: int | None = None
        self.changes = [0]

    @property
    def upper(self) -> int:
        return self.resolved if self.end is None else min(self.resolved, self.end)

    @property
    def last(self) -> int:
        """No DDL can come below it."""
        return max(
            [self.resolved, self.changes[-1], self.end or 0, *(ts for ts, _, _ in self.rows)]
        )

    def schema(self, ts: int) -> int:
        """The DDL that gave the schema of rows with that commit_ts."""
        return max((change for change in self.changes if change < ts), default=0)

    def holds(self) -> int | None:
        """How far the whole may be resolved because of it."""
        return None if self.end is not None and self.resolved >= self.end else self.resolved


class SinkMachine(RuleBasedStateMachine):
    """A changefeed of two tables, step by step."""

    @initialize(quota=st.sampled_from([1, 2000, 6000, 1 << 20]), split_txn=st.booleans())
    def begin(self, quota: int, split_txn: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.sorter = Interrupted(
            self.directory,
            SorterSettings(
                memory_bytes=3000, block_bytes=400, segment_bytes=4000, shards=1, clean_interval_s=0
            ),
        )
        self.manager = SinkManager(
            self.sorter, memory_quota_bytes=quota, workers=1, split_txn=split_txn
        )
        self.quota, self.split_txn, self.largest = quota, split_txn, 0
        self.model = {span: Model() for span in SPANS}
        self.went = (0, 0)
        self.refused_after = -1
        self.dispatcher = self.manager._dispatcher
        self.dispatcher._request_bytes = 1  # each batch asks for memory
        self.manager._quota.block_acquire = self.wait_for_memory
        self.try_acquire = self.manager._quota.try_acquire
        self.manager._quota.try_acquire = self.acquire_if_not_refused
        for span in SPANS:
            self.sorter.add_table(span, 0)
            self.manager.add_table(span, 0, self.mount_of(0))

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.ack(self.manager.resolved_ts())
            for span in SPANS:
                self.manager.remove_table(span)
            assert self.manager.stats().used_bytes == 0
            self.sorter.close()
            shutil.rmtree(self.directory)

    @rule(table=tables, changes=changes, by=st.integers(0, 4), tasks=tasks)
    def pull(self, table: int, changes: list[tuple[int, int]], by: int, tasks: list[Task]) -> None:
        self.add(table, changes)
        self.resolve(table, by)
        self.work(tasks)

    @rule(tasks=tasks)
    def work(self, tasks: list[Task]) -> None:
        for between, granted, by_transaction in tasks:
            self.dispatcher._short_of_memory = False
            task = self.dispatcher._take_slowest()
            if task is None:
                return
            waiting = list(between)
            self.sorter.happen = lambda waiting=waiting: self.happen_next(waiting)
            self.sorter.by_transaction, self.refused_after = by_transaction, granted or -1
            self.dispatcher._work_on(task)
            self.sorter.happen, self.sorter.by_transaction, self.refused_after = (
                lambda: None,
                False,
                -1,
            )
            assert not self.dispatcher.failures()
            self.read_all(task.table.span)

    def add(self, table: int, changes: list[tuple[int, int]]) -> None:
        span, model = SPANS[table], self.model[SPANS[table]]
        if model.end is not None:
            return
        commit = [model.resolved + after for after, _ in changes]
        started = [
            min(start_ts, ts - 1) for ts, (_, start_ts) in zip(commit, changes, strict=True)
        ]  # always before
        rows = {
            (ts, start_ts, b"%04d" % n)
            for n, (ts, start_ts) in enumerate(zip(commit, started, strict=True))
        }
        model.rows |= rows
        commit_ts, starts, keys = zip(*rows, strict=True)
        count = len(rows)
        values, none = [b"v" * 60] * count, [None] * count
        self.sorter.add(span, raw_batch(commit_ts, starts, [INSERT] * count, keys, values, none))

    def resolve(self, table: int, by: int) -> None:
        span, model = SPANS[table], self.model[SPANS[table]]
        if self.manager._tables.get(span) is not None:
            model.resolved += by
            self.sorter.resolve(span, model.resolved)

    @rule(table=tables, after=st.integers(0, 2))
    def alter(self, table: int, after: int) -> None:
        span, model = SPANS[table], self.model[SPANS[table]]
        ts = model.resolved + after
        if model.end is None and ts > model.changes[-1]:
            model.changes.append(ts)
            self.manager.change_table(span, ts, self.mount_of(ts))

    @rule(after=st.integers(1, 3))
    def drop_or_create_again(self, after: int) -> None:
        if self.model[SPANS[1]].end is None:
            self.drop(after - 1)
        else:
            self.create_again(after)

    def drop(self, after: int) -> None:
        model = self.model[SPANS[1]]
        model.end = model.last + after
        self.manager.end_table(SPANS[1], model.end)

    def create_again(self, after: int) -> None:
        span, model = SPANS[1], self.model[SPANS[1]]
        ts = max(each.last for each in self.model.values()) + after
        if self.manager._tables.get(span) is None:
            self.sorter.add_table(span, ts)
            self.manager.add_table(span, ts, self.mount_of(ts), born=True)
            model.rows, model.began, model.acked = set(), ts, ts
        else:
            if model.resolved < model.end:  # a table comes again after all of it that was before
                self.sorter.resolve(span, model.end)
            self.manager.change_table(span, ts, self.mount_of(ts))
        model.resolved, model.end = ts, None
        model.changes.append(ts)

    @rule()
    def plan(self) -> None:
        """Who asks about all tables is told of each that has rows."""
        start_ts, end_ts = self.manager.checkpoint_ts(), self.manager.resolved_ts()
        began = max(model.began for model in self.model.values())
        borders = [ts for model in self.model.values() for ts in (*model.changes, model.end or 0)]
        if start_ts >= end_ts or any(start_ts < ts < end_ts for ts in borders):
            return
        cleaned = [
            table.cleaned_ts
            for span in SPANS
            if (table := self.manager._tables.get(span)) is not None
        ]
        if start_ts < max(
            cleaned, default=0
        ):  # a table whose rows were acknowledged by themselves, ahead of the others
            return
        planned = {part.span for part in self.manager.plan_tables(None, start_ts, end_ts)}
        expected = {
            span
            for span, model in self.model.items()
            if any(start_ts < row[0] <= end_ts for row in model.rows)
        }
        assert planned == expected or start_ts < began

    def read_all(self, span: Span) -> None:
        """Whatever is staged or not, all rows are there, up to each schema change."""
        table, model = self.manager._tables.get(span), self.model[span]
        if table is None:
            return
        start_ts = min(max(table.checkpoint_ts, model.began), model.upper)
        for end_ts in [*(ts for ts in model.changes if start_ts < ts < model.upper), model.upper]:
            self.check_read(span, start_ts, end_ts)
            start_ts = end_ts

    @rule(table=tables, start=st.integers(0, 4), length=st.integers(0, 8))
    def read(self, table: int, start: int, length: int) -> None:
        span, model = SPANS[table], self.model[SPANS[table]]
        if self.manager._tables.get(span) is None:
            return
        kept = max(self.manager._tables.one(span).cleaned_ts, model.began)
        start_ts = min(kept + start, model.upper)
        end_ts = min(start_ts + length, model.upper)
        if any(start_ts < change < end_ts for change in model.changes):
            with pytest.raises(RangeCrossesDdlError):
                self.manager.read(span, start_ts, end_ts)
            return
        self.check_read(span, start_ts, end_ts)

    def check_read(self, span: Span, start_ts: int, end_ts: int) -> None:
        model = self.model[span]
        rows = [
            row for batch in self.manager.read(span, start_ts, end_ts) for row in batch.to_pylist()
        ]
        assert [tuple(row.values())[:3] for row in rows] == sorted(
            row for row in model.rows if start_ts < row[0] <= end_ts
        )
        assert {row["schema"] for row in rows} <= {model.schema(end_ts)}

    @rule(share=st.integers(1, 9), table=st.one_of(st.none(), tables))
    def ack(self, share: int, table: int | None = None) -> None:
        span = None if table is None else SPANS[table]
        if span is not None and self.manager._tables.get(span) is None:
            return
        checkpoint_ts, upper_ts = self.manager.checkpoint_ts(span), self.manager.resolved_ts(span)
        ts = max(checkpoint_ts + (upper_ts - checkpoint_ts) * share // 9, checkpoint_ts)
        for each in SPANS if span is None else [span]:
            self.model[each].acked = max(self.model[each].acked, ts)
        assert self.manager.ack(ts, span) >= ts

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "manager") and self.split_txn:
            assert self.manager.stats().used_bytes <= max(self.quota, self.largest)

    @invariant()
    def the_whole_is_as_far_as_the_tables_that_hold_it(self) -> None:
        if hasattr(self, "manager"):
            held = [ts for model in self.model.values() if (ts := model.holds()) is not None]
            assert self.manager.resolved_ts() == min(held)
            present = [
                table for span in SPANS if (table := self.manager._tables.get(span)) is not None
            ]
            assert self.manager.checkpoint_ts() == min(
                table.checkpoint_ts for table in present if table.checkpoint_ts < table.end_ts
            )

    @invariant()
    def nothing_goes_back_and_no_row_is_passed_unacknowledged(self) -> None:
        if hasattr(self, "manager"):
            now = self.manager.resolved_ts(), self.manager.checkpoint_ts()
            assert all(before <= after for before, after in zip(self.went, now, strict=True))
            self.went = now
            for model in self.model.values():
                assert not [row for row in model.rows if model.acked < row[0] <= now[1]]

    def happen_next(self, waiting: list[tuple[str, int]]) -> None:
        if not waiting:
            return
        what, number = waiting.pop()
        saved = self.sorter.happen, self.sorter.by_transaction
        self.sorter.happen, self.sorter.by_transaction = lambda: None, False
        if what == "ack":
            self.ack(number, [None, 0, 1][number % 3])
        elif what == "read":
            self.read(number % 2, 0, number)
        elif what == "add":
            self.add(number % 2, [(number, 0)])
        else:
            self.resolve(number % 2, number)
        self.sorter.happen, self.sorter.by_transaction = saved

    def acquire_if_not_refused(self, size: int) -> bool:
        self.refused_after -= 1
        return self.refused_after != 0 and self.try_acquire(size)

    def wait_for_memory(self, size: int) -> None:
        """The reader reads on and acknowledges, as far as the tables are complete;
        then there must be room.
        """
        for span in SPANS:
            if self.manager._tables.get(span) is not None:
                model = self.model[span]
                model.acked = max(model.acked, model.upper)
                self.manager.ack(model.upper, span)
        assert self.manager._quota._ledger.has_room(size)
        self.manager._quota.force_acquire(size)

    def mount_of(self, ts: int) -> Mount:
        def mount(raw: pa.RecordBatch) -> pa.RecordBatch:
            commit_ts, start_ts = (
                raw.column(name).cast(pa.int64()) for name in ("commit_ts", "start_ts")
            )
            batch = pa.record_batch(
                {
                    "_commit_ts": commit_ts,
                    "_start_ts": start_ts,
                    "key": raw.column("key"),
                    "v": raw.column("value"),
                    "schema": pa.array([ts] * raw.num_rows, pa.int64()),
                }
            )
            self.largest = max(self.largest, batch.nbytes)
            return batch

        return mount


TestSink = pytest.mark.timeout(240)(SinkMachine.TestCase)
TestSink.settings = settings(max_examples=35, stateful_step_count=25, deadline=None)
