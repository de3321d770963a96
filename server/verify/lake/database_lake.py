"""Lakes in databases, read in one snapshot and repaired in one transaction; no Spark.

A database shows its newest cut only. Manifest, fences and rows are read in one snapshot, so they
belong together though the lake's job goes on. A `Reader` for each kind of database brings rows as
Arrow.

Invariants of a repair:
1. The lake's lock is held, and the fence row is locked and unchanged: what is repaired is what was
   compared.
2. The rows' `_commit_ts` is the cut, and the fence stays: changes of later cuts are larger, so they
   win.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final, Protocol

import pyarrow as pa
from pyspark_tidemark.digest import RangeChecksums
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.lake.databases import manifest
from pyspark_tidemark.lake.databases.database import STAGED, Database, driver_errors
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest
from pyspark_tidemark.lake.format import APPEND, SCD2, SOFT_DELETE, UPSERT
from pyspark_tidemark.lake.opening import database as database_of
from pyspark_tidemark.lake.schema import VALID_FROM, VALID_TO
from pyspark_tidemark.lake.soft_delete import IS_DELETED
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.question import Question, key_schema, whole_extent
from server.verify.spans import Extent

_NEVER: Final = -1


class Reader(Protocol):
    """One database in one snapshot."""

    def quoted(self, name: str) -> str:
        """One identifier, dots included."""

    def quoted_table(self, name: str) -> str:
        """The two identifiers of `database.table`: the first dot is between them."""

    def manifest(self, changefeed: str) -> tuple[str | None, Mapping[str, int]]:
        """The newest record, and the fence of each table."""

    def batches(self, table: str, query: str, schema: Any) -> Iterator[Any]:
        """Return a query's rows as RecordBatches that can be cast to `schema`."""

    def close(self) -> None:
        """End the snapshot."""


def _postgres(uri: SinkUri) -> Reader:
    from server.verify.lake.postgres import PostgresReader

    return PostgresReader(uri)


def _mysql(uri: SinkUri) -> Reader:
    from server.verify.lake.mysql import MySqlReader

    return MySqlReader(uri)


_READERS: Final[Mapping[str, Callable[[SinkUri], Reader]]] = {
    "postgresql": _postgres,
    "mysql": _mysql,
}


def open_reader(uri: SinkUri) -> Reader:
    """Connect to a database.

    Raises:
        SourceError: ErrTargetInvalid, it is none; ErrTargetUnavailable, ErrCredentials.
    """
    if uri.format not in _READERS:
        raise SourceError(
            "ErrTargetInvalid",
            f"lakes of the format {uri.format} cannot be read here; those of "
            f"{' and '.join(_READERS)} can",
        )
    return _READERS[uri.format](uri)


class DatabaseLake:
    """Implements `server.verify.lake.job.LakeSide`."""

    def __init__(self, uri: SinkUri, changefeed: str, reader: Reader) -> None:
        self._uri = uri
        self._changefeed = changefeed
        self._reader = reader
        text, self._fences = reader.manifest(changefeed)
        self._newest = None if text is None else CutRecord.from_json(text)

    @classmethod
    @contextmanager
    def open(cls, uri: SinkUri, changefeed: str, *, locked: bool) -> Iterator["DatabaseLake"]:
        """The lake for the block.

        Raises:
            SourceError: ErrTargetBusy, its job runs; ErrTargetUnavailable, ErrCredentials,
                ErrDriverMissing.
        """
        with ExitStack() as stack:
            database = database_of(uri)
            # The lock comes first: a snapshot from before it could lack a cut that the job was
            # still ending.
            if locked:
                stack.enter_context(DatabaseManifest.opened(database, changefeed))
            reader = open_reader(uri)
            stack.callback(reader.close)
            yield cls(uri, changefeed, reader)

    def cut(self, at: int | None) -> dict[str, Any]:
        """See `LakeSide.cut`; a table whose next cut is applied, but not in the manifest yet,
        is at that one.
        """
        newest = self._newest
        if newest is None:
            raise SourceError(
                "ErrCutNotFound",
                f"the database {self._uri.path} has no cut of {self._changefeed} yet",
            )
        if at is not None and at < newest.end_ts:
            raise SourceError(
                "ErrCutNotFound",
                f"a database shows its newest cut only, which ends at {newest.end_ts}; leave --at "
                "out",
            )
        beyond = {name: ts for name, ts in self._fences.items() if ts > newest.end_ts}
        return {"cut": newest.end_ts, "mode": self._mode, "beyond": beyond, "newest_only": True}

    def extent(self, question: Question) -> Extent:
        """See `LakeSide.extent`."""
        of_key = dataclasses.replace(question, schema=key_schema(question))
        parts = of_key.extent(self._batches(of_key))
        return whole_extent(tuple(part.to_pylist()[0].values()) for part in parts)

    def range_checksums(self, question: Question) -> bytes:
        """See `LakeSide.range_checksums`."""
        range_checksums = RangeChecksums(question.ranges)
        for summed in question.summed(self._batches(question)):
            range_checksums.merge(summed["leaves"][0].as_py())
        return range_checksums.to_bytes()

    def rows(self, question: Question) -> Any:
        """See `LakeSide.rows`."""
        return pa.Table.from_batches(
            question.chosen_rows(self._batches(question)), question.answer_schema
        )

    def check_repair(self, question: Question) -> None:
        """See `LakeSide.check_repair`."""
        name, newest = question.name, self._newest
        if self._mode != UPSERT or name not in self._fences:
            raise SourceError(
                "ErrRepairUnsupported",
                f"table {name}: only tables of mode upsert are repaired in place, not histories; "
                "write others anew with a new changefeed",
            )
        if newest is None or self._fences[name] > newest.end_ts:
            raise SourceError(
                "ErrRepairUnsupported",
                f"table {name} holds a cut that was not ended: start the lake's job, stop it when "
                "it has applied one, and verify again",
            )

    def repair(self, question: Question, gone: Any, live: Any) -> int:
        """See `LakeSide.repair`."""
        return repair_table(self._uri, self._changefeed, question, gone, live)

    @property
    def _mode(self) -> str:
        return (self._newest.mode if self._newest is not None else None) or self._uri.mode("")

    def _batches(self, question: Question) -> Iterator[Any]:
        if self._fences.get(question.name, _NEVER) < 0:
            # No cut was applied to it: the table may not exist.
            return iter(())
        query = current_rows(
            self._reader.quoted, self._reader.quoted_table(question.name), question, self._mode
        )
        return self._reader.batches(question.name, query, question.schema)


