"""A plan over all tables gives the rows of each of them, or an error with a name: a table whose
rows are gone, or were never here, is not taken for one that has none.
"""

from contextlib import ExitStack, closing

import pytest

from sink.manager import SinkManager
from sorter import Sorter, SorterSettings
from sorter.errors import RangeCleanedError, TableNotFoundError
from storage.model.event import INSERT, raw_batch
from storage.model.span import Span

A, B, C = (Span(number, b"t%d" % number, b"") for number in range(3))


class Interrupted(Sorter):
    """A sorter in which something happens right before it looks for rows."""

    def __init__(self, *args):
        super().__init__(*args)
        self.happen = None

    def has_rows_above(self, span, ts):
        happen, self.happen = self.happen, None
        if happen is not None:
            happen()
        return super().has_rows_above(span, ts)


class Capture:
    """A sorter and a sink with tables from `start_ts` on."""

    def __init__(self, directory, spans, start_ts=0):
        self.sorter = Interrupted(
            directory, SorterSettings(block_bytes=500, shards=1, clean_interval_s=0)
        )
        self.sink = SinkManager(self.sorter, memory_quota_bytes=1 << 20)
        for span in spans:
            self.add(span, start_ts)

    def add(self, span, start_ts, **kind):
        self.sorter.add_table(span, start_ts)
        self.sink.add_table(span, start_ts, lambda batch: batch, **kind)

    def put(self, span, *timestamps):
        count = len(timestamps)
        keys, values = [b"%d" % ts for ts in timestamps], [b"v"] * count
        starts = [ts - 1 for ts in timestamps]
        self.sorter.add(
            span, raw_batch(timestamps, starts, [INSERT] * count, keys, values, [None] * count)
        )

    def resolve(self, ts, *spans):
        for span in spans:
            self.sorter.resolve(span, ts)

    def remove(self, span, **kind):
        self.sink.remove_table(span, **kind)
        self.sorter.remove_table(span)

    def planned(self, start_ts, end_ts):
        parts = self.sink.plan_tables(None, start_ts, end_ts)
        return {part.span: part.rows for part in parts}

    def close(self):
        self.sink.stop()
        self.sorter.close()


@pytest.fixture
def opened(tmp_path):
    with ExitStack() as stack:
        yield lambda name, *args: stack.enter_context(closing(Capture(tmp_path / name, *args)))


def refused(capture, start_ts, end_ts):
    """Whether all that a reader may ask of all tables above `start_ts` is refused."""
    for ask in (
        lambda: capture.planned(start_ts, end_ts),
        lambda: capture.planned(start_ts, start_ts),
        lambda: capture.sink.cut(start_ts),
        lambda: capture.sink.cut(start_ts, max_rows=1),
        lambda: list(capture.sink.extents(start_ts, end_ts)),
    ):
        with pytest.raises(RangeCleanedError):
            ask()
    return True


def test_a_quiet_table_that_moved_is_not_left_out_of_what_is_replayed(opened):
    first, second = opened("first", [A]), opened("second", [B])
    for capture, span in ((first, A), (second, B)):
        capture.put(span, 15)
        capture.resolve(20, span)
        capture.sink.ack(10)
        capture.sink.ack(20)
        assert capture.planned(10, 20) == {span: 1}
    second.add(A, 20, standby=True)
    second.resolve(20, A)
    second.sink.count(A, 20)
    first.remove(A)
    assert refused(second, 10, 20)
    assert second.planned(20, 20) == {}


def test_what_was_pulled_from_the_checkpoint_again_is_not_taken_for_all(opened):
    capture = opened("capture", [A, B], 20)
    capture.resolve(30, A, B)
    assert refused(capture, 10, 20)
    assert refused(capture, 10, 30)
    capture.put(A, 35)
    capture.resolve(40, A, B)
    assert capture.planned(20, 40) == {A: 1}


