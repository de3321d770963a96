"""Many datums at once, as `storage.tidb.datum` reads one: the same cells, found column by column.

A cell that stands verbatim in the datum is a slice of it; a number is a number, whose cell has yet to be made.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from storage.model.errors import CorruptError
from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.datum import BYTES, COMPACT_BYTES, DECIMAL, DURATION, FLOAT, INT, JSON, NIL, UINT, UVARINT, VARINT
from storage.tidb.decimal import PRECISION_MAX, digit_groups
from storage.tidb.json import ARRAY, FIXED_BYTES, OBJECT, OPAQUE, STRING
from storage.tidb.varint_batch import decode_uvarints, zigzag

_WORD: Final = 8
_SIGN: Final = np.uint64(1 << 63)
_DECIMAL_BYTES: Final = np.zeros((256, 256), np.int64)
for _precision in range(1, PRECISION_MAX + 1):
    for _scale in range(_precision + 1):
        _DECIMAL_BYTES[_precision, _scale] = 2 + sum(width for _, width in digit_groups(_precision, _scale))
_JSON_BYTES: Final = np.zeros(256, np.int64)
for _code, _size in FIXED_BYTES.items():
    _JSON_BYTES[_code] = 1 + _size


class UncommonDatumError(CorruptError):
    """A datum that rows do not have, or none at all; the scalar way says which."""


@dataclass(frozen=True, slots=True)
class Datums:
    """One datum of each row: where its verbatim cell is, or which number it is; `end` is the offset after it."""

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
        none, nowhere, every = np.zeros(count, np.bool_), np.zeros(count, np.int64), np.ones(count, np.bool_)
        return cls(nowhere, nowhere, np.full(count, number, np.int64), every, every, none, nowhere)


def decode_datums(column: BinaryColumn, at: Offsets, wanted: Mask) -> Datums:
    """The datum at each offset; undefined where not `wanted`.

    Raises:
        UncommonDatumError: there is none, or one in a form that only keys have.
        CorruptError: a number is too large.
    """
    at = np.minimum(at, len(column.data) - _WORD - 1)  # where none is wanted, at may be anywhere
    flags = np.where(wanted, column.u8(at), NIL)
    out = Datums(
        at + 1,
        np.zeros(len(at), np.int64),
        np.zeros(len(at), np.int64),
        np.isin(flags, (INT, DURATION, VARINT)),
        np.isin(flags, (INT, UINT, DURATION, VARINT, UVARINT)),
        flags == NIL,
        at + wanted,
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
        words, end = column.u64_be(_inside(column, begin, _WORD)), begin + _WORD
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
        at = _inside(column, begin, 2)
        sizes = _DECIMAL_BYTES[column.u8(at), column.u8(at + 1)]
    elif flag == JSON:
        sizes = _json_sizes(column, begin)
    else:
        raise UncommonDatumError(f"a datum begins with {flag}: {'only keys have it' if flag == BYTES else 'no datum'}")
    if bool(np.any((sizes < 0) | (sizes > len(column.data)) | ((sizes == 0) & (flag != COMPACT_BYTES)))):
        raise UncommonDatumError(f"a datum of kind {flag} has no size")
    return begin, begin + sizes


def _json_sizes(column: BinaryColumn, begin: Offsets) -> Offsets:
    codes = column.u8(_inside(column, begin, 1))
    sizes = _JSON_BYTES[codes]
    nested = (codes == OBJECT) | (codes == ARRAY)
    sizes = np.where(nested, 1 + column.u32(_inside(column, begin + 5, 4)).astype(np.int64), sizes)
    texts = (codes == STRING) | (codes == OPAQUE)
    if bool(texts.any()):
        at = _inside(column, begin + np.where(codes == OPAQUE, 2, 1), _WORD)
        lengths, end = decode_uvarints(column, at, texts)
        sizes = np.where(texts, end - begin + np.minimum(lengths, 1 << 40).astype(np.int64), sizes)
    return sizes


def _inside(column: BinaryColumn, at: Offsets, width: int) -> Offsets:
    """Offsets at which `width` bytes can be read; what lies beyond its row is found out later."""
    return np.minimum(at, len(column.data) - width)
