"""The final verdict on every statement and event of a log: what a changefeed does when it comes,
by the product's code.

    python -m tests.unit.server.puller.mysql.verdicts     writes docs/format/mysql-verdicts.md

A statement is about the captured table `db.t`, which has the columns and keys it speaks of, or
about others.
"""

# ruff: noqa: E501 (the tables of the page are wide)

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from server.capture.source.mysql import mysql_table
from server.puller.mysql.ddl.column_types import Collations
from server.puller.mysql.ddl.definition import Definition
from server.puller.mysql.ddl.statement import Kind, Statement, read_statement
from server.puller.mysql.ddl.tokens import Dialect
from server.puller.mysql.ddl.tracker import Context, created
from server.puller.mysql.ddl.tree import (
    AddKey,
    AlterTable,
    ChangeColumn,
    CreateTable,
    DropColumn,
    DropKey,
    Position,
    RenameColumn,
    RenameKey,
    RenameTables,
    TableName,
)
from server.puller.mysql.ddl_changes import DdlChanges
from server.puller.mysql.session.errors import LogDamagedError, SavepointUnclearError
from server.puller.mysql.tables import CatalogFacts, Tables, record_of
from server.puller.mysql.transaction.transactions import LoggedStatement
from storage.model.errors import TidemarkError
from storage.mysql.control import Query
from storage.mysql.event import ROWS, EventType, EventUnsupportedError, split_events
from tests.unit.server.puller.mysql.statements import (
    NO_EFFECT,
    READ_AGAIN,
    STATEMENTS,
    STOP,
    UNDERSTOOD,
)

PAGE: Final = Path(__file__).parents[5] / "docs/format/mysql-verdicts.md"
SERVERS: Final = {
    "MariaDB 10.6": Dialect(version=100600),
    "MariaDB 12": Dialect(version=120000),
    "MySQL 8.0": Dialect(mariadb=False, version=80000),
    "MySQL 9": Dialect(mariadb=False, version=90000),
}
COLLATIONS: Final = Collations(
    {
        "utf8mb4_general_ci": 45,
        "utf8mb4_bin": 46,
        "latin1_swedish_ci": 8,
        "latin1_bin": 47,
        "utf8mb3_general_ci": 33,
    },
    {"utf8mb4": 45, "latin1": 8, "utf8mb3": 33, "ascii": 11},
)
_TEXTS: Final = ("char", "varchar", "text", "tinytext", "mediumtext", "longtext")


def final(query: str, dialect: Dialect = SERVERS["MariaDB 12"]) -> tuple[str, str]:
    """The verdict on a statement, and why or what stops the changefeed."""
    statement = read_statement(query, "db", dialect=dialect)
    if statement.kind is Kind.NOTHING:
        return NO_EFFECT, ""
    renamed = (
        [old for old, _ in statement.tree.pairs] if isinstance(statement.tree, RenameTables) else []
    )
    altered = [statement.tree.name] if isinstance(statement.tree, AlterTable) else []
    names = list(dict.fromkeys([("db", "t"), *renamed, *altered]))
    if statement.kind in (Kind.SAVEPOINT, Kind.ROLLBACK_TO):
        return (
            UNDERSTOOD,
            (
                f"rows behind it are undone; {SavepointUnclearError.code} where the log does not tell "
                "which"
            ),
        )
    tables = Tables(
        [
            mysql_table(record_of(_captured(statement, name), number))
            for number, name in enumerate(names, 1)
        ]
    )
    catalog: Any = SimpleNamespace(wants=lambda schema, _: schema in ("db", "a"))
    rows: Any = SimpleNamespace(ignored=set())
    changes = DdlChanges(tables, rows, catalog)
    logged = LoggedStatement(9, Query(1, "db", query, 0), statement, "binlog.000001", 4, dialect)
    try:
        effect = changes.effect_of(logged)
    except TidemarkError as err:
        return STOP, err.code
    if statement.kind is Kind.UNKNOWN:
        return NO_EFFECT, "it names no captured table; ErrMySQLDDLUnknown if it does"
    if statement.kind is not Kind.DDL:
        return (
            NO_EFFECT,
            "as far as its table is a base table without triggers: the catalogue is asked",
        )
    outcome = changes.outcome(logged, effect, CatalogFacts(COLLATIONS, "utf8mb4_general_ci"))
    if any(outcome.faults.values()) or any(tracked.faults for tracked in outcome.tracked.values()):
        return STOP, "ErrTableIneligible"
    again = [why for tracked in outcome.tracked.values() for why in tracked.unclear]
    again += [why for name, why in outcome.lost.items() if tables.by_id(effect.touched[name])]
    if effect.moved:
        again.append("rows move beside the log")
    if effect.filled:
        again.append("its rows are in no event")
    return (READ_AGAIN, "; ".join(again)) if again else (UNDERSTOOD, "")


