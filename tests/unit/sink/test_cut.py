"""Cuts: the largest ts whose rows fit, whole commit_ts only."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sink import cut
from sink.cut import Bounds, find_cut, measure
from sorter import Extent

blocks = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12).map(sorted), max_size=8)


def extents(blocks: list[list[int]], read: list[int] | None = None) -> list[Extent]:
    def load(number: int, block: list[int]):
        if read is not None:
            read.append(number)
        return np.array(block, np.uint64)

    return [
        Extent(
            block[0],
            block[-1],
            len(block),
            10 * len(block),
            lambda number=number, block=block: load(number, block),
        )
        for number, block in enumerate(blocks)
    ]


@given(
    blocks,
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from([1, 5, 1 << 16]),
)
def test_a_cut_is_the_largest_that_fits_and_holds_a_commit_ts(
    blocks, start_ts, length, limit, by_bytes, compact
) -> None:
    upper_ts = start_ts + length
    bounds = Bounds(max_bytes=10 * limit) if by_bytes else Bounds(max_rows=limit)
    cut._COMPACT_ROWS, kept = compact, cut._COMPACT_ROWS
    found = find_cut(extents(blocks), start_ts, upper_ts, bounds)
    cut._COMPACT_ROWS = kept
    rows = sorted(ts for block in blocks for ts in block if start_ts < ts <= upper_ts)
    fitting = [
        ts for ts in range(start_ts + 1, upper_ts + 1) if sum(row <= ts for row in rows) <= limit
    ]
    expected = max([*fitting, rows[0]] if rows else [upper_ts])
    assert found == expected


def test_extents_beyond_what_fits_are_not_read() -> None:
    read: list[int] = []
    many = [list(range(100 * number + 1, 100 * number + 101)) for number in range(2000)]
    assert find_cut(extents(many, read), 0, 200_000, Bounds(max_rows=150)) == 150
    assert len(read) <= 1 + (cut._COMPACT_ROWS // 100)


@given(blocks, st.integers(0, 30), st.integers(0, 30))
def test_a_range_is_measured_exactly(blocks, start_ts, length) -> None:
    rows = sum(start_ts < ts <= start_ts + length for block in blocks for ts in block)
    assert measure(extents(blocks), start_ts, start_ts + length) == (rows, 10 * rows)
