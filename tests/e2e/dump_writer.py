"""Writers that never rest, and the history of what they committed:
who is right about the source at each commit_ts.

Each writer owns its keys, so what a transaction did to them is what SELECT shows before and after,
within it. The server's order is that of its GTIDs (one domain); which commit_ts each has is a
question for `dump_audit`.
"""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pymysql
from pymysql.cursors import Cursor

from tests.e2e.dump_tables import SHAPES, WRITERS, Table
from tests.mariadb import MariaDb

Key = tuple[Any, ...]
Row = dict[str, Any]
_PAUSE_S = 0.012
_SCHEMA_SHARE = 0.02
_SCHEMA_MAX = 4


@dataclass(frozen=True)
class Schema:
    """A DDL: what it did to the rows of a table."""

    table: str
    verb: str
    column: str = ""
    held: Any = None
    """What older rows hold in an added column."""


@dataclass(frozen=True)
class Entry:
    """One transaction; `changes` are None for rows that it removed."""

    seq: int
    changes: dict[tuple[str, Key], Row | None] = field(default_factory=dict)
    schema: Schema | None = None
    ending: str = ""
    """How it was committed."""


@dataclass
class History:
    """Of one run; written by its writers, read when they have stopped."""

    tables: list[Table]
    base: dict[str, dict[Key, Row]] = field(default_factory=dict)
    """What was there before."""
    entries: list[Entry] = field(default_factory=list)
    may_alter: threading.Event = field(default_factory=threading.Event)


