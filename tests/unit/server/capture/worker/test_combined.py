"""The sinks of several workers, taken together, answer as one sink manager with all tables."""

import asyncio
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.capture.cut import combined_cut, cut_part
from server.capture.local import LocalSink
from server.capture.worker import wire
from server.capture.worker.combined import CombinedSink
from server.capture.worker.shared_tables import SchemaChangeRouter
from sink.cut import Bounds
from sink.errors import AckAboveResolvedError
from sorter import Sorter, SorterSettings
from sorter.errors import NotResolvedError, RangeCleanedError, TableNotFoundError
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.event import INSERT, raw_batch
from storage.model.span import Span
from storage.model.ts import MAX_TS
from storage.tasks import background_tasks

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

    local_sink = None

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


class Moving(Side):
    """As a side; its tables go from one sink to another, and are pulled there from the whole's
    checkpoint.
    """

    def __init__(self, directory: Path, dealt: list[int]) -> None:
        super().__init__(directory, dealt)
        self.combined = CombinedSink(self.owners, Inline())
        self.rows: list[tuple[Span, int, bytes, bytes]] = []
        self.coming: dict[Span, int] = {}
        """Tables that stand by in the sink of that number."""
        self.late: dict[Span, int] = {}
        """Those of them that have yet to resolve up to there."""

    def feed(self, span: Span, resolved_ts: int, commits: list[int]) -> None:
        fed = [(span, ts, b"%d" % n, b"v" * (10 + 7 * n % 90)) for n, ts in enumerate(commits)]
        self.rows += fed
        for number in {self.sinks.index(self.owners[span]), *self._to(span)}:
            self._add(number, fed)
        self.sorters[self.sinks.index(self.owners[span])].resolve(span, resolved_ts)
        if span in self.coming:
            self.late[span] = resolved_ts

    def prepare(self, span: Span, number: int, resolved_ts: int) -> None:
        number %= len(self.sinks)
        if span in self.coming or self.sinks[number] is self.owners[span]:
            return
        start_ts = self.combined.checkpoint_ts()
        self.sorters[number].add_table(span, start_ts)
        self.sinks[number].add_table(span, start_ts, lambda raw: raw, standby=True)
        self._add(number, [row for row in self.rows if row[0] == span and row[1] > start_ts])
        self.coming[span], self.late[span] = number, max(resolved_ts, start_ts)

    def catch_up(self, span: Span) -> None:
        if span in self.late:
            self.sorters[self.coming[span]].resolve(span, self.late.pop(span))

    def switch(self, span: Span, whole: LocalSink) -> None:
        number = self.coming.pop(span, None)
        self.late.pop(span, None)
        if number is None:
            return
        source, target = self.owners[span], self.sinks[number]
        gone = target, number
        try:
            target.count(span, source.checkpoint_ts(span))
            gone = source, self.sinks.index(source)
            self._check_plan(whole)
            self.combined.move([span], target)
            self._check_plan(whole)
            self.owners[span] = target
        except NotResolvedError:
            pass
        sink, number = gone
        sink.remove_table(span)
        self.sorters[number].remove_table(span)

    def _check_plan(self, whole: LocalSink) -> None:
        end_ts = whole.resolved_ts()
        start_ts = min(end_ts, max(whole.checkpoint_ts(span) for span in (None, *SPANS)))
        plans = [sink.plan_tables(None, start_ts, end_ts) for sink in (self.combined, whole)]
        assert len(plans[0]) == len(plans[1])
        # Weights are estimates, of blocks that are cut otherwise after a move.
        one, several = ({(part.span, part.rows) for part in plan} for plan in plans)
        assert one == several
        assert self.combined.resolved_ts() == end_ts

    def _to(self, span: Span) -> list[int]:
        return [self.coming[span]] if span in self.coming else []

    def _add(self, number: int, rows: list[tuple[Span, int, bytes, bytes]]) -> None:
        if rows:
            [span] = {row[0] for row in rows}
            _, commits, keys, values = zip(*rows, strict=True)
            self.sorters[number].add(span, batch(list(commits), list(keys), list(values)))


FED = st.tuples(st.integers(0, 30), st.lists(st.integers(1, 12), max_size=8))
MOVES = st.lists(
    st.tuples(st.just("feed"), st.lists(FED, min_size=len(SPANS), max_size=len(SPANS)))
    | st.tuples(st.just("prepare"), st.sampled_from(SPANS), st.integers(0, 2))
    | st.tuples(st.just("go on"), st.sampled_from(SPANS), st.booleans())
    | st.tuples(st.just("ack"), st.integers(0, 9), SPAN)
    | st.tuples(st.just("read"), BOUND),
    min_size=10,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=len(SPANS), max_size=len(SPANS)), MOVES)
