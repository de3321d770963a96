"""Tables of TiDB as sources know them, and what a DDL means to one changefeed."""

import json
from typing import Any

import pytest

from server.puller.source import TableChange
from server.puller.table import SourceTable, TableIneligibleError, TableRecord
from server.puller.tidb.change import table_change
from server.puller.tidb.errors import DdlUnsupportedError
from server.puller.tidb.table import Removed, part_spans, removed_from, tidb_table
from storage.model.errors import InvalidError
from storage.tidb.column import Column
from storage.tidb.key import record_key
from storage.tidb.schema import TableInfo
from storage.tidb.schema_history import REMOVED, Change, Table

DOC = json.loads(TableInfo.build(7, "t", [Column.bigint("id"), Column.bigint("v")]).to_json())


def parted(*ids: int, **more: Any) -> TableRecord:
    parts = [{"id": number, "name": {"O": f"p{number}", "L": f"p{number}"}} for number in ids]
    return TableRecord("a", DOC | {"partition": {"enable": True, "definitions": parts}} | more)


def test_of_a_table_only_what_is_taken_is_mounted_and_the_key() -> None:
    record = TableRecord("a", DOC).selecting(["v"])
    key = list(tidb_table(TableRecord("a", DOC)).mounter.key_columns)
    assert tidb_table(record).mounter.schema.names[4:] == sorted({"v", *key})
    assert record.whole == TableRecord("a", DOC)
    assert tidb_table(TableRecord("a", DOC).selecting([])).mounter.schema.names[4:] == key


def test_a_partitioned_table_is_one_table_that_holds_the_keys_of_all_its_partitions() -> None:
    record = parted(9, 12, 10)
    table = tidb_table(record)
    assert (table.name, table.span.table_id) == ("a.t", 7)
    for number in (9, 10, 12):
        assert table.span.contains(record_key(number, 5))
    assert [span.table_id for span in part_spans(record)] == [9, 12, 10]
    assert not part_spans(TableRecord("a", DOC))


def test_another_set_of_partitions_is_another_span() -> None:
    spans = {tidb_table(parted(*ids)).span for ids in ((9, 10, 11), (9, 11), (9, 10, 12), (9,))}
    assert len(spans) == 4
    assert tidb_table(parted(9, 11)).span == tidb_table(parted(9, 11, **{REMOVED: {}})).span


def test_what_has_no_rows_or_no_key_is_refused() -> None:
    ineligible: list[dict[str, Any]] = [{"view": {}}, {"sequence": {}}, {"pk_is_handle": False}]
    for more in ineligible:
        with pytest.raises(TableIneligibleError):
            tidb_table(TableRecord("a", DOC | more))


def test_removed_partitions_are_read_from_the_record() -> None:
    removed = removed_from(parted(9, **{REMOVED: {"ts": 100, "partition_ids": [8]}}))
    assert (removed, removed.delete_ts) == (Removed(100, (8,)), 101)
    assert removed_from(parted(9)).partition_ids == ()
    with pytest.raises(InvalidError, match="nothing sensible"):
        removed_from(parted(9, **{REMOVED: {"ts": "x", "partition_ids": [8]}}))


class Wants:
    """A catalog that takes tables of database `a` only."""

    def wants(self, schema_name: str, table_name: str) -> bool:
        del table_name
        return schema_name == "a"

    def table(self, record: TableRecord) -> SourceTable | None:
        return tidb_table(record) if record.schema_name == "a" else None

    async def change(self, change: TableChange) -> None:
        del change

    def resolve(self, ts: int) -> None:
        del ts


def test_a_change_of_tables_that_nobody_wants_is_none() -> None:
    assert table_change(Change(9, "q", (Table(2, "b", DOC),)), Wants()) is None


def test_a_change_names_what_is_new_dropped_and_truncated() -> None:
    mine, other = Table(1, "a", DOC), Table(2, "b", DOC)
    found = table_change(Change(9, "q", (mine, other), (mine, other), (mine,)), Wants())
    assert found is not None
    assert ([table.name for table in found.tables], found.dropped, found.truncated) == (["a.t"], ("a.t",), ("a.t",))


def test_what_moves_rows_without_writing_them_is_refused_for_wanted_tables_only() -> None:
    with pytest.raises(DdlUnsupportedError, match=r"at 9 a\.t: why: q"):
        table_change(Change(9, "q", (Table(1, "a", DOC),), moved="why"), Wants())
    with pytest.raises(DdlUnsupportedError, match="every table"):
        table_change(Change(9, "flashback", moved="why"), Wants())
    assert table_change(Change(9, "q", (Table(2, "b", DOC),), moved="why"), Wants()) is None
