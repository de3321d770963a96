"""Columns of rows as Arrow arrays, in the types that docs/format/tidb-rows.md gives TiDB's: what
Spark reads.

Rows come behind a format byte, images of the log and rows of a SELECT mixed
(docs/format/mysql-rows.md). Strings, bytes and what is made text are converted here, for many rows
at once; numbers in `number`, times in `moment`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.model.errors import CorruptError
from storage.mysql.binary_row import NUMBER_BYTES, BinaryShape
from storage.mysql.buffer import PAD_BYTES, Bytes, Offsets, reading
from storage.mysql.changes import BINARY_ROW, IMAGE
from storage.mysql.charset import (
    BINARY,
    BINARY_COLLATION,
    UTF8,
    decode_text,
    is_exact,
    is_one_to_one,
)
from storage.mysql.image import Cells, Shape
from storage.mysql.json import decode_json
from storage.mysql.moment import MOMENT_TYPES, binary_moments, binary_times, moments, times
from storage.mysql.number import (
    decimal_texts,
    decimal_type,
    decimals,
    floats,
    full_years,
    integer_type,
    integers,
    masked,
    years,
)
from storage.mysql.schema import INTEGER_BYTES, INTEGERS, STRINGS, Column, Table, Type
from storage.tidb.binary import content

SRID_BYTES: Final = 4
_ASCII_SUPERSETS: Final = frozenset(
    {"latin1", "latin2", "cp1250", "cp1251", "cp1256", "cp1257", "koi8r", "koi8u", "gbk"}
)
"""Character sets whose bytes below 0x80, if there are no others, are ASCII."""
_EMPTY_MEMBER: Final = "\0"
_NULL_CELL_BYTES: Final = 32
"""A null last cell begins at the end of all rows,
and as much as its type's longest value (DECIMAL) is read there.
"""
_ARROW_TYPES: Final = {
    **MOMENT_TYPES,
    Type.YEAR: pa.int16(),
    Type.FLOAT: pa.float32(),
    Type.DOUBLE: pa.float64(),
    Type.BIT: pa.binary(),
    Type.GEOMETRY: pa.binary(),
    Type.VECTOR: pa.binary(),
}


def arrow_type(column: Column) -> pa.DataType:
    """The Arrow type in which the column's values reach Spark."""
    if column.as_text:
        return pa.string()
    if column.type in INTEGERS:
        return integer_type(column)
    if column.type is Type.NEWDECIMAL:
        return decimal_type(column)
    if column.type in STRINGS and not column.is_text:
        return pa.binary()
    return _ARROW_TYPES.get(column.type, pa.string())


def arrow_columns(table: Table, rows: pa.Array) -> list[pa.Array]:
    """The columns of rows behind their format byte; nulls where an entry of `rows` is null.

    Raises:
        CorruptError: an entry is not a row of the table.
    """
    u8s, begin = content(rows, _NULL_CELL_BYTES + PAD_BYTES)
    data, end = Bytes(u8s), begin[1:]
    valid = np.asarray(rows.is_valid())
    with reading(f"a row of {table.name}"):
        at = np.flatnonzero(valid)
        formats = data.u8(begin[at])
        if bool((formats > BINARY_ROW).any()):
            raise CorruptError(
                f"a row of {table.name} has the format {int(formats.max())}; a newer version "
                "wrote it"
            )
        parts = [(kind, at[formats == kind]) for kind in (IMAGE, BINARY_ROW)]
        parts = [(kind, places) for kind, places in parts if len(places)]
        part_columns = [
            _columns(table, kind, data, begin[places] + 1, end[places]) for kind, places in parts
        ]
    if not part_columns:
        return [pa.nulls(len(rows), arrow_type(column)) for column in table.columns]
    if len(part_columns) == 1 and len(at) == len(rows):
        return part_columns[0]
    return _interleaved([places for _, places in parts], part_columns, len(rows))


def _columns(table: Table, kind: int, data: Bytes, begin: Offsets, end: Offsets) -> list[pa.Array]:
    shapes: dict[int, type[Shape | BinaryShape]] = {IMAGE: Shape, BINARY_ROW: BinaryShape}
    shape = shapes[kind].of(table.columns)
    cells = shape.find(data, begin, range(len(table.columns)))
    # A row has no trace of its schema: the only check is that its last column ends where it does.
    if not np.array_equal(cells[len(table.columns) - 1].end, end):
        raise CorruptError(
            f"a row of {table.name} does not end with its last column: its schema is another one"
        )
    convert = _IMAGE_CELLS if kind == IMAGE else _BINARY_CELLS
    return [
        convert[column.type](column, data, cells[place])
        for place, column in enumerate(table.columns)
    ]


def _interleaved(
    places: Sequence[Offsets], parts: Sequence[list[pa.Array]], count: int
) -> list[pa.Array]:
    """The columns of several parts, whose rows belong at `places`; null elsewhere."""
    source = np.zeros(count, np.int64)
    missing = np.ones(count, np.bool_)
    at = np.concatenate(places)
    source[at], missing[at] = np.arange(len(at)), False
    take = pa.array(source, mask=missing)
    return [pa.concat_arrays(columns).take(take) for columns in zip(*parts, strict=True)]


