"""One row of a table as its key and value, by column names: the scalar way, for writers and for single rows.

Batches go through `sink.mounter`, which must give the same values.
"""

from collections.abc import Mapping

from storage.model.errors import InvalidError
from storage.tidb.cell import Value, decode_cell, encode_cell, parse_default
from storage.tidb.column import Column
from storage.tidb.handle import handle_cells
from storage.tidb.key import record_key
from storage.tidb.row import decode_row, encode_row
from storage.tidb.row_v1 import as_v2
from storage.tidb.schema import TableInfo

_SIGN = 1 << 63


def encode_record(table: TableInfo, values: Mapping[str, Value]) -> tuple[bytes, bytes]:
    """The key and value of a row of a table with an integer primary key; columns left out are NULL.

    Raises:
        InvalidError: the primary key is missing or not an integer, a column is unknown, or a value is not of its type.
    """
    handle = table.handle_column
    named = {table.column(name): value for name, value in values.items()}
    number = named.pop(handle, None) if handle else None
    if not isinstance(number, int):
        raise InvalidError(f"table {table.name}: a row needs its integer primary key, not {number!r}")
    cells = {column.id: None if value is None else encode_cell(column, value) for column, value in named.items()}
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
