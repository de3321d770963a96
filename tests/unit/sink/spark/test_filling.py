"""Columns added at a barrier bring what existing rows hold, but for changelogs."""

import pyarrow as pa
import pytest
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.barrier import Barrier
from pyspark_tidemark.lake.databases.text import as_quoted
from pyspark_tidemark.lake.format import IGNORE
from pyspark_tidemark.lake.schema import Policy, lake_schema

OLD = pa.schema(
    [
        ("_op", pa.string()),
        ("_commit_ts", pa.int64()),
        ("_start_ts", pa.int64()),
        ("_seq", pa.int64()),
        ("id", pa.int8()),
    ]
)
NEW = OLD.append(pa.field("n", pa.int8())).append(pa.field("later", pa.string()))


class OneTable:
    """A target at ts 10 that notes what it is asked to change;
    it keeps small integers as Iceberg does.
    """

    def __init__(self, mode):
        self._schema = self.storable(lake_schema(TableMeta("s.t", ("id",), OLD), mode))
        self.changes = []

    def position(self, table):
        return 10

    def schema(self, table):
        return self._schema

    def storable(self, schema):
        return pa.schema(
            [pa.field(f.name, pa.int32() if f.type == pa.int8() else f.type) for f in schema]
        )

    def alter(self, table, change):
        self.changes.append(change)


@pytest.mark.parametrize(
    ("mode", "filled"),
    [
        ("upsert", (("n", pa.scalar(7, pa.int32())),)),
        ("scd2", (("n", pa.scalar(7, pa.int32())),)),
        ("append", ()),
    ],
)
def test_older_rows_get_what_the_schema_tells_of_them(mode, filled):
    target = OneTable(mode)
    table = TableMeta("s.t", ("id",), NEW, 20, {"n": 7, "id": 1})
    Barrier(None, target, None, Policy(mode)).fitting(table)
    (change,) = target.changes
    assert [field.name for field in change.added] == ["n", "later"]
    assert change.filled == filled


def test_a_column_called_like_one_that_another_mode_adds_is_the_upstreams():
    target, schema = OneTable("upsert"), OLD.append(pa.field("is_current", pa.int32()))
    target._schema = lake_schema(TableMeta("s.t", ("id",), schema))
    table = TableMeta("s.t", ("id",), schema.append(pa.field("later", pa.string())), 20)
    fitted = Barrier(None, target, None, Policy("upsert", evolution=IGNORE)).fitting(table)
    assert fitted.schema.names == [*OLD.names, "is_current"]


def test_a_value_is_one_literal_of_standard_sql():
    assert as_quoted(pa.scalar("it's \\")) == "'it''s \\'"
    assert as_quoted(pa.scalar(b"\0'")) == "'\\x0027'"
    assert as_quoted(pa.scalar(True)) == "'true'"
