"""Runs that memory pressure wrote stay few, and are merged in an order that keeps who came last."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sorter import Sorter
from sorter.levels import FAN_IN, RunLevels
from storage.model.event import INSERT, Position, raw_batch
from storage.model.span import Span


@given(st.integers(0, 5000))
def test_runs_stay_few_and_a_merge_takes_neighbours_only(count: int) -> None:
    levels, merges = RunLevels(), 0
    for number in range(count):
        levels.add(number)
        while (level := levels.full()) is not None:
            runs = levels.runs(level)
            newer = [run for lower in range(level) for run in levels.runs(lower)]
            assert all(run > max(runs) for run in newer)
            levels.merged(level, min(runs))
            merges += 1
    assert len(levels) < 3 * FAN_IN
    assert merges == count // FAN_IN + count // FAN_IN**2


def test_cleaned_runs_are_forgotten() -> None:
    levels = RunLevels()
    for number in range(FAN_IN):
        levels.add(number)
    levels.keep(0, frozenset({3, 5}))
    assert levels.runs(0) == {3, 5}
    assert levels.full() is None


def test_many_tiny_spills_of_a_table_are_read_in_few_pieces_and_the_last_copy_counts(tmp_path: Path) -> None:
    span = Span(1, b"a", b"b")
    sorter = Sorter(tmp_path, memory_bytes=0)
    sorter.add_table(span, 0)
    for turn in range(200):
        key = b"%03d" % (turn % 150)
        sorter.add(span, raw_batch([9], [5], [INSERT], [key], [b"%d" % turn], [None]))
    stats = sorter.table_stats(span)
    assert stats.runs == stats.blocks == 200 // FAN_IN + 200 % FAN_IN
    sorter.resolve(span, 9)
    rows = [row for batch in sorter.fetch(span, Position(1, 0), Position.fence(9)) for row in batch.to_pylist()]
    expected = [(b"%03d" % key, b"%d" % (key + 150 if key < 50 else key)) for key in range(150)]
    assert [(row["key"], row["value"]) for row in rows] == expected
    after = sorter.table_stats(span)
    assert (after.fetches, after.blocks_read, after.rows_read, after.rows_out) == (1, stats.blocks, 200, 150)
    sorter.close()
