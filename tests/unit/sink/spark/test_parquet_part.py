"""A cut's file: all rows in their order, in row groups of a bounded size,
counted as if they had been read at once.
"""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.checksum import checksum, hexadecimal
from pyspark_tidemark.lake.files import repeating_columns
from pyspark_tidemark.lake.parquet import target as changelog
from pyspark_tidemark.lake.parquet.target import (
    CUT,
    ChangelogTarget,
    ParquetConnector,
    timestamps,
)
from pyspark_tidemark.lake.target import StoredTable
from pyspark_tidemark.sink_uri import SinkUri

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


def test_a_directory_of_somebody_else_among_the_cuts_is_told_by_name(tmp_path):
    """Readers take it for a cut, too, and its column `cut` would be none of numbers."""
    assert timestamps(["cut=12", "cut=9", "_since-3", "other"], CUT) == [9, 12]
    table = TableMeta("bank.accounts", ("id",), pa.schema([("id", pa.int64())]))
    target = ChangelogTarget(None, str(tmp_path))
    for name in ("cut=last", "cut=1_0", "cut=", "cut=-5", "cut=12.old"):
        strange = tmp_path / "bank" / "accounts" / name
        strange.mkdir(parents=True)
        with pytest.raises(SourceError, match=r"ErrTargetForeign.*bank\.accounts.*move it") as told:
            target.position(table)
        assert not told.value.retryable
        strange.rmdir()
    assert target.position(table) is None


@pytest.mark.parametrize("cuts", [[], [40, 50]])
def test_a_later_table_of_the_name_is_not_read_as_the_former_one(tmp_path, cuts):
    for cut in cuts:
        (tmp_path / "bank" / "t" / f"{CUT}{cut}").mkdir(parents=True)
    table = StoredTable(SinkUri.parse(f"parquet://{tmp_path}"), "feed", "bank.t")
    with pytest.raises(SourceError, match=r"ErrCutExpired.*bank\.t has no cut up to 30"):
        ParquetConnector().read(None, table, 30)


def test_a_file_that_is_cut_off_is_named(tmp_path):
    path = tmp_path / "part-00000.parquet"
    pq.write_table(pa.table({"id": [1]}), path)
    assert changelog.read_columns(path).names == ["id"]
    for content in (b"", path.read_bytes()[:-1]):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"ErrLakeDamaged.*part-00000\.parquet"):
            changelog.read_columns(path)


def test_only_columns_whose_values_come_again_get_a_dictionary(tmp_path):
    count = 100_000
    columns = {
        "same": pa.array(["a"] * count),
        "number": pa.array(range(count)),
        "late": pa.array([*range(90_000), *[0] * 10_000]),
        "null": pa.nulls(count, pa.string()),
        "truth": pa.array([False, True] * (count // 2)),
        "list.of": pa.array([[number] for number in range(count)]),
        "a.b": pa.array([f"x{number % 100}" for number in range(count)]),
    }
    rows = pa.table(columns)
    repeating = repeating_columns(rows)
    assert repeating == ["same", "late", "null", "truth", "list.of", "a.b"]
    assert repeating_columns(rows.slice(0, 1)) == ["list.of"]
    assert repeating_columns(rows.slice(0, 0)) == list(columns)
    pq.write_table(rows, tmp_path / "file", use_dictionary=repeating)
    assert pq.read_table(tmp_path / "file").equals(rows)
    group = pq.ParquetFile(tmp_path / "file").metadata.row_group(0)
    with_dictionary = {
        group.column(at).path_in_schema
        for at in range(group.num_columns)
        if group.column(at).has_dictionary_page
    }
    assert with_dictionary >= {"same", "late", "a.b"}
    assert "number" not in with_dictionary