def current_rows(quoted: Callable[[str], str], name: str, question: Question, mode: str) -> str:
    """The query of a table's rows as of the cut, whatever the mode keeps;
    its columns are called `{columns}`. Pure.

    `name` is the table's, quoted; `quoted` quotes a column.
    """
    ts, inside = (
        question.ts,
        "" if question.spans is None else f"({question.spans.condition(quoted)})",
    )
    also = f" AND {inside}" if inside else ""
    if mode == SCD2:
        valid = f"{VALID_FROM} <= {ts} AND ({VALID_TO} IS NULL OR {VALID_TO} > {ts}){also}"
        return f"SELECT {{columns}} FROM {name} WHERE {valid}"  # noqa: S608 - quoted

    if mode == APPEND:
        # The condition on the key may stand inside: a key's changes are all in the same range.
        last = (
            f"PARTITION BY {', '.join(map(quoted, question.key))} ORDER BY _commit_ts DESC, _seq "
            "DESC"
        )
        changes = f"{name} t WHERE _commit_ts <= {ts} AND _commit_ts > {question.since}{also}"
        numbered = f"SELECT t.*, row_number() OVER ({last}) AS _place FROM {changes}"  # noqa: S608 - quoted
        return f"SELECT {{columns}} FROM ({numbered}) s WHERE _place = 1 AND _op <> 'delete'"  # noqa: S608 - quoted

    if mode == SOFT_DELETE:
        return f"SELECT {{columns}} FROM {name} WHERE NOT {IS_DELETED}{also}"  # noqa: S608 - quoted

    return f"SELECT {{columns}} FROM {name}{f' WHERE {inside}' if inside else ''}"  # noqa: S608 - quoted


def repair_table(uri: SinkUri, changefeed: str, question: Question, gone: Any, live: Any) -> int:
    """Remove keys, add rows (pyarrow.Tables); returns the cut.

    Raises:
        SourceError: ErrTargetBusy, a cut was applied meanwhile; ErrTargetUnavailable,
            ErrTargetRefused.
    """
    database = database_of(uri)
    rows = live.append_column("_commit_ts", pa.array([question.ts] * len(live), pa.int64()))
    with driver_errors(database), closing(database.connect()) as connection:
        with connection.cursor() as cursor:
            fence = manifest.read_row(cursor, changefeed, question.name, lock=True)
            if fence is None or fence.end_ts > question.ts:
                raise SourceError(
                    "ErrTargetBusy", f"a job has applied a cut to {question.name}; verify again"
                )

            # One staging table, used twice: for the keys that go, then for the rows that come.
            name = database.quoted_table(question.name)
            _stage(cursor, database, gone, question.key)
            for statement in database.delete_staged(name, question.key):
                cursor.execute(statement)

            _stage(cursor, database, rows, question.key)
            columns = ", ".join(map(database.quoted, rows.schema.names))
            cursor.execute(f"INSERT INTO {name} ({columns}) SELECT {columns} FROM {STAGED}")  # noqa: S608 - quoted
        connection.commit()
    return question.ts


def _stage(cursor: Any, database: Database, rows: Any, key: tuple[str, ...]) -> None:
    types = [
        database.type_of(field.type, key_columns=len(key) if field.name in key else 0)
        for field in rows.schema
    ]
    columns = [
        f"{database.quoted(name)} {kind}"
        for name, kind in zip(rows.schema.names, types, strict=True)
    ]
    database.stage(cursor, columns, rows.to_batches(), key)
