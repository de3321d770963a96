"""MySQL and MariaDB: multi-row REPLACE into a temporary table,
then INSERT … ON DUPLICATE KEY UPDATE.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pymysql
from pymysql.constants import CR, ER

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.changes import DELETE
from pyspark_tidemark.lake.columns import free_name, quoted
from pyspark_tidemark.lake.databases.database import (
    KEY_INDEX,
    STAGED,
    TableKey,
    columns_of,
    key_of,
    password,
)
from pyspark_tidemark.lake.databases.mysql_login import GuardedConnection
from pyspark_tidemark.lake.databases.text import as_values
from pyspark_tidemark.lake.schema import SchemaChange
from pyspark_tidemark.lake.soft_delete import IS_DELETED
from pyspark_tidemark.redaction import mysql_error
from pyspark_tidemark.sink_uri import SinkUri

_CHARACTERS = "CHARACTER SET utf8mb4"
_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    # The database, that of our own tables as well, may have another one.
    pa.string(): f"longtext {_CHARACTERS}",
    pa.binary(): "longblob",
    pa.date32(): "date",
    pa.timestamp("us"): "datetime(6)",
    pa.timestamp("us", tz="UTC"): "timestamp(6) NULL",
}
_KEY_BYTES = 3072  # InnoDB's limit for an index
_MYSQL_KEYS, _MARIADB_KEYS = "utf8mb4_0900_bin", "utf8mb4_nopad_bin"
"""Collations that compare bytes and pad nothing: to utf8mb4_bin 'b' and 'b ' are one key."""
_NAMES = "utf8mb4_bin"
"""The collation of names, which every version has: it pads, but no name ends with a blank."""
_STATEMENT_BYTES = 1 << 19
_PACKET_BYTES_MAX = 1 << 30
"""The largest max_allowed_packet of MySQL and MariaDB."""
_DISK_FULL = (ER.DISK_FULL, ER.RECORD_FILE_FULL)
_DENIED = (ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR)
_REFUSED = (
    ER.BAD_NULL_ERROR,
    ER.INVALID_USE_OF_NULL,
    ER.TABLE_EXISTS_ERROR,
    ER.BAD_TABLE_ERROR,
    ER.BAD_FIELD_ERROR,
    ER.DUP_FIELDNAME,
    ER.TOO_LONG_IDENT,
    ER.MULTIPLE_PRI_KEY,
    ER.TOO_LONG_KEY,
    ER.KEY_COLUMN_DOES_NOT_EXITS,
    ER.BLOB_USED_AS_KEY,
    ER.CANT_DROP_FIELD_OR_KEY,
    ER.TOO_MANY_FIELDS,
    ER.TOO_BIG_ROWSIZE,
    ER.TOO_BIG_FIELDLENGTH,
    ER.INVALID_DEFAULT,
    ER.WRONG_COLUMN_NAME,
    ER.WRONG_TABLE_NAME,
    ER.WRONG_DB_NAME,
    ER.BLOB_KEY_WITHOUT_LENGTH,
    ER.TRUNCATED_WRONG_VALUE,
    ER.TRUNCATED_WRONG_VALUE_FOR_FIELD,
    ER.DATA_TOO_LONG,
    ER.WARN_DATA_OUT_OF_RANGE,
)
"""Refusals of a statement that the driver takes for trouble of the server's."""
_CONNECT_S = 10


