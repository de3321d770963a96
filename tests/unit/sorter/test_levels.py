"""Runs that memory pressure wrote stay few, and are merged in an order that keeps who came last."""

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorter import Sorter, SorterSettings
from sorter.merge import FAN_IN, LARGE_BYTES, RunLevels
from storage.model.event import INSERT, Position, raw_batch
from storage.model.span import Span

SMALL = 1000


def merge_all(levels: RunLevels, runs: dict[int, int]) -> int:
    """Merge as long as it is asked for; `runs` are the sizes by number;
    returns the bytes written.
    """
    written = 0
    while (chosen := levels.to_merge()) is not None:
        numbers = sorted(runs)
        first = numbers.index(min(chosen))
        assert numbers[first : first + len(chosen)] == sorted(chosen), "neighbours only"
        size = sum(runs.pop(run) for run in chosen)
        runs[min(chosen)] = size
        levels.merged(chosen, size)
        written += size
    return written


@given(
    st.lists(
        st.sampled_from([1, SMALL, LARGE_BYTES - 1, LARGE_BYTES, 8 * LARGE_BYTES]), max_size=600
    )
)
def test_runs_stay_few_and_neighbours_only_are_merged(sizes: list[int]) -> None:
    levels, runs = RunLevels(), dict[int, int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLevels, "fan_in", 4)
        patch.setattr(RunLevels, "most_runs", 20)
        for number, size in enumerate(sizes):
            runs[number] = size
            levels.add(number, size)
            merge_all(levels, runs)
            assert len(levels) == len(runs) <= 20
            again = RunLevels()
            again.thaw(array("Q", levels.freeze()))
            assert again.freeze() == levels.freeze()


def test_small_runs_are_written_again_once_a_level_and_large_ones_not_at_all() -> None:
    small, runs = RunLevels(), dict[int, int]()
    written = 0
    for number in range(FAN_IN**2):
        runs[number] = SMALL
        small.add(number, SMALL)
        written += merge_all(small, runs)
    assert (written, runs) == (2 * SMALL * FAN_IN**2, {0: SMALL * FAN_IN**2})
    large = RunLevels()
    for number in range(700):
        large.add(number, LARGE_BYTES)
        assert large.to_merge() is None


def test_cleaned_runs_are_forgotten() -> None:
    levels = RunLevels()
    for number in range(FAN_IN):
        levels.add(number, SMALL)
    chosen = levels.to_merge()
    assert chosen == frozenset(range(FAN_IN))
    levels.retain(chosen, frozenset({3, 5}))
    assert len(levels) == 2
    assert levels.to_merge() is None


def test_many_tiny_spills_of_a_table_are_read_in_few_pieces_and_the_last_copy_counts(
    tmp_path: Path,
) -> None:
    span = Span(1, b"a", b"b")
    sorter = Sorter(tmp_path, SorterSettings(memory_bytes=0))
    sorter.add_table(span, 0)
    for turn in range(200):
        key = b"%03d" % (turn % 150)
        sorter.add(span, raw_batch([9], [5], [INSERT], [key], [b"%d" % turn], [None]))
    stats = sorter.table_stats(span)
    assert stats.runs == stats.blocks == 200 // FAN_IN + 200 % FAN_IN
    sorter.resolve(span, 9)
    rows = [
        row
        for batch in sorter.fetch(span, Position(1, 0), Position.fence(9))
        for row in batch.to_pylist()
    ]
    expected = [(b"%03d" % key, b"%d" % (key + 150 if key < 50 else key)) for key in range(150)]
    assert [(row["key"], row["value"]) for row in rows] == expected
    after = sorter.table_stats(span)
    assert (after.fetches, after.blocks_read, after.rows_read, after.rows_out) == (
        1,
        stats.blocks,
        200,
        150,
    )
    sorter.close()
