"""Tables of TiDB as sources know them, and what a DDL means to one changefeed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pytest

from server.changefeed.columns import ColumnRules
from server.changefeed.filter import TableFilter
from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord
from server.changefeed.terms import Terms
from server.puller.source import TableChange
from server.puller.tidb.schema_puller import DdlUnsupportedError, table_change
from server.puller.tidb.table import (
    Removed,
    Reread,
    following,
    keeping_identities,
    part_spans,
    record_of,
    removed_from,
    reread_of,
    tidb_table,
)
from sink.mounter import COLUMN_ID
from storage.model.errors import InvalidError, TidemarkError
from storage.tidb.ddl import Action, Job
from storage.tidb.field_type import Flag, Type
from storage.tidb.record import record_key
from storage.tidb.schema import Column, TableInfo
from storage.tidb.schema_history import MODIFIED, REMOVED, Change, SchemaHistory, Table

ADD_COLUMN, ADD_INDEX = 5, 7
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


def test_what_has_no_rows_no_key_or_soft_deletes_is_refused() -> None:
    ineligible: list[dict[str, Any]] = [
        {"view": {}},
        {"sequence": {}},
        {"pk_is_handle": False},
        {"softdelete_info": {"retention": "1d"}},
    ]
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
        return self.wants_any_of(schema_name)

    def wants_any_of(self, schema_name: str) -> bool:
        return schema_name == "a"

    def known(self, commit_ts: int) -> None:
        """Every change is news here."""
        del commit_ts

    def table(self, record: TableRecord, commit_ts: int | None = None) -> SourceTable | None:
        del commit_ts
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
    assert found.dropped == ("a.t", "b.t"), (
        "the catalog has to see that a table came from outside of the filter"
    )


def test_what_moves_rows_without_writing_them_is_refused_for_wanted_tables_only() -> None:
    with pytest.raises(DdlUnsupportedError, match=r"at 9 a\.t: why: q"):
        table_change(Change(9, "q", (Table(1, "a", DOC),), moved="why"), Wants())
    with pytest.raises(DdlUnsupportedError, match="every table"):
        table_change(Change(9, "flashback", moved="why"), Wants())
    assert table_change(Change(9, "q", (Table(2, "b", DOC),), moved="why"), Wants()) is None
    with pytest.raises(DdlUnsupportedError, match=r"at 9 a: why: q"):
        table_change(Change(9, "q", moved="why", database="a"), Wants())
    assert table_change(Change(9, "q", moved="why", database="b"), Wants()) is None, (
        "another database came back"
    )


def test_the_advice_of_a_ddl_that_cannot_be_followed_names_the_ts_from_which_another_changefeed_begins() -> (
    None
):
    moved = Change(9, "ALTER TABLE t EXCHANGE …", (Table(1, "a", DOC),), moved="rows move")
    with pytest.raises(
        DdlUnsupportedError, match=r"a\.t: rows move.*Create another changefeed with --start-ts 9"
    ):
        table_change(moved, Wants())


def test_a_changefeed_that_begins_at_an_exchange_or_leaves_its_tables_out_is_not_stopped_by_it() -> (
    None
):
    exchange = {
        "id": 5, "type": Action.EXCHANGE_PARTITION, "state": 6, "schema_id": 1, "table_id": 7, "query": "EXCHANGE",
        "binlog": {"TableInfo": None}, "raw_args": [9, 1, 8],
    }  # fmt: skip
    job = Job.parse(json.dumps(exchange))
    parted_info = parted(9, 10).table_info | {"id": 8, "name": {"O": "p", "L": "p"}}

    def history(database: str) -> SchemaHistory:
        return SchemaHistory(
            10, {1: database}, [Table(1, database, DOC), Table(1, database, parted_info)]
        )

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
    second = keeping_identities(
        with_columns(id=1, v=4, w=3), first
    )  # MODIFY v, by a reorganization
    third = keeping_identities(with_columns(id=1, u=4, w=5), second)  # RENAME v TO u, MODIFY w
    fourth = keeping_identities(with_columns(id=1, u=4, w=5, v=6), third)  # ADD v
    assert [identities(each) for each in (first, second, third, fourth)] == [
        {"id": 1, "v": 2, "w": 3},
        {"id": 1, "v": 2, "w": 3},
        {"id": 1, "u": 2, "w": 3},
        {"id": 1, "u": 2, "w": 3, "v": 6},
    ]


def test_a_record_says_where_only_names_tell_which_column_is_which() -> None:
    first = with_columns(id=1, v=2, w=3)
    dropped_and_added = keeping_identities(with_columns(id=1, w=3, u=4), first)
    assert not dropped_and_added.matched_by_names
    several = with_columns(id=1, u=4, w=5)  # CHANGE v u, MODIFY w: both are built anew
    several.table_info[MODIFIED] = {"ts": 9, "added": 0, "alone": False}
    after = keeping_identities(several, first)
    assert after.matched_by_names
    rules = ColumnRules(["s.t=*,!v"])
    before = tidb_table(rules.of(tidb_table(first)))
    with pytest.raises(TableIneligibleError, match=r"has no column v any more.*u instead"):
        Terms("c", TableFilter(["*.*"]), columns=rules).of(tidb_table(after), before)
    alone = with_columns(id=1, u=4, w=3)
    alone.table_info[MODIFIED] = {"ts": 9, "added": 0, "alone": True}
    followed = tidb_table(keeping_identities(alone, first))
    assert rules.of(followed, before).selected == ["id", "w"]


@dataclass
class Followed:
    """A table that a real history takes from DDL to DDL,
    each told to a catalog that has the table of before.
    """

    table: SourceTable

    def __post_init__(self) -> None:
        info = self.table.record.table_info
        self._history = SchemaHistory(10, {1: "a"}, [Table(1, "a", info)])
        self._ts = 10

    def wants(self, schema_name: str, table_name: str) -> bool:
        del schema_name, table_name
        return True

    def wants_any_of(self, schema_name: str) -> bool:
        del schema_name
        return True

    def table_of(self, record: TableRecord) -> SourceTable:
        return tidb_table(following(record, self.table.record))

    def ddl(
        self, action: int, *columns: Column, late: bool = False, several: Any = None, **more: Any
    ) -> TableChange:
        """A DDL that leaves these columns."""
        doc = {
            "id": self._ts, "type": action, "state": 4, "schema_id": 1, "table_id": 7, "query": "ALTER",
            "binlog": {"TableInfo": info_of(*columns) | more}, "multi_schema_info": several,
        }  # fmt: skip
        self._ts += 10
        change = self._history.apply(Job.parse(json.dumps(doc)), self._ts, late=late)
        assert change is not None
        told = table_change(change, Following(self))
        assert told is not None
        (self.table,) = told.tables
        return told


class Following(Wants):
    """A catalog with one table."""

    def __init__(self, followed: Followed) -> None:
        self._followed = followed

    def known(self, commit_ts: int) -> None:
        """Every change is news here."""
        del commit_ts

    def table(self, record: TableRecord, commit_ts: int | None = None) -> SourceTable | None:
        assert commit_ts
        return self._followed.table_of(record)


def info_of(*columns: Column) -> dict[str, Any]:
    """`columns` with the ids that they say, behind the key."""
    all_columns = [Column.bigint("id"), *columns]
    doc: dict[str, Any] = json.loads(TableInfo.build(7, "t", all_columns).to_json())
    for column, given in zip(doc["cols"][1:], columns, strict=True):
        column["id"] = given.id
    return doc


UNIQUE: dict[str, Any] = {
    "index_info": [
        {
            "is_unique": True,
            "is_primary": False,
            "state": 5,
            "idx_name": {"O": "u", "L": "u"},
            "id": 1,
            "idx_cols": [{"offset": 1, "length": -1}],
        }
    ],
    "pk_is_handle": False,
}
"""A key of the second column."""
MODIFIED_AT_20 = {MODIFIED: {"ts": 20, "alone": True, "added": 0}}
V = replace(Column.varchar("v", 20), id=2)
INT = Column(name="v", id=2, type=Type.LONG, flen=11)


def followed(*columns: Column) -> Followed:
    return Followed(tidb_table(TableRecord("a", info_of(*columns))))


@pytest.mark.parametrize(
    ("old", "new", "emptied"),
    [
        (V, replace(V, id=3, flen=3), False),
        (replace(INT, flen=20, type=Type.LONGLONG), replace(V, id=3), True),
        (INT, replace(V, id=3, name="w"), True),
        (V, replace(V, id=3, name="w", flen=3), False),
        (
            replace(V, type=Type.ENUM, elems=("x", "y")),
            replace(V, id=3, type=Type.ENUM, elems=("y", "x")),
            False,
        ),
        (
            replace(V, type=Type.DATETIME, flen=26, decimal=6),
            replace(V, id=3, type=Type.DATETIME, flen=19),
            False,
        ),
    ],
    ids=[
        "shorter",
        "another type",
        "another type and name",
        "shorter and another name",
        "members",
        "no microseconds",
    ],
)
def test_a_modify_that_rewrites_values_has_the_table_read_again_behind_it(
    old: Column, new: Column, emptied: bool
) -> None:
    table = followed(old)
    before = table.table
    change = table.ddl(Action.MODIFY_COLUMN, new)
    assert (reread_of(table.table.record), change.truncated) == (
        Reread(20, emptied),
        ("a.t",) * emptied,
    )
    assert table.table.span != before.span
    assert table.table.span.contains(record_key(7, 5))
    assert identities(table.table.record)[new.name] == 2, "the same column"


TIME = Column(name="v", id=2, type=Type.TIME, flen=10, decimal=0)
BITS = Column(name="v", id=2, type=Type.BIT, flen=8)
UNSIGNED = replace(INT, flags=Flag.UNSIGNED)


@pytest.mark.parametrize(
    ("old", "new", "emptied"),
    [
        (TIME, replace(TIME, flen=17, decimal=6), False),
        (BITS, replace(BITS, flen=16), False),
        (UNSIGNED, replace(UNSIGNED, type=Type.LONGLONG, flen=20), True),
        (replace(INT, type=Type.LONGLONG, flen=20), INT, True),
    ],
    ids=["more digits", "more bytes", "another type for readers", "narrower"],
)
def test_a_modify_of_the_table_info_alone_has_what_it_shows_otherwise_read_again(
    old: Column, new: Column, emptied: bool
) -> None:
    """TiDB leaves rows as they are where they fit the new type; readers have texts and bytes."""
    for action in (Action.MODIFY_COLUMN, Action.MULTI_SCHEMA_CHANGE):
        table = followed(old)
        change = table.ddl(action, new)
        assert (reread_of(table.table.record), change.truncated) == (
            Reread(20, emptied),
            ("a.t",) * emptied,
        )


def test_a_key_that_is_shown_otherwise_empties_the_table() -> None:
    key = replace(TIME, flags=Flag.NOT_NULL)
    table = Followed(tidb_table(TableRecord("a", info_of(key) | UNIQUE)))
    change = table.ddl(Action.MODIFY_COLUMN, replace(key, decimal=6), **UNIQUE)
    assert change.truncated == ("a.t",)


def test_moments_as_text_are_read_again_with_more_digits() -> None:
    moment = replace(TIME, type=Type.DATETIME, flen=19)
    for shown, is_reread in (("text", True), ("key-text", False)):
        before = TableRecord("a", info_of(moment)).showing(shown)
        now = TableRecord("a", info_of(replace(moment, decimal=6)) | MODIFIED_AT_20).showing(shown)
        assert reread_of(following(now, before)).ts == 20 * is_reread


@pytest.mark.parametrize(
    ("action", "columns"),
    [
        (Action.MODIFY_COLUMN, (replace(INT, type=Type.LONGLONG, flen=20),)),
        (Action.MODIFY_COLUMN, (replace(INT, flags=Flag.NOT_NULL),)),
        (Action.MODIFY_COLUMN, (replace(INT, name="renamed"),)),
        (ADD_COLUMN, (INT, replace(V, id=3, name="w", origin_default="7"))),
        (Action.MULTI_SCHEMA_CHANGE, (replace(INT, type=Type.LONGLONG, flen=20),)),
        (Action.MULTI_SCHEMA_CHANGE, ()),
        (
            Action.MULTI_SCHEMA_CHANGE,
            (INT, replace(V, id=3, name="_V$_i_0", hidden=True, generated="v + 1")),
        ),
        (ADD_INDEX, (INT, replace(V, id=3, name="_V$_i_0", hidden=True, generated="v + 1"))),
    ],
    ids=[
        "wider",
        "not null",
        "name",
        "added",
        "several wider",
        "dropped",
        "several with an index",
        "index",
    ],
)
def test_a_ddl_that_leaves_stored_values_reads_nothing_again(
    action: int, columns: Sequence[Column]
) -> None:
    table = followed(INT)
    before = table.table.span
    change = table.ddl(action, *columns)
    assert (reread_of(table.table.record), change.truncated, table.table.span) == (
        Reread(),
        (),
        before,
    )


def test_columns_that_only_change_places_are_not_read_again() -> None:
    w = replace(INT, name="w", id=3)
    table = followed(INT, w)
    assert not table.ddl(Action.MODIFY_COLUMN, w, INT).truncated
    assert reread_of(table.table.record).ts == 0


@pytest.mark.parametrize(
    ("changes", "late", "is_reread"),
    [((5,), False, False), ((12,), False, True), ((5,), True, True), ((), True, True)],
)
def test_new_columns_of_an_alter_with_several_changes_are_read_again_unless_rows_with_them_come_behind_it(
    changes: Sequence[int], late: bool, is_reread: bool
) -> None:
    """Binlogs tell such an ALTER when users have had its columns for a while."""
    table = followed(INT)
    several = {"sub_jobs": [{"type": each} for each in changes], "revertible": False}
    columns = INT, replace(V, id=3, name="w")
    table.ddl(Action.MULTI_SCHEMA_CHANGE, *columns, late=late, several=several)
    assert reread_of(table.table.record).ts == 20 * is_reread


def test_a_column_that_was_being_built_when_the_changefeed_began_is_read_again() -> None:
    hidden = replace(V, id=3, name="_Col$_v_0", flen=3, state=3)
    table = followed(V, hidden)
    table.ddl(Action.MODIFY_COLUMN, replace(V, id=3, flen=3))
    assert reread_of(table.table.record) == Reread(20)
    assert identities(table.table.record) == {"id": 1, "v": 2}


@pytest.mark.parametrize("kind", [71, 72, Action.TRUNCATE_TABLE])
def test_columns_stay_the_same_where_a_table_gets_another_id(kind: int) -> None:
    """PARTITION BY, REMOVE PARTITIONING and TRUNCATE, behind a MODIFY that built a column anew."""
    table = followed(V)
    table.ddl(Action.MODIFY_COLUMN, replace(V, id=3, flen=3))
    history = SchemaHistory(20, {1: "a"}, [Table(1, "a", table.table.record.table_info)])
    doc = {
        "id": 99, "type": kind, "state": 4, "schema_id": 1, "table_id": 7, "query": "ALTER",
        "binlog": {"TableInfo": info_of(replace(V, id=3, flen=3)) | {"id": 9}},
    }  # fmt: skip
    change = history.apply(Job.parse(json.dumps(doc)), 30)
    assert change is not None
    record = record_of(change.tables[0])
    assert (record.former_id, table.table.record.former_id) == (7, 7)
    after = following(record, table.table.record)
    assert identities(after) == {"id": 1, "v": 2}
    assert (reread_of(after), tidb_table(after).span.table_id) == (Reread(), 9)


def test_a_key_with_other_values_empties_the_table() -> None:
    key = replace(V, flags=Flag.NOT_NULL)
    table = Followed(tidb_table(TableRecord("a", info_of(key) | UNIQUE)))
    change = table.ddl(Action.MODIFY_COLUMN, replace(key, id=3, flen=3), **UNIQUE)
    assert change.truncated == ("a.t",)


def test_a_table_stays_where_it_began_anew_until_it_does_so_again() -> None:
    table = followed(V)
    table.ddl(Action.MODIFY_COLUMN, replace(V, id=3, flen=3))
    begun = table.table.span
    table.ddl(ADD_COLUMN, replace(V, id=3, flen=3), replace(INT, id=4, name="w"))
    change = table.ddl(Action.RENAME_TABLE, replace(V, id=3, flen=3), name={"O": "u", "L": "u"})
    assert (table.table.name, table.table.span, reread_of(table.table.record).ts) == (
        "a.u",
        begun,
        20,
    )
    assert not change.truncated
    table.ddl(Action.MODIFY_COLUMN, replace(V, id=5, flen=2))
    assert (table.table.span != begun, reread_of(table.table.record).ts) == (True, 50)
    again = tidb_table(TableRecord("a", json.loads(table.table.record.table_info_json)))
    assert again.span == table.table.span, "as a worker, or a new owner, reads the record"


def test_columns_that_swap_their_names_swap_nothing_else() -> None:
    first = with_columns(id=1, v=2, w=3)
    assert identities(keeping_identities(with_columns(id=1, v=3, w=2), first)) == {
        "id": 1,
        "v": 3,
        "w": 2,
    }
