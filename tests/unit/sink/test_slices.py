"""Slices of a table: they cover the range, split no commit_ts,
and are about as large as was asked for.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sink.cut import SLICES_MAX, sliced
from sorter import Extent
from storage.model.span import Span

SPAN = Span(1, b"t", b"")
blocks = st.lists(
    st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 500)),
    max_size=12,
)


def extent(timestamps: list[int], row_bytes: int) -> Extent:
    ts = np.sort(np.array(timestamps, np.uint64))
    return Extent(int(ts[0]), int(ts[-1]), len(ts), len(ts) * row_bytes, lambda: ts)


@given(blocks, st.integers(0, 30), st.integers(0, 40), st.integers(1, 20_000))
def test_slices_follow_one_another_and_none_is_without_rows(rows, start_ts, length, slice_bytes):
    end_ts = start_ts + length
    extents = [extent(timestamps, size) for timestamps, size in rows]
    inside = [
        (ts, size) for timestamps, size in rows for ts in timestamps if start_ts < ts <= end_ts
    ]
    parts = sliced(SPAN, extents, start_ts, end_ts, slice_bytes)
    assert bool(parts) == bool(inside)
    if not parts:
        return
    assert [start_ts, *(part.end_ts for part in parts)] == [
        *(part.start_ts for part in parts),
        end_ts,
    ]
    assert sum(part.rows for part in parts) == len(inside)
    assert all(part.rows > 0 for part in parts)
    total = sum(size for _, size in inside)
    assert len(parts) <= min(-(-total // slice_bytes), SLICES_MAX)
    heaviest = max(sum(size for ts, size in inside if ts == at) for at, _ in inside)
    largest = max((each.bytes for each in extents if each.bytes * 8 <= slice_bytes), default=0)
    assert all(part.bytes <= slice_bytes + heaviest + 12 * largest for part in parts)


def test_a_large_table_is_cut_evenly_and_a_commit_ts_never():
    parts = sliced(SPAN, [extent(list(range(1, 10_001)), 100)], 0, 20_000, 100_000)
    assert [part.rows for part in parts] == [1000] * 10
    [part] = sliced(SPAN, [extent([7] * 1000, 1000)], 0, 10, 10)
    assert (part.start_ts, part.end_ts, part.rows) == (0, 10, 1000)


def test_the_number_of_slices_is_bounded():
    assert len(sliced(SPAN, [extent(list(range(1, 10_001)), 100)], 0, 10_000, 1)) == SLICES_MAX
