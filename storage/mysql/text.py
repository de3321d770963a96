"""Strings, bytes and what is made text, of many rows at once: CHAR to BLOB, ENUM, SET, BIT,
JSON, GEOMETRY.
"""

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.model.errors import CorruptError
from storage.mysql.buffer import Bytes
from storage.mysql.charset import BINARY, UTF8, decode_text
from storage.mysql.image import Cells
from storage.mysql.json import decode_json
from storage.mysql.number import masked
from storage.mysql.schema import Column
from storage.mysql.types import Type

SRID_BYTES: Final = 4
_ASCII_TOO: Final = frozenset(
    {"latin1", "latin2", "cp1250", "cp1251", "cp1256", "cp1257", "koi8r", "koi8u", "gbk"}
)
"""Character sets whose bytes below 0x80, if there are no others, are ASCII."""


def strings(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """CHAR, VARCHAR and TEXT as text; BINARY, of its full length, VARBINARY and BLOB as bytes."""
    if column.is_text:
        return _decoded(column, data.slices(cells.begin, cells.end, cells.present))
    if column.type is Type.STRING and column.charset == BINARY:
        return _padded(column, data, cells)
    return data.slices(cells.begin, cells.end, cells.present)


def raw(data: Bytes, cells: Cells) -> pa.Array:
    """Bytes as they are."""
    return data.slices(cells.begin, cells.end, cells.present)


def geometries(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """GEOMETRY as its WKB."""
    begin = cells.begin + SRID_BYTES
    present = np.ones(len(begin), np.bool_) if cells.present is None else cells.present
    if bool((begin > cells.end)[present].any()):
        raise CorruptError(f"column {column.name}: a geometry without an SRID")
    return data.slices(np.minimum(begin, cells.end), cells.end, cells.present)


def json_texts(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """MySQL's binary JSON as text."""
    contents = raw(data, cells).to_pylist()
    try:
        return pa.array(
            [None if cell is None else decode_json(cell) for cell in contents], pa.string()
        )
    except CorruptError as err:
        raise CorruptError(f"column {column.name}: {err.message}") from err


def enums(column: Column, data: Bytes, cells: Cells, width: int) -> pa.Array:
    """The names of an ENUM's members; 0 is '', what an invalid value became."""
    numbers = data.number(cells.begin, width).astype(np.int64)
    if cells.present is not None:
        numbers = np.where(cells.present, numbers, 0)
    if bool((numbers > len(column.elems)).any()):
        raise CorruptError(f"column {column.name}: ENUM has no member {int(numbers.max())}")
    return pa.array(["", *column.elems], pa.string()).take(masked(numbers, cells))


def sets(column: Column, data: Bytes, cells: Cells, width: int) -> pa.Array:
    """The names of a SET's members, joined by commas; each distinct set is written once."""
    numbers = data.number(cells.begin, width).astype(np.uint64)
    if cells.present is not None:
        numbers = np.where(cells.present, numbers, np.uint64(0))
    distinct, places = np.unique(numbers, return_inverse=True)
    if len(distinct) and int(distinct[-1]) >> len(column.elems):
        raise CorruptError(f"column {column.name}: SET has no members {int(distinct[-1]):#x}")
    names = [_names(column, number) for number in distinct.tolist()]
    return pa.array(names, pa.string()).take(masked(places, cells))


def _names(column: Column, number: int) -> str:
    return ",".join(name for bit, name in enumerate(column.elems) if number >> bit & 1)


def _decoded(column: Column, contents: pa.Array) -> pa.Array:
    charset = column.charset
    if charset in UTF8 or (charset in _ASCII_TOO and _is_ascii(contents)):
        try:
            return contents.cast(pa.string())
        except pa.ArrowInvalid:  # not UTF-8 somewhere: find the nearest text, value by value
            charset = "utf8mb4"
    distinct = contents.dictionary_encode()
    names = [decode_text(charset, value) for value in distinct.dictionary.to_pylist()]
    return pa.array(names, pa.string()).take(distinct.indices)


def _is_ascii(texts: pa.Array) -> bool:
    content = texts.buffers()[2]
    return content is None or not bool((np.frombuffer(content, np.uint8) & 0x80).any())


def _padded(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """BINARY(n) has n bytes; trailing zeros are not in the log."""
    size = column.meta
    at = cells.begin[:, None] + np.arange(size)
    lines = np.where(
        at < cells.end[:, None], data.u8(np.minimum(at, len(data.u8s) - 1)), np.uint8(0)
    ).astype(np.uint8)
    ends = pa.py_buffer(np.arange(len(lines) + 1, dtype=np.int32) * np.int32(size))
    full = pa.Array.from_buffers(
        pa.binary(), len(lines), [None, ends, pa.py_buffer(np.ascontiguousarray(lines))]
    )
    return full if cells.present is None else pc.if_else(pa.array(cells.present), full, None)
