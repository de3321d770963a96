"""The sinks of several workers, taken together, answer as one sink manager with all tables."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.capture.cut import combined_cut, cut_part
from server.capture.local import LocalSink
from server.capture.worker import wire
from server.capture.worker.combined import CombinedSink
from sink.cut import Bounds
from sink.errors import AckAboveResolvedError
from sorter import Sorter, SorterSettings
from sorter.errors import TableNotFoundError
from storage.model.errors import TidemarkError
from storage.model.event import INSERT, raw_batch
from storage.model.span import Span

SPANS = [Span(table, b"t%d" % table, b"") for table in range(4)]
HIGHEST = 60
NEVER_A_SUM_BYTES = 0.3183098861837907
"""No sum of row weights ends like that: whether rows fit is never a matter of rounding."""


class Inline(Executor):
    """Asks one after the other."""

    def map(self, fn, *iterables):
        return map(fn, *iterables)


class Overheard(LocalSink):
    """Its part of a cut goes over the wire and back."""

    def cut_part(self, start_ts, upper_ts, bounds):
        message = wire.part_message(super().cut_part(start_ts, upper_ts, bounds))
        return wire.part_of(type(message).FromString(message.SerializeToString()))


class Side:
    """Tables dealt to `shares` sinks, each with a sorter of its own."""

    def __init__(self, directory: Path, dealt: list[int]) -> None:
        self.sinks, self.sorters, self.owners = [], [], {}
        for share in sorted(set(dealt)):
            spans = [span for span, owner in zip(SPANS, dealt, strict=True) if owner == share]
            sorter = Sorter(directory / str(share), SorterSettings(block_bytes=400, shards=1))
            sink = Overheard(sorter, memory_quota_bytes=1 << 20)
            for span in spans:
                sorter.add_table(span, 0)
                sink.add_table(span, 0, lambda raw: raw)
                self.owners[span] = sink
            self.sinks.append(sink)
            self.sorters.append(sorter)

    def feed(self, span: Span, resolved_ts: int, commits: list[int]) -> None:
        sorter = self.sorters[self.sinks.index(self.owners[span])]
        if commits:
            keys = [b"%d" % number for number in range(len(commits))]
            values = [b"v" * (10 + 7 * number % 90) for number in range(len(commits))]
            sorter.add(span, batch(commits, keys, values))
        sorter.resolve(span, resolved_ts)

    def close(self) -> None:
        for sink, sorter in zip(self.sinks, self.sorters, strict=True):
            sink.stop()
            sorter.close()


def batch(commits: list[int], keys: list[bytes], values: list[bytes]) -> pa.RecordBatch:
    count = len(commits)
    return raw_batch(
        commits, [ts - 1 for ts in commits], [INSERT] * count, keys, values, [None] * count
    )


def outcome(call):
    try:
        return call()
    except TidemarkError as err:
        return type(err)


TS = st.integers(0, HIGHEST)
BOUND = st.none() | st.integers(0, 40)
SPAN = st.none() | st.sampled_from(SPANS)
OPERATIONS = st.lists(
    st.tuples(
        st.just("feed"),
        st.sampled_from(SPANS),
        st.integers(0, 30),
        st.lists(st.integers(1, 12), max_size=20),
    )
    | st.tuples(st.just("cut"), TS, BOUND, st.none() | st.integers(0, 3000), SPAN)
    | st.tuples(st.just("plan"), TS, TS)
    | st.tuples(st.just("ack"), TS, SPAN),
    max_size=40,
)


def carry_out(sink, operation):
    match operation:
        case ("cut", start_ts, max_rows, max_bytes, span):
            limit = None if max_bytes is None else max_bytes + NEVER_A_SUM_BYTES
            return outcome(lambda: sink.cut(start_ts, max_rows, limit, span))
        case ("plan", start_ts, end_ts):
            return outcome(
                lambda: sorted(
                    sink.plan_tables(SPANS, start_ts, end_ts), key=lambda part: part.span
                )
            )
        case ("ack", ts, span):
            return outcome(lambda: sink.ack(ts, span))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=len(SPANS), max_size=len(SPANS)),
    st.none() | TS,
    OPERATIONS,
)
def test_several_sinks_answer_as_one_with_all_tables(dealt, barrier_ts, operations):
    with tempfile.TemporaryDirectory() as directory:
        one, several = (
            Side(Path(directory, "one"), [0] * len(SPANS)),
            Side(Path(directory, "several"), dealt),
        )
        [single], combined = one.sinks, CombinedSink(several.owners, Inline())
        if barrier_ts is not None:
            for sink in (single, *several.sinks):
                sink.update_barrier_ts(barrier_ts)
        resolved = dict.fromkeys(SPANS, 0)
        for operation in operations:
            if operation[0] == "feed":
                _, span, step, commits = operation
                below, resolved[span] = resolved[span], min(resolved[span] + step, HIGHEST)
                above = [below + commit for commit in commits]
                for side in (one, several):
                    side.feed(span, resolved[span], above)
            elif operation[0] == "ack" and barrier_ts is not None and operation[1] > barrier_ts:
                continue  # readers acknowledge what they were given
            else:
                assert carry_out(combined, operation) == carry_out(single, operation), operation
            for span in (None, *SPANS):
                assert combined.resolved_ts(span) == single.resolved_ts(span)
                assert combined.checkpoint_ts(span) == single.checkpoint_ts(span)
        one.close()
        several.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Side]:
    side = Side(tmp_path, [0, 0, 1, 1])
    yield side
    side.close()


def test_an_acknowledgement_that_one_share_refuses_reaches_none(two):
    for span in SPANS:
        two.feed(span, 50 if span != SPANS[3] else 10, [5])
    combined = CombinedSink(two.owners, Inline())
    with pytest.raises(AckAboveResolvedError):
        combined.ack(20)
    assert [sink.checkpoint_ts() for sink in two.sinks] == [0, 0]
    assert combined.ack(10) == 10


def test_a_table_of_nobody_is_named(two):
    with pytest.raises(TableNotFoundError, match="table 99"):
        CombinedSink(two.owners, Inline()).plan_tables([Span(99, b"", b"")], 0, 1)


def test_a_part_of_very_many_commits_ends_early_and_the_cut_with_it(two):
    two.feed(SPANS[0], 40, [1, 2, 2, 3, 4, 5, 6])
    two.feed(SPANS[2], 40, [2, 9])
    extents = [two.sorters[0].extents(SPANS[0], 1, 40), two.sorters[1].extents(SPANS[2], 1, 40)]
    parts = [cut_part(found, 0, 40, commits_max=3) for found in extents]
    assert [part.end_ts for part in parts] == [3, 40]
    assert [extent.commit_ts.tolist() for extent in parts[0].extents] == [[1, 2, 3]]
    assert combined_cut(parts, 0, Bounds(max_rows=100)) == 3
    assert combined_cut(parts, 0, Bounds(max_rows=2)) == 1
