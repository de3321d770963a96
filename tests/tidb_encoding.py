"""TiDB's keys and values as TiDB writes them, of which the product only reads: for tests."""

from storage.codec import encode_bytes, encode_u64
from storage.tidb.datum import COMPACT_BYTES, DECIMAL, FLOAT, JSON, NIL, UVARINT, VARINT
from storage.tidb.field_type import TEXTS, Type
from storage.tidb.number import encode_uvarint, encode_varint
from storage.tidb.record import record_prefix
from storage.tidb.schema import Column

_VERBATIM = {Type.FLOAT: FLOAT, Type.DOUBLE: FLOAT, Type.NEWDECIMAL: DECIMAL, Type.JSON: JSON}


def encode_datum(column: Column, cell: bytes | None) -> bytes:
    """The compact datum of a cell, as rows of format v1 and binlogs hold it."""
    if cell is None:
        return bytes((NIL,))
    if column.type in TEXTS:
        return bytes((COMPACT_BYTES,)) + encode_varint(len(cell)) + cell
    if column.type in _VERBATIM:
        return bytes((_VERBATIM[column.type],)) + cell
    if column.stores_signed:
        return bytes((VARINT,)) + encode_varint(int.from_bytes(cell, "little", signed=True))
    return bytes((UVARINT,)) + encode_uvarint(int.from_bytes(cell, "little"))


def common_record_key(table_id: int, handle: bytes) -> bytes:
    """The key of the row with a common handle."""
    return record_prefix(table_id) + handle


def database_key(database_id: int) -> bytes:
    """The key of a database's DBInfo."""
    return _hash_key(b"DBs", b"DB:%d" % database_id)


def table_key(database_id: int, table_id: int) -> bytes:
    """The key of a table's TableInfo."""
    return _hash_key(b"DB:%d" % database_id, b"Table:%d" % table_id)


def _hash_key(name: bytes, field: bytes) -> bytes:
    return b"m" + encode_bytes(name) + encode_u64(ord("h")) + encode_bytes(field)
