"""Acknowledged history that is kept: every range above the floor gives all its rows, and one below
it is refused by name, never given in part.
"""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sink.cut import Bounds
from sink.manager import SinkManager
from sink.tables import TableSinks
from sorter import Sorter, SorterSettings
from sorter.errors import RangeCleanedError, TableNotFoundError
from storage.model.event import INSERT, raw_batch
from storage.model.span import Span

SPANS = [Span(number, b"t%d" % number, b"") for number in range(3)]


def at(second):
    """A commit_ts: two of them are never in one bucket of the sorter's sums."""
    return second << 30


START = at(100)


class Kept:
    """Tables of a changefeed, and all rows that ever came."""

    def __init__(self, directory):
        sizes = {"memory_bytes": 2000, "block_bytes": 300, "segment_bytes": 2000}
        self.sorter = Sorter(directory, SorterSettings(**sizes, shards=1, clean_interval_s=0))
        self.sink = SinkManager(self.sorter, memory_quota_bytes=1 << 20)
        self.sink.keep_above(START)
        self.rows = {span: [] for span in SPANS}
        self.resolved = self.acked = START
        self.floor = START
        for span in SPANS:
            self.add_table(span, START)

    def close(self):
        self.sink.stop()
        self.sorter.close()

    def add_table(self, span, start_ts, **kind):
        self.sorter.add_table(span, start_ts)
        self.sink.add_table(span, start_ts, lambda batch: batch, **kind)
        if span in self.ends:
            del self.ends[span]

    @property
    def ends(self):
        return self.__dict__.setdefault("_ends", {})

    def put(self, span, *timestamps):
        count = len(timestamps)
        self.rows[span] += timestamps
        keys = [b"%d" % ts for ts in timestamps]
        starts, values = [ts - 1 for ts in timestamps], [b"v" * 30] * count
        self.sorter.add(
            span, raw_batch(timestamps, starts, [INSERT] * count, keys, values, [None] * count)
        )

    def resolve(self, ts):
        self.resolved = ts
        for span in SPANS:
            if self.sink._tables.get(span) is not None:
                self.sorter.resolve(span, max(ts, self.sorter.resolved_ts(span)))

    def ack(self, ts):
        self.acked = max(self.acked, ts)
        self.sink.ack(ts)

    def keep(self, ts):
        self.floor = max(self.floor, ts)
        self.sink.keep_above(ts)

    def read(self, span, start_ts, end_ts):
        batches = list(self.sink.read(span, start_ts, end_ts))
        return [ts for batch in batches for ts in batch.column("commit_ts").to_pylist()]

    def expected(self, span, start_ts, end_ts):
        return sorted({ts for ts in self.rows[span] if start_ts < ts <= end_ts})

    def check(self, start_ts, end_ts):
        """Exactly the rows, or a refusal that is right."""
        for span in SPANS:
            try:
                found = self.read(span, start_ts, end_ts)
            except (RangeCleanedError, TableNotFoundError):
                assert start_ts < self.sink.kept_ts()
            else:
                assert found == self.expected(span, start_ts, end_ts)
        self.check_all(start_ts, end_ts)

    def check_all(self, start_ts, end_ts):
        """The same of all tables at once."""
        try:
            planned = {part.span for part in self.sink.plan_tables(None, start_ts, end_ts)}
        except RangeCleanedError:
            assert start_ts < self.sink.kept_ts()
        else:
            assert planned >= {span for span in SPANS if self.expected(span, start_ts, end_ts)}
        try:
            assert self.sink.cut(start_ts) == end_ts
        except RangeCleanedError:
            assert start_ts < self.sink.kept_ts()


@pytest.fixture
def kept(tmp_path):
    opened = Kept(tmp_path)
    yield opened
    opened.close()


