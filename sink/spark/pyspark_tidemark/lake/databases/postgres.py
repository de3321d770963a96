"""PostgreSQL: COPY into a temporary table, then INSERT … ON CONFLICT."""

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import errors

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.changes import DELETE
from pyspark_tidemark.lake.databases.database import (
    KEY_INDEX,
    STAGED,
    TableKey,
    key_of,
    password,
)
from pyspark_tidemark.lake.databases.text import as_csv, as_quoted
from pyspark_tidemark.lake.schema import SchemaChange
from pyspark_tidemark.lake.soft_delete import IS_DELETED
from pyspark_tidemark.redaction import postgres_error
from pyspark_tidemark.sink_uri import SinkUri

_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp",
    pa.timestamp("us", tz="UTC"): "timestamptz",
}
_LATER = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    errors.SerializationFailure,
    errors.DeadlockDetected,
)
_NEVER = (errors.ProgramLimitExceeded, errors.TooManyColumns, errors.StatementTooComplex)
"""Limits, as of an index's entry, that the driver takes for trouble of the server's."""
_CONNECT_S = 10
_SESSION = (
    "SET TIME ZONE 'UTC'; SET client_min_messages = warning; "
    # `text.as_quoted` writes no backslash escapes.
    "SET standard_conforming_strings = on; "
    # A cut is acknowledged when it is committed, so it has to outlive the server.
    "SELECT set_config('synchronous_commit', 'on', false) "
    "WHERE current_setting('synchronous_commit') = 'off'"
)
"""What a database, or a user, may have set otherwise."""
_REQUIRE_AUTH_SINCE = 160_000
"""The libpq that can refuse a server which asks for the password itself."""
_PRIMARY_KEY, _MOVING = "tidemark_primary", "tidemark_moving"
"""How the names of keys begin, and those of tables on their way to another schema."""