def _captured(statement: Statement, name: TableName) -> Definition:
    """A table with the columns and keys that a statement speaks of."""
    texts, columns, keys = {"text"}, ["id", "v", "other", "text"], ["PRIMARY KEY (id)"]
    specs = statement.tree.specs if isinstance(statement.tree, AlterTable) else ()
    new = {
        spec.column.name.lower()
        for spec in specs
        if hasattr(spec, "column") and not isinstance(spec, ChangeColumn)
    }
    for spec in specs:
        match spec:
            case DropColumn(name=column) | RenameColumn(old=column) | ChangeColumn(old=column):
                columns.append(column)
                if isinstance(spec, ChangeColumn) and spec.column.type.base in _TEXTS:
                    texts.add(column)
            case AddKey(key=key):
                columns += [
                    part.column
                    for part in key.parts
                    if part.column and part.column.lower() not in new
                ]
            case DropKey(kind="key", name=index) | RenameKey(old=index) if (
                index.upper() != "PRIMARY"
            ):
                keys.append(f"KEY `{index}` (other)")
        position = getattr(spec, "position", None)
        if isinstance(position, Position) and position.after and position.after.lower() not in new:
            columns.append(position.after)
    listed = [
        f"`{each}` {'VARCHAR(9)' if each in texts else 'INT'} "
        f"{'NOT NULL' if each == 'id' else 'NULL'}"
        for each in dict.fromkeys(column.lower() for column in columns)
    ]
    tree = read_statement(
        f"CREATE TABLE t ({', '.join([*listed, *keys])}) CHARSET utf8mb4", "db"
    ).tree
    assert isinstance(tree, CreateTable)
    tracked = created(tree, 1, 1, Context(COLLATIONS))
    table = tracked.table
    return Definition(
        name,
        table.columns,
        table.primary_key,
        "",
        (),
        table.indexes,
        table.collation,
        table.free_column_id,
    )


def final_of_event(number: int) -> tuple[str, str]:
    """The verdict on an event of a type that its writer does not mark as one to be passed over."""
    try:
        split_events(_event(number), checksums=False)[0].check_known()
    except EventUnsupportedError as err:
        return STOP, err.code
    kind = EventType(number)
    return next(
        ((verdict, why) for kinds, verdict, why in _EVENTS if kind in kinds), (NO_EFFECT, "")
    )


def _event(number: int) -> bytes:
    head = bytes(4) + bytes((number,)) + bytes(4) + (23).to_bytes(4, "little") + bytes(6)
    return head + bytes(4)


