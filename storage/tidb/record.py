"""One row of a table as its key and value, by column names; and what a record key tells of its row.

A record key holds the integer primary key, or the clustered primary key's columns (`HandleCells`,
`handle_cells`). `encode_record` and `decode_record` are the scalar way, for writers and for single
rows. Batches go through `sink.tidb_mounter`, which must give the same values.
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError, InvalidError
from storage.tidb.cell import Value, decode_cell, encode_cell, parse_default
from storage.tidb.cells import Cells
from storage.tidb.datum import decode_datum
from storage.tidb.field_type import TEXTS
from storage.tidb.integer import signed_cell, unsigned_cell
from storage.tidb.key import decode_int_handles, decode_record_key, record_key
from storage.tidb.row import as_v2, decode_row, encode_row
from storage.tidb.schema import Column, TableInfo

_BINARY_COLLATIONS = frozenset(
    {"binary", "utf8mb4_bin", "utf8_bin", "utf8mb4_0900_bin", "latin1_bin", "ascii_bin"}
)
_MASK = (1 << 64) - 1
_SIGN = 1 << 63


def handle_cells(table: TableInfo, key: bytes) -> dict[int, bytes | None]:
    """The cells, by column id, that `key` holds; empty if the handle is the hidden `_tidb_rowid`.

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
        cell, offset = decode_datum(handle, offset)
        if column.type not in TEXTS or (
            table.handle_is_whole and column.collate in _BINARY_COLLATIONS
        ):
            cells[column.id] = cell
    return cells


class HandleCells:
    """What a batch of record keys tells of its rows;
    keys are decoded when the first column is asked for.
    """

    def __init__(self, table: TableInfo, keys: pa.Array) -> None:
        self._table = table
        self._keys = keys
        self.column_ids = frozenset(column.id for column in table.common_handle_columns)

    def integers(self) -> npt.NDArray[np.int64]:
        """The handles of a table with an integer primary key; see `decode_int_handles`."""
        return decode_int_handles(self._keys)

    def cells(self, column_id: int) -> Cells:
        """The cells of a clustered primary key's column; missing where the key cannot tell.

        Raises:
            CorruptError: a key is not a record key of this table's kind.
        """
        return Cells.of([cells.get(column_id) for cells in self._decoded])

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