def test_tables_that_move_between_sinks_are_in_one_of_them_at_any_time(dealt, operations):
    with tempfile.TemporaryDirectory() as directory:
        one = Side(Path(directory, "one"), [0] * len(SPANS))
        several = Moving(Path(directory, "several"), dealt)
        [single], combined = one.sinks, several.combined
        # As its owner sends to a share: without tables it is as far as the barrier.
        for sink in several.sinks:
            sink.update_barrier_ts(MAX_TS)
        resolved = dict.fromkeys(SPANS, 0)
        for operation in operations:
            match operation:
                case ("feed", fed):
                    for span, (step, commits) in zip(SPANS, fed, strict=True):
                        below, resolved[span] = resolved[span], resolved[span] + step
                        above = [below + commit for commit in commits]
                        for side in (one, several):
                            side.feed(span, resolved[span], above)
                case ("prepare", span, number):
                    several.prepare(span, number, resolved[span])
                case ("go on", span, is_last):
                    several.switch(span, single) if is_last else several.catch_up(span)
                case ("ack", ninths, span):
                    start_ts, end_ts = single.checkpoint_ts(span), single.resolved_ts(span)
                    ts = start_ts + (end_ts - start_ts) * ninths // 9
                    assert combined.ack(ts, span) == single.ack(ts, span)
                case ("read", max_rows):
                    # A table that was acknowledged by itself may be ahead of the others.
                    start_ts = max(single.checkpoint_ts(span) for span in (None, *SPANS))
                    if start_ts > single.resolved_ts():
                        continue
                    end_ts = single.cut(start_ts, max_rows)
                    assert combined.cut(start_ts, max_rows) == end_ts
                    assert rows_of(combined, start_ts, end_ts) == rows_of(single, start_ts, end_ts)
            for span in (None, *SPANS):
                assert combined.resolved_ts(span) == single.resolved_ts(span)
                assert combined.checkpoint_ts(span) == single.checkpoint_ts(span)
        one.close()
        several.close()


def rows_of(sink, start_ts, end_ts):
    read = {span: sink.read(span, start_ts, end_ts) for span in SPANS}
    return {
        span: [row for batch in batches for row in batch.to_pylist()]
        for span, batches in read.items()
    }


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


class Leaving:
    """A share that ends while it is asked; `leaves` is what its owner does before."""

    local_sink = None

    def __init__(self, leaves=None):
        self.leaves, self.asked = leaves, 0

    def _ask(self, *_):
        self.asked += 1
        if self.leaves:
            self.leaves(self)
        raise UnavailableError("it does not run")

    limit = ack = plan_tables = _ask

    def resolved_ts(self, _span=None):
        return 100


class Staying(Leaving):
    def _ask(self, *_):
        self.asked += 1

    limit = _ask

    def ack(self, ts, _span=None):
        return ts

    def plan_tables(self, *_):
        return []


def test_readers_do_not_notice_that_a_share_without_tables_ends_while_it_is_asked():
    leaving, staying = Leaving(), Staying()
    combined = CombinedSink({SPANS[0]: staying}, Inline(), [leaving])
    leaving.leaves = combined.leave
    assert combined.ack(50) == 50
    combined.join(leaving)
    assert combined.plan_tables(None, 0, 50) == []
    assert leaving.asked == 2
    broken = CombinedSink({SPANS[0]: staying}, Inline(), [Leaving()])
    for ask in (lambda: broken.ack(50), lambda: broken.plan_tables(None, 0, 50)):
        with pytest.raises(UnavailableError):
            ask()


async def test_a_share_without_tables_that_ends_while_it_is_limited_ends_nothing_else():
    shares, staying = {}, Staying()
    leaving = Leaving(lambda _: shares.pop("leaving"))
    shares |= {"staying": staying, "leaving": leaving}
    router = SchemaChangeRouter(SimpleNamespace(shares=shares))
    router.resolved(7)
    async with asyncio.timeout(60), background_tasks(router.run()):
        while not leaving.asked:  # noqa: ASYNC110 - it is asked in a thread
            await asyncio.sleep(0.01)
        router.resolved(8)
        while staying.asked < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    shares["broken"] = Leaving()
    router.resolved(9)
    with pytest.raises(ExceptionGroup) as raised:
        await router.run()
    assert raised.group_contains(UnavailableError)


def test_a_share_that_leaves_takes_along_the_rows_of_tables_that_ended_there(two):
    for span in SPANS:
        two.feed(span, 50, [15])
    combined = CombinedSink(two.owners, Inline())
    for ts in (10, 40):
        combined.ack(ts)
    assert len(combined.plan_tables(None, 10, 20)) == len(SPANS)
    for span in SPANS[2:]:  # they end, and nobody moves them
        two.sinks[1].end_table(span, 20)
    assert combined.is_with(two.sinks[1], SPANS[2])
    combined.leave(two.sinks[1], 20)
    for ask in (
        lambda: combined.plan_tables(None, 10, 20),
        lambda: combined.plan_tables(None, 19, 50),
        lambda: combined.cut(10),
    ):
        with pytest.raises(RangeCleanedError, match="tables that ended before 20"):
            ask()
    assert combined.kept_ts() == 20
    assert combined.plan_tables(None, 20, 50) == []
    assert combined.cut(20) == 50