_COMPRESSED: Final = frozenset(
    range(EventType.MARIADB_WRITE_ROWS_COMPRESSED_V1, EventType.MARIADB_DELETE_ROWS_COMPRESSED + 1)
)
_EVENTS: Final[tuple[tuple[Collection[int], str, str], ...]] = (
    (ROWS | _COMPRESSED, UNDERSTOOD, "rows"),
    (
        (EventType.TABLE_MAP,),
        UNDERSTOOD,
        "compared with the table that is known; another one is a DDL without a statement",
    ),
    (
        (EventType.QUERY, EventType.MARIADB_QUERY_COMPRESSED),
        UNDERSTOOD,
        "by its statement, below",
    ),
    ((EventType.EXECUTE_LOAD_QUERY,), STOP, "LOAD DATA as a statement: ErrMySQLStatementLogged"),
    ((EventType.TRANSACTION_PAYLOAD,), UNDERSTOOD, "by the events that it holds"),
    ((EventType.PARTIAL_UPDATE_ROWS,), STOP, EventUnsupportedError.code),
    ((EventType.INCIDENT,), STOP, LogDamagedError.code),
    (
        (EventType.XID, EventType.XA_PREPARE),
        UNDERSTOOD,
        "the end of a transaction, or of its first phase",
    ),
    (
        (EventType.GTID, EventType.ANONYMOUS_GTID, EventType.GTID_TAGGED, EventType.MARIADB_GTID),
        UNDERSTOOD,
        "a transaction begins",
    ),
    (
        (
            EventType.ROTATE,
            EventType.FORMAT_DESCRIPTION,
            EventType.PREVIOUS_GTIDS,
            EventType.MARIADB_GTID_LIST,
        ),
        UNDERSTOOD,
        "the place in the log",
    ),
    (
        (
            EventType.INTVAR,
            EventType.RAND,
            EventType.USER_VAR,
            EventType.APPEND_BLOCK,
            EventType.BEGIN_LOAD_QUERY,
        ),
        NO_EFFECT,
        "they belong to a statement, which has its own verdict",
    ),
)
TYPES: Final = (*range(43), *range(160, 172))
"""Those of both servers, and what old versions had."""


def page() -> str:
    """The document."""
    lines = [
        _HEAD,
        "## Events",
        "",
        "| type | event | verdict | why, or the error |",
        "|---|---|---|---|",
    ]
    for number in TYPES:
        name = EventType(number).name if number in set(EventType) else "not known"
        verdict, why = final_of_event(number)
        lines.append(f"| {number} | {name} | {verdict} | {why} |")
    lines += [
        "",
        "All other types: stop. An event that its writer marks as ignorable is passed over.",
        "",
    ]
    kinds = [
        (kind, queries) for by_kind in STATEMENTS.values() for kind, queries in by_kind.items()
    ]
    for kind, queries in kinds:
        lines += [
            f"## {kind[:1].upper()}{kind[1:]}",
            "",
            "| statement | verdict | why, or the error |",
            "|---|---|---|",
        ]
        lines += [*map(_line, queries), ""]
    return "\n".join(lines)


def _line(query: str) -> str:
    by_server = {name: final(query, dialect) for name, dialect in SERVERS.items()}
    verdicts = list(dict.fromkeys(by_server.values()))
    shown = " ".join(query.split()).replace("|", "/").replace("`", "")
    if len(verdicts) == 1:
        return f"| `{shown}` | {verdicts[0][0]} | {verdicts[0][1]} |"
    of = {
        each: ", ".join(name for name, mine in by_server.items() if mine == each)
        for each in verdicts
    }
    says = "; ".join(f"{each[0]} ({of[each]})" for each in verdicts)
    return f"| `{shown}` | {says} | {'; '.join(filter(None, (why for _, why in verdicts)))} |"


_HEAD: Final = """# What a changefeed does when it meets an event or a statement

Made by `python -m tests.unit.server.puller.mysql.verdicts` from the code that follows the log; a test compares. Each
form of both manuals, as MariaDB 10.6 and 12 and MySQL 8.0 and 9 write them, has one of four verdicts:

- **no effect on data**: neither rows nor tables of a changefeed are others behind it.
- **understood**: rows, columns and keys are followed exactly.
- **read again**: the rows of the altered table are read again by a dump from there on. With `on-unclear-ddl=stop` in the
  source URI, or where rows move that nobody copies, the changefeed stops with ErrMySQLRowsMoved.
- **stop**: the changefeed stops with the named error, after everything before it was delivered. A statement about other
  tables than captured ones, if it is understood, stops nothing.

A statement is about the captured table `t`, whose column `v` holds INT, or VARCHAR(9) where it becomes text. What an ALTER
does to values depends on the columns: docs/design/0029-mysql-schema-tracker.md.
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
