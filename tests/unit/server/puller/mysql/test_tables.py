"""What statements do to the tables of a changefeed: ids stay with tables,
through renames and ghosts.
"""

import contextlib
import struct
from typing import Any

import pytest

from server.capture.source.mysql import mysql_table
from server.changefeed.table import SourceTable, TableIneligibleError
from server.puller.mysql.ddl.column_types import Collations
from server.puller.mysql.ddl.definition import Definition
from server.puller.mysql.ddl.statement import read_statement
from server.puller.mysql.ddl.tokens import Dialect
from server.puller.mysql.ddl.tree import TableName
from server.puller.mysql.session.errors import DdlUnknownError, StatementLoggedError
from server.puller.mysql.tables import (
    CatalogFacts,
    StatementOutcome,
    Tables,
    definition_of_table_map,
    has_gh_ost_comment,
    name_of,
    new_id,
    record_of,
    same_keys,
)
from server.puller.mysql.transaction import scanner
from server.puller.mysql.transaction.scanner import LogIndex, TableSearch, _answer, is_before
from server.puller.mysql.transaction.transactions import LoggedStatement
from storage.mysql.control import Query
from storage.mysql.event import EventType
from storage.mysql.schema import Column, Table, Type
from storage.mysql.table_map import TableMap
from tests.unit.storage.mysql.encode import LONG, event, events, table_map

COLUMNS = (Column(name="id", type=Type.LONG, nullable=False), Column(name="v", type=Type.LONG))


def table(name: str, table_id: int, schema: str = "s") -> SourceTable:
    return mysql_table(record_of(Definition((schema, name), COLUMNS, ("id",)), table_id))


def tables() -> Tables:
    return Tables([table("a", 1), table("b", 2), table("x", 9, "other")])


def effect(query: str, wanted: str = "ab_") -> tuple[dict[str, int], list[str], list[str]]:
    found = tables().effect(read_statement(query, "s"), lambda _, name: name[0] in wanted)
    return (
        {name: table_id for (_, name), table_id in found.touched.items()},
        [name for _, name in (*found.dropped, *found.foreign)],
        [name for _, name in found.truncated],
    )


NONE: Any = ({}, [], [])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("ALTER TABLE a ADD COLUMN c INT", ({"a": 1}, [], [])),
        ("ALTER TABLE elsewhere.z ADD COLUMN c INT", NONE),
        ("CREATE TABLE a2 (id INT)", ({"a2": -1}, [], [])),
        ("CREATE TABLE z (id INT)", NONE),
        ("CREATE OR REPLACE TABLE a (id INT)", ({"a": -1}, ["a"], [])),
        ("DROP TABLE a, z", ({}, ["a"], [])),
        ("DROP DATABASE s", ({}, ["a", "b"], [])),
        ("CREATE OR REPLACE SCHEMA s CHARACTER SET latin1", ({}, ["a", "b"], [])),
        ("CREATE OR REPLACE SEQUENCE a START WITH 5", ({}, ["a"], [])),
        ("CREATE SEQUENCE a", NONE),
        ("CREATE SCHEMA IF NOT EXISTS s", NONE),
        ("TRUNCATE a", ({}, [], ["a"])),
        ("TRUNCATE z", NONE),
        ("RENAME TABLE a TO a3", ({"a3": 1}, ["a"], [])),
        ("RENAME TABLE a TO z", ({}, ["a"], [])),
        ("RENAME TABLE a TO z, b TO a, z TO b", ({"a": 2, "b": 1}, [], [])),
        ("RENAME TABLE a TO z, zgho TO a", ({"a": 1}, [], [])),
        ("RENAME TABLE a TO _del, zgho TO a", ({"_del": 1, "a": -1}, ["zgho"], [])),
        ("RENAME TABLE z TO a9", ({"a9": -1}, ["z"], [])),
        ("RENAME TABLE IF EXISTS z TO a9", ({"a9": -1}, ["z"], [])),
        ("RENAME TABLE IF EXISTS z TO a", NONE),
        ("RENAME TABLE IF EXISTS a0 TO a", NONE),
        ("RENAME TABLE IF EXISTS z TO y", NONE),
        ("RENAME TABLE IF EXISTS z TO a, a TO a3", ({"a3": 1}, ["a"], [])),
        ("RENAME TABLE IF EXISTS a TO z, b TO a, z TO b", ({"a": 2, "b": 1}, [], [])),
        ("RENAME TABLE IF EXISTS a TO z, zgho TO a, z TO a7", ({"a": -1, "a7": 1}, ["zgho"], [])),
        ("RENAME TABLE z TO a", ({"a": -1}, ["z"], [])),
        ("ALTER TABLE a RENAME TO b2, ADD COLUMN c INT", ({"b2": 1}, ["a"], [])),
        ("CREATE VIEW a AS SELECT 1", NONE),
    ],
)
def test_a_statement_touches_truncates_and_drops_by_name(query: str, expected: Any) -> None:
    assert effect(query) == expected


