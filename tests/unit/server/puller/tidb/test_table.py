"""Tables of TiDB as sources know them, and what a DDL means to one changefeed."""

import json
from typing import Any, NoReturn

import pytest

from server.puller.source import TableChange
from server.puller.table import SourceTable, TableIneligibleError, TableRecord
from server.puller.tidb.change import table_change
from server.puller.tidb.errors import DdlUnsupportedError
from server.puller.tidb.table import Removed, keeping_identities, part_spans, removed_from, tidb_table
from sink.defaults import COLUMN_ID
from storage.model.errors import InvalidError, TidemarkError
from storage.tidb.column import Column
from storage.tidb.ddl import Action, Job
from storage.tidb.key import record_key
from storage.tidb.schema import TableInfo
from storage.tidb.schema_history import REMOVED, Change, SchemaHistory, Table

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
    removed = {REMOVED: {"ts": 100, "partition_ids": [10]}}
    assert tidb_table(parted(9, 11)).span == tidb_table(parted(9, 11, **removed)).span


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

    async def refuse(self, ts: int, error: TidemarkError) -> NoReturn:
        del ts
        raise error

    def resolve(self, ts: int) -> None:
        del ts


def test_a_change_of_tables_that_nobody_wants_is_none() -> None:
    assert table_change(Change(9, "q", (Table(2, "b", DOC),)), Wants()) is None


def test_a_change_names_what_is_new_dropped_and_truncated() -> None:
    mine, other = Table(1, "a", DOC), Table(2, "b", DOC)
    found = table_change(Change(9, "q", (mine, other), (mine, other), (mine,)), Wants())
    assert found is not None
    tables = [table.name for table in found.tables]
    assert (tables, found.truncated) == (["a.t"], ("a.t",))
    assert found.dropped == ("a.t", "b.t"), "the catalog has to see that a table came from outside of the filter"


def test_what_moves_rows_without_writing_them_is_refused_for_wanted_tables_only() -> None:
    with pytest.raises(DdlUnsupportedError, match=r"at 9 a\.t: why: q"):
        table_change(Change(9, "q", (Table(1, "a", DOC),), moved="why"), Wants())
    with pytest.raises(DdlUnsupportedError, match="every table"):
        table_change(Change(9, "flashback", moved="why"), Wants())
    assert table_change(Change(9, "q", (Table(2, "b", DOC),), moved="why"), Wants()) is None


def test_the_advice_of_a_ddl_that_cannot_be_followed_names_the_ts_from_which_another_changefeed_begins() -> None:
    moved = Change(9, "ALTER TABLE t EXCHANGE …", (Table(1, "a", DOC),), moved="rows move")
    with pytest.raises(DdlUnsupportedError, match=r"a\.t: rows move.*Create another changefeed with --start-ts 9"):
        table_change(moved, Wants())


def test_a_changefeed_that_begins_at_an_exchange_or_leaves_its_tables_out_is_not_stopped_by_it() -> None:
    exchange = {
        "id": 5, "type": Action.EXCHANGE_PARTITION, "state": 6, "schema_id": 1, "table_id": 7, "query": "EXCHANGE",
        "binlog": {"TableInfo": None}, "raw_args": [9, 1, 8],
    }  # fmt: skip
    job = Job.parse(json.dumps(exchange))
    parted_info = parted(9, 10).table_info | {"id": 8, "name": {"O": "p", "L": "p"}}

    def history(database: str) -> SchemaHistory:
        return SchemaHistory(10, {1: database}, [Table(1, database, DOC), Table(1, database, parted_info)])

    taken = history("a").apply(job, 20)
    assert taken is not None
    with pytest.raises(DdlUnsupportedError):
        table_change(taken, Wants())
    left_out = history("b").apply(job, 20)
    assert left_out is not None
    assert table_change(left_out, Wants()) is None, "its --filter leaves the tables out"


def identities(record: TableRecord) -> dict[str, int]:
    schema = tidb_table(record).mounter.schema
    return {field.name: int(field.metadata[COLUMN_ID]) for field in schema if field.metadata}


def with_columns(**ids: int) -> TableRecord:
    columns = [Column.bigint(name) for name in ids]
    doc = json.loads(TableInfo.build(7, "t", columns).to_json())
    for column in doc["cols"]:
        column["id"] = ids[column["name"]["O"]]
    return TableRecord("s", doc)


def test_a_column_that_tidb_has_built_anew_is_still_the_same_column() -> None:
    first = with_columns(id=1, v=2, w=3)
    second = keeping_identities(with_columns(id=1, v=4, w=3), first)  # MODIFY v, by a reorganization
    third = keeping_identities(with_columns(id=1, u=4, w=5), second)  # RENAME v TO u, MODIFY w
    fourth = keeping_identities(with_columns(id=1, u=4, w=5, v=6), third)  # ADD v
    assert [identities(each) for each in (first, second, third, fourth)] == [
        {"id": 1, "v": 2, "w": 3},
        {"id": 1, "v": 2, "w": 3},
        {"id": 1, "u": 2, "w": 3},
        {"id": 1, "u": 2, "w": 3, "v": 6},
    ]


def test_columns_that_swap_their_names_swap_nothing_else() -> None:
    first = with_columns(id=1, v=2, w=3)
    assert identities(keeping_identities(with_columns(id=1, v=3, w=2), first)) == {"id": 1, "v": 3, "w": 2}
