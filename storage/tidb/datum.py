"""Datums: a flag byte, then a value; what common handles, index keys,
rows of format v1 and binlogs are made of.

`decode_datum` reads one. `decode_datums` reads many at once, column by column, and gives the same
cells; the rare ones that it leaves out are read one by one.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from storage.codec import decode_bytes, decode_i64, decode_u64, encode_bytes, encode_i64, encode_u64
from storage.model.errors import CorruptError
from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.field_type import TEXTS, Type
from storage.tidb.json import ARRAY, FIXED_BYTES, OBJECT, OPAQUE, STRING, json_size
from storage.tidb.number import (
    PRECISION_MAX,
    decimal_size,
    decode_uvarint,
    decode_uvarints,
    decode_varint,
    digit_groups,
    signed_cell,
    unsigned_cell,
    zigzag,
)
from storage.tidb.schema import Column

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
_SIGN: Final = np.uint64(1 << 63)
_DECIMAL_BYTES: Final = np.zeros((256, 256), np.int64)
_JSON_BYTES: Final = np.zeros(256, np.int64)
# The sizes of decimals by precision and scale; 0, for shapes that there are not, is refused.
for _precision in range(1, PRECISION_MAX + 1):
    for _scale in range(_precision + 1):
        _DECIMAL_BYTES[_precision, _scale] = 2 + sum(
            width for _, width in digit_groups(_precision, _scale)
        )
for _code, _size in FIXED_BYTES.items():
    _JSON_BYTES[_code] = 1 + _size


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
        raise CorruptError(
            f"a datum's value of {size} bytes at offset {begin} of {len(data)} ends early"
        )
    return data[begin : begin + size], begin + size


class UncommonDatumError(CorruptError):
    """A datum that rows do not have, or none at all; the scalar way says which."""


@dataclass(frozen=True, slots=True)
class Datums:
    """One datum of each row: where its verbatim cell is, or which number it is;
    `end` is the offset after it.
    """

    begin: Offsets
    size: Offsets
    number: npt.NDArray[np.int64]
    is_signed: Mask
    is_number: Mask
    is_null: Mask
    end: Offsets

    @classmethod
    def of_number(cls, number: int, count: int) -> "Datums":
        """The same number `count` times, standing nowhere."""
        none, nowhere, every = (
            np.zeros(count, np.bool_),
            np.zeros(count, np.int64),
            np.ones(count, np.bool_),
        )
        return cls(nowhere, nowhere, np.full(count, number, np.int64), every, every, none, nowhere)


def decode_datums(column: BinaryColumn, at: Offsets, present: Mask) -> Datums:
    """The datum at each offset; undefined where not `present`.

    Raises:
        UncommonDatumError: there is none, or one in a form that only keys have.
        CorruptError: a number is too large.
    """
    # where no datum is to be read, `at` may be any offset
    at = np.minimum(at, len(column.data) - _WORD - 1)
    flags = np.where(present, column.u8(at), NIL)
    out = Datums(
        at + 1,
        np.zeros(len(at), np.int64),
        np.zeros(len(at), np.int64),
        np.isin(flags, (INT, DURATION, VARINT)),
        np.isin(flags, (INT, UINT, DURATION, VARINT, UVARINT)),
        flags == NIL,
        at + present,
    )
    for flag in np.flatnonzero(np.bincount(flags, minlength=256)).tolist():
        if flag != NIL:
            _decode(column, flag, np.flatnonzero(flags == flag), out)
    return out


def _decode(column: BinaryColumn, flag: int, rows: Offsets, out: Datums) -> None:
    begin = out.begin[rows]
    if flag in {VARINT, UVARINT}:
        numbers, end = decode_uvarints(column, begin, np.ones(len(rows), np.bool_))
        out.number[rows] = zigzag(numbers) if flag == VARINT else numbers.view(np.int64)
    elif flag in {INT, DURATION, UINT}:
        words, end = column.u64_be(_readable(column, begin, _WORD)), begin + _WORD
        out.number[rows] = (words if flag == UINT else words ^ _SIGN).view(np.int64)
    else:
        begin, end = _verbatim(column, flag, begin)
        out.begin[rows], out.size[rows] = begin, end - begin
    out.end[rows] = end


def _verbatim(column: BinaryColumn, flag: int, begin: Offsets) -> tuple[Offsets, Offsets]:
    if flag == COMPACT_BYTES:
        numbers, begin = decode_uvarints(column, begin, np.ones(len(begin), np.bool_))
        sizes = zigzag(numbers)
    elif flag == FLOAT:
        sizes = np.full(len(begin), _WORD, np.int64)
    elif flag == DECIMAL:
        at = _readable(column, begin, 2)
        sizes = _DECIMAL_BYTES[column.u8(at), column.u8(at + 1)]
    elif flag == JSON:
        sizes = _json_sizes(column, begin)
    else:
        raise UncommonDatumError(
            f"a datum begins with {flag}: {'only keys have it' if flag == BYTES else 'no datum'}"
        )
    if bool(
        np.any((sizes < 0) | (sizes > len(column.data)) | ((sizes == 0) & (flag != COMPACT_BYTES)))
    ):
        raise UncommonDatumError(f"a datum of kind {flag} has no size")
    return begin, begin + sizes


def _json_sizes(column: BinaryColumn, begin: Offsets) -> Offsets:
    codes = column.u8(_readable(column, begin, 1))
    sizes = _JSON_BYTES[codes]
    nested = (codes == OBJECT) | (codes == ARRAY)
    sizes = np.where(
        nested, 1 + column.u32(_readable(column, begin + 5, 4)).astype(np.int64), sizes
    )
    texts = (codes == STRING) | (codes == OPAQUE)
    if bool(texts.any()):
        at = _readable(column, begin + np.where(codes == OPAQUE, 2, 1), _WORD)
        lengths, end = decode_uvarints(column, at, texts)
        sizes = np.where(texts, end - begin + np.minimum(lengths, 1 << 40).astype(np.int64), sizes)
    return sizes


def _readable(column: BinaryColumn, at: Offsets, width: int) -> Offsets:
    """The offsets, moved back where fewer than `width` bytes follow in the buffer. Whether each
    datum fits into its row is checked later.
    """
    return np.minimum(at, len(column.data) - width)