class Writer:
    """One session that changes its own keys until it is told to stop."""

    def __init__(self, server: MariaDb, history: History, number: int, dice: random.Random) -> None:
        self._history = history
        self._number = number
        self._dice = dice
        self._version = 0
        self._schemas = dice.randint(0, _SCHEMA_MAX) if number == 0 else 0
        self._added: list[tuple[Table, str]] = []
        self._connection = server.connect()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self._thread.start()

    def stop(self) -> None:
        """Commit no more; raises what it could not do."""
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._connection.cursor() as cursor:
                while not self._stop.is_set():
                    try:
                        self._once(cursor)
                    except (pymysql.OperationalError, pymysql.InternalError) as err:
                        if err.args[0] not in (
                            1205,
                            1213,
                            1412,
                        ):  # locked, deadlock, the table is another one
                            raise
                        self._connection.rollback()
                    time.sleep(self._dice.random() * _PAUSE_S)
        except BaseException as err:  # noqa: BLE001 - told by `stop`
            self._error = err
        finally:
            self._connection.close()

    def _once(self, cursor: Cursor) -> None:
        if (
            self._schemas
            and self._history.may_alter.is_set()
            and self._dice.random() < _SCHEMA_SHARE
        ):
            self._schemas -= 1
            self._version += 1
            self._change_schema(cursor)
            return
        ending = self._dice.choices(("commit", "xa", "rollback"), (88, 7, 5))[0]
        cursor.execute(f"XA START 'w{self._number}'" if ending == "xa" else "BEGIN")
        try:
            changes = self._changes(cursor)
        except pymysql.Error:
            if ending == "xa":
                with suppress(pymysql.Error):  # a deadlock has marked it
                    cursor.execute(f"XA END 'w{self._number}'")
                cursor.execute(f"XA ROLLBACK 'w{self._number}'")
            raise
        if ending == "xa":
            self._end_xa(cursor)
        else:
            cursor.execute(ending)
        if changes and ending != "rollback":
            self._history.entries.append(Entry(_last_seq(cursor), changes, ending=ending))

    def _end_xa(self, cursor: Cursor) -> None:
        name = f"'w{self._number}'"
        cursor.execute(f"XA END {name}")
        cursor.execute(f"XA PREPARE {name}")
        time.sleep(self._dice.random() * 0.1)  # rows are in the log, and nobody sees them
        cursor.execute(f"XA COMMIT {name}")

    def _changes(self, cursor: Cursor) -> dict[tuple[str, Key], Row | None]:
        before: dict[tuple[str, Key], Row | None] = {}
        after: dict[tuple[str, Key], Row | None] = {}
        for _ in range(self._dice.choice((1, 1, 1, 2, 4))):
            table = self._dice.choice(self._history.tables)
            statement, where = self._statement(table)
            was = _rows(cursor, table, where)
            cursor.execute(statement)
            now = _rows(cursor, table, where)
            for key in was.keys() | now.keys():
                before.setdefault((table.name, key), was.get(key))
                after[table.name, key] = now.get(key)
        return {key: row for key, row in after.items() if row != before[key]}

    def _statement(self, table: Table) -> tuple[str, str]:
        """A change, and the condition for all keys that it may touch."""
        dice, writer = self._dice, self._number
        self._version += 1
        version, most = self._version, table.shape.rows
        numbers = [dice.randrange(most) for _ in range(dice.choice((1, 1, 2, 30)))]
        where = table.where(writer, numbers, dice)
        verb = dice.choices(
            ("insert", "update", "delete", "move", "replace"), (20, 35, 12, 15, 18)
        )[0]
        if verb == "update":
            return f"UPDATE {table.name} SET ver = {version} WHERE {where}", where
        if verb == "delete":
            return f"DELETE FROM {table.name} WHERE {where}", where
        if verb in ("insert", "replace"):
            rows = [table.row(writer, number, version, dice) for number in numbers]
            return table.insert(rows, "INSERT IGNORE" if verb == "insert" else "REPLACE"), where
        old, new = (
            numbers[0],
            dice.choice((numbers[-1], dice.randrange(most))),
        )  # the same: in another spelling
        names = zip(table.shape.key, table.spelling(writer, new, dice), strict=True)
        moved = ", ".join(f"{name} = {value}" for name, value in names)
        where = table.where(writer, [old], dice)
        statement = f"UPDATE IGNORE {table.name} SET {moved}, ver = {version} WHERE {where}"
        return statement, f"{where} OR {table.where(writer, [new], dice)}"

    def _change_schema(self, cursor: Cursor) -> None:
        verbs: list[Callable[[Table], tuple[str, Schema]]] = [
            self._add,
            self._drop,
            self._widen,
            _truncate,
            self._create,
        ]
        table = self._dice.choice(self._history.tables)
        statement, schema = self._dice.choices(verbs, (4, 2, 1, 2, 2))[0](table)
        cursor.execute(statement)
        self._history.entries.append(Entry(_last_seq(cursor), schema=schema))
        if schema.verb == "create":
            self._history.tables.append(Table(schema.table, SHAPES["few"]))

    def _add(self, table: Table) -> tuple[str, Schema]:
        column, held = (
            f"c{self._version}",
            self._dice.choice((None, 7, "seven")),
        )  # a name is never used again
        self._added.append((table, column))
        kind = "VARCHAR(9)" if isinstance(held, str) else "INT"
        rest = "" if held is None else f" NOT NULL DEFAULT {held!r}"
        place = self._dice.choice(("", " FIRST", " AFTER ver"))
        statement = f"ALTER TABLE {table.name} ADD COLUMN {column} {kind}{rest}{place}"
        return statement, Schema(table.name, "add", column, held)

    def _drop(self, table: Table) -> tuple[str, Schema]:
        if not self._added:
            return self._add(table)
        table, column = self._added.pop()
        return f"ALTER TABLE {table.name} DROP COLUMN {column}", Schema(table.name, "drop", column)

    def _widen(self, table: Table) -> tuple[str, Schema]:
        size = table.shape.note_bytes + self._version + 1
        return f"ALTER TABLE {table.name} MODIFY note VARCHAR({size})", Schema(table.name, "widen")

    def _create(self, table: Table) -> tuple[str, Schema]:
        made = Table(f"{table.name.split('.')[0]}.later{self._version}", SHAPES["few"])
        return made.create(), Schema(made.name, "create")


def base_of(server: MariaDb, tables: list[Table]) -> dict[str, dict[Key, Row]]:
    """All rows, as they are now."""
    connection = server.connect()
    try:
        with connection.cursor() as cursor:
            return {table.name: _rows(cursor, table, "TRUE") for table in tables}
    finally:
        connection.close()


def writers_of(server: MariaDb, history: History, dice: random.Random) -> list[Writer]:
    """Started."""
    return [
        Writer(server, history, number, random.Random(dice.getrandbits(64)))
        for number in range(WRITERS)
    ]


def _truncate(table: Table) -> tuple[str, Schema]:
    return f"TRUNCATE TABLE {table.name}", Schema(table.name, "truncate")


def _rows(cursor: Cursor, table: Table, where: str) -> dict[Key, Row]:
    cursor.execute(f"SELECT * FROM {table.name} WHERE {where}")
    names = [column[0] for column in cursor.description]
    rows = (dict(zip(names, row, strict=True)) for row in cursor.fetchall())
    return {table.key_of(row): row for row in rows}


def _last_seq(cursor: Cursor) -> int:
    cursor.execute("SELECT @@last_gtid")
    found = cursor.fetchone()
    assert found is not None
    return int(str(found[0]).rpartition("-")[2])
