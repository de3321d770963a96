"""The events that are not rows: what each one's body says.

Source: MySQL's libbinlogevents (control_events.h, statement_events.h), MariaDB's log_event.h;
MariaDB 10.11's logs.
"""

import enum
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from storage.mysql.buffer import Reader
from storage.mysql.charset import BINARY, UTF8, charset_of, decode_text
from storage.mysql.gtid import read_tag

MARIADB_STANDALONE = 1
MARIADB_COMMITS_AS_GROUP = 2
MARIADB_PREPARED_XA = 64
MARIADB_COMPLETED_XA = 128
_MARIADB_START_ALTER = 2
_MARIADB_ROLLBACK_ALTER = 8
_FLAGS2, _SQL_MODE, _CATALOG, _AUTO_INCREMENT, _CHARSET, _TIME_ZONE, _CATALOG_NZ = range(7)
_LC_TIME_NAMES, _CHARSET_DATABASE, _TABLE_MAP_FOR_UPDATE, _MASTER_DATA_WRITTEN = range(7, 11)
_INVOKER, _UPDATED_SCHEMAS, _MICROSECONDS, _EXPLICIT_TIMESTAMPS = 11, 12, 13, 16
_TOO_MANY_SCHEMAS = 254
_VARIABLE_BYTES = {
    _FLAGS2: 4,
    _SQL_MODE: 8,
    _AUTO_INCREMENT: 4,
    _CHARSET: 6,
    _LC_TIME_NAMES: 2,
    _CHARSET_DATABASE: 2,
    _TABLE_MAP_FOR_UPDATE: 8,
    _MASTER_DATA_WRITTEN: 4,
    _MICROSECONDS: 3,
    _EXPLICIT_TIMESTAMPS: 1,
}
_TEXT_VARIABLES = frozenset({_TIME_ZONE, _CATALOG_NZ})
_MARIADB_EXPLICIT_TIMESTAMPS = 1 << 24
"""A bit of the flags; MySQL has a variable for it."""
_LOAD_BYTES = 13
_MARIADB_GTID = struct.Struct("<QIB")
_QUERY = struct.Struct("<IIBHH")
_XID = struct.Struct("<III")
_MYSQL_GTID = struct.Struct("<B16sQ")
_MYSQL_GROUP_BYTES = 17
_COMMITTED_BYTES = 7
_ORIGINAL_FOLLOWS = 1 << 55
_CHECKSUM_CRC32 = 1
_CRC32_AND_ALGORITHM_BYTES = 5


@dataclass(frozen=True, slots=True)
class FormatDescription:
    """Begins each log: who wrote it, and whether its events end with a CRC32."""

    server_version: str
    checksums: bool

    @classmethod
    def parse(cls, body: bytes, *, split_with_checksums: bool) -> "FormatDescription":
        """Read the body; the event itself always ends with a CRC32,
        which `split_events` may have cut off already.
        """
        reader = Reader(body)
        reader.take(2)
        version = reader.take(50).rstrip(b"\0").decode(errors="replace")
        algorithm = body[-1] if split_with_checksums else body[-_CRC32_AND_ALGORITHM_BYTES]
        return cls(version, checksums=algorithm == _CHECKSUM_CRC32)

    @property
    def is_mariadb(self) -> bool:
        """Whether MariaDB wrote it."""
        return "mariadb" in self.server_version.lower()


