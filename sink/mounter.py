"""The mounter: raw key-value changes in, typed rows in columns out; the last step before a consumer sees a table.

Invariants:
1. The rows of the output are the rows of the input, in the same order, except that an update of the key columns of a
   table whose rows are not stored by them becomes a delete and an insert (`sink.key_change`).
2. Mounting has no state: the same batch always gives the same rows. `_seq` numbers the rows of one transaction
   (commit_ts, start_ts) from 0 within the batch; a transaction that crosses batches is numbered on by whoever reads
   them in order, from the begin of a range (`sink.mounted.SequenceMount`), so reading the range again gives the same.
3. All columns are nullable, and of the types Spark reads.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sink.key_change import split_key_changes
from storage.model.errors import CorruptError
from storage.model.event import DELETE, INSERT, UPDATE
from storage.tidb.arrow import arrow_array, arrow_integers, arrow_type, arrow_value
from storage.tidb.cell import parse_default
from storage.tidb.cells import RowBlock
from storage.tidb.handle import HandleCells
from storage.tidb.schema import Column, TableInfo

META_FIELDS: Final = (
    pa.field("_op", pa.string()),
    pa.field("_commit_ts", pa.int64()),
    pa.field("_start_ts", pa.int64()),
    pa.field("_seq", pa.int64()),
)
_OP_NAMES = pa.array([{DELETE: "delete", UPDATE: "update", INSERT: "insert"}.get(op) for op in range(INSERT + 1)])


class Mounter:
    """Mounts the changes of one table; immutable, so any number of threads may share it."""

    def __init__(self, table: TableInfo, schema_name: str) -> None:
        self.table = table
        self.name: str = f"{schema_name}.{table.name}"
        self.key_columns: tuple[str, ...] = tuple(column.name for column in table.key_columns)
        self._columns = table.stored_columns
        self._defaults = {column.id: _default(column) for column in self._columns if column.origin_default is not None}
        fields = [pa.field(column.name, arrow_type(column)) for column in self._columns]
        self.schema: pa.Schema = pa.schema([*META_FIELDS, *fields])

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Mount one batch of `RAW_SCHEMA`, sorted as the sorter gives it.

        Deletes carry the old row; without it, only what the key tells (pulled with old values, such a delete found no
        row to delete).

        Raises:
            CorruptError: a key or row is not what TiDB writes for this table.
        """
        raw = raw if self.table.handle_is_key else split_key_changes(raw, self.table.key_columns)
        block = RowBlock(_rows(raw))
        keys = HandleCells(self.table, raw["key"])
        columns = [self._column(column, block, keys) for column in self._columns]
        return pa.RecordBatch.from_arrays([*_meta(raw), *columns], schema=self.schema)

    def _column(self, column: Column, block: RowBlock, keys: HandleCells) -> pa.Array:
        if column is self.table.handle_column:
            return arrow_integers(column, keys.integers(), np.ones(len(block), np.bool_))
        cells = block.cells(column.id)
        values = arrow_array(column, cells)
        if column.id in keys.column_ids and bool(np.any(cells.unknown)):
            return pc.if_else(pa.array(cells.unknown), arrow_array(column, keys.cells(column.id)), values)
        default = self._defaults.get(column.id)
        if default is not None and bool(np.any(cells.missing)):
            return pc.if_else(pa.array(cells.missing), default, values)
        return values


def _default(column: Column) -> pa.Scalar:
    return pa.scalar(arrow_value(column, parse_default(column)), arrow_type(column))


def _rows(raw: pa.RecordBatch) -> pa.Array:
    """What each change tells of its row: the new value, or a delete's old one."""
    deletes = pc.equal(raw["op"], pa.scalar(DELETE, pa.uint8()))
    if pc.any(pc.and_not(raw["value"].is_null(), deletes)).as_py():
        raise CorruptError("an insert or update without a row; a puller must give each change its value")
    return pc.if_else(deletes, raw["old_value"], raw["value"]) if pc.any(deletes).as_py() else raw["value"]


def _meta(raw: pa.RecordBatch) -> list[pa.Array]:
    commit_ts, start_ts = (np.asarray(raw[name]).astype(np.int64) for name in ("commit_ts", "start_ts"))
    ops = _OP_NAMES.take(raw["op"].cast(pa.int64()))
    return [ops, pa.array(commit_ts), pa.array(start_ts), pa.array(_seq(commit_ts, start_ts))]


def _seq(commit_ts: npt.NDArray[np.int64], start_ts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each row's number within its transaction."""
    rows = np.arange(len(commit_ts), dtype=np.int64)
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (commit_ts[1:] != commit_ts[:-1]) | (start_ts[1:] != start_ts[:-1])
    return rows - np.maximum.accumulate(np.where(begins, rows, 0))