def test_tables_that_have_nothing_left_are_not_taken_for_ones_that_had_nothing(opened):
    capture = opened("capture", [A, B])
    capture.put(A, 5)
    capture.put(B, 15)
    capture.resolve(30, A, B)
    for ts in (10, 20, 30):
        capture.sink.ack(ts)
    assert refused(capture, 0, 30)
    assert refused(capture, 19, 30)
    assert capture.planned(20, 30) == {}


def test_a_table_that_has_ended_and_is_gone_had_rows(opened):
    capture = opened("capture", [A])
    capture.put(A, 15)
    capture.resolve(20, A)
    capture.sink.update_barrier_ts(20)
    capture.sink.end_table(A, 20)
    capture.sink.ack(10)
    capture.sink.update_barrier_ts(40)
    capture.add(B, 35, born=True)
    capture.resolve(40, B)
    capture.sink.ack(30)
    capture.sink.ack(40)
    with pytest.raises(TableNotFoundError):
        capture.sink.resolved_ts(A)
    assert refused(capture, 10, 20)
    assert capture.planned(30, 40) == {}


def test_a_born_table_is_no_reason_to_refuse_what_was_before(opened):
    capture = opened("capture", [A])
    capture.put(A, 5)
    capture.add(B, 20, born=True)
    capture.resolve(30, A, B)
    assert capture.planned(0, 30) == {A: 1}
    assert capture.sink.cut(0) == 30


def test_while_a_table_is_pulled_again_all_tables_wait_for_it(opened):
    capture = opened("capture", [A, B])
    capture.put(A, 5, 15)
    capture.put(B, 15)
    capture.resolve(10, A)
    capture.resolve(30, B)
    capture.sink.ack(10)
    capture.sink.ack(20, B)
    before = capture.sink.resolved_ts(), capture.sink.checkpoint_ts()
    assert before == (10, 10)
    capture.remove(A, comes_back=True)
    assert (capture.sink.resolved_ts(), capture.sink.checkpoint_ts()) == before
    for ask in (
        lambda: capture.planned(10, 10),
        lambda: capture.sink.cut(10),
        lambda: capture.sink.extents(10, 10),
    ):
        with pytest.raises(TableNotFoundError, match=r"table 0 .*ask again"):
            ask()
    capture.add(A, 10)
    assert (capture.sink.resolved_ts(), capture.sink.checkpoint_ts()) == before
    capture.put(A, 15)
    capture.resolve(30, A)
    assert capture.planned(20, 30) == {}
    assert capture.sink.checkpoint_ts() == 10


def test_a_table_that_stands_by_and_goes_holds_nothing(opened):
    capture = opened("capture", [A])
    capture.add(B, 0, standby=True)
    capture.remove(B, comes_back=True)
    capture.put(A, 5)
    capture.resolve(10, A)
    assert capture.planned(0, 10) == {A: 1}


@pytest.mark.parametrize("acknowledged", [A, None])
def test_rows_that_are_given_up_while_they_are_planned_are_missed(opened, acknowledged):
    capture = opened("capture", [A, B])
    capture.put(A, 5)
    capture.put(B, 15)
    capture.resolve(30, A, B)

    def acknowledge():
        for ts in (10, 20, 30):
            capture.sink.ack(ts, acknowledged)

    capture.sorter.happen = acknowledge
    with pytest.raises(RangeCleanedError):
        capture.planned(0, 30)


def test_a_table_that_goes_elsewhere_while_all_are_planned_is_left_out_as_a_whole(opened):
    capture = opened("capture", [A, B])
    capture.put(A, 5)
    capture.put(B, 5)
    capture.resolve(30, A, B)
    capture.sorter.happen = lambda: capture.remove(B)
    assert capture.planned(0, 30) == {A: 1}
    capture.sorter.happen = lambda: capture.remove(A, comes_back=True)
    with pytest.raises(TableNotFoundError):
        capture.planned(0, 30)
