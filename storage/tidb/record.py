"""One row of a table in the store: its record key, its value, and what the key tells of the row.

A row lives at the record key `t{table_id}_r{handle}`. The handle is the integer primary key, the
columns of the clustered primary key (`handle_cells`, `HandleCells`), or the hidden `_tidb_rowid`.

`encode_record` and `decode_record` are the scalar way, by column names, for writers and for single
rows. Batches go through `sink.tidb_mounter`, which must give the same values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.codec import (
    decode_i64,
    encode_i64,
    prefix_end,
)
from storage.model.errors import CorruptError, InvalidError
from storage.model.span import Span
from storage.tidb.binary import BinaryColumn, Mask
from storage.tidb.cell import Value, decode_cell, encode_cell, parse_default
from storage.tidb.datum import decode_datum
from storage.tidb.field_type import TEXTS
from storage.tidb.number import signed_cell, unsigned_cell
from storage.tidb.row import as_v2, decode_row, encode_row
from storage.tidb.row_layout import Cells
from storage.tidb.schema import Column, TableInfo

_TABLE = b"t"
_RECORD = b"_r"
_PREFIX_BYTES = len(_TABLE) + 8 + len(_RECORD)
_INT_KEY_BYTES = _PREFIX_BYTES + 8
_SIGN_BIT = np.uint64(1 << 63)
_SIGN = 1 << 63
_MASK = (1 << 64) - 1
_BINARY_COLLATIONS = frozenset(
    {"binary", "utf8mb4_bin", "utf8_bin", "utf8mb4_0900_bin", "latin1_bin", "ascii_bin"}
)


@dataclass(frozen=True, slots=True)
class RecordKey:
    """A decoded record key; a partition's rows carry the partition's id as `table_id`."""

    table_id: int
    handle: int | bytes


def record_prefix(table_id: int) -> bytes:
    """The prefix of every record key of the table; index keys have another prefix."""
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
        (handles.view(np.uint64) ^ _SIGN_BIT).astype(">u8").view(np.uint8).reshape(-1, 8)
    )
    bounds = np.arange(len(handles) + 1, dtype=np.int32) * _INT_KEY_BYTES
    return pa.Array.from_buffers(
        pa.binary(), len(handles), [None, pa.py_buffer(bounds), pa.py_buffer(keys)]
    )


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
    return (column.u64_be(begin + _PREFIX_BYTES) ^ _SIGN_BIT).view(np.int64)


def handle_cells(table: TableInfo, key: bytes) -> dict[int, bytes | None]:
    """The cells, by column id, that `key` holds for a row which does not have them; empty if the
    handle is the hidden `_tidb_rowid`.

    For a column of characters the key may hold the collation's sort key, or a prefix; then the row
    holds the column itself. A row without it is of a cluster without the new collations, where keys
    hold characters as they are, or of a collation whose sort key is the text.

    Raises:
        CorruptError: `key` is not a record key of this table's kind.
    """
    handle = decode_record_key(key).handle
    if table.handle_column:
        if not isinstance(handle, int):
            raise CorruptError(f"table {table.name}: the handle is not an integer: {key.hex()}")
        return {table.handle_column.id: _integer(table.handle_column, handle)}
    if not table.common_handle_columns:
        return {}
    if isinstance(handle, int):
        raise CorruptError(
            f"table {table.name}: the handle is not its clustered primary key: {key.hex()}"
        )
    return _common(table, handle)


def _integer(column: Column, handle: int) -> bytes:
    return signed_cell(handle) if column.stores_signed else unsigned_cell(handle & _MASK)


def _common(table: TableInfo, handle: bytes) -> dict[int, bytes | None]:
    cells: dict[int, bytes | None] = {}
    offset = 0
    for column in table.common_handle_columns:
        cells[column.id], offset = decode_datum(handle, offset)
    return cells


def _key_holds_value(table: TableInfo, column: Column) -> bool:
    """Whether a key always holds the column's whole value, not a sort key or a prefix of it."""
    is_whole_text = table.handle_is_whole and column.collate in _BINARY_COLLATIONS
    return column.type not in TEXTS or is_whole_text


class HandleCells:
    """The values of a batch of record keys; keys are decoded when the first column is requested."""

    def __init__(self, table: TableInfo, keys: pa.Array) -> None:
        self._table = table
        self._keys = keys
        columns = table.common_handle_columns
        self.column_ids = frozenset(column.id for column in columns)
        self._whole_ids = frozenset(
            column.id for column in columns if _key_holds_value(table, column)
        )

    def integers(self) -> npt.NDArray[np.int64]:
        """The handles of a table with an integer primary key; see `decode_int_handles`."""
        return decode_int_handles(self._keys)

    def cells(self, column_id: int, left_out: Mask) -> Cells:
        """The cells of a clustered primary key's column; missing where the key may hold a sort key
        or a prefix of the value.

        `left_out`: the places that have a row without the column; there the key holds the whole
        value (`handle_cells`).

        Raises:
            CorruptError: a key is not a record key of this table's kind.
        """
        is_whole = column_id in self._whole_ids
        return Cells.of(
            [
                cells.get(column_id) if is_whole or is_left_out else None
                for cells, is_left_out in zip(self._decoded, left_out.tolist(), strict=True)
            ]
        )

    @cached_property
    def _decoded(self) -> list[dict[int, bytes | None]]:
        return [handle_cells(self._table, key) for key in self._keys.to_pylist()]


def encode_record(table: TableInfo, values: Mapping[str, Value]) -> tuple[bytes, bytes]:
    """The key and value of a row of a table with an integer primary key; columns left out are NULL.

    Raises:
        InvalidError: the primary key is missing or not an integer, a column is unknown, or a value
            is not of its type.
    """
    handle = table.handle_column
    named = {table.column(name): value for name, value in values.items()}
    number = named.pop(handle, None) if handle else None
    if not isinstance(number, int):
        raise InvalidError(
            f"table {table.name}: a row needs its integer primary key, not {number!r}"
        )
    cells = {
        column.id: None if value is None else encode_cell(column, value)
        for column, value in named.items()
    }
    # An unsigned handle is the same 64 bits read as signed.
    signed = (number + _SIGN) % (2 * _SIGN) - _SIGN
    return record_key(table.id, signed), encode_row(cells)


def decode_record(table: TableInfo, key: bytes, row: bytes) -> dict[str, Value]:
    """The values of the stored columns, by name.

    Raises:
        CorruptError: the key or row is not what TiDB writes for this table.
    """
    cells = handle_cells(table, key) | decode_row(as_v2(row))
    return {column.name: _value(column, cells) for column in table.stored_columns}


def _value(column: Column, cells: Mapping[int, bytes | None]) -> Value:
    if column.id not in cells:
        return parse_default(column)
    cell = cells[column.id]
    return None if cell is None else decode_cell(column, cell)