@pytest.mark.parametrize(
    ("query", "moved", "filled"),
    [
        ("ALTER TABLE a TRUNCATE PARTITION p0, p1", "a", ""),
        ("ALTER TABLE a DROP PARTITION IF EXISTS p", "a", ""),
        ("ALTER TABLE z EXCHANGE PARTITION p WITH TABLE a", "a", ""),
        ("ALTER TABLE a EXCHANGE PARTITION p WITH TABLE b WITHOUT VALIDATION", "ab", ""),
        ("ALTER TABLE a CONVERT PARTITION p TO TABLE b3", "a", "b3"),
        ("ALTER TABLE z CONVERT PARTITION p TO TABLE b3", "", "b3"),
        ("ALTER TABLE a CONVERT TABLE b TO PARTITION p VALUES LESS THAN (9)", "a", ""),
        ("ALTER TABLE a IMPORT TABLESPACE", "a", ""),
        ("ALTER IGNORE TABLE a ADD UNIQUE KEY (v)", "a", ""),
        ("ALTER IGNORE TABLE a ADD COLUMN w INT", "a", ""),
        ("ALTER IGNORE TABLE a COMMENT='x', ALGORITHM=COPY", "a", ""),
        ("ALTER IGNORE TABLE a PARTITION BY LIST (id) (PARTITION p VALUES IN (1))", "a", ""),
        ("ALTER IGNORE TABLE a RENAME TO a9", "", ""),
        ("ALTER TABLE a REORGANIZE PARTITION p INTO (PARTITION q VALUES LESS THAN (9))", "", ""),
        ("ALTER TABLE a ADD PARTITION (PARTITION q VALUES LESS THAN (9))", "", ""),
        ("ALTER TABLE z DROP PARTITION p", "", ""),
        ("RENAME TABLE z TO a9", "", "a9"),
        ("ALTER TABLE a8 ADD PRIMARY KEY (id)", "", "a8"),
        ("ALTER TABLE a8 ADD PRIMARY KEY (id), RENAME TO a9", "", "a9"),
        ("CREATE TABLE a8 (id INT PRIMARY KEY)", "", ""),
        ("RENAME TABLE a TO _del, zgho TO a", "", "a"),
        ("RENAME TABLE a TO z, zgho TO a", "", ""),
    ],
)
def test_rows_that_no_event_brings_are_told_by_table(query: str, moved: str, filled: str) -> None:
    found = tables().effect(read_statement(query, "s"), lambda _, name: name[0] in "ab_")
    assert "".join(name for _, name in found.moved) == moved
    assert "".join(name for _, name in found.filled) == filled
    assert bool(found) or not (moved or filled)


@pytest.mark.parametrize(
    ("query", "reloaded"),
    [
        ("RENAME TABLE a TO z, z2 TO a", True),
        ("rename /* gh-ost */ table a TO _a_del, _a_gho TO a", False),
        ("rename /* gh-ost */ table a TO _a_20261126_del, _a_gho TO a", False),
        ("rename /* gh-ost */ table a TO z, _a_gho TO a", True),
        ("RENAME TABLE a TO _a_del, _a_gho TO a", True),
        ("RENAME TABLE a TO __a_old, _a_new TO a", True),
        ("RENAME TABLE a TO a_old, a_new TO a", True),
        ("RENAME TABLE a TO _a_del, other.stage TO a", True),
    ],
)
def test_a_table_that_takes_the_place_of_another_has_its_rows_by_gh_ost_only(
    query: str, reloaded: bool
) -> None:
    """Names alone prove nothing: a table that was filled by hand, or with --where, has others."""
    statement, by_ghost = read_statement(query, "s"), has_gh_ost_comment(query)
    found = tables().effect(statement, lambda _, name: name == "a", by_ghost=by_ghost)
    assert found.taken_over == {("s", "a")}
    assert found.reloaded == (found.taken_over if reloaded else set())