def test_what_is_acknowledged_can_be_read_again_and_again_until_the_floor_rises(kept):
    a, b, _ = SPANS
    kept.put(a, at(110), at(120), at(130))
    kept.put(b, at(115))
    kept.resolve(at(140))
    for ts in (at(110), at(120), at(140)):
        kept.ack(ts)
    assert kept.sink.checkpoint_ts() == at(140)
    assert kept.read(a, START, at(140)) == [at(110), at(120), at(130)]
    kept.keep(at(112))
    assert kept.read(a, at(112), at(140)) == [at(120), at(130)]
    assert kept.sink.kept_ts() == at(112)
    with pytest.raises(RangeCleanedError, match=f"keeps the rows above {at(112)}"):
        kept.read(a, at(111), at(140))
    kept.keep(at(140))
    assert kept.sorter.is_empty(b)
    # The acknowledgement before the last still counts.
    assert kept.read(a, at(120), at(140)) == [at(130)]


def test_a_quiet_table_whose_rows_are_gone_is_not_taken_for_one_without_rows(kept):
    a, b, _ = SPANS
    kept.put(b, at(105))
    kept.put(a, at(150))
    kept.resolve(at(160))
    for ts in (at(110), at(120), at(160)):
        kept.ack(ts)
    kept.keep(at(120))
    assert kept.sorter.is_empty(b)
    with pytest.raises(RangeCleanedError):
        kept.sink.plan_tables(None, START, at(160))
    with pytest.raises(RangeCleanedError):
        kept.sink.cut(START, 10)
    assert [part.span for part in kept.sink.plan_tables(None, at(120), at(160))] == [a]


def test_without_a_floor_what_is_acknowledged_goes_as_before(tmp_path):
    kept = Kept(tmp_path)
    # As in a changefeed that keeps nothing.
    kept.sink._tables.shared.keep_ts = TableSinks().shared.keep_ts
    a = SPANS[0]
    kept.put(a, at(110), at(120), at(130))
    kept.resolve(at(140))
    for ts in (at(110), at(120), at(140)):
        kept.ack(ts)
    assert kept.sink.kept_ts() == at(120)
    with pytest.raises(RangeCleanedError):
        kept.read(a, at(110), at(140))
    kept.close()


def test_a_table_that_ends_stays_until_its_rows_are_given_up(kept):
    a, b, _ = SPANS
    kept.put(b, at(110), at(120))
    kept.resolve(at(125))
    kept.sink.end_table(b, at(125))
    kept.put(a, at(140))
    kept.resolve(at(150))
    for ts in (at(125), at(140), at(150)):
        kept.ack(ts)
    assert kept.read(b, START, at(125)) == [at(110), at(120)]
    assert kept.sink.stats().tables == 3
    kept.keep(at(124))
    assert kept.sink.stats().tables == 3
    kept.keep(at(125))
    assert kept.sink.stats().tables == 2
    with pytest.raises(TableNotFoundError):
        kept.sorter.resolved_ts(b)


def test_a_table_that_ended_and_goes_with_its_history_raises_the_floor(kept):
    a, b, _ = SPANS
    kept.put(b, at(110))
    kept.resolve(at(125))
    kept.sink.end_table(b, at(125))
    kept.put(a, at(140))
    kept.resolve(at(150))
    for ts in (at(125), at(140), at(150)):
        kept.ack(ts)
    # As when its rows were damaged: nobody brings them again.
    kept.sink.remove_table(b)
    kept.sorter.remove_table(b)
    assert kept.sink.kept_ts() == at(125)
    with pytest.raises(RangeCleanedError):
        kept.sink.plan_tables(None, START, at(150))
    assert kept.read(a, at(125), at(150)) == [at(140)]


