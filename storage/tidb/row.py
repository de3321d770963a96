"""The value of a record key: one row, in row format v2, or v1 if an old TiDB wrote it.

v2 is `128 flags u16 not_null u16 null, ids, end offsets, cells`. Ids are one byte and offsets two,
or four bytes each in a large row; ids of non-null columns come first, ascending, then those of null
columns. A column in neither list was added later, or is NULL and has no default.

v1 is pairs of datums, column id then value; one nil byte stands for no pairs. It is translated to
v2, so that there is one way to read a row. See docs/format/tidb-rows.md.
"""

import struct
from collections.abc import Mapping
from typing import Final

from storage.model.errors import CorruptError
from storage.tidb.datum import NIL, decode_datum

VERSION: Final = 128
LARGE: Final = 1
"""Flag: ids and offsets are four bytes wide. Other flags announce a checksum after the cells;
it is not read.
"""
HEAD_BYTES: Final = 6
COLUMN_ID_MAX: Final = 0xFFFFFFFF
_HEAD = struct.Struct("<BBHH")
SMALL_ID_MAX: Final = 0xFF
SMALL_BYTES_MAX: Final = 0xFFFF
"""Above either of them a row is large."""


def encode_row(cells: Mapping[int, bytes | None]) -> bytes:
    """Encode cells by column id; None is NULL. The form is large only if an id or the size demands
    it.
    """
    present = sorted((column_id, cell) for column_id, cell in cells.items() if cell is not None)
    nulls = sorted(column_id for column_id, cell in cells.items() if cell is None)
    ids = [column_id for column_id, _ in present] + nulls
    ends, size = [], 0
    for _, cell in present:
        size += len(cell)
        ends.append(size)
    large = size > SMALL_BYTES_MAX or max(ids, default=0) > SMALL_ID_MAX
    head = _HEAD.pack(VERSION, LARGE if large else 0, len(present), len(nulls))
    id_form, end_form = ("I", "I") if large else ("B", "H")
    index = struct.pack(f"<{len(ids)}{id_form}", *ids) + struct.pack(
        f"<{len(ends)}{end_form}", *ends
    )
    return b"".join((head, index, *(cell for _, cell in present)))


def decode_row(row: bytes) -> dict[int, bytes | None]:
    """The cells by column id, None for NULL.

    Raises:
        CorruptError: `row` is not a whole row of format v2.
    """
    try:
        version, flags, not_null, null = _HEAD.unpack_from(row)
        id_form, end_form = ("I", "I") if flags & LARGE else ("B", "H")
        ids = struct.unpack_from(f"<{not_null + null}{id_form}", row, HEAD_BYTES)
        ends_at = HEAD_BYTES + len(ids) * struct.calcsize(id_form)
        ends = struct.unpack_from(f"<{not_null}{end_form}", row, ends_at)
    except struct.error as err:
        raise CorruptError(f"row of {len(row)} bytes ends within its header") from err
    data = ends_at + not_null * struct.calcsize(end_form)
    bounds = (0, *ends)
    if version != VERSION or data + bounds[-1] > len(row) or list(bounds) != sorted(bounds):
        raise CorruptError(f"row of {len(row)} bytes is not of format v2: {row[:HEAD_BYTES].hex()}")
    cells: dict[int, bytes | None] = {}
    for column_id, begin, end in zip(ids, bounds, ends, strict=False):
        cells.setdefault(column_id, row[data + begin : data + end])
    for column_id in ids[not_null:]:
        cells.setdefault(column_id, None)
    return cells


def as_v2(row: bytes) -> bytes:
    """The same row in format v2; a row of that format is returned as it is.

    Raises:
        CorruptError: `row` is of neither format.
    """
    if row[:1] == bytes((VERSION,)):
        return row
    return encode_row(decode_pairs(row) if row != bytes((NIL,)) else {})


def decode_pairs(data: bytes, offset: int = 0) -> dict[int, bytes | None]:
    """Cells by column id; ends at the end of `data`.

    Raises:
        CorruptError: the bytes are not pairs of column id and value, each id once.
    """
    cells: dict[int, bytes | None] = {}
    if offset >= len(data):
        raise CorruptError("a row of format v1 is empty")
    while offset < len(data):
        column, offset = decode_datum(data, offset)
        column_id = int.from_bytes(column or b"", "little", signed=True)
        if column is None or column_id in cells or not 0 < column_id <= COLUMN_ID_MAX:
            raise CorruptError(
                f"a row of format v1 has no column id, or one twice, before offset {offset}"
            )
        cells[column_id], offset = decode_datum(data, offset)
    return cells
