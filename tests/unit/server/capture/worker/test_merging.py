"""The parts of a split table, put together again, are what one sorter gives of the whole."""

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from server.capture.worker.merging import joined, merged
from sink.cut import Slice
from storage.model.span import Span

OPS = ["delete", "update", "insert"]
SCHEMA = pa.schema(
    [
        ("_op", pa.string()),
        ("_commit_ts", pa.int64()),
        ("_start_ts", pa.int64()),
        ("_seq", pa.int64()),
        ("key", pa.int64()),
    ]
)
CHANGES = st.sets(
    st.tuples(st.integers(1, 5), st.integers(0, 2), st.integers(0, 2), st.integers(0, 30)),
    max_size=60,
)
"""commit_ts, start_ts below it, operation, key."""


def numbered(changes):
    """Mounted rows of changes in their order, each transaction counted from 0."""
    rows, counts = [], {}
    for commit_ts, start_ts, op, key in changes:
        seq = counts[commit_ts, start_ts] = counts.get((commit_ts, start_ts), -1) + 1
        rows.append((OPS[op], commit_ts, start_ts, seq, key))
    columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, each.type) for column, each in zip(columns, SCHEMA, strict=True)],
        schema=SCHEMA,
    )


def cut_up(batch, sizes):
    """The rows in batches of these sizes, empty ones among them."""
    for size in sizes:
        yield batch.slice(0, size)
        batch = batch.slice(size)
    yield batch


@settings(deadline=None, max_examples=300)
@given(
    CHANGES,
    st.lists(st.integers(0, 31), max_size=3),
    st.lists(st.lists(st.integers(0, 7), max_size=8), min_size=4, max_size=4),
)
def test_parts_put_together_are_the_whole(changes, borders, sizes):
    whole = numbered(sorted(changes))
    bounds = [0, *sorted(borders), 99]
    parts = [
        cut_up(numbered(sorted(each for each in changes if low <= each[3] < high)), of_part)
        for low, high, of_part in zip(bounds, bounds[1:], sizes, strict=False)
    ]
    together = pa.Table.from_batches(list(merged(parts)), SCHEMA)
    assert together.to_pylist() == whole.to_pylist()


SPAN = Span(1, b"a", b"z")


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 500)), max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.none() | st.integers(1, 600),
)
def test_slices_of_parts_become_slices_that_cover_the_range_and_count_each_row_once(
    parts, slice_bytes
):
    slices, end_ts = [], 100
    for number, sizes in enumerate(parts):
        begin = 10
        for place, (rows, size) in enumerate(sizes):
            last = place == len(sizes) - 1
            end = end_ts if last else begin + 1 + (size + number) % 10
            slices.append(Slice(Span(1, b"%d" % number, b""), begin, end, rows, size))
            begin = end
    whole = joined(SPAN, slices, (10, end_ts), slice_bytes)
    assert sum(part.rows for part in whole) == sum(part.rows for part in slices)
    assert sum(part.bytes for part in whole) == sum(part.bytes for part in slices)
    if whole:
        assert [part.start_ts for part in whole] == [10, *(part.end_ts for part in whole[:-1])]
        assert whole[-1].end_ts == end_ts
        assert {part.span for part in whole} == {SPAN}
        assert len(whole) == 1 or slice_bytes is not None