def test_a_table_that_comes_later_has_none_of_the_history_before(kept):
    a, b, _ = SPANS
    kept.put(b, at(110))
    kept.put(a, at(110))
    kept.resolve(at(150))
    kept.ack(at(120))
    kept.ack(at(150))
    kept.sink.remove_table(b)
    kept.sorter.remove_table(b)
    kept.add_table(b, at(150))
    kept.resolve(at(160))
    assert kept.sink.kept_ts() == at(150)
    with pytest.raises(RangeCleanedError):
        kept.sink.plan_tables(None, START, at(160))
    with pytest.raises(RangeCleanedError):
        kept.read(b, at(120), at(160))
    assert kept.read(a, at(120), at(160)) == []


def test_tables_with_nothing_but_kept_rows_are_not_staged_again(kept):
    a = SPANS[0]
    kept.put(a, at(110), at(120))
    kept.resolve(at(140))
    kept.ack(at(130))
    kept.ack(at(140))
    dispatcher = kept.sink._dispatcher
    while dispatcher._take_slowest() is not None:
        raise AssertionError("nothing is to be staged")
    kept.put(a, at(150))
    kept.resolve(at(160))
    assert dispatcher._take_slowest() is not None


def test_a_cut_above_the_checkpoint_does_not_look_at_what_is_kept_below(kept):
    a = SPANS[0]
    kept.put(a, at(110), at(120))
    kept.resolve(at(140))
    kept.ack(at(140))
    asked = []
    extents = kept.sorter.extents
    kept.sorter.extents = lambda *range_: asked.append(range_) or extents(*range_)
    assert kept.sink.plan_tables(None, at(140), at(140)) == []
    assert kept.sink._ranges.cut(at(130), Bounds(1)) == at(140)
    assert not asked


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), st.integers(0, 2), st.lists(st.integers(1, 20), min_size=1, max_size=6)
        ),
        st.tuples(st.just("resolve"), st.integers(0, 20), st.none()),
        st.tuples(st.just("ack"), st.integers(0, 20), st.none()),
        st.tuples(st.just("ack one"), st.integers(0, 2), st.integers(0, 20)),
        st.tuples(st.just("keep"), st.integers(0, 40), st.none()),
        st.tuples(st.just("come anew"), st.integers(0, 2), st.none()),
        st.tuples(st.just("read"), st.integers(0, 60), st.integers(0, 60)),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(STEPS)
def test_a_range_gives_all_its_rows_or_is_refused(steps):
    with tempfile.TemporaryDirectory() as directory:
        kept = Kept(Path(directory))
        try:
            for step, first, second in steps:
                take(kept, step, first, second)
                for start_ts in (kept.sink.kept_ts(), kept.sink.kept_ts() - 1, START):
                    kept.check(max(START, start_ts), kept.resolved)
            assert kept.sink.kept_ts() <= max(kept.acked, kept.floor)
        finally:
            kept.close()


def take(kept, step, first, second):
    if step == "put":
        kept.put(SPANS[first], *sorted({kept.resolved + at(after) for after in second}))
    elif step == "resolve":
        kept.resolve(kept.resolved + at(first))
    elif step == "ack":
        kept.ack(min(kept.acked + at(first), kept.resolved))
    elif step == "ack one":
        ts = min(kept.sink.checkpoint_ts(SPANS[first]) + at(second), kept.resolved)
        kept.sink.ack(ts, SPANS[first])
    elif step == "keep":
        kept.keep(max(START, kept.sink.checkpoint_ts() - at(first)))
    elif step == "come anew":
        # As when another capture had it: it is pulled again from its checkpoint.
        span = SPANS[first]
        start = kept.sink.checkpoint_ts(span)
        kept.sink.remove_table(span)
        kept.sorter.remove_table(span)
        kept.add_table(span, start)
        again, kept.rows[span] = [ts for ts in kept.rows[span] if ts > start], kept.rows[span]
        for ts in again:
            kept.rows[span].remove(ts)
        if again:
            kept.put(span, *sorted(again))
        kept.sorter.resolve(span, max(start, kept.resolved))
        kept.acked = max(kept.acked, start)
    else:
        start = START + at(min(first, second))
        kept.check(min(start, kept.resolved), kept.resolved)
