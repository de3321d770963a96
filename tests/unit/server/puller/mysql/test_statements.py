"""What is done with each statement of the manuals;
and what of a statement is not understood is never passed over.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.puller.mysql.ddl.statement import Kind, Statement, read_statement
from server.puller.mysql.ddl.tokens import Dialect
from server.puller.mysql.ddl.tree import AlterTable, CreateTable, Literal
from storage.mysql.event import EventType
from tests.unit.server.puller.mysql.statements import (
    NO_EFFECT,
    READ_AGAIN,
    STATEMENTS,
    STOP,
    UNDERSTOOD,
)
from tests.unit.server.puller.mysql.verdicts import PAGE, TYPES, final_of_event, page

SERVER = Dialect(version=101119)
KINDS = {NO_EFFECT: {Kind.NOTHING}, UNDERSTOOD: {Kind.DDL}, READ_AGAIN: {Kind.DDL}}
ALL = [
    (verdict, kind, query)
    for verdict, kinds in STATEMENTS.items()
    for kind in kinds
    for query in kinds[kind]
]
DESIGN = Path(__file__).parents[5] / "docs/design/0029-mysql-schema-tracker.md"


def read(query: str, dialect: Dialect = SERVER) -> Statement:
    return read_statement(query, "db", dialect=dialect)


@pytest.mark.parametrize(("verdict", "kind", "query"), ALL)
def test_each_statement_has_its_verdict(verdict: str, kind: str, query: str) -> None:
    statement = read(query)
    expected = KINDS.get(verdict, {Kind.ROWS} if "by a statement" in kind else {Kind.UNKNOWN})
    if kind == "savepoints":
        expected = {Kind.SAVEPOINT, Kind.ROLLBACK_TO}
    if kind.startswith("system versioning"):
        expected = {Kind.DDL}  # the tracker refuses them
    assert statement.kind in expected, statement.reason
    assert (statement.tree is None) == (statement.kind is Kind.UNKNOWN)


@pytest.mark.parametrize(
    "query", [query for verdict, _, query in ALL if verdict in (UNDERSTOOD, READ_AGAIN)]
)
def test_a_rest_that_is_not_understood_makes_all_of_it_unknown(query: str) -> None:
    if read(query.split("--", maxsplit=1)[0] + " x").kind is not Kind.UNKNOWN:
        assert any(word in query for word in ("SELECT", "`")), "only a query may go on"
    assert (
        read(query + " FROBNICATE (").kind is Kind.UNKNOWN
        or "SELECT" in query
        or query.endswith("-- end")
    )


@pytest.mark.parametrize(
    ("query", "mode", "name"),
    [
        ('TRUNCATE TABLE "t"', 4, "t"),
        ('ALTER TABLE "d"."t x" RENAME COLUMN "v" TO "w"', 4, "t x"),
        (r"ALTER TABLE t COMMENT 'C:\', ADD x INT", 1 << 20, "t"),
        (r"ALTER TABLE t COMMENT 'it\'s', ADD x INT", 0, "t"),
    ],
)
def test_names_and_strings_are_those_of_the_sessions_sql_mode(
    query: str, mode: int, name: str
) -> None:
    statement = read(query, Dialect(sql_mode=mode, version=101119))
    assert [action.name[1] for action in statement.actions] == [name]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("SET STATEMENT sql_mode='ANSI_QUOTES' FOR ALTER TABLE t ADD x INT DEFAULT 5", ""),
        (r"SET STATEMENT sql_mode='' FOR ALTER TABLE t ADD x TEXT DEFAULT 'a\nb'", "of its session"),
        ("SET STATEMENT sql_mode='' FOR CREATE TABLE t (id INT PRIMARY KEY, d DATE)", "of its session"),
        (r"ALTER TABLE t /* SET STATEMENT sql_mode */ ADD x TEXT DEFAULT 'a\nb'", ""),
        (r"SET STATEMENT lock_wait_timeout=5 FOR ALTER TABLE t ADD x TEXT DEFAULT 'a\nb'", ""),
    ],
)  # fmt: skip
def test_the_mode_that_a_statement_sets_for_itself_is_not_the_one_it_is_read_with(
    query: str, reason: str
) -> None:
    tree = read(query, Dialect(sql_mode=4, version=101119)).tree
    assert isinstance(tree, AlterTable | CreateTable)
    assert reason in tree.unsure if reason else not tree.unsure


def test_a_statement_that_is_about_other_tables_in_another_mode_is_not_understood() -> None:
    query = "SET STATEMENT sql_mode='' FOR DROP TABLE \"t\""
    assert read(query, Dialect(version=101119)).actions  # it failed in every other mode
    query = "SET STATEMENT sql_mode='' FOR UPDATE \"t\" SET v = 1"
    assert read(query, Dialect(version=101119)).kind is Kind.UNKNOWN


@pytest.mark.parametrize(
    ("column", "bit", "maria", "mysql"),
    [
        # EMPTY_STRING_IS_NULL of a MariaDB is the bit of a MySQL's TIME_TRUNCATE_FRACTIONAL
        ("VARCHAR(5) DEFAULT ''", 32, ("varchar", ""), ("varchar", "string")),
        ("VARCHAR(5) DEFAULT ('')", 32, ("varchar", ""), ("varchar", "string")),
        ("DATE", 9, ("datetime", ""), ("date", "")),  # ORACLE: to a MySQL 5.7 no type is another
        ("BLOB", 9, ("longblob", ""), ("blob", "")),
        ("TIMESTAMP(3)", 12, ("datetime", ""), ("datetime", "")),  # MAXDB
        ("REAL", 0, ("float", ""), ("float", "")),
    ],
)
def test_a_bit_of_sql_mode_means_what_it_does_on_the_server_that_has_it(
    column: str, bit: int, maria: tuple[str, str], mysql: tuple[str, str]
) -> None:
    seen = []
    for dialect in (
        Dialect(version=101119, sql_mode=1 << bit),
        Dialect(mariadb=False, version=50744, sql_mode=1 << bit),
    ):
        tree = read(f"CREATE TABLE t (c {column})", dialect).tree
        assert isinstance(tree, CreateTable)
        (definition,) = tree.columns
        default = definition.default
        assert default is None or isinstance(default, Literal)
        sort = "" if default is None or default.sort == "null" else default.sort
        seen.append((definition.type.base, sort))
    assert seen == [maria, mysql]


@pytest.mark.parametrize("kind", ["", "UNIQUE ", "FULLTEXT ", "SPATIAL ", "VECTOR "])
def test_an_index_of_any_kind_is_one_of_its_table(kind: str) -> None:
    for query in (f"CREATE {kind}INDEX i ON t (g)", f"CREATE OR REPLACE {kind}INDEX i ON t (g)"):
        statement = read(query)
        assert isinstance(statement.tree, AlterTable), statement.reason
        assert statement.tree.name == ("db", "t")
    for verb in ("CREATE", "CREATE OR REPLACE", "DROP"):
        assert read(f"{verb} SPATIAL REFERENCE SYSTEM 4120").kind is Kind.NOTHING


@pytest.mark.parametrize(
    ("dialect", "keys"),
    [
        (Dialect(version=101119), ["foreign"]),
        (Dialect(version=100434), []),
        (Dialect(mariadb=False, version=80046), []),
        (Dialect(mariadb=False, version=90000), ["foreign"]),
        (Dialect(mariadb=False), ["foreign"]),
    ],
)
def test_references_of_a_column_is_a_foreign_key_where_the_server_keeps_it(
    dialect: Dialect, keys: list[str]
) -> None:
    tree = read("CREATE TABLE t (r INT REFERENCES u (id) ON DELETE CASCADE)", dialect).tree
    assert isinstance(tree, CreateTable)
    assert [key.kind for key in tree.columns[0].keys] == keys
    whole = "CREATE TABLE t (r INT, FOREIGN KEY (r) REFERENCES u (id) ON DELETE CASCADE)"
    tree = read(whole, dialect).tree
    assert isinstance(tree, CreateTable)
    assert [key.kind for key in tree.keys] == ["foreign"]


def test_executable_comments_run_where_the_server_runs_them() -> None:
    query = (
        "ALTER TABLE t /*!50701 ADD a INT, */ /*!80000 ADD b INT, */ /*M!101100 ADD c INT, */ "
        "/*!999999 ADD d INT, */ FORCE"
    )
    names = {
        dialect: [
            spec.column.name for spec in read(query, dialect).tree.specs if hasattr(spec, "column")
        ]  # type: ignore[union-attr]
        for dialect in (Dialect(version=101119), Dialect(mariadb=False, version=80046))
    }
    assert list(names.values()) == [["c"], ["a", "b"]]


@pytest.mark.parametrize(
    ("elements", "version", "names"),
    [
        ("vector INT", 101119, ["id", "vector"]),
        ("vector INT, VECTOR INDEX (id)", 101119, ["id", "vector"]),
        ("e VECTOR(3), VECTOR (e)", 110809, ["id", "e"]),
        ("VECTOR n (e) DISTANCE=cosine M=5 COMMENT 'x', e VECTOR(3)", 110809, ["id", "e"]),
    ],
)
def test_vector_begins_a_key_where_no_column_may_be_called_so(
    elements: str, version: int, names: list[str]
) -> None:
    tree = read(f"CREATE TABLE t (id INT PRIMARY KEY, {elements})", Dialect(version=version)).tree
    assert isinstance(tree, CreateTable)
    assert [column.name for column in tree.columns] == names


@given(st.text(max_size=60))
def test_any_text_is_read_or_not_understood(query: str) -> None:
    for text in (
        query,
        f"ALTER TABLE t {query}",
        f"CREATE TABLE t (a {query})",
        f"SET STATEMENT {query}",
    ):
        read(text)


def test_the_table_in_the_design_is_made_of_these() -> None:
    lines = ["| kind | verdict | such as |", "|---|---|---|"]
    for verdict, kinds in STATEMENTS.items():
        for kind, queries in kinds.items():
            shown = "; ".join(
                f"`{' '.join(query.split())[:70].replace('|', '/').replace('`', '')}`"
                for query in queries[:3]
            )
            lines.append(f"| {kind} | {verdict} | {shown} |")
    table = "\n".join(lines)
    assert table in DESIGN.read_text(encoding="utf-8"), f"put this into {DESIGN.name}:\n{table}"


def test_the_page_of_verdicts_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "python -m tests.unit.server.puller.mysql.verdicts"
    )


@pytest.mark.parametrize("number", TYPES)
def test_events_stop_by_name_unless_they_may_be_passed_over(number: int) -> None:
    verdict, why = final_of_event(number)
    assert (verdict == STOP) == why.endswith(
        ("ErrBinlogEventUnsupported", "ErrMySQLLogDamaged", "ErrMySQLStatementLogged")
    )
    assert number in set(EventType) or verdict == STOP
