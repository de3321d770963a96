"""The cuts of a database target, in its own table `_tidemark_cuts`;
the right to write is a lock of one connection.

The lock's connection commits the cuts: who lost it, as when the server restarted, can commit
nothing.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cuts import CutRecord, records
from pyspark_tidemark.lake.databases import tables
from pyspark_tidemark.lake.databases.database import Database, explained
from pyspark_tidemark.lake.manifest import check_follows

_TIDY_EVERY = 256
_ENDING_S, _LOOK_S = 2.0, 0.05


class DatabaseManifest:
    """See `lake.manifest.Manifest`."""

    def __init__(
        self, database: Database, connection: Any, changefeed: str, last: CutRecord | None
    ) -> None:
        self._database = database
        self._connection = connection
        self._app = changefeed
        self._since_tidied = 0
        self.last = last

    @classmethod
    @contextmanager
    def opened(cls, database: Database, changefeed: str) -> Iterator["DatabaseManifest"]:
        """The manifest for the block, created if there is none.

        Raises:
            SourceError: ErrTargetBusy, another job has the lock; ErrTargetUnavailable,
                ErrCredentials.
        """
        with explained(database):
            connection = database.connect()
        try:
            with explained(database):
                with connection.cursor() as cursor:
                    tables.create(cursor)
                    free = _locked(database, cursor, changefeed)
                    last = _last(cursor, changefeed)
                connection.commit()
            if not free:
                raise SourceError(
                    "ErrTargetBusy",
                    f"another job writes the changefeed {changefeed!r} there; stop it first",
                )
            yield cls(database, connection, changefeed, last)
        finally:
            connection.close()

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:  # noqa: ARG002 - nobody else begins
        """See `Manifest`."""
        return end_ts

    def commit(self, record: CutRecord) -> None:
        """Make a cut visible; durable when it returns."""
        check_follows(self.last, record)
        self._execute(
            f"INSERT INTO {tables.CUTS} VALUES (%s, %s, %s, %s)",  # noqa: S608 - ours
            (self._app, record.end_ts, record.applied_at, record.to_json()),
        )
        self.last = record

    def note_moved(self, ts: int) -> None:
        """See `Manifest`; a row among those of tables."""
        if not self.moved_at(ts):
            self._execute(
                f"INSERT INTO {tables.TABLES} VALUES (%s, %s, %s, '', '')",  # noqa: S608 - ours
                (self._app, _moved(ts), ts),
            )

    def moved_at(self, ts: int) -> bool:
        """See `Manifest`."""
        with explained(self._database):
            with self._connection.cursor() as cursor:
                cursor.execute(
                    f"SELECT end_ts FROM {tables.TABLES} WHERE app = %s AND name = %s",  # noqa: S608 - ours
                    (self._app, _moved(ts)),
                )
                row = cursor.fetchone()
            self._connection.commit()
        return row is not None

    def cuts(self) -> list[CutRecord]:
        """All kept cuts."""
        with explained(self._database):
            with self._connection.cursor() as cursor:
                cursor.execute(
                    f"SELECT document FROM {tables.CUTS} WHERE app = %s ORDER BY end_ts",  # noqa: S608 - ours
                    (self._app,),
                )
                cuts = records(row[0] for row in cursor.fetchall())
            self._connection.commit()
        return cuts

    def tidy(self, horizon: datetime) -> None:
        """Once for so many cuts, remove those from before `horizon`, but never the newest."""
        self._since_tidied += 1
        if self._since_tidied < _TIDY_EVERY or self.last is None:
            return
        self._since_tidied = 0
        self._execute(
            f"DELETE FROM {tables.CUTS} WHERE app = %s AND applied_at < %s AND end_ts < %s",  # noqa: S608 - ours
            (self._app, horizon.isoformat(timespec="milliseconds"), self.last.end_ts),
        )

    def _execute(self, statement: str, values: tuple[Any, ...]) -> None:
        with explained(self._database):
            with self._connection.cursor() as cursor:
                cursor.execute(statement, values)
            self._connection.commit()


def _locked(database: Database, cursor: Any, changefeed: str) -> bool:
    """Take the lock; a job that has just ended may seem to have it,
    as servers notice late that a client is gone.
    """
    deadline = time.monotonic() + _ENDING_S
    while not (free := database.lock(cursor, changefeed)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return free


def _moved(ts: int) -> str:
    """No table has such a name."""
    return f".moved-{ts}"


def _last(cursor: Any, changefeed: str) -> CutRecord | None:
    cursor.execute(
        f"SELECT document FROM {tables.CUTS} WHERE app = %s ORDER BY end_ts DESC LIMIT 1",  # noqa: S608 - ours
        (changefeed,),
    )
    row = cursor.fetchone()
    return None if row is None else CutRecord.from_json(row[0])
