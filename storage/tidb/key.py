"""Where TiDB keeps things in the store: rows, and the schemas they are read by.

A row of a table lives at the record key `t{table_id}_r{handle}`. Databases, table schemas and DDL
jobs live at meta keys, as of any timestamp.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.codec import (
    decode_bytes,
    decode_i64,
    decode_u64,
    encode_bytes,
    encode_i64,
    encode_u64,
    prefix_end,
)
from storage.model.errors import CorruptError
from storage.model.span import Span
from storage.tidb.binary import BinaryColumn

_TABLE = b"t"
_RECORD = b"_r"
_PREFIX_BYTES = len(_TABLE) + 8 + len(_RECORD)
_INT_KEY_BYTES = _PREFIX_BYTES + 8
_SIGN = np.uint64(1 << 63)
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
_TABLE_FIELD = b"Table:"
_HISTORY = b"DDLJobHistory"


@dataclass(frozen=True, slots=True)
class RecordKey:
    """A decoded record key; a partition's rows carry the partition's id as `table_id`."""

    table_id: int
    handle: int | bytes


def record_prefix(table_id: int) -> bytes:
    """What every record key of the table starts with; index keys have another prefix."""
    return _TABLE + encode_i64(table_id) + _RECORD


def table_span(table_id: int) -> Span:
    """The raw key range of the table's records."""
    prefix = record_prefix(table_id)
    return Span(table_id, prefix, prefix_end(prefix))


def record_key(table_id: int, handle: int) -> bytes:
    """The key of the row with an integer handle; an unsigned handle >= 2^63 is the same 64 bits
    read as signed.
    """
    return record_prefix(table_id) + encode_i64(handle)


def record_keys(table_id: int, handles: npt.NDArray[np.int64]) -> pa.Array:
    """The keys of many rows with integer handles."""
    keys = np.empty((len(handles), _INT_KEY_BYTES), np.uint8)
    keys[:, :_PREFIX_BYTES] = np.frombuffer(record_prefix(table_id), np.uint8)
    keys[:, _PREFIX_BYTES:] = (
        (handles.view(np.uint64) ^ _SIGN).astype(">u8").view(np.uint8).reshape(-1, 8)
    )
    bounds = np.arange(len(handles) + 1, dtype=np.int32) * _INT_KEY_BYTES
    return pa.Array.from_buffers(
        pa.binary(), len(handles), [None, pa.py_buffer(bounds), pa.py_buffer(keys)]
    )


def common_record_key(table_id: int, handle: bytes) -> bytes:
    """The key of the row with a common handle."""
    return record_prefix(table_id) + handle


def decode_record_key(key: bytes) -> RecordKey:
    """Split a record key.

    Raises:
        CorruptError: `key` is not a record key.
    """
    if len(key) < _INT_KEY_BYTES or key[:1] != _TABLE or key[9:_PREFIX_BYTES] != _RECORD:
        raise CorruptError(f"not a record key: {key.hex()}")
    handle = decode_i64(key, _PREFIX_BYTES) if len(key) == _INT_KEY_BYTES else key[_PREFIX_BYTES:]
    return RecordKey(decode_i64(key, 1), handle)


def decode_int_handles(keys: pa.Array) -> npt.NDArray[np.int64]:
    """The integer handles of many record keys at once.

    Raises:
        CorruptError: a key is not a record key with an integer handle.
    """
    column = BinaryColumn(keys)
    begin = column.begin
    if not bool(np.all(column.end - begin == _INT_KEY_BYTES)):
        raise CorruptError(
            "a record key without an integer handle in a table whose handle is an integer"
        )
    tags = column.u16(begin + 9)
    if not bool(
        np.all(tags == int.from_bytes(_RECORD, "little")) and np.all(column.u8(begin) == _TABLE[0])
    ):
        raise CorruptError("a key that is not a record key in a table's change history")
    return (column.u64_be(begin + _PREFIX_BYTES) ^ _SIGN).view(np.int64)


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
    return _hash_key(_DATABASE + b"%d" % database_id, _TABLE_FIELD + b"%d" % table_id)


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
    if name.startswith(_DATABASE) and field.startswith(_TABLE_FIELD):
        return SchemaKey(
            _number(name.removeprefix(_DATABASE), key),
            _number(field.removeprefix(_TABLE_FIELD), key),
        )
    return None


def _hash_key(name: bytes, field: bytes) -> bytes:
    return _META + encode_bytes(name) + encode_u64(_HASH) + encode_bytes(field)


def _number(digits: bytes, key: bytes) -> int:
    if not digits.isdigit():
        raise CorruptError(f"a meta key without a number: {key.hex()}")
    return int(digits)
