"""Rows are arranged as Python would sort them, and left alone where they are in order already."""

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sorter import order
from storage.model.event import raw_batch

numbers = st.integers(0, 3)
keys = st.lists(
    st.tuples(numbers, numbers, numbers, st.binary(max_size=2)), min_size=1, max_size=12
)


def batch_of(rows: list[tuple[int, int, int, bytes]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True))
    return raw_batch(*columns, [b"%d" % number for number in range(len(rows))], [None] * len(rows))


@given(keys)
@example([(1, 1, 1, b"a"), (1, 1, 1, b"a")])
@example([(1, 2, 1, b"a"), (1, 1, 2, b"b"), (1, 1, 2, b"c")])
def test_rows_are_sorted_and_of_equal_ones_the_last_stays(
    rows: list[tuple[int, int, int, bytes]],
) -> None:
    expected = sorted({row: b"%d" % number for number, row in enumerate(rows)}.items())
    found = order.sort([batch_of(rows)]).to_pylist()
    assert [(*list(row.values())[:4], row["value"]) for row in found] == [
        (*row, value) for row, value in expected
    ]


@given(keys)
def test_sorted_rows_are_not_moved(rows: list[tuple[int, int, int, bytes]]) -> None:
    assert order.arrange([batch_of(sorted(set(rows)))]).order is None


@pytest.mark.parametrize("column", range(4))
def test_each_column_counts(column: int) -> None:
    low, high = [1, 1, 1, b"a"], [1, 1, 1, b"a"]
    high[column] = [2, 2, 2, b"b"][column]
    assert order.arrange([batch_of([tuple(high), tuple(low)])]).order.tolist() == [1, 0]
    assert order.arrange([batch_of([tuple(low), tuple(high)])]).order is None
