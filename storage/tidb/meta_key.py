"""Meta keys: where TiDB keeps its databases, table schemas and DDL jobs in the store, as of any timestamp.

    m{DBs}h{DB:84} = DBInfo       m{DB:84}h{Table:86} = TableInfo      m{DDLJobHistory}h{job id} = a finished Job
    t{281474976710654}_r{job id}: the rows of mysql.tidb_ddl_job, in which an unfinished job stands

Braces are memcomparable bytes, `h` is a big-endian number of eight bytes. A job's row turns to `done` in the same
transaction that brings its last schema in force: that transaction's commit_ts is the DDL's.
Source: TiDB meta/meta.go, structure/type.go; `meta_kv` of the vectors.
"""

from typing import Final, NamedTuple

from storage.codec import decode_bytes, decode_u64, encode_bytes, encode_u64, prefix_end
from storage.model.errors import CorruptError
from storage.model.span import Span
from storage.tidb.key import record_key, record_prefix

JOB_TABLE_ID: Final = (1 << 48) - 2
"""mysql.tidb_ddl_job, since TiDB 6.2."""
JOB_META_COLUMN_ID: Final = 5
SCHEMAS_BEGIN: Final = b"mDB"
SCHEMAS_END: Final = prefix_end(SCHEMAS_BEGIN)
"""All databases and tables, and their counters, lie in `[SCHEMAS_BEGIN, SCHEMAS_END)`."""

_META = b"m"
_HASH = ord("h")
_DATABASES = b"DBs"
_DATABASE = b"DB:"
_TABLE = b"Table:"
_HISTORY = b"DDLJobHistory"


class SchemaKey(NamedTuple):
    """What a meta key names: a database (`table_id` 0), or a table of one."""

    database_id: int
    table_id: int


def job_span() -> Span:
    """The records of mysql.tidb_ddl_job."""
    prefix = record_prefix(JOB_TABLE_ID)
    return Span(JOB_TABLE_ID, prefix, prefix_end(prefix))


def job_key(job_id: int) -> bytes:
    """Where a job stands until it has ended."""
    return record_key(JOB_TABLE_ID, job_id)


def history_key(job_id: int) -> bytes:
    """Where a job stands after it has ended."""
    return _hash_key(_HISTORY, encode_u64(job_id))


def database_key(database_id: int) -> bytes:
    """Where a database's DBInfo stands."""
    return _hash_key(_DATABASES, _DATABASE + b"%d" % database_id)


def table_key(database_id: int, table_id: int) -> bytes:
    """Where a table's TableInfo stands."""
    return _hash_key(_DATABASE + b"%d" % database_id, _TABLE + b"%d" % table_id)


def decode_schema_key(key: bytes) -> SchemaKey | None:
    """What `key` names; None for counters, policies and whatever else lies among them.

    Raises:
        CorruptError: `key` is none of TiDB's meta keys.
    """
    if key[:1] != _META:
        raise CorruptError(f"not a meta key: {key.hex()}")
    name, at = decode_bytes(key, 1)
    if len(key) < at + 8 or decode_u64(key, at) != _HASH:
        return None
    field, _ = decode_bytes(key, at + 8)
    if name == _DATABASES and field.startswith(_DATABASE):
        return SchemaKey(_number(field.removeprefix(_DATABASE), key), 0)
    if name.startswith(_DATABASE) and field.startswith(_TABLE):
        return SchemaKey(_number(name.removeprefix(_DATABASE), key), _number(field.removeprefix(_TABLE), key))
    return None


def _hash_key(name: bytes, field: bytes) -> bytes:
    return _META + encode_bytes(name) + encode_u64(_HASH) + encode_bytes(field)


def _number(digits: bytes, key: bytes) -> int:
    if not digits.isdigit():
        raise CorruptError(f"a meta key without a number: {key.hex()}")
    return int(digits)
