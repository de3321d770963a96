"""The column of mode soft-delete, and changes as they are written in it."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta, Known, TableMeta
from pyspark_tidemark.lake.soft_delete import MarkedTables, as_sent, mark_all, marked, with_mark

ENVELOPE = [
    ("_op", pa.string()),
    ("_commit_ts", pa.int64()),
    ("_start_ts", pa.int64()),
    ("_seq", pa.int64()),
]


def table(*columns):
    schema = pa.schema([*ENVELOPE, *((name, pa.int64()) for name in ("id", *columns))])
    return TableMeta("shop.t", ("id",), schema)


def test_a_table_gets_the_column_once():
    once = with_mark(table("v"))
    assert once.schema.names[-2:] == ["v", "is_deleted"]
    assert with_mark(once) is once


@pytest.mark.parametrize("name", ["is_deleted", "IS_DELETED", "Is_Deleted"])
def test_a_column_of_that_name_is_refused_with_the_way_out(name):
    with pytest.raises(SourceError, match=rf"ErrNameUnsupported.*shop\.t has {name}.*--columns"):
        with_mark(table("v", name))


def test_tables_that_are_known_already_are_described_as_they_are():
    class Changefeed:
        def describe(self, ts=None, *, known=None):
            tables = known.tables if known else {"shop.t": table("v")}
            return ChangefeedMeta(0, ts, tables)

    marking = MarkedTables(Changefeed())
    first = marking.describe(5)
    again = marking.describe(6, known=Known(5, first.tables))
    assert again.tables["shop.t"] is first.tables["shop.t"]
    assert "is_deleted" in first.tables["shop.t"].schema.names


@given(st.lists(st.sampled_from(["insert", "update", "delete"]), max_size=9))
def test_marked_changes_are_no_deletes_and_can_be_told_back(ops):
    rows = pa.table(
        {"_op": pa.array(ops, pa.string()), "id": pa.array(range(len(ops)), pa.int64())}
    )
    written = marked(rows)
    assert "delete" not in written["_op"].to_pylist()
    assert written["is_deleted"].to_pylist() == [op == "delete" for op in ops]
    assert as_sent(written).equals(rows)


def test_a_truncated_table_keeps_when_its_rows_were_deleted_before():
    assert mark_all("`t`", 7) == (
        "UPDATE `t` SET is_deleted = true, _commit_ts = 7 WHERE NOT is_deleted"
    )