@dataclass(frozen=True, slots=True)
class Rotate:
    """The log goes on in another file."""

    position: int
    file: str

    @classmethod
    def parse(cls, body: bytes) -> "Rotate":
        """Read the body."""
        reader = Reader(body)
        return cls(reader.number(8), reader.rest.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class MariaGtid:
    """Begins a transaction of MariaDB (type 162); its server is in the event's header."""

    seq: int
    domain: int
    server: int
    flags: int
    xid: tuple[bytes, bytes] | None = None
    """An XA transaction's global and branch ids, at its PREPARE and at its end."""
    changes_nothing: bool = False
    """Whether it is the first phase of an ALTER that another transaction ends, or one that failed
    (binlog_alter_two_phase).
    """

    @classmethod
    def parse(cls, header: bytes, body: bytes) -> "MariaGtid":
        """Read header and body."""
        reader = Reader(body)
        seq, domain, flags = reader.unpack(_MARIADB_GTID)
        xid = None
        if flags & MARIADB_COMMITS_AS_GROUP:
            reader.take(8)
        if flags & (MARIADB_PREPARED_XA | MARIADB_COMPLETED_XA):
            reader.take(4)
            global_size, branch_size = reader.number(1), reader.number(1)
            xid = reader.take(global_size), reader.take(branch_size)
        # behind it engines and the ALTER's number, of no concern
        phase = reader.number(1) if reader.rest else 0
        nothing = bool(phase & (_MARIADB_START_ALTER | _MARIADB_ROLLBACK_ALTER))
        return cls(seq, domain, int.from_bytes(header[5:9], "little"), flags, xid, nothing)

    @property
    def is_standalone(self) -> bool:
        """Whether exactly one event follows, which commits by itself (a DDL), without an XID."""
        return bool(self.flags & MARIADB_STANDALONE)

    @property
    def is_prepared(self) -> bool:
        """Whether its rows are of an XA PREPARE: they count only if `XA COMMIT` follows."""
        return bool(self.flags & MARIADB_PREPARED_XA)

    def __str__(self) -> str:
        return f"{self.domain}-{self.server}-{self.seq}"


@dataclass(frozen=True, slots=True)
class MysqlGtid:
    """Begins a transaction of MySQL (type 33; 34 where the server gives none out,
    then `gno` is 0; 42 with a tag).
    """

    server: uuid.UUID
    gno: int
    tag: str = ""
    committed_us: int = 0
    """The commit time on the original server, in µs since the Unix epoch, the same on all replicas;
    0: the log does not have it.
    """

    @classmethod
    def parse(cls, body: bytes) -> "MysqlGtid":
        """Read the body of type 33 or 34."""
        reader = Reader(body)
        _, server, gno = _MYSQL_GTID.unpack(reader.take(_MYSQL_GTID.size))
        committed_us = 0
        if len(reader.rest) >= _MYSQL_GROUP_BYTES + _COMMITTED_BYTES:
            reader.take(_MYSQL_GROUP_BYTES)
            committed_us = reader.number(_COMMITTED_BYTES)
            if committed_us & _ORIGINAL_FOLLOWS:
                committed_us = reader.number(_COMMITTED_BYTES)
        return cls(uuid.UUID(bytes=server), gno, committed_us=committed_us)

    @classmethod
    def parse_tagged(cls, body: bytes) -> "MysqlGtid":
        """Read the body of type 42: numbered fields of numbers that tell their own width;
        the last ones may be missing.

        Source: MySQL's mysql::serialization and the events of a MySQL 9.7.
        """
        reader = Reader(body)
        reader.varied()  # the version of the format
        end = reader.varied()
        reader.varied()
        server, gno, tag, committed = uuid.UUID(int=0), 0, "", {}
        while reader.at < min(end, len(body)):
            number = reader.varied()
            if number == _Tagged.SERVER:
                server = uuid.UUID(bytes=bytes(reader.varied() & 0xFF for _ in range(16)))
            elif number == _Tagged.TAG:
                tag = read_tag(reader.take(reader.varied()))
            elif number == _Tagged.GNO:
                gno = reader.varied() >> 1  # the lowest bit is its sign
            else:
                committed[number] = reader.varied()
        us = committed.get(_Tagged.ORIGINAL_US, committed.get(_Tagged.COMMITTED_US, 0))
        return cls(server, gno, tag, us)

    def __str__(self) -> str:
        return ":".join(filter(None, (str(self.server), self.tag, str(self.gno))))


class _Tagged(enum.IntEnum):
    SERVER = 1
    GNO = 2
    TAG = 3
    COMMITTED_US = 6
    ORIGINAL_US = 7


@dataclass(frozen=True, slots=True)
class Query:
    """A statement: DDL, `BEGIN`, `COMMIT`, `XA …`, or rows that were logged as a statement."""

    thread_id: int
    schema: str
    """The default schema when it ran."""
    sql: str
    error_code: int
    sql_mode: int = 0
    """The session's, as bits."""
    connection: str = "utf8mb4"
    """The character set of the session's constants."""
    explicit_timestamps: bool = True
    """The session surely had explicit_defaults_for_timestamp; older servers do not tell."""

    @classmethod
    def parse(cls, body: bytes, *, loads: bool = False) -> "Query":
        """Read the body; `loads`: of EXECUTE_LOAD_QUERY, which tells of its file, too."""
        reader = Reader(body)
        thread_id, _, size, error_code, variables_size = reader.unpack(_QUERY)
        if loads:
            reader.take(_LOAD_BYTES)
        variables = _variables(reader.take(variables_size))
        schema = reader.take(size).decode(errors="replace")
        reader.take(1)
        sql_mode = int.from_bytes(variables.get(_SQL_MODE, b""), "little")
        client = charset_of(int.from_bytes(variables.get(_CHARSET, b"")[:2], "little")) or "utf8mb4"
        sql = (
            reader.rest.decode(errors="replace")
            if client in UTF8 | {BINARY}
            else decode_text(client, reader.rest)
        )
        connection = (
            charset_of(int.from_bytes(variables.get(_CHARSET, b"")[2:4], "little")) or "utf8mb4"
        )
        explicit = _explicit_timestamps(variables)
        return cls(thread_id, schema, sql, error_code, sql_mode, connection, explicit)


def _skip_schemas(reader: Reader) -> None:
    """The names of the schemas that a statement changes, each with a zero behind it."""
    count = reader.number(1)
    for _ in range(0 if count == _TOO_MANY_SCHEMAS else count):
        while reader.take(1) != b"\0":
            pass


def _explicit_timestamps(variables: Mapping[int, bytes]) -> bool:
    flags = int.from_bytes(variables.get(_FLAGS2, b""), "little")
    own = variables.get(_EXPLICIT_TIMESTAMPS, b"")
    return bool(flags & _MARIADB_EXPLICIT_TIMESTAMPS) or own == b"\1"


def _variables(data: bytes) -> dict[int, bytes]:
    """The session's variables that go with a statement, up to the first that is not of interest."""
    reader = Reader(data)
    values: dict[int, bytes] = {}
    while reader.rest:
        code = reader.number(1)
        if code in _VARIABLE_BYTES:
            values[code] = reader.take(_VARIABLE_BYTES[code])
        elif code in _TEXT_VARIABLES:
            values[code] = reader.take(reader.number(1))
        elif code == _CATALOG:
            values[code] = reader.take(reader.number(1) + 1)
        elif code == _INVOKER:
            values[code] = reader.take(reader.number(1)) + reader.take(reader.number(1))
        elif code == _UPDATED_SCHEMAS:
            _skip_schemas(reader)
        else:
            break
    return values


@dataclass(frozen=True, slots=True)
class XaPrepare:
    """Ends the first part of an XA transaction (type 38); `one_phase`: it is committed with it."""

    one_phase: bool
    xid: tuple[bytes, bytes]

    @classmethod
    def parse(cls, body: bytes) -> "XaPrepare":
        """Read the body."""
        reader = Reader(body)
        one_phase = bool(reader.number(1))
        _, global_size, branch_size = reader.unpack(_XID)
        return cls(one_phase, (reader.take(global_size), reader.take(branch_size)))


@dataclass(frozen=True, slots=True)
class MariaGtidList:
    """Begins each file of MariaDB's log (type 163): the last GTIDs (domain, server,
    seq) of the files before it.
    """

    gtids: tuple[tuple[int, int, int], ...]

    @classmethod
    def parse(cls, body: bytes) -> "MariaGtidList":
        """Read the body."""
        reader = Reader(body)
        count = reader.number(4) & 0x0FFFFFFF
        return cls(
            tuple((reader.number(4), reader.number(4), reader.number(8)) for _ in range(count))
        )