class Postgres:
    """A PostgreSQL database; the upstream's databases become schemas."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    format = "postgresql"
    table_options = ""
    name_type = "varchar(200)"
    document_type = "text"

    def __init__(self, uri: SinkUri) -> None:
        self._settings: dict[str, Any] = {
            "host": uri.host,
            "port": uri.port,
            "user": uri.user,
            "dbname": uri.path,
        }
        self._settings |= {
            "password": password(uri),
            "connect_timeout": _CONNECT_S,
            "application_name": "tidemark",
            # Rows are sent as bytes of UTF-8; the database, or the environment, may say else.
            "client_encoding": "utf8",
        }
        if uri.option("ca-path"):
            self._settings |= {"sslmode": "verify-full", "sslrootcert": uri.option("ca-path")}
        elif self._settings["password"]:
            self._settings["require_auth"] = _without_clear_text()

    def connect(self) -> Any:
        """See `Database`."""
        connection = psycopg.connect(**self._settings)
        connection.execute(_SESSION)
        connection.commit()
        return connection

    def quoted(self, name: str) -> str:
        """See `Database`."""
        return '"' + name.replace('"', '""') + '"'

    def quoted_table(self, name: str) -> str:
        """See `Database`."""
        return ".".join(map(self.quoted, name.split(".", 1)))

    def type_of(self, kind: Any, *, key_columns: int) -> str:  # noqa: ARG002 - any type can be indexed
        """See `Database`."""
        if pa.types.is_decimal(kind):
            return f"numeric({kind.precision}, {kind.scale})"
        return _TYPES[kind]

    def lock(self, cursor: Any, name: str) -> bool:
        """An advisory lock of the session."""
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        cursor.execute("SELECT pg_try_advisory_lock(%s)", (number,))
        return bool(cursor.fetchone()[0])

    def finds_by_name(self, cursor: Any, name: str) -> bool:
        """See `Database`: CREATE TABLE looks into the first schema of the search path only, and
        that is the user's once the upstream has a database of the user's name.
        """
        cursor.execute("SELECT to_regclass(%s) IS NOT NULL", (name,))
        return bool(cursor.fetchone()[0])

    def retype(self, cursor: Any, table: str, columns: Mapping[str, str]) -> list[str]:
        """See `Database`: they always had these types."""
        del cursor, table, columns
        return []

    def namespace(self, name: str) -> str:
        """See `Database`."""
        return f"CREATE SCHEMA IF NOT EXISTS {self.quoted(name.partition('.')[0])}"

    def stage(
        self,
        cursor: Any,
        columns: Sequence[str],
        batches: Iterable[Any],
        key: Sequence[str],  # noqa: ARG002 - keeps all
    ) -> None:
        """See `Database`; keeps all changes: `upsert` takes each key's last one."""
        cursor.execute(f"CREATE TEMPORARY TABLE {STAGED} ({', '.join(columns)}) ON COMMIT DROP")
        with cursor.copy(f"COPY {STAGED} FROM STDIN (FORMAT csv)") as copy:
            for batch in batches:
                copy.write(as_csv(batch))
        # Nobody else does: autovacuum does not see temporary tables, and without statistics the
        # planner takes this one for small.
        cursor.execute(f"ANALYZE {STAGED}")

    def delete_staged(self, table: str, key: Sequence[str]) -> list[str]:
        """See `Database`."""
        same = " AND ".join(f"t.{self.quoted(name)} = s.{self.quoted(name)}" for name in key)
        return [
            f"DELETE FROM {table} t USING {STAGED} s WHERE {same}",  # noqa: S608 - quoted names
            f"DROP TABLE {STAGED}",
        ]

    def upsert(self, table: str, columns: Sequence[str], key: Sequence[str]) -> list[str]:
        """See `Database`."""
        name, keys = self.quoted_table(table), ", ".join(self.quoted(column) for column in key)
        quoted = [self.quoted(column) for column in columns]
        same = " AND ".join(f"t.{self.quoted(column)} = s.{self.quoted(column)}" for column in key)
        last = f"(SELECT DISTINCT ON ({keys}) * FROM {STAGED} ORDER BY {keys}, _commit_ts DESC, _seq DESC) s"  # noqa: S608 - quoted
        sets = ", ".join(f"{column} = excluded.{column}" for column in quoted)
        insert = (
            f"INSERT INTO {name} AS t ({', '.join(quoted)}) SELECT {', '.join(quoted)} FROM {last}"  # noqa: S608 - quoted
        )
        newer = (
            f"ON CONFLICT ({keys}) DO UPDATE SET {sets} WHERE t._commit_ts < excluded._commit_ts"
        )
        return [
            f"DELETE FROM {name} t USING {last} WHERE {same} AND s._op = '{DELETE}' AND t._commit_ts < s._commit_ts",  # noqa: S608 - quoted
            f"{insert} WHERE _op <> '{DELETE}' {newer}",
        ]

    def end_versions(self, table: str, key: Sequence[str]) -> str:
        """See `Database`."""
        keys = ", ".join(self.quoted(column) for column in key)
        same = " AND ".join(f"t.{self.quoted(column)} = f.{self.quoted(column)}" for column in key)
        return (
            f"UPDATE {self.quoted_table(table)} t SET valid_to_ts = f.ts, is_current = false "  # noqa: S608 - quoted
            f"FROM (SELECT {keys}, min(_commit_ts) AS ts FROM {STAGED} GROUP BY {keys}) f WHERE "
            f"{same} AND t.is_current"
        )

    def alter(self, table: str, change: SchemaChange, mark: str) -> list[str]:  # noqa: ARG002 - one transaction
        """See `Database`."""
        name, filled = f"ALTER TABLE {self.quoted_table(table)}", dict(change.filled)
        steps = [f"DROP COLUMN {self.quoted(column)}" for column in change.dropped]
        # Names may be swapped or passed on, so no column gets its new name before all have left
        # their old ones.
        passing = [
            (old, f"_tidemark_{number}", new) for number, (old, new) in enumerate(change.renamed)
        ]
        steps += [
            f"RENAME COLUMN {self.quoted(old)} TO {self.quoted(between)}"
            for old, between, _ in passing
        ]
        steps += [
            f"RENAME COLUMN {self.quoted(between)} TO {self.quoted(new)}"
            for _, between, new in passing
        ]
        steps += [
            f"ALTER COLUMN {self.quoted(field.name)} TYPE {self.type_of(field.type, key_columns=0)}"
            for field in change.widened
        ]
        steps += [
            f"ADD COLUMN {self.quoted(field.name)} {self.type_of(field.type, key_columns=0)}"
            + (f" DEFAULT {as_quoted(filled[field.name])}" if field.name in filled else "")
            for field in change.added
        ]
        steps += [f"ALTER COLUMN {self.quoted(column)} DROP DEFAULT" for column in filled]
        return [f"{name} {step}" for step in steps]

    def drop_key(self, cursor: Any, table: str, dropped: Sequence[str]) -> list[str]:
        """See `Database`: PostgreSQL drops a key with a column of it."""
        del cursor, table, dropped
        return []

    def free_key(self, cursor: Any, table: str, key: Sequence[str]) -> None:
        """See `Database`."""
        name, keys = self.quoted_table(table), ", ".join(map(self.quoted, key))
        null = " OR ".join(f"{self.quoted(each)} IS NULL" for each in key)
        newest = f"PARTITION BY {keys} ORDER BY {IS_DELETED}, _commit_ts DESC"
        cursor.execute(
            f"DELETE FROM {name} WHERE ctid IN (SELECT ctid FROM (SELECT ctid, {IS_DELETED}, "  # noqa: S608 - quoted
            f"({null}) AS has_null, row_number() OVER ({newest}) AS place FROM {name}) r "
            f"WHERE {IS_DELETED} AND (has_null OR place > 1))"
        )

    def replace_key(self, cursor: Any, table: str, key: TableKey) -> list[str]:
        """See `Database`; in the transaction of the cursor."""
        name = self.quoted_table(table)
        schema = table.partition(".")[0]
        former = key_of(cursor, table)
        cursor.execute(
            "SELECT conname FROM pg_constraint WHERE contype = 'p' AND conrelid = CAST(%s AS "
            "regclass)",
            (name,),
        )
        steps = [f"DROP CONSTRAINT {self.quoted(row[0])}" for row in cursor.fetchall()]
        freed = former if not key.is_unique else [each for each in former if each in key.others]
        steps += [f"ALTER COLUMN {self.quoted(each)} DROP NOT NULL" for each in freed]
        cursor.execute(
            "SELECT indexname FROM pg_indexes WHERE schemaname = %s AND tablename = %s AND "
            "starts_with(indexname, %s)",
            (schema, table.partition(".")[2], KEY_INDEX),
        )
        indexes = [f"DROP INDEX {self.quoted_table(f'{schema}.{row[0]}')}" for row in cursor]
        columns = ", ".join(map(self.quoted, key.types))
        if key.is_unique:
            steps.append(f"ADD {self.primary_key(columns)}")
        else:
            index = _unique(KEY_INDEX)
            indexes.append(f"CREATE INDEX {index} ON {name} ({columns})")
        return [*(f"ALTER TABLE {name} {step}" for step in steps), *indexes]

    def exact_key(self, cursor: Any, table: str, key: Mapping[str, str]) -> list[str]:  # noqa: ARG002 - they are
        """See `Database`."""
        return []

    def is_altered(self, cursor: Any, table: str, mark: str) -> bool:  # noqa: ARG002 - our own row says it
        """See `Database`: our own row changes in the same transaction."""
        return False

    def primary_key(self, columns: str) -> str:
        """See `Database`. By default its index would be called after the table, and would keep that
        name when the table gets another one.
        """
        return f"CONSTRAINT {_unique(_PRIMARY_KEY)} PRIMARY KEY ({columns})"

    def rename_table(self, cursor: Any, old: str, new: str) -> list[str]:
        """See `Database`; in the transaction of the cursor."""
        (schema, _, table), (before, _, _) = new.partition("."), old.partition(".")
        if schema == before:
            return [f"ALTER TABLE {self.quoted_table(old)} RENAME TO {self.quoted(table)}"]
        # Either name may be another table's in the other schema, so it moves under a third one.
        between = _unique(_MOVING)
        return [
            self.namespace(new),
            *self._freed_names(cursor, old, schema),
            f"ALTER TABLE {self.quoted_table(old)} RENAME TO {between}",
            f"ALTER TABLE {self.quoted(before)}.{between} SET SCHEMA {self.quoted(schema)}",
            f"ALTER TABLE {self.quoted(schema)}.{between} RENAME TO {self.quoted(table)}",
        ]

    def _freed_names(self, cursor: Any, table: str, schema: str) -> list[str]:
        """The statements that rename those of a table's indexes whose names are taken in another
        schema: a schema has each name once, and indexes move with their table.
        """
        cursor.execute(
            "SELECT own.relname FROM pg_index JOIN pg_class own ON own.oid = indexrelid "
            "WHERE indrelid = CAST(%s AS regclass) AND EXISTS (SELECT 1 FROM pg_class other JOIN "
            "pg_namespace ON pg_namespace.oid = other.relnamespace WHERE nspname = %s AND "
            "other.relname = own.relname)",
            (self.quoted_table(table), schema),
        )
        before = table.partition(".")[0]
        return [
            f"ALTER INDEX {self.quoted_table(f'{before}.{row[0]}')} RENAME TO {_unique(_PRIMARY_KEY)}"
            for row in cursor.fetchall()
        ]

    def error_of(self, err: Exception) -> SourceError:
        """See `Database`."""
        if isinstance(err, errors.DiskFull):
            return SourceError(
                "ErrTargetFull",
                f"the database's disk is full ({postgres_error(err)}); make room",
                retryable=True,
            )
        if "authentication method requirement" in str(err):
            advice = (
                "the server asks for the password itself, which it gets only over verified TLS: "
                "add ca-path=/path"
            )
            return SourceError("ErrCredentials", f"{advice} to the target ({postgres_error(err)})")
        if isinstance(err, (errors.InvalidPassword, errors.InvalidAuthorizationSpecification)):
            return SourceError("ErrCredentials", f"the database refuses us: {postgres_error(err)}")
        if isinstance(err, errors.UntranslatableCharacter):
            return SourceError(
                "ErrTargetRefused",
                f"a text does not fit into the database's encoding ({postgres_error(err)}): choose a "
                "database that was created with ENCODING 'UTF8'",
            )
        if isinstance(err, errors.CharacterNotInRepertoire):
            # What is sent is UTF-8, so it is the one character that PostgreSQL's texts cannot have.
            return SourceError(
                "ErrTargetRefused",
                "a text holds the character U+0000, which PostgreSQL cannot: remove it at the "
                "source, or create the changefeed with --columns that leave the column out "
                f"({postgres_error(err)})",
            )
        later = isinstance(err, _LATER) and not isinstance(err, _NEVER)
        code = "ErrTargetUnavailable" if later else "ErrTargetRefused"
        return SourceError(code, f"PostgreSQL says: {postgres_error(err)}", retryable=later)


def _unique(prefix: str) -> str:
    """A name that no other table or index of any schema has."""
    return f"{prefix}_{secrets.token_hex(8)}"


def _without_clear_text() -> str:
    """What libpq must ask of a server that TLS has not verified:
    any login but one that sends the password itself.

    Raises:
        SourceError: ErrCredentials, this libpq cannot ask for it.
    """
    if psycopg.pq.version() < _REQUIRE_AUTH_SINCE:
        raise SourceError(
            "ErrCredentials",
            "this libpq gives the password to any server that asks for it in clear text: add "
            "ca-path=/path to the "
            "target, or take a libpq of 16 or later (pip install 'psycopg[binary]')",
        )
    return "!password"
