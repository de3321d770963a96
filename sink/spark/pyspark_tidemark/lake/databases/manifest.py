"""What Tidemark itself keeps in a target database, in two tables of its own: the cuts
(`_tidemark_cuts`), and for each table the cut that it is at, and its columns (`_tidemark_tables`).

Invariants:
1. The right to write is a lock of one connection, and that connection commits the cuts: a job that
   lost it, as when the server restarted, can commit nothing.
2. A table's row changes in the transaction that changes the table, so the row is its fence. MySQL
   commits each DDL by itself: there the columns to come are noted before (`next_schema`).
"""

import base64
import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pyarrow as pa

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut_record import CutRecord, Shown, records, shown_by
from pyspark_tidemark.lake.databases.database import Database, driver_errors
from pyspark_tidemark.lake.manifest import SINGLE_TABLES, check_follows

CUTS, TABLES = "_tidemark_cuts", "_tidemark_tables"
NOT_YET = -1
"""The end_ts of a table that is made, but has no cut yet."""
_TS = "bigint NOT NULL"
_KEYS = {TABLES: "app, name", CUTS: "app, end_ts"}
_TIDY_EVERY_CUTS = 256
_LOCK_WAIT_S, _LOCK_PAUSE_S = 2.0, 0.05


class DatabaseManifest:
    """Implements `lake.manifest.Manifest`."""

    commits = SINGLE_TABLES

    def __init__(
        self, database: Database, connection: Any, changefeed: str, last: CutRecord | None
    ) -> None:
        self._database = database
        self._connection = connection
        self._app = changefeed
        # Due at once, as earlier lives may have ended before it was.
        self._since_tidied = _TIDY_EVERY_CUTS
        self.last = last

    @classmethod
    @contextmanager
    def opened(cls, database: Database, changefeed: str) -> Iterator["DatabaseManifest"]:
        """The manifest for the block, created if there is none.

        Raises:
            SourceError: ErrTargetBusy, another job has the lock; ErrTargetUnavailable,
                ErrCredentials.
        """
        with driver_errors(database):
            connection = database.connect()
        try:
            with driver_errors(database):
                with connection.cursor() as cursor:
                    create_tables(database, cursor)
                    is_locked = _lock(database, cursor, changefeed)
                    last = _last(cursor, changefeed)
                connection.commit()
            if not is_locked:
                raise SourceError(
                    "ErrTargetBusy",
                    f"another job writes the changefeed {changefeed!r} there; stop it first",
                )
            yield cls(database, connection, changefeed, last)
        finally:
            connection.close()

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:  # noqa: ARG002 - nobody else begins
        """See `Manifest`; a job whose lock is gone with its connection writes no table."""
        self._execute("SELECT 1", ())
        return end_ts

    def commit(self, record: CutRecord) -> None:
        """Make a cut visible; durable when it returns."""
        check_follows(self.last, record)
        # By the lock's own connection, never by a new one: invariant 1.
        self._execute(
            f"INSERT INTO {CUTS} VALUES (%s, %s, %s, %s)",  # noqa: S608 - ours
            (self._app, record.end_ts, record.applied_at, record.to_json()),
        )
        self.last = record

    def note_moved(self, ts: int) -> None:
        """See `Manifest`; a row among those of tables."""
        if not self.moved_at(ts):
            self._execute(
                f"INSERT INTO {TABLES} VALUES (%s, %s, %s, '', '')",  # noqa: S608 - ours
                (self._app, _moved(ts), ts),
            )

    def moved_at(self, ts: int) -> bool:
        """See `Manifest`."""
        with driver_errors(self._database):
            with self._connection.cursor() as cursor:
                cursor.execute(
                    f"SELECT end_ts FROM {TABLES} WHERE app = %s AND name = %s",  # noqa: S608 - ours
                    (self._app, _moved(ts)),
                )
                row = cursor.fetchone()
            self._connection.commit()
        return row is not None

    def cuts(self) -> list[CutRecord]:
        """All kept cuts."""
        with driver_errors(self._database):
            with self._connection.cursor() as cursor:
                cursor.execute(
                    f"SELECT document FROM {CUTS} WHERE app = %s ORDER BY end_ts",  # noqa: S608 - ours
                    (self._app,),
                )
                cuts = records(row[0] for row in cursor.fetchall())
            self._connection.commit()
        return cuts

    def each_cut(self) -> Iterator[CutRecord]:
        """See `Manifest`."""
        yield from self.cuts()

    def shown(self) -> dict[str, Shown]:
        """See `Manifest`."""
        return shown_by(self.cuts())

    def tidy(self, horizon: datetime) -> None:
        """Once in `_TIDY_EVERY_CUTS`, remove cuts from before `horizon`, but never the newest."""
        self._since_tidied += 1
        if self._since_tidied < _TIDY_EVERY_CUTS or self.last is None:
            return
        self._since_tidied = 0
        self._execute(
            f"DELETE FROM {CUTS} WHERE app = %s AND applied_at < %s AND end_ts < %s",  # noqa: S608 - ours
            (self._app, horizon.isoformat(timespec="milliseconds"), self.last.end_ts),
        )

    def _execute(self, statement: str, values: tuple[Any, ...]) -> None:
        with driver_errors(self._database):
            with self._connection.cursor() as cursor:
                cursor.execute(statement, values)
            self._connection.commit()


