"""Canonical keys: the bytes that identify a row,
the same for its images in the log and for what SELECT gives of it.

    key      = cell of each key column, in the key's order
    cell     = the bytes of a row image, of fixed size | size u32, bytes | bytes, at the end only

The bytes are the stored ones, whatever the collation: 'a' and 'A' are two keys, and an update of
one to the other in a case-insensitive key is a delete and an insert. CHAR and BINARY come without
what pads them, as a log has them. Source: the traps of DBLog on MySQL, seen on MariaDB 10.11.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.mysql.buffer import Bytes, Offsets
from storage.mysql.charset import pad_of
from storage.mysql.image import Cells, Shape
from storage.mysql.schema import Column, Table
from storage.mysql.types import Type, fixed_bytes


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """One column of a key: where it is in the table, and its fixed size, or 0."""

    place: int
    size: int
    pad: bytes
    """What may fill a value's end without meaning; empty for all but CHAR and BINARY."""

    @classmethod
    def of(cls, place: int, column: Column) -> "KeyColumn":
        """How the column stands in a key."""
        pad = pad_of(column.charset) if column.type is Type.STRING else b""
        return cls(place, fixed_bytes(column.type, column.meta) or 0, pad)


def key_columns(table: Table) -> tuple[KeyColumn, ...]:
    """The columns of the table's key."""
    return tuple(KeyColumn.of(place, table.columns[place]) for place in table.key_places)


def image_keys(data: Bytes, at: Offsets, shape: Shape, columns: tuple[KeyColumn, ...]) -> pa.Array:
    """The keys of the images that begin at `at`, which ascend."""
    cells = shape.find(data, at, {column.place for column in columns})
    if all(column.size for column in columns):
        return fixed_keys(
            [data.matrix(cells[column.place].begin, column.size) for column in columns], len(at)
        )
    *firsts, last = columns
    pieces = [_inner(data, column, cells[column.place]) for column in firsts]
    return join_pieces([*pieces, _piece(data, last, cells[last.place])])


def fixed_keys(cells: list[npt.NDArray[np.uint8]], count: int) -> pa.Array:
    """Keys of cells that all have a fixed size: one matrix each,
    a line for each of the `count` rows.
    """
    lines = (
        np.ascontiguousarray(np.hstack(cells) if len(cells) > 1 else cells[0])
        if cells
        else np.zeros((count, 0))
    )
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(lines.shape[1])
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(lines)]
    )


def join_pieces(pieces: list[pa.Array]) -> pa.Array:
    """Keys of pieces that stand one after another."""
    if len(pieces) == 1:
        return pieces[0]
    return pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.binary()))


def sized(piece: pa.Array) -> pa.Array:
    """The same bytes behind their size."""
    sizes = np.asarray(pc.binary_length(piece)).astype("<u4")
    return join_pieces([fixed_keys([sizes.view(np.uint8).reshape(-1, 4)], len(piece)), piece])


def without_pad(data: Bytes, begin: Offsets, end: Offsets, pad: bytes) -> Offsets:
    """Where the values end if nothing pads them."""
    width, pad_number = len(pad), int.from_bytes(pad, "little")
    end = end.copy()
    padded = np.arange(len(end)) if width else np.zeros(0, np.int64)
    while len(padded):
        padded = padded[end[padded] - begin[padded] >= width]
        padded = padded[data.number(end[padded] - width, width) == pad_number]
        end[padded] -= width
    return end


def _inner(data: Bytes, column: KeyColumn, cells: Cells) -> pa.Array:
    piece = _piece(data, column, cells)
    return piece if column.size else sized(piece)


def _piece(data: Bytes, column: KeyColumn, cells: Cells) -> pa.Array:
    if column.size:
        return fixed_keys([data.matrix(cells.begin, column.size)], len(cells.begin))
    return data.slices(cells.begin, without_pad(data, cells.begin, cells.end, column.pad))
