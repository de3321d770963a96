"""A cut's file: all rows in their order, in row groups of a bounded size,
counted as if they had been read at once.
"""

import io

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.checksum import checksum, hexadecimal
from pyspark_tidemark.lake.parquet import target as changelog

SCHEMA = pa.schema([("_op", pa.string()), ("id", pa.int64()), ("text", pa.string())])


class Held:
    """Changes that are there already."""

    table = TableMeta("bank.accounts", ("id",), SCHEMA)

    def __init__(self, sizes):
        rows = [
            {"_op": "insert", "id": number, "text": "x" * (number % 50)}
            for number in range(sum(sizes))
        ]
        self.whole, self._sizes = pa.Table.from_pylist(rows, SCHEMA), sizes

    def batches(self):
        start = 0
        for size in self._sizes:
            yield from self.whole.slice(start, size).combine_chunks().to_batches()
            start += size


@given(sizes=st.lists(st.integers(0, 40), max_size=8), group=st.integers(1, 4000))
def test_a_cut_is_written_whole_in_groups_and_counted_on_the_way(sizes, group):
    changes, file = Held(sizes), io.BytesIO()
    usual, changelog._GROUP_BYTES = changelog._GROUP_BYTES, group
    try:
        counted = changelog.write_part(changes, file)
    finally:
        changelog._GROUP_BYTES = usual
    assert pq.read_table(file).equals(changes.whole)
    rows, total = checksum([changes.whole])
    assert (counted.rows, counted.checksum) == (rows, hexadecimal(total))
    groups = pq.ParquetFile(file).metadata.num_row_groups
    assert groups <= len([size for size in sizes if size])