def _lock(database: Database, cursor: Any, changefeed: str) -> bool:
    """Take the lock; False if another job has it."""
    # A job that has just ended may seem to have it: servers notice late that a client is gone.
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not (is_locked := database.lock(cursor, changefeed)) and time.monotonic() < deadline:
        time.sleep(_LOCK_PAUSE_S)
    return is_locked


def _last(cursor: Any, changefeed: str) -> CutRecord | None:
    cursor.execute(
        f"SELECT document FROM {CUTS} WHERE app = %s ORDER BY end_ts DESC LIMIT 1",  # noqa: S608 - ours
        (changefeed,),
    )
    row = cursor.fetchone()
    return None if row is None else CutRecord.from_json(row[0])


def _moved(ts: int) -> str:
    """The name of a note's row: no table has one that begins with a dot."""
    return f".moved-{ts}"


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A table's row; `next_schema` differs from `schema` while it is being altered."""

    end_ts: int
    schema: Any
    next_schema: Any


def create_tables(database: Database, cursor: Any) -> None:
    """Make both tables, if they are not there; those of earlier versions get today's columns."""
    for table, key in _KEYS.items():
        columns = _columns(database, table)
        if not database.finds_by_name(cursor, table):
            listed = ", ".join(f"{name} {kind}" for name, kind in columns.items())
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS {table} ({listed}, PRIMARY KEY ({key})) "
                f"{database.table_options}"
            )
        for statement in database.retype(cursor, table, columns):
            cursor.execute(statement)


def _columns(database: Database, table: str) -> dict[str, str]:
    """The columns of one of our own tables with their types."""
    name, text = f"{database.name_type} NOT NULL", f"{database.document_type} NOT NULL"
    if table == CUTS:
        return {"app": name, "end_ts": _TS, "applied_at": "varchar(40) NOT NULL", "document": text}
    return {"app": name, "name": name, "end_ts": _TS, "columns_now": text, "columns_next": text}


def read_row(cursor: Any, app: str, name: str, *, lock: bool = False) -> TableRow | None:
    """A table's row; with `lock` nobody else may change it until the transaction's end."""
    cursor.execute(
        f"SELECT end_ts, columns_now, columns_next FROM {TABLES} WHERE app = %s AND name = %s"  # noqa: S608 - ours
        + (" FOR UPDATE" if lock else ""),
        (app, name),
    )
    row = cursor.fetchone()
    return None if row is None else TableRow(int(row[0]), _schema(row[1]), _schema(row[2]))


def same_but_for_case(cursor: Any, app: str, name: str) -> str | None:
    """Another table of the changefeed whose name differs from this one in case only."""
    cursor.execute(
        f"SELECT name FROM {TABLES} WHERE app = %s AND lower(name) = lower(%s) AND name <> %s",  # noqa: S608 - ours
        (app, name, name),
    )
    row = cursor.fetchone()
    return None if row is None else str(row[0])


def insert_row(cursor: Any, app: str, name: str, schema: Any) -> None:
    """Note a table that is about to be made."""
    text = _text(schema)
    cursor.execute(
        f"INSERT INTO {TABLES} VALUES (%s, %s, %s, %s, %s)",  # noqa: S608 - ours
        (app, name, NOT_YET, text, text),
    )


def set_end_ts(cursor: Any, app: str, name: str, end_ts: int) -> None:
    """Note the cut that a table is at."""
    cursor.execute(
        f"UPDATE {TABLES} SET end_ts = %s WHERE app = %s AND name = %s",  # noqa: S608 - ours
        (end_ts, app, name),
    )


def set_next_schema(cursor: Any, app: str, name: str, schema: Any) -> None:
    """Note the columns that a table is about to get."""
    cursor.execute(
        f"UPDATE {TABLES} SET columns_next = %s WHERE app = %s AND name = %s",  # noqa: S608 - ours
        (_text(schema), app, name),
    )


def adopt_next_schema(cursor: Any, app: str, name: str) -> None:
    """Note that a table has the columns of `set_next_schema`."""
    cursor.execute(
        f"UPDATE {TABLES} SET columns_now = columns_next WHERE app = %s AND name = %s",  # noqa: S608 - ours
        (app, name),
    )


def rename_row(cursor: Any, app: str, old: str, new: str) -> None:
    """Give a table's row another name."""
    cursor.execute(f"UPDATE {TABLES} SET name = %s WHERE app = %s AND name = %s", (new, app, old))  # noqa: S608 - ours


def delete_row(cursor: Any, app: str, name: str) -> None:
    """Remove the row of a table that is gone."""
    cursor.execute(f"DELETE FROM {TABLES} WHERE app = %s AND name = %s", (app, name))  # noqa: S608 - ours


def _text(schema: Any) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _schema(text: str) -> Any:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
