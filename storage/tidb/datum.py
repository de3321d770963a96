"""Datums: a flag byte, then a value; what common handles, index keys, rows of format v1 and binlogs are made of.

    0 nil   1 bytes, memcomparable   2 bytes after a varint size   3 int, memcomparable   4 uint, memcomparable
    5 float   6 decimal   7 duration, memcomparable   8 varint   9 uvarint   10 binary JSON

Keys use the memcomparable forms, rows the compact ones. Dates, enums, sets and bits are flattened to unsigned integers.
A datum is translated to and from the cell of row format v2 that means the same: values are decoded in one place only.
Source: TiDB util/codec.
"""

from typing import Final

from storage.codec import decode_bytes, decode_i64, decode_u64, encode_bytes, encode_i64, encode_u64
from storage.model.errors import CorruptError
from storage.tidb.column import Column
from storage.tidb.decimal import decimal_size
from storage.tidb.integer import signed_cell, unsigned_cell
from storage.tidb.json import json_size
from storage.tidb.mysql import TEXTS, Type
from storage.tidb.varint import decode_uvarint, decode_varint, encode_uvarint, encode_varint

NIL: Final = 0
BYTES: Final = 1
COMPACT_BYTES: Final = 2
INT: Final = 3
UINT: Final = 4
FLOAT: Final = 5
DECIMAL: Final = 6
DURATION: Final = 7
VARINT: Final = 8
UVARINT: Final = 9
JSON: Final = 10

_WORD = 8
_VERBATIM = {Type.FLOAT: FLOAT, Type.DOUBLE: FLOAT, Type.NEWDECIMAL: DECIMAL, Type.JSON: JSON}


def decode_datum(data: bytes, offset: int = 0) -> tuple[bytes | None, int]:
    """The cell that the datum at `offset` stands for, None for NULL, and the offset after it.

    Raises:
        CorruptError: there is no whole datum.
    """
    flag, begin = data[offset : offset + 1], offset + 1
    match flag[0] if flag else None:
        case 0:
            return None, begin
        case 1:
            return decode_bytes(data, begin)
        case 2:
            size, begin = decode_varint(data, begin)
            return _slice(data, begin, size)
        case 3 | 7:
            return signed_cell(decode_i64(*_word(data, begin))), begin + _WORD
        case 4:
            return unsigned_cell(decode_u64(*_word(data, begin))), begin + _WORD
        case 5:
            return _slice(data, begin, _WORD)
        case 6:
            return _slice(data, begin, decimal_size(data, begin))
        case 8:
            number, end = decode_varint(data, begin)
            return signed_cell(number), end
        case 9:
            number, end = decode_uvarint(data, begin)
            return unsigned_cell(number), end
        case 10:
            return _slice(data, begin, json_size(data, begin))
    raise CorruptError(f"no datum at offset {offset}: {data[offset : offset + 16].hex()}")


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


def encode_key_datum(column: Column, cell: bytes | None) -> bytes:
    """The memcomparable datum of a cell; characters must be their collation's sort key already."""
    if cell is None:
        return bytes((NIL,))
    if column.type in TEXTS:
        return bytes((BYTES,)) + encode_bytes(cell)
    if column.type in _VERBATIM:
        return bytes((_VERBATIM[column.type],)) + cell
    if column.stores_signed:
        flag = DURATION if column.type is Type.TIME else INT
        return bytes((flag,)) + encode_i64(int.from_bytes(cell, "little", signed=True))
    return bytes((UINT,)) + encode_u64(int.from_bytes(cell, "little"))


def _word(data: bytes, begin: int) -> tuple[bytes, int]:
    return _slice(data, begin, _WORD)[0], 0


def _slice(data: bytes, begin: int, size: int) -> tuple[bytes, int]:
    if size < 0 or begin + size > len(data):
        raise CorruptError(f"a datum's value of {size} bytes at offset {begin} of {len(data)} ends early")
    return data[begin : begin + size], begin + size