def test_a_table_that_becomes_a_partition_is_gone() -> None:
    assert effect("ALTER TABLE a CONVERT TABLE b TO PARTITION p VALUES LESS THAN (9)") == (
        {"a": 1},
        ["b"],
        [],
    )


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("INSERT INTO a VALUES (1)", StatementLoggedError),
        ("CALL anything()", StatementLoggedError),
        ("REORGANIZE THE `A`", DdlUnknownError),
    ],
)
def test_statements_that_may_change_rows_of_ours_are_refused(
    query: str, expected: type[Exception]
) -> None:
    with pytest.raises(expected, match=r"binlog\.000001:9"):
        tables().check(read_statement(query, "s"), query, "binlog.000001:9", 7)


def test_names_that_are_no_words_are_found_in_statements_too() -> None:
    query = "UPDATE `ta-b` SET v = 1"
    with pytest.raises(StatementLoggedError, match="ta-b"):
        Tables([table("ta-b", 1)]).check(read_statement(query, "s"), query, "here", 7)


def test_statements_about_other_tables_are_not_refused() -> None:
    for query in ("INSERT INTO z VALUES (1)", "REORGANIZE THE z"):
        tables().check(read_statement(query, "s"), query, "here", 7)


@pytest.mark.parametrize(
    ("sql", "error_code", "refused"),
    [
        ("FROBNICATE TABLE a7", 0, True),
        ("FROBNICATE TABLE s.a7", 0, True),
        ("FROBNICATE TABLE zz", 0, False),
        ("FROBNICATE TABLE a7", 1146, False),
        ("CREATE TABLE a7 (id INT)", 0, False),
    ],
)
def test_a_statement_that_may_make_a_table_of_ours_is_refused(
    sql: str, error_code: int, refused: bool
) -> None:
    """Though it names none that there is."""
    logged = LoggedStatement(
        7, Query(1, "s", sql, error_code), read_statement(sql, "s"), "binlog.1", 9
    )
    with pytest.raises(DdlUnknownError) if refused else contextlib.nullcontext():
        tables().check_new(logged, lambda schema, name: schema == "s" and name[0] == "a")


def test_a_character_set_has_the_collation_that_its_session_gives_it() -> None:
    sql = "CREATE TABLE a (k VARCHAR(9) CHARACTER SET utf8mb4 PRIMARY KEY, v TEXT CHARSET latin1)"
    query = Query(1, "s", sql, 0, default_collations={"utf8mb4": 46})
    logged = LoggedStatement(7, query, read_statement(sql, "s"), "binlog.1", 9)
    none = Tables([])
    effect = none.effect(logged.statement, lambda schema, _: schema == "s")
    facts = CatalogFacts(Collations({}, {"utf8mb4": 45, "latin1": 8}))
    made = StatementOutcome(none, logged, effect, facts).read().tracked["s", "a"].table
    assert [column.collation for column in made.columns] == [46, 8]


def test_a_renamed_table_is_known_by_its_new_name_only() -> None:
    held = tables()
    held.apply([table("c", 1)], [("s", "b")])
    assert (
        sorted(map(name_of, held.by_name.values()))
        == [("other", "x"), ("s", "c")]
        == sorted(held.by_name)
    )


def test_new_ids_depend_on_name_and_commit_ts_and_are_not_those_of_snapshots() -> None:
    ids = {
        new_id(ts, name) for ts in range(50) for name in (("a", "b.c"), ("a.b", "c"), ("x", "y"))
    }
    assert len(ids) == 150
    assert all(1 << 48 <= each < 1 << 53 for each in ids)
    assert new_id(7, ("a", "b")) == 509880632073864


