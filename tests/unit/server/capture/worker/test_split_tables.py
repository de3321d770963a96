"""A table that is split over sinks, and split otherwise while it is read, gives what one sink gives
of the whole: the same rows with the same numbers in the same order, the same positions and counts.
"""

import itertools
import json
import tempfile
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.capture.local import LocalSink
from server.capture.worker.combined import CombinedSink
from server.changefeed.table import TableRecord
from server.puller.tidb.table import part, tidb_table
from server.rpc.errors import coded
from sink.errors import AckAboveResolvedError
from sink.flight.feeds import TableNotExistsError
from sorter import Sorter, SorterSettings
from sorter.errors import TableNotFoundError
from storage.model.errors import InvalidError
from storage.model.event import DELETE, INSERT, UPDATE, raw_batch
from storage.model.span import Span
from storage.tidb.record import encode_record, record_key
from storage.tidb.schema import Column, TableInfo

INFO = TableInfo.build(7, "t", [Column.bigint("id"), Column.bigint("v")])
KEYS = 12
SINKS = 3


WHOLE = tidb_table(TableRecord("s", json.loads(INFO.to_json())))


class Inline(Executor):
    """Asks one after the other."""

    def map(self, fn, *iterables):
        return map(fn, *iterables)


class Shared(LocalSink):
    """A share's sink."""

    local_sink = None


class One:
    """A sink with its sorter."""

    def __init__(self, stack, directory):
        self.sorter = Sorter(directory, SorterSettings(block_bytes=400, shards=1))
        self.sink = Shared(self.sorter, memory_quota_bytes=1 << 20)
        stack.callback(self.sorter.close)
        stack.callback(self.sink.stop)

    def add(self, table, start_ts, *, standby):
        self.sorter.add_table(table.span, start_ts)
        mount = table.mounter.mount
        self.sink.add_table(table.span, start_ts, mount, standby=standby)

    def remove(self, span):
        self.sink.remove_table(span)
        self.sorter.remove_table(span)


class Sides:
    """One sink with the whole table, and several with its parts."""

    def __init__(self, stack, directory):
        self.whole = One(stack, directory / "whole")
        self.several = [One(stack, directory / str(number)) for number in range(SINKS)]
        self.whole.add(WHOLE, 0, standby=False)
        self.several[0].add(WHOLE, 0, standby=False)
        self.placed = {WHOLE.span: self.several[0]}
        sinks = [one.sink for one in self.several]
        self.combined = CombinedSink({WHOLE.span: sinks[0]}, Inline(), sinks)
        self.rows, self.state, self.resolved_ts = [], {}, 0
        self._barrier()

    def commit(self, commit_ts, start_ts, changes):
        """A transaction; what each change is follows from what is there."""
        rows = []
        for key, value in changes.items():
            before = self.state.get(key)
            old = None if before is None else encode_record(INFO, {"id": key, "v": before})[1]
            if value is None and before is None:
                continue
            new = None if value is None else encode_record(INFO, {"id": key, "v": value})[1]
            op = DELETE if value is None else INSERT if before is None else UPDATE
            rows.append((commit_ts, start_ts, op, record_key(7, key), new, old))
            self.state[key] = value
        self.rows += rows
        self._add(self.whole, WHOLE.span, rows)
        for span, one in self.placed.items():
            self._add(one, span, rows)

    def resolve(self, ts):
        self.resolved_ts = max(self.resolved_ts, ts)
        self.whole.sorter.resolve(WHOLE.span, self.resolved_ts)
        for span, one in self.placed.items():
            one.sorter.resolve(span, self.resolved_ts)
        self._barrier()

    def reshape(self, borders, dealt):
        """Other parts, each pulled from the checkpoint by some sink."""
        keys = [WHOLE.span.start_key, *(record_key(7, key) for key in borders), WHOLE.span.end_key]
        spans = [Span(7, begin, end) for begin, end in itertools.pairwise(keys)]
        shape = {
            span: self.placed.get(span, self.several[number % SINKS])
            for span, number in zip(spans, dealt, strict=False)
        }
        new = {span: one for span, one in shape.items() if span not in self.placed}
        checkpoint_ts = self.combined.checkpoint_ts()
        self.combined.expect(new)
        for span, one in new.items():
            one.add(part(WHOLE, span) if span != WHOLE.span else WHOLE, checkpoint_ts, standby=True)
            self._add(one, span, [row for row in self.rows if row[0] > checkpoint_ts])
            one.sorter.resolve(span, self.resolved_ts)
            self.check()
        for span, one in new.items():
            one.sink.count(span, self.combined.checkpoint_ts(WHOLE.span))
            self.check()
        self.combined.reshape(WHOLE.span, {span: one.sink for span, one in shape.items()})
        self.check()
        for span, one in self.placed.items():
            if span not in shape:
                one.remove(span)
                self.check()
        self.placed = shape

    def check(self):
        """Between any two steps a reader finds the table, once."""
        checkpoint_ts = self.whole.sink.checkpoint_ts()
        assert self.combined.resolved_ts() == self.whole.sink.resolved_ts()
        assert self.combined.resolved_ts(WHOLE.span) == self.whole.sink.resolved_ts(WHOLE.span)
        assert self.combined.checkpoint_ts() == checkpoint_ts
        self.check_range(checkpoint_ts, self.resolved_ts)

    def check_range(self, start_ts, end_ts, slice_bytes=None):
        one, several = (
            pa.Table.from_batches(
                list(sink.read(WHOLE.span, start_ts, end_ts)), WHOLE.mounter.schema
            )
            for sink in (self.whole.sink, self.combined)
        )
        assert several.to_pylist() == one.to_pylist()
        for spans in (None, [WHOLE.span]):
            slices = self.combined.plan_tables(spans, start_ts, end_ts, slice_bytes)
            assert sum(each.rows for each in slices) == one.num_rows
            assert {each.span for each in slices} <= {WHOLE.span}
            if slices:
                assert [each.start_ts for each in slices[1:]] == [e.end_ts for e in slices[:-1]]
                assert (slices[0].start_ts, slices[-1].end_ts) == (start_ts, end_ts)

    def cut(self, max_rows):
        """A cut of the table alone, within bounds, holds at least one commit."""
        start_ts = self.combined.checkpoint_ts()
        end_ts = self.combined.cut(start_ts, max_rows, None, WHOLE.span)
        commits = [row[0] for row in self.rows if start_ts < row[0] <= self.resolved_ts]
        inside = [ts for ts in commits if ts <= end_ts]
        assert start_ts <= end_ts <= self.resolved_ts
        if commits:
            assert len(inside) <= max_rows or len({*inside}) == 1
            assert inside
        assert self.combined.cut(start_ts, max_rows) == self.whole.sink.cut(start_ts, max_rows)

    def ack(self, ts, *, alone):
        """All, or the table by itself."""
        assert self.combined.ack(ts, WHOLE.span if alone else None) == self.whole.sink.ack(
            ts, WHOLE.span if alone else None
        )

    def _barrier(self):
        for one in (self.whole, *self.several):
            one.sink.update_barrier_ts(self.resolved_ts)

    def _add(self, one, span, rows):
        inside = [row for row in rows if span.contains(row[3])]
        if inside:
            one.sorter.add(span, raw_batch(*map(list, zip(*inside, strict=True))))


