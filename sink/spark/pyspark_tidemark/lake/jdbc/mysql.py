"""MySQL and MariaDB: multi-row REPLACE into a temporary table, then INSERT … ON DUPLICATE KEY UPDATE."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pymysql
from pymysql.constants import ER

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.changes import DELETE
from pyspark_tidemark.lake.jdbc.database import STAGED, password
from pyspark_tidemark.lake.jdbc.text import as_values
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.schema import SchemaChange
from pyspark_tidemark.lake.target import TargetUri

_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "longtext",
    pa.binary(): "longblob",
    pa.date32(): "date",
    pa.timestamp("us"): "datetime(6)",
    pa.timestamp("us", tz="UTC"): "timestamp(6) NULL",
}
_KEY_BYTES = 3072  # InnoDB's limit for an index
_STATEMENT_BYTES = 1 << 19
_DISK_FULL = (ER.DISK_FULL, ER.RECORD_FILE_FULL)
_DENIED = (ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR)
_CONNECT_S = 10


class MySql:
    """A MySQL or MariaDB server; the upstream's databases become databases, the URI's one holds our own tables."""

    errors: tuple[type[Exception], ...] = (pymysql.MySQLError,)

    def __init__(self, uri: TargetUri) -> None:
        self._settings: dict[str, Any] = {"host": uri.host, "port": uri.port, "user": uri.user, "database": uri.path}
        self._settings |= {"password": password(uri), "connect_timeout": _CONNECT_S, "charset": "utf8mb4"}
        if uri.option("ca-path"):
            self._settings |= {"ssl_ca": uri.option("ca-path"), "ssl_verify_cert": True, "ssl_verify_identity": True}

    def connect(self) -> Any:
        """See `Database`; with backslash escapes, as `text.as_values` writes them, and without locks on gaps."""
        connection = pymysql.connect(
            **self._settings,
            autocommit=False,
            init_command="SET time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
        )
        connection.query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        return connection

    def quoted(self, name: str) -> str:
        """See `Database`."""
        return ".".join(quoted(part) for part in name.split(".", 1))

    def type_of(self, found: Any, *, key_columns: int) -> str:
        """See `Database`."""
        if pa.types.is_decimal(found):
            return f"decimal({found.precision}, {found.scale})"
        if key_columns and found == pa.string():
            return f"varchar({_KEY_BYTES // key_columns // 4}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        if key_columns and found == pa.binary():
            return f"varbinary({_KEY_BYTES // key_columns})"
        return _TYPES[found]

    def lock(self, cursor: Any, name: str) -> bool:
        """A named lock of the connection."""
        cursor.execute("SELECT GET_LOCK(%s, 0)", (f"tidemark:{hashlib.sha256(name.encode()).hexdigest()[:40]}",))
        return bool(cursor.fetchone()[0])

    def namespace(self, name: str) -> str:
        """See `Database`."""
        return f"CREATE DATABASE IF NOT EXISTS {quoted(name.partition('.')[0])} CHARACTER SET utf8mb4"

    def stage(self, cursor: Any, columns: Sequence[str], batches: Iterable[Any], key: Sequence[str]) -> None:
        """See `Database`; with `key` a later change of a key replaces an earlier one."""
        primary = f", PRIMARY KEY ({', '.join(quoted(column) for column in key)})" if key else ""
        cursor.execute(f"DROP TEMPORARY TABLE IF EXISTS {STAGED}")
        cursor.execute(f"CREATE TEMPORARY TABLE {STAGED} ({', '.join(columns)}{primary})")
        for batch in batches:
            for values in as_values(batch, _STATEMENT_BYTES):
                cursor.execute(f"REPLACE INTO {STAGED} VALUES {values}")  # noqa: S608 - literals of as_values

    def upsert(self, table: str, columns: Sequence[str], key: Sequence[str]) -> list[str]:
        """See `Database`; `_commit_ts`, which the guard reads, is set last."""
        name = self.quoted(table)
        same = " AND ".join(f"t.{quoted(column)} = s.{quoted(column)}" for column in key)
        ordered = [column for column in columns if column != "_commit_ts"] + ["_commit_ts"]
        names = ", ".join(quoted(column) for column in ordered)
        newer = f"{name}.`_commit_ts` < VALUES(`_commit_ts`)"
        sets = ", ".join(f"{quoted(c)} = IF({newer}, VALUES({quoted(c)}), {name}.{quoted(c)})" for c in ordered)
        live, gone = f"_op <> '{DELETE}'", f"s._op = '{DELETE}' AND t._commit_ts < s._commit_ts"
        return [
            f"DELETE t FROM {name} t JOIN {STAGED} s ON {same} WHERE {gone}",
            f"INSERT INTO {name} ({names}) SELECT {names} FROM {STAGED} WHERE {live} ON DUPLICATE KEY UPDATE {sets}",  # noqa: S608 - quoted
        ]

    def end_versions(self, table: str, key: Sequence[str]) -> str:
        """See `Database`."""
        keys = ", ".join(quoted(column) for column in key)
        same = " AND ".join(f"t.{quoted(column)} = f.{quoted(column)}" for column in key)
        first = f"(SELECT {keys}, min(_commit_ts) AS ts FROM {STAGED} GROUP BY {keys}) f"  # noqa: S608 - quoted
        return (
            f"UPDATE {self.quoted(table)} t JOIN {first} "  # noqa: S608 - quoted
            f"ON {same} SET t.valid_to_ts = f.ts, t.is_current = false WHERE t.is_current"
        )

    def alter(self, table: str, change: SchemaChange) -> list[str]:
        """See `Database`; one statement that counts, each being a transaction: a default may stay behind, unused."""
        steps = [f"RENAME COLUMN {quoted(old)} TO {quoted(new)}" for old, new in change.renamed]
        steps += [f"DROP COLUMN {quoted(column)}" for column in change.dropped]
        steps += [
            f"MODIFY COLUMN {quoted(field.name)} {self.type_of(field.type, key_columns=0)}" for field in change.widened
        ]
        filled = {column: _row(value) for column, value in change.filled}
        steps += [
            f"ADD COLUMN {quoted(field.name)} {self.type_of(field.type, key_columns=0)}"
            + (f" DEFAULT {filled[field.name]}" if field.name in filled else "")
            for field in change.added
        ]
        name = f"ALTER TABLE {self.quoted(table)}"
        plain = [", ".join(f"ALTER COLUMN {quoted(column)} DROP DEFAULT" for column in filled)] if filled else []
        return [f"{name} {step}" for step in (", ".join(steps), *plain)]

    def renamed(self, old: str, new: str) -> list[str]:
        """See `Database`."""
        return [self.namespace(new), f"RENAME TABLE {self.quoted(old)} TO {self.quoted(new)}"]

    def explained(self, err: Exception) -> SourceError:
        """See `Database`."""
        number = err.args[0] if err.args and isinstance(err.args[0], int) else 0
        if number in _DISK_FULL:
            return SourceError("ErrTargetFull", f"the database's disk is full ({err}); make room", retryable=True)
        if number in _DENIED:
            return SourceError("ErrCredentials", f"the database refuses us: {err}")
        later = isinstance(err, (pymysql.OperationalError, pymysql.InterfaceError))
        return SourceError(
            "ErrTargetUnavailable" if later else "ErrTargetRefused", f"the database says: {err}", retryable=later
        )


def _row(value: Any) -> str:
    """`(literal)`: as a default it is an expression, which columns of every type may have."""
    column = pa.array([value.as_py()], value.type)
    return as_values(pa.record_batch([column], ["value"]), _STATEMENT_BYTES)[0]