def test_what_makes_a_table_ineligible_is_kept_in_its_record() -> None:
    with pytest.raises(TableIneligibleError, match="no transactions"):
        mysql_table(
            record_of(
                Definition(("s", "t"), COLUMNS, ("id",), "MyISAM", ("it has no transactions",)), 1
            )
        )
    with pytest.raises(TableIneligibleError, match="primary key"):
        mysql_table(record_of(Definition(("s", "t"), COLUMNS, ()), 1))


BEGIN = ("log.000001", 100)
"""The place where a search begins."""


def index_of(*seen: str | TableMap) -> LogIndex:
    """The index of a log that has these statements and tables behind `BEGIN`, each 10 bytes on."""
    index = LogIndex(BEGIN, Dialect())
    for number, each in enumerate(seen, 1):
        index.end = BEGIN[0], BEGIN[1] + 10 * number
        if isinstance(each, str):
            index.see_statement(read_statement(each, "s"), each)
        else:
            index.see_table(body_of(each))
    return index


def body_of(table_map: TableMap) -> bytes:
    """Of a TABLE_MAP event, as far as its names."""
    names = b"".join(
        bytes((len(name),)) + name.encode() + b"\0" for name in (table_map.schema, table_map.table)
    )
    return bytes(8) + names


def looked(*queries: str) -> dict[TableName, str]:
    """By the names a table has first: where it is at the end, or `gone`."""
    index = index_of(*queries)
    found = [index.search(("s", name), BEGIN) for name in ("a", "b")]
    return {each.name: "gone" if each.gone else each.now[1] for each in found}


def test_looking_ahead_follows_names_and_ends_at_drops() -> None:
    assert looked("RENAME TABLE a TO t, b TO a, t TO b") == {("s", "a"): "b", ("s", "b"): "a"}
    assert looked("RENAME TABLE a TO t", "DROP TABLE t, b") == {
        ("s", "a"): "gone",
        ("s", "b"): "gone",
    }
    assert looked("DROP DATABASE s", "CREATE TABLE a (id INT)") == {
        ("s", "a"): "gone",
        ("s", "b"): "gone",
    }


def test_what_was_read_once_answers_for_each_place_in_it() -> None:
    a, b = (TableMap("s", name, COLUMNS, ("id",)) for name in "ab")
    index = index_of("CREATE TABLE a (id INT)", a, "ALTER TABLE a ADD x INT", a, b, a)
    created, altered = (BEGIN[0], BEGIN[1] + 10), (BEGIN[0], BEGIN[1] + 30)
    assert index.search(("s", "a"), created) == TableSearch(("s", "a"), ("s", "a"), body_of(a))
    assert index.search(("s", "a"), altered).table_map == body_of(a)
    assert index.search(("s", "b"), created).table_map == body_of(b)
    assert index.search(("s", "c"), created).is_open
    # Only the first one behind each DDL is kept.
    assert len(index._entries) == 5


def test_what_a_transaction_holds_without_places_comes_behind_its_begin() -> None:
    """As in MariaDB 11.8, where only its first and last events have one."""
    body = table_map(7, "t", [(LONG, 0)])
    gtid = event(EventType.MARIADB_GTID, struct.pack("<QIB", 1, 0, 0) + bytes(6))
    sql = b"CREATE OR REPLACE TABLE t (id INT)"
    query = struct.pack("<IIBHH", 1, 0, 4, 0, 0) + b"shop\0" + sql
    parts = [event(EventType.QUERY, query), event(EventType.TABLE_MAP, body)]
    end = event(EventType.XID, bytes(8))
    index = LogIndex(("log.000001", 100), Dialect())
    index.see(events([at(gtid, 150), *parts, at(end, 400)]))
    found = index.search(("shop", "t"), ("log.000001", 150))
    assert (found.table_map, found.gone) == (body, False)
    assert index.search(("shop", "t"), ("log.000001", 400)).is_open


def at(whole: bytes, place: int) -> bytes:
    """The event, with the place of its end."""
    return whole[:13] + struct.pack("<I", place) + whole[17:]


def test_a_table_that_is_altered_before_its_rows_come_is_not_told_surely() -> None:
    index = index_of("ALTER TABLE a ADD x INT", TableMap("s", "a", COLUMNS, ("id",)))
    assert index.search(("s", "a"), BEGIN).altered