CHANGES = st.dictionaries(
    st.integers(0, KEYS - 1), st.none() | st.integers(0, 99), min_size=1, max_size=KEYS
)
STEPS = st.lists(
    st.tuples(st.just("commit"), st.lists(CHANGES, min_size=1, max_size=3))
    | st.tuples(
        st.just("reshape"),
        st.lists(st.integers(1, KEYS - 1), unique=True, max_size=3).map(sorted),
        st.lists(st.integers(0, SINKS - 1), min_size=4, max_size=4),
    )
    | st.tuples(st.just("ack"), st.integers(0, 100), st.booleans())
    | st.tuples(st.just("cut"), st.integers(1, 20))
    | st.tuples(st.just("read"), st.integers(0, 100), st.integers(1, 2000)),
    max_size=14,
)


@settings(deadline=None, max_examples=40)
@given(STEPS)
def test_a_split_table_gives_what_the_whole_gives_whatever_its_parts_are(steps):
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides, ts = Sides(stack, Path(directory)), 10
        for step in steps:
            match step:
                case ("commit", transactions):
                    # Of one commit_ts there may be several transactions, of other clients.
                    for number, changes in enumerate(transactions):
                        sides.commit(ts + 5, ts + number, changes)
                    ts += 10
                    sides.resolve(ts)
                case ("reshape", borders, dealt) if borders or sides.placed.keys() != {WHOLE.span}:
                    sides.reshape(borders, dealt)
                case ("ack", percent, alone):
                    low = sides.combined.checkpoint_ts()
                    sides.ack(low + (sides.resolved_ts - low) * percent // 100, alone=alone)
                case ("cut", max_rows):
                    sides.cut(max_rows)
                case ("read", percent, slice_bytes):
                    low = sides.combined.checkpoint_ts()
                    middle = low + (sides.resolved_ts - low) * percent // 100
                    sides.check_range(low, middle, slice_bytes)
                    sides.check_range(middle, sides.resolved_ts, slice_bytes)
            sides.check()


def test_what_is_above_the_parts_of_a_table_is_not_acknowledged():
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides = Sides(stack, Path(directory))
        sides.commit(15, 10, {1: 1, 9: 1})
        sides.resolve(20)
        sides.reshape([5], [1, 2])
        with pytest.raises(AckAboveResolvedError):
            sides.combined.ack(21, WHOLE.span)
        sides.check()


def test_a_part_whose_share_has_ended_elsewhere_is_asked_for_again():
    """The capture that had it passes the call on, to an owner who knows whole tables only."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides = Sides(stack, Path(directory))
        sides.commit(15, 10, {1: 1, 9: 1})
        sides.resolve(20)
        sides.reshape([5], [1, 2])
        [_, (part_span, one)] = sides.placed.items()

        def gone(*_, **__):
            raise coded(InvalidError, TableNotExistsError.code, "no table 's.t#1f2e3d4c5b6a'")

        one.sink.read = gone
        with pytest.raises(TableNotFoundError):
            sides.combined.read(WHOLE.span, 0, 20)

        def moved(*_, **__):
            sides.combined.reshape(WHOLE.span, {WHOLE.span: sides.whole.sink})
            gone()

        one.sink.read = moved
        rows = [
            row for batch in sides.combined.read(WHOLE.span, 0, 20) for row in batch.to_pylist()
        ]
        assert [row["id"] for row in rows] == [1, 9], part_span
