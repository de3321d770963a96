"""A database as a target: one transaction a table and cut, with its fence row in it."""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from pyspark_tidemark.column_metadata import with_column_ids
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import DELETE, Changes, CountedBatches
from pyspark_tidemark.lake.checksum import hexadecimal
from pyspark_tidemark.lake.columns import free_name
from pyspark_tidemark.lake.cut_record import Shown
from pyspark_tidemark.lake.databases import manifest
from pyspark_tidemark.lake.databases.database import (
    STAGED,
    Database,
    TableKey,
    columns_of,
    driver_errors,
)
from pyspark_tidemark.lake.format import APPEND, ROW_MODES, SCD2, SOFT_DELETE, UPSERT
from pyspark_tidemark.lake.schema import (
    SchemaChange,
    check_held,
    check_key,
    lake_columns,
    lake_key,
    lake_schema,
)
from pyspark_tidemark.lake.soft_delete import mark_all
from pyspark_tidemark.lake.target import Applied, Health, Retention, check_replaceable, removed

_NAME_BYTES_MAX = 63
"""The length of a table's name: PostgreSQL takes 63 bytes, MySQL 64 characters."""


class DatabaseTarget:
    """The tables of one changefeed in a database."""

    names_are_paths = False

    def __init__(self, database: Database, changefeed: str, *, mode: str = UPSERT) -> None:
        self._database = database
        self._app = changefeed
        self._mode = mode
        self._has_exact_key: set[str] = set()
        # PostgreSQL fails one of two `CREATE SCHEMA IF NOT EXISTS` that run at once.
        self._creating = threading.Lock()
        with self._transaction() as cursor:
            manifest.create_tables(database, cursor)

    @property
    def empties_with_cut(self) -> bool:
        """True in mode upsert: old rows go and new ones come in one transaction."""
        return self._mode == UPSERT

    def position(self, table: TableMeta) -> int | None:
        """The end_ts in the table's row; None if no cut has been applied yet.

        Raises:
            SourceError: ErrTargetForeign, a table of that name is not ours; ErrTableNoKey;
                ErrNameUnsupported.
        """
        check_key(table, self._mode)
        check_held(table, self._mode, self._database.format)
        with self._transaction() as cursor:
            fence = manifest.read_row(cursor, self._app, table.name)
            if fence is None:
                self._check_free(cursor, table.name)
        return None if fence is None or fence.end_ts == manifest.NOT_YET else fence.end_ts

    def check_continues(self, table: TableMeta, shown: Shown) -> None:
        """Check that the table exists. A restored database needs no more: our own rows about its
        tables were restored with them. See `VersionedTarget`.
        """
        del shown
        with self._transaction() as cursor:
            # Only after barriers are crossed: amid a renaming, the row is there without its table.
            row = manifest.read_row(cursor, self._app, table.name)
            if row is not None and row.end_ts == manifest.NOT_YET:
                return  # a barrier has begun to make it anew (`replace`)
            if row is None or not columns_of(cursor, table.name):
                raise removed(table.name)

    def version(self, table: TableMeta) -> int:
        """The newest cut: a database shows no other."""
        return self.position(table) or 0

    def schema(self, table: TableMeta) -> Any:
        """The schema that the table was created or altered with, if it still has these columns;
        columns that others have added count as text.
        """
        with self._transaction() as cursor:
            fence = manifest.read_row(cursor, self._app, table.name)
            assert fence is not None
            actual = columns_of(cursor, table.name)
            altered = self._database.is_altered(cursor, table.name, _alter_mark(fence.next_schema))
        for schema in (
            (fence.next_schema, fence.schema) if altered else (fence.schema, fence.next_schema)
        ):
            if sorted(schema.names) == sorted(actual):
                return schema
        named = {field.name: field for field in fence.schema}
        return pa.schema([named.get(name, pa.field(name, pa.string())) for name in actual])

    def storable(self, schema: Any) -> Any:
        """The same: our row about the table keeps the types as the captures send them."""
        return schema

    def create(self, changes: Changes) -> Applied:
        """Make the table, then apply its first cut."""
        table = changes.table
        # The row comes first: a table without one counts as somebody else's (`position`). And MySQL
        # cannot make the table in the transaction that fills it, so a crash may leave it empty.
        with self._creating:
            with self._transaction() as cursor:
                is_noted = manifest.read_row(cursor, self._app, table.name) is not None
                if not is_noted:
                    # Again: one of a name that differs in case only may have been made meanwhile.
                    self._check_free(cursor, table.name)
                    schema = self._identified_schema(table)
                    manifest.insert_row(cursor, self._app, table.name, schema)
            with self._transaction() as cursor:
                cursor.execute(self._database.namespace(table.name))
                if is_noted:
                    # What a crash has left: empty, or of the types before `replace`.
                    cursor.execute(self._drop_statement(table.name))
                cursor.execute(self._create_statement(table))
        return self.apply(changes)

    def apply(self, changes: Changes) -> Applied:
        """Stage the changes, apply them and move the fence, in one transaction."""
        table, counting = changes.table, CountedBatches(changes)
        self._make_key_exact(table)
        with self._transaction(table.name) as cursor:
            # Locked: of two jobs with the same cut one waits here, and then finds it applied.
            fence = manifest.read_row(cursor, self._app, table.name, lock=True)
            # Another job may have applied a shorter or a longer cut from the same start: a part of
            # the changes would be applied twice.
            if fence is not None and fence.end_ts > changes.start_ts:
                raise SourceError(
                    "ErrTargetBusy",
                    f"another job has applied changes of this cut to {table.name}",
                    retryable=True,
                )
            key = table.key if self._mode in ROW_MODES else ()
            self._database.stage(cursor, self._columns(table.schema, table.key), counting, key)
            if changes.emptied:
                cursor.execute(f"DELETE FROM {self._database.quoted_table(table.name)}")  # noqa: S608 - quoted
            for statement in self._statements(table):
                cursor.execute(statement)
            manifest.set_end_ts(cursor, self._app, table.name, changes.end_ts)
        return Applied(counting.rows, changes.end_ts, hexadecimal(counting.total))

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        """Change the columns, with their identities."""
        # Noted first: MySQL commits each statement by itself, so after a crash `schema` must find
        # out which of the two schemas the table has.
        with self._transaction() as cursor:
            fence = manifest.read_row(cursor, self._app, table.name, lock=True)
            if fence and self._database.is_altered(
                cursor, table.name, _alter_mark(fence.next_schema)
            ):
                # A job died after such a statement, before it noted that the table is altered.
                manifest.adopt_next_schema(cursor, self._app, table.name)
            manifest.set_next_schema(cursor, self._app, table.name, self._identified_schema(table))
        mark = _alter_mark(self._identified_schema(table))
        with self._transaction() as cursor:
            for statement in (
                *self._database.drop_key(cursor, table.name, change.dropped),
                *self._database.alter(table.name, change, mark),
            ):
                cursor.execute(statement)
            manifest.adopt_next_schema(cursor, self._app, table.name)

    def rekey(self, table: TableMeta) -> None:
        """Give the table another key, in modes whose key has the upstream's columns.

        In scd2 it is an index from then on, not a primary key: versions that have ended may have
        nulls in it, or be equal.
        """
        if self._mode == APPEND:
            return
        with self._transaction(table.name) as cursor:
            if self._mode == SOFT_DELETE:
                # Rows of former times: no primary key held them to be unlike each other.
                self._database.free_key(cursor, table.name, lake_key(table, self._mode))
            for statement in self._database.replace_key(cursor, table.name, self._table_key(table)):
                cursor.execute(statement)

    def is_empty(self, table: TableMeta) -> bool:
        """Whether the database finds no row."""
        with self._transaction() as cursor:
            cursor.execute(f"SELECT 1 FROM {self._database.quoted_table(table.name)} LIMIT 1")  # noqa: S608 - quoted
            return cursor.fetchone() is None

    def truncate(self, table: TableMeta, ts: int) -> None:
        """Without rows (upsert), all of them marked (soft-delete), all versions ended (scd2), or as
        it is (append).
        """
        name = self._database.quoted_table(table.name)
        with self._transaction() as cursor:
            if self._mode == UPSERT:
                cursor.execute(f"DELETE FROM {name}")  # noqa: S608 - quoted
            elif self._mode == SOFT_DELETE:
                cursor.execute(mark_all(name, ts))
            elif self._mode == SCD2:
                # Not as a parameter: a name may have a percent sign.
                cursor.execute(
                    f"UPDATE {name} SET valid_to_ts = {ts}, is_current = false WHERE is_current"  # noqa: S608 - quoted
                )

    def replace(self, table: TableMeta, ts: int, change: SchemaChange) -> None:
        """Create the table anew (upsert, soft-delete). In the other modes it holds history, which
        stays: it gets the new columns, or the name `TABLE__until_TS` if it cannot have them.
        """
        if self._mode in ROW_MODES:
            # The row first: after a crash, `create` goes on from there.
            with self._transaction() as cursor:
                manifest.delete_row(cursor, self._app, table.name)
                manifest.insert_row(cursor, self._app, table.name, self._identified_schema(table))
            with self._transaction() as cursor:
                cursor.execute(self._drop_statement(table.name))
            return
        until = _superseded_name(table.name, ts)
        with self._transaction() as cursor:
            if not columns_of(cursor, table.name):
                # MySQL commits the table's new name by itself: after a crash only the row is left.
                manifest.rename_row(cursor, self._app, table.name, until)
                return
        self.truncate(table, ts)
        actual = self.schema(table)
        types = {field.name: field.type for field in lake_schema(table, self._mode)}
        if all(types.get(field.name, field.type) == field.type for field in actual):
            # Also without a change: the identities of the new table's columns are noted.
            self.alter(table, change)
            return
        with self._transaction() as cursor:
            for statement in self._database.rename_table(cursor, table.name, until):
                cursor.execute(statement)
            manifest.rename_row(cursor, self._app, table.name, until)

    def drop(self, table: TableMeta) -> None:
        """Drop the table, then remove its row."""
        with self._transaction() as cursor:
            cursor.execute(self._drop_statement(table.name))
            manifest.delete_row(cursor, self._app, table.name)

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Rename the table and its row; a kept table of the new name is dropped before."""
        with self._transaction() as cursor:
            # MySQL commits the table's new name by itself: after a crash only the row is left.
            there = bool(columns_of(cursor, old.name))
            kept = there and manifest.read_row(cursor, self._app, new.name) is not None
            if kept and columns_of(cursor, new.name):
                check_replaceable(self._mode, new.name)
        if kept:
            self.drop(new)
        with self._transaction() as cursor:
            if there:
                for statement in self._database.rename_table(cursor, old.name, new.name):
                    cursor.execute(statement)
            manifest.rename_row(cursor, self._app, old.name, new.name)

    def maintain(self, kept: Retention) -> Health | None:
        """Do nothing: databases look after themselves."""

    def close(self) -> None:
        """Do nothing: no work goes on beside the cuts."""

    def _check_free(self, cursor: Any, name: str) -> None:
        """Check that the database has no table of that name.

        Raises:
            SourceError: ErrTargetForeign.
        """
        if not columns_of(cursor, name):
            return
        other = manifest.same_but_for_case(cursor, self._app, name)
        raise SourceError(
            "ErrTargetForeign",
            f"the table {name} is there, but not by this changefeed; choose another --target"
            if other is None
            else f"the database takes the names {other} and {name} for one: give one of them another "
            "name there (--route), or another target",
        )

    def _drop_statement(self, name: str) -> str:
        return f"DROP TABLE IF EXISTS {self._database.quoted_table(name)}"

    def _make_key_exact(self, table: TableMeta) -> None:
        """Give the key of a table that an earlier version created its collation; once a job."""
        if self._mode == APPEND or table.name in self._has_exact_key:
            return
        key = self._key_types(table)
        with self._transaction(table.name) as cursor:
            for statement in self._database.exact_key(cursor, table.name, key):
                cursor.execute(statement)
        self._has_exact_key.add(table.name)

    def _key_types(self, table: TableMeta) -> dict[str, str]:
        key = lake_key(table, self._mode)
        named = {field.name: field for field in lake_schema(table, self._mode)}
        return {
            name: self._database.type_of(named[name].type, key_columns=len(key)) for name in key
        }

    def _table_key(self, table: TableMeta) -> TableKey:
        types = self._key_types(table)
        others = {
            field.name: self._database.type_of(field.type, key_columns=0)
            for field in lake_schema(table, self._mode)
            if field.name not in types
        }
        return TableKey(types, others, is_unique=self._mode != SCD2)

    def _identified_schema(self, table: TableMeta) -> Any:
        """The columns of the target's table, with their identities, as our own row keeps them."""
        return with_column_ids(lake_schema(table, self._mode), table.column_ids)

    def _create_statement(self, table: TableMeta) -> str:
        schema, key = lake_schema(table, self._mode), lake_key(table, self._mode)
        primary = self._database.primary_key(", ".join(map(self._database.quoted, key)))
        columns = ", ".join(self._columns(schema, key))
        return (
            f"CREATE TABLE IF NOT EXISTS {self._database.quoted_table(table.name)} "
            f"({columns}, {primary})"
        )

    def _columns(self, schema: Any, key: Sequence[str]) -> list[str]:
        names = [self._database.quoted(field.name) for field in schema]
        indexed = [len(key) if field.name in key else 0 for field in schema]
        types = [
            self._database.type_of(field.type, key_columns=count)
            for field, count in zip(schema, indexed, strict=True)
        ]
        return [f"{name} {kind}" for name, kind in zip(names, types, strict=True)]

    def _statements(self, table: TableMeta) -> list[str]:
        columns = lake_columns(table, self._mode)
        if self._mode in ROW_MODES:
            return self._database.upsert(table.name, columns, table.key)
        name = self._database.quoted_table(table.name)
        if self._mode == APPEND:
            names = ", ".join(self._database.quoted(column) for column in columns)
            return [f"INSERT INTO {name} ({names}) SELECT {names} FROM {STAGED}"]  # noqa: S608 - quoted
        return [self._database.end_versions(table.name, table.key), self._new_versions(table)]

    def _new_versions(self, table: TableMeta) -> str:
        quoted = self._database.quoted
        own = ", ".join(quoted(column) for column in lake_columns(table, SCD2)[:-3])
        keys = ", ".join(quoted(column) for column in table.key)
        end = free_name("_ends", table.schema.names)
        ends = f"lead(_commit_ts) OVER (PARTITION BY {keys} ORDER BY _commit_ts, _seq)"
        return (
            f"INSERT INTO {self._database.quoted_table(table.name)} ({own}, valid_from_ts, valid_to_ts, is_current) "  # noqa: S608 - quoted
            f"SELECT {own}, _commit_ts, {end}, {end} IS NULL FROM (SELECT *, {ends} AS {end} FROM "
            f"{STAGED}) s WHERE _op <> '{DELETE}' AND ({end} IS NULL OR {end} > _commit_ts)"
        )

    @contextmanager
    def _transaction(self, about: str = "") -> Iterator[Any]:
        """A cursor whose work is committed at the end of the block; errors name the table `about`
        which it is.
        """
        # Each has its own connection: tables are written in parallel.
        try:
            with driver_errors(self._database):
                connection = self._database.connect()
                try:
                    with connection.cursor() as cursor:
                        yield cursor
                    connection.commit()
                finally:
                    connection.close()
        except SourceError as err:
            if err.code != "ErrTargetRefused" or not about:
                raise
            raise SourceError(err.code, f"{about}: {err.message}") from err


def _superseded_name(name: str, ts: int) -> str:
    """The name of a table whose place another one has taken at `ts`, short enough for every
    database.
    """
    database, _, table = name.partition(".")
    suffix = f"__until_{ts}"
    kept = table.encode()[: _NAME_BYTES_MAX - len(suffix)].decode(errors="ignore")
    return f"{database}.{kept}{suffix}"


def _alter_mark(schema: Any) -> str:
    """The mark that ALTER leaves at a table which it brings to a schema."""
    # Not by names alone: after a swap of two columns both schemas have the same ones.
    return f"tidemark columns {hashlib.sha256(schema.serialize().to_pybytes()).hexdigest()[:32]}"