def has_ambiguous_values(column: Column) -> bool:
    """Whether readers may see two different values of the column as the same; a key must not have
    such values.
    """
    if column.type in {Type.ENUM, Type.SET}:
        return "" in column.elems
    return column.is_text and not is_one_to_one(column.charset)


def may_hold_surrogates(column: Column, shown: pa.Array) -> bool:
    """Whether a UTF-8 text may hold UTF-16 surrogates, which are shown as U+FFFD: the servers
    accept them there, a letter beyond U+FFFF as a pair of them, too.
    """
    is_utf8 = column.is_text and column.charset in UTF8
    return is_utf8 and bool(pc.any(pc.match_substring(shown, "\ufffd")).as_py())


def ambiguous_key(table: Table, rows: pa.Array) -> tuple[str, int, str] | None:
    """Find a value of the key that readers would see as another value of it; returns the column's
    name, the row and the reason. None: there is none in these rows.
    """
    odd = [
        place
        for place in table.key_places
        if table.columns[place].is_text or has_ambiguous_values(table.columns[place])
    ]
    columns = [
        _distinguishable(column) if place in odd else column
        for place, column in enumerate(table.columns)
    ]
    stored = arrow_columns(dataclasses.replace(table, columns=tuple(columns)), rows)
    for place in odd:
        column = table.columns[place]
        for value in pc.unique(stored[place].drop_null()).to_pylist():
            if reason := _ambiguity(column, value):
                return column.name, pc.index(stored[place], value).as_py(), reason
    return None


def _distinguishable(column: Column) -> Column:
    """The column with a type in which all of its values differ."""
    if column.type in {Type.ENUM, Type.SET}:
        return dataclasses.replace(
            column, elems=tuple(each or _EMPTY_MEMBER for each in column.elems)
        )
    return dataclasses.replace(column, type=Type.VARCHAR, collation=BINARY_COLLATION)


def _ambiguity(column: Column, stored: str | bytes) -> str:
    """Why a value is seen as another one; empty: it is not."""
    if isinstance(stored, bytes):
        if is_exact(column.charset, stored):
            return ""
        return (
            f"the bytes x'{stored.hex()}', for whose characters {column.charset} has others, too,"
        )
    if column.type is Type.ENUM:
        return "" if stored else "the invalid value 0, which reads as the member '',"
    return "the member '' alone, which reads as the empty set," if stored == _EMPTY_MEMBER else ""


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
    """GEOMETRY as its WKB; one without any byte is what rows have in a new NOT NULL column."""
    begin = cells.begin + SRID_BYTES
    present = np.ones(len(begin), np.bool_) if cells.present is None else cells.present
    if bool(((begin > cells.end) & (cells.begin < cells.end))[present].any()):
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


def selected_json_texts(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """JSON in a binary-protocol row, which is text."""
    try:
        return raw(data, cells).cast(pa.string())
    except pa.ArrowInvalid as err:
        raise CorruptError(f"column {column.name}: {err}") from err


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
    if charset in UTF8 or (charset in _ASCII_SUPERSETS and _is_ascii(contents)):
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


_Convert = Callable[[Column, Bytes, Cells], pa.Array]
_SAME_CELLS: Final[dict[Type, _Convert]] = {
    Type.FLOAT: floats,
    Type.DOUBLE: floats,
    Type.BIT: lambda _, data, cells: raw(data, cells),
    Type.GEOMETRY: geometries,
    Type.VECTOR: lambda _, data, cells: raw(data, cells),
    **dict.fromkeys(STRINGS, strings),
}
_IMAGE_CELLS: Final[dict[Type, _Convert]] = _SAME_CELLS | {
    **{
        kind: lambda column, data, cells: integers(column, data, cells, INTEGER_BYTES[column.type])
        for kind in INTEGERS
    },
    **dict.fromkeys(MOMENT_TYPES, moments),
    Type.YEAR: lambda _, data, cells: years(data, cells),
    Type.NEWDECIMAL: decimals,
    Type.TIME: times,
    Type.TIME2: times,
    Type.ENUM: lambda column, data, cells: enums(column, data, cells, column.meta),
    Type.SET: lambda column, data, cells: sets(column, data, cells, column.meta),
    Type.JSON: json_texts,
}
_BINARY_CELLS: Final[dict[Type, _Convert]] = _SAME_CELLS | {
    **{
        kind: lambda column, data, cells: integers(column, data, cells, NUMBER_BYTES[column.type])
        for kind in INTEGERS
    },
    **dict.fromkeys(MOMENT_TYPES, binary_moments),
    Type.YEAR: lambda _, data, cells: full_years(data, cells),
    Type.NEWDECIMAL: decimal_texts,
    Type.TIME: binary_times,
    Type.TIME2: binary_times,
    Type.ENUM: lambda column, data, cells: enums(column, data, cells, 8),
    Type.SET: lambda column, data, cells: sets(column, data, cells, 8),
    Type.JSON: selected_json_texts,
}