def test_what_is_behind_the_reader_is_dropped_when_it_is_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scanner, "_FORGET_MIN", 2)
    index = index_of(
        "CREATE TABLE a (id INT)", "DROP TABLE a", "CREATE TABLE b (id INT)", "DROP TABLE b"
    )
    rest = index.without((BEGIN[0], BEGIN[1] + 30))
    assert (len(index._entries), len(rest._entries)) == (4, 1)
    assert rest.search(("s", "b"), rest.begin).gone
    assert rest.end == index.end


@pytest.mark.parametrize(
    ("query", "alone"),
    [
        ("DROP TRIGGER tr", False),
        ("CREATE OR REPLACE TRIGGER tr AFTER INSERT ON x FOR EACH ROW SET @a = 1", False),
        ("/* x */ CREATE TRIGGER tr AFTER INSERT ON x FOR EACH ROW SET @a = 1", True),
        ("DROP VIEW a", True),
        ("CREATE TABLE a (id INT)", False),
        ("RENAME TABLE b TO a", False),
        ("DROP DATABASE s", False),
        ("ALTER TABLE a ADD x INT", True),
        ("TRUNCATE a", True),
    ],
)
def test_what_triggers_a_table_had_is_known_while_none_ended(query: str, alone: bool) -> None:
    assert index_of(query).is_known_alone(("s", "a"), BEGIN) is alone
    assert index_of(query).is_known_alone(("s", "a"), (BEGIN[0], BEGIN[1] + 10))


def test_a_table_found_under_a_later_name_has_the_one_it_was_sought_by() -> None:
    index = index_of("RENAME TABLE a TO t, b TO a, t TO b")
    found = [index.search(("s", name), BEGIN) for name in "ab"]
    there = {("s", name): Definition(("s", name), COLUMNS, ("id",)) for name in "ab"}
    seen = _answer(found, there, mariadb=True)
    assert [seen["s", name].table.name for name in "ab"] == [("s", "a"), ("s", "b")]


def test_places_of_a_log_are_ordered_by_the_number_of_their_file() -> None:
    assert is_before(("binlog.999999", 5), ("binlog.1000000", 4))
    assert is_before(("binlog.000002", 4), ("binlog.000002", 5))
    assert not is_before(("binlog.000002", 5), ("binlog.000002", 5))


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (
            Column(name="k", type=Type.LONG),
            Column(name="k", type=Type.LONGLONG, unsigned=True),
            True,
        ),
        (
            Column(name="k", type=Type.LONG),
            Column(name="k", type=Type.VARCHAR, meta=80, collation=45),
            False,
        ),
        (
            Column(name="k", type=Type.VARCHAR, meta=80, collation=45),
            Column(name="k", type=Type.BLOB, meta=2, collation=45),
            True,
        ),
        (
            Column(name="k", type=Type.VARCHAR, meta=80, collation=45),
            Column(name="k", type=Type.VARCHAR, meta=80, collation=46),
            False,
        ),
        (
            Column(name="k", type=Type.ENUM, elems=("a", "b")),
            Column(name="k", type=Type.ENUM, elems=("b", "a")),
            False,
        ),
        (Column(name="k", type=Type.LONG), Column(name="other", type=Type.LONG), False),
    ],
)
def test_keys_are_the_same_where_their_values_are_in_the_same_order(
    before: Column, after: Column, same: bool
) -> None:
    versions = [
        mysql_table(record_of(Definition(("s", "t"), (each,), (each.name,)), 1))
        for each in (before, after)
    ]
    assert same_keys(*versions) == same


@pytest.mark.parametrize(("digits", "faults"), [(0, 0), (6, 1)])
def test_times_of_mariadb_5_3_with_fractions_are_no_columns_that_a_log_tells(
    digits: int, faults: int
) -> None:
    """Their TABLE_MAP has no length: DATETIME(6) has eight bytes, as DATETIME had, but others."""
    old = Column(name="d", type=Type.DATETIME)
    of_today = Column(name="d", type=Type.DATETIME2, meta=digits)
    table_map = TableMap(
        "s", "t", (Column(name="id", type=Type.LONG, nullable=False), old), ("id",)
    )
    definition = definition_of_table_map(table_map, [Table(1, "t", (of_today,), ())])
    assert len(definition.faults) == faults
    assert all("column d has fractions" in fault for fault in definition.faults)