class MySql:
    """A MySQL or MariaDB server; the upstream's databases become databases,
    the URI's one holds our own tables.
    """

    errors: tuple[type[Exception], ...] = (pymysql.MySQLError,)
    format = "mysql"
    table_options = _CHARACTERS
    name_type = f"varchar(200) {_CHARACTERS} COLLATE {_NAMES}"
    document_type = f"longtext {_CHARACTERS}"

    def __init__(self, uri: SinkUri) -> None:
        self._settings: dict[str, Any] = {
            "host": uri.host,
            "port": uri.port,
            "user": uri.user,
            "database": uri.path,
        }
        self._settings |= {
            "password": password(uri).encode(),
            "connect_timeout": _CONNECT_S,
            "charset": "utf8mb4",
        }
        self._settings["server_is_verified"] = bool(uri.option("ca-path"))
        if uri.option("ca-path"):
            self._settings |= {
                "ssl_ca": uri.option("ca-path"),
                "ssl_verify_cert": True,
                "ssl_verify_identity": True,
            }
        self._key_collation = _MYSQL_KEYS
        self._packet_bytes = _STATEMENT_BYTES

    def connect(self) -> Any:
        """See `Database`."""
        # This sql_mode has no NO_BACKSLASH_ESCAPES: `text.as_values` writes backslash escapes.
        connection: Any = GuardedConnection(
            **self._settings,
            autocommit=False,
            init_command="SET time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
        )
        self._key_collation = (
            _MARIADB_KEYS if "mariadb" in connection.get_server_info().lower() else _MYSQL_KEYS
        )
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@max_allowed_packet")
            self._packet_bytes = int(cursor.fetchone()[0])
        # REPEATABLE READ would lock gaps between keys, where tables are written in parallel.
        connection.query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        return connection

    def quoted(self, name: str) -> str:
        """See `Database`."""
        return quoted(name)

    def quoted_table(self, name: str) -> str:
        """See `Database`."""
        return ".".join(map(quoted, name.split(".", 1)))

    def type_of(self, kind: Any, *, key_columns: int) -> str:
        """See `Database`."""
        if pa.types.is_decimal(kind):
            return f"decimal({kind.precision}, {kind.scale})"
        if key_columns and kind == pa.string():
            return (
                f"varchar({_KEY_BYTES // key_columns // 4}) {_CHARACTERS} COLLATE "
                f"{self._key_collation}"
            )
        if key_columns and kind == pa.binary():
            return f"varbinary({_KEY_BYTES // key_columns})"
        if key_columns and kind == pa.timestamp("us", tz="UTC"):
            # Without a default, old servers set the column to the current time at each update.
            return "timestamp(6) NOT NULL DEFAULT '2000-01-01 00:00:00'"
        return _TYPES[kind]

    def lock(self, cursor: Any, name: str) -> bool:
        """A named lock of the connection."""
        cursor.execute(
            "SELECT GET_LOCK(%s, 0)",
            (f"tidemark:{hashlib.sha256(name.encode()).hexdigest()[:40]}",),
        )
        return bool(cursor.fetchone()[0])

    def finds_by_name(self, cursor: Any, name: str) -> bool:  # noqa: ARG002 - see below
        """See `Database`: both look into the database of the connection."""
        return False

    def retype(self, cursor: Any, table: str, columns: Mapping[str, str]) -> list[str]:
        """See `Database`."""
        # Earlier versions had `text`, which ends at 65,535 bytes, and took names that differ in
        # case or accents for one.
        cursor.execute(
            "SELECT column_name, data_type, collation_name FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND table_name = %s",
            (table,),
        )
        outdated = [
            name
            for name, kind, collation in cursor.fetchall()
            if kind == "text" or (_NAMES in columns.get(name, "") and collation != _NAMES)
        ]
        steps = [f"MODIFY COLUMN {name} {columns[name]}" for name in outdated if name in columns]
        return [f"ALTER TABLE {table} {', '.join(steps)}"] if steps else []

    def namespace(self, name: str) -> str:
        """See `Database`."""
        return f"CREATE DATABASE IF NOT EXISTS {quoted(name.partition('.')[0])} {_CHARACTERS}"

    def stage(
        self, cursor: Any, columns: Sequence[str], batches: Iterable[Any], key: Sequence[str]
    ) -> None:
        """See `Database`."""
        # Batches come in commit order, so REPLACE leaves each key's last change.
        primary = f", PRIMARY KEY ({', '.join(quoted(column) for column in key)})" if key else ""
        cursor.execute(f"DROP TEMPORARY TABLE IF EXISTS {STAGED}")
        cursor.execute(f"CREATE TEMPORARY TABLE {STAGED} ({', '.join(columns)}{primary})")
        for batch in batches:
            for statement in self._staging(batch):
                cursor.execute(statement)

    def _staging(self, batch: Any) -> list[str]:
        """The statements that stage a batch, each of a size that the server takes.

        Raises:
            SourceError: ErrRowTooLarge, a row is larger than that.
        """
        # The server drops the connection in the middle of a packet that is far too large, so that
        # one looks like trouble of the network: it is refused here.
        statements = _replacing(batch, min(_STATEMENT_BYTES, self._packet_bytes // 2))
        if any(_packet_bytes(each) > self._packet_bytes for each in statements):
            statements = _replacing(batch, 1)
        largest = max(map(_packet_bytes, statements), default=0)
        if largest > self._packet_bytes:
            raise _row_too_large(largest, self._packet_bytes)
        return statements

    def delete_staged(self, table: str, key: Sequence[str]) -> list[str]:
        """See `Database`."""
        same = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in key)
        return [
            f"DELETE t FROM {table} t JOIN {STAGED} s ON {same}",
            # Without TEMPORARY the server commits before it drops the table.
            f"DROP TEMPORARY TABLE {STAGED}",
        ]

    def upsert(self, table: str, columns: Sequence[str], key: Sequence[str]) -> list[str]:
        """See `Database`."""
        # MySQL assigns from left to right, and later assignments see earlier ones: `_commit_ts`,
        # which `newer` reads, has to be set last.
        name = self.quoted_table(table)
        same = " AND ".join(f"t.{quoted(column)} = s.{quoted(column)}" for column in key)
        ordered = [column for column in columns if column != "_commit_ts"] + ["_commit_ts"]
        names = ", ".join(quoted(column) for column in ordered)
        newer = f"{name}.`_commit_ts` < VALUES(`_commit_ts`)"
        sets = ", ".join(
            f"{quoted(c)} = IF({newer}, VALUES({quoted(c)}), {name}.{quoted(c)})" for c in ordered
        )
        live, deleted = f"_op <> '{DELETE}'", f"s._op = '{DELETE}' AND t._commit_ts < s._commit_ts"
        return [
            f"DELETE t FROM {name} t JOIN {STAGED} s ON {same} WHERE {deleted}",
            f"INSERT INTO {name} ({names}) SELECT {names} FROM {STAGED} WHERE {live} ON DUPLICATE KEY UPDATE {sets}",  # noqa: S608 - quoted
        ]

    def end_versions(self, table: str, key: Sequence[str]) -> str:
        """See `Database`."""
        keys = ", ".join(quoted(column) for column in key)
        same = " AND ".join(f"t.{quoted(column)} = f.{quoted(column)}" for column in key)
        first = f"(SELECT {keys}, min(_commit_ts) AS ts FROM {STAGED} GROUP BY {keys}) f"  # noqa: S608 - quoted
        return (
            f"UPDATE {self.quoted_table(table)} t JOIN {first} "  # noqa: S608 - quoted
            f"ON {same} SET t.valid_to_ts = f.ts, t.is_current = false WHERE t.is_current"
        )

    def alter(self, table: str, change: SchemaChange, mark: str) -> list[str]:
        """See `Database`."""
        # MySQL commits each statement by itself, so all steps are one. Only the defaults go in
        # another: after a crash they stay behind, and nothing uses them.
        retyped = {field.name for field in change.widened}
        steps = [f"DROP COLUMN {quoted(column)}" for column in change.dropped]
        steps += [
            f"RENAME COLUMN {quoted(old)} TO {quoted(new)}"
            for old, new in change.renamed
            if new not in retyped
        ]
        steps += [
            f"CHANGE COLUMN {quoted(change.old_names.get(field.name, field.name))} "
            f"{quoted(field.name)} {self.type_of(field.type, key_columns=0)}"
            for field in change.widened
        ]
        filled = {column: _row(value) for column, value in change.filled}
        steps += [
            f"ADD COLUMN {quoted(field.name)} {self.type_of(field.type, key_columns=0)}"
            + (f" DEFAULT {filled[field.name]}" if field.name in filled else "")
            for field in change.added
        ]
        name = f"ALTER TABLE {self.quoted_table(table)}"
        plain = (
            [", ".join(f"ALTER COLUMN {quoted(column)} DROP DEFAULT" for column in filled)]
            if filled
            else []
        )
        return [f"{name} {step}" for step in (", ".join([*steps, f"COMMENT = '{mark}'"]), *plain)]

    def is_altered(self, cursor: Any, table: str, mark: str) -> bool:
        """See `Database`: the mark is the table's comment."""
        schema, _, name = table.partition(".")
        cursor.execute(
            "SELECT table_comment FROM information_schema.tables WHERE table_schema = %s AND "
            "table_name = %s",
            (schema, name),
        )
        row = cursor.fetchone()
        return row is not None and row[0] == mark

    def drop_key(self, cursor: Any, table: str, dropped: Sequence[str]) -> list[str]:
        """See `Database`."""
        # MariaDB drops no column of a primary key that has others, too.
        if not set(key_of(cursor, table)) & set(dropped):
            return []
        return [f"ALTER TABLE {self.quoted_table(table)} DROP PRIMARY KEY"]

    def free_key(self, cursor: Any, table: str, key: Sequence[str]) -> None:
        """See `Database`."""
        # Rows have nothing to be named by, as the former key may be gone: those that stay are kept
        # beside, and come back. Bytes are compared: a text's own collation may take two for one.
        name, kept = self.quoted_table(table), f"{STAGED}_kept"
        columns = ", ".join(map(quoted, columns_of(cursor, table)))
        keys = ", ".join(f"CAST({quoted(each)} AS BINARY)" for each in key)
        whole = " AND ".join(f"{quoted(each)} IS NOT NULL" for each in key)
        newest = f"PARTITION BY {keys} ORDER BY {IS_DELETED}, _commit_ts DESC"
        place = free_name("_place", columns_of(cursor, table))
        cursor.execute(f"DROP TEMPORARY TABLE IF EXISTS {kept}")
        cursor.execute(
            f"CREATE TEMPORARY TABLE {kept} SELECT {columns} FROM (SELECT t.*, row_number() OVER "  # noqa: S608 - quoted
            f"({newest}) AS {place} FROM {name} t) r WHERE {IS_DELETED} AND {place} = 1 AND {whole}"
        )
        cursor.execute(f"DELETE FROM {name} WHERE {IS_DELETED}")  # noqa: S608 - quoted
        cursor.execute(f"INSERT INTO {name} ({columns}) SELECT {columns} FROM {kept}")  # noqa: S608 - quoted
        cursor.execute(f"DROP TEMPORARY TABLE {kept}")

    def replace_key(self, cursor: Any, table: str, key: TableKey) -> list[str]:
        """See `Database`; one statement."""
        schema, _, name = table.partition(".")
        former = key_of(cursor, table)
        cursor.execute(
            "SELECT DISTINCT index_name FROM information_schema.statistics WHERE table_schema = %s "
            "AND table_name = %s AND index_name = %s",
            (schema, name, KEY_INDEX),
        )
        steps = [f"DROP INDEX {KEY_INDEX}" for _ in cursor.fetchall()]
        steps += ["DROP PRIMARY KEY"] if former else []
        steps += [
            f"MODIFY COLUMN {quoted(column)} {key.others[column]}"
            for column in former
            if column in key.others
        ]
        null = "NOT NULL" if key.is_unique else "NULL"
        steps += [
            f"MODIFY COLUMN {quoted(column)} {kind} {null}" for column, kind in key.types.items()
        ]
        columns = ", ".join(map(quoted, key.types))
        steps.append(
            f"ADD PRIMARY KEY ({columns})"
            if key.is_unique
            else f"ADD INDEX {KEY_INDEX} ({columns})"
        )
        return [f"ALTER TABLE {self.quoted_table(table)} {', '.join(steps)}"]

    def exact_key(self, cursor: Any, table: str, key: Mapping[str, str]) -> list[str]:
        """See `Database`."""
        # Earlier versions gave keys utf8mb4_bin, which pads.
        schema, _, name = table.partition(".")
        cursor.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND "
            "table_name = %s AND collation_name = 'utf8mb4_bin'",
            (schema, name),
        )
        padded = {row[0] for row in cursor.fetchall()}
        steps = [
            f"MODIFY COLUMN {quoted(column)} {kind} NOT NULL"
            for column, kind in key.items()
            if column in padded
        ]
        return [f"ALTER TABLE {self.quoted_table(table)} {', '.join(steps)}"] if steps else []

    def primary_key(self, columns: str) -> str:
        """See `Database`."""
        return f"PRIMARY KEY ({columns})"

    def rename_table(self, cursor: Any, old: str, new: str) -> list[str]:
        """See `Database`."""
        if old.lower() == new.lower():
            cursor.execute("SELECT @@lower_case_table_names")
            if cursor.fetchone()[0]:
                return []  # to this server both are one name
        return [
            self.namespace(new),
            f"RENAME TABLE {self.quoted_table(old)} TO {self.quoted_table(new)}",
        ]

    def error_of(self, err: Exception) -> SourceError:
        """See `Database`."""
        number = err.args[0] if err.args and isinstance(err.args[0], int) else 0
        if number in _DISK_FULL:
            return SourceError(
                "ErrTargetFull",
                f"the database's disk is full ({mysql_error(err)}); make room",
                retryable=True,
            )
        if number == CR.CR_AUTH_PLUGIN_CANNOT_LOAD:
            return SourceError("ErrCredentials", f"{err.args[1]}: add ca-path=/path to the target")
        if number in _DENIED:
            return SourceError("ErrCredentials", f"the database refuses us: {mysql_error(err)}")
        if number == ER.NET_PACKET_TOO_LARGE:
            return SourceError(
                "ErrRowTooLarge",
                "a statement is larger than the target's max_allowed_packet: SET GLOBAL "
                f"max_allowed_packet = {_PACKET_BYTES_MAX} there, then resume the changefeed",
            )
        # PyMySQL raises OperationalError for nearly everything, refusals of a statement, too: tried
        # again and again, those would never end.
        later = (
            isinstance(err, (pymysql.OperationalError, pymysql.InterfaceError))
            and number not in _REFUSED
        )
        return SourceError(
            "ErrTargetUnavailable" if later else "ErrTargetRefused",
            f"the database says: {mysql_error(err)}",
            retryable=later,
        )


def _replacing(batch: Any, most_bytes: int) -> list[str]:
    return [
        f"REPLACE INTO {STAGED} VALUES {values}"  # noqa: S608 - literals of as_values
        for values in as_values(batch, most_bytes)
    ]


def _packet_bytes(statement: str) -> int:
    """With the byte that says that a query follows."""
    return 1 + len(statement.encode())


def _row_too_large(size: int, most: int) -> SourceError:
    if size > _PACKET_BYTES_MAX:
        way_out = "which no server takes: leave its largest column out by --columns"
    else:
        needed = 1 << (size - 1).bit_length()
        way_out = (
            f"and the target's max_allowed_packet is {most}: SET GLOBAL max_allowed_packet = "
            f"{needed} there (and in its configuration), or leave the row's largest column out by "
            "--columns"
        )
    return SourceError(
        "ErrRowTooLarge",
        f"a row takes {size} bytes in a statement, {way_out}; then resume the changefeed",
    )


def _row(value: Any) -> str:
    """`(literal)`."""
    # The parentheses make an expression of it: a plain literal is no default of TEXT or BLOB.
    column = pa.array([value.as_py()], value.type)
    return as_values(pa.record_batch([column], ["value"]), _STATEMENT_BYTES)[0]
