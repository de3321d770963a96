"""Record keys: `t{table_id}_r{handle}`, where a row of a table lives.

The handle is an integer (the integer primary key, or `_tidb_rowid`), or a common handle: the clustered primary key's
columns in TiDB's memory-comparable datum encoding. Keys here are raw user keys, without timestamp.
Source: TiDB tablecodec.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.codec import decode_i64, encode_i64, prefix_end
from storage.model.errors import CorruptError
from storage.model.span import Span
from storage.tidb.binary import BinaryColumn

_TABLE = b"t"
_RECORD = b"_r"
_PREFIX_BYTES = len(_TABLE) + 8 + len(_RECORD)
_INT_KEY_BYTES = _PREFIX_BYTES + 8
_SIGN = np.uint64(1 << 63)


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
    """The key of the row with an integer handle; an unsigned handle >= 2^63 is the same 64 bits read as signed."""
    return record_prefix(table_id) + encode_i64(handle)


def record_keys(table_id: int, handles: npt.NDArray[np.int64]) -> pa.Array:
    """The keys of many rows with integer handles."""
    keys = np.empty((len(handles), _INT_KEY_BYTES), np.uint8)
    keys[:, :_PREFIX_BYTES] = np.frombuffer(record_prefix(table_id), np.uint8)
    keys[:, _PREFIX_BYTES:] = (handles.view(np.uint64) ^ _SIGN).astype(">u8").view(np.uint8).reshape(-1, 8)
    bounds = np.arange(len(handles) + 1, dtype=np.int32) * _INT_KEY_BYTES
    return pa.Array.from_buffers(pa.binary(), len(handles), [None, pa.py_buffer(bounds), pa.py_buffer(keys)])


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
        raise CorruptError("a record key without an integer handle in a table whose handle is an integer")
    tags = column.u16(begin + 9)
    if not bool(np.all(tags == int.from_bytes(_RECORD, "little")) and np.all(column.u8(begin) == _TABLE[0])):
        raise CorruptError("a key that is not a record key in a table's change history")
    return (column.u64_be(begin + _PREFIX_BYTES) ^ _SIGN).view(np.int64)
