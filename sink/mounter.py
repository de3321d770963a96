"""The mounter: raw key-value changes in, typed rows in columns out; the last step before a consumer sees a table.

Invariants:
1. The rows of the output are the rows of the input, in the same order.
2. `_seq` numbers the rows of one transaction (commit_ts, start_ts) from 0. A transaction may cross batches, so the
   number of its rows in earlier batches is carried by a `MountCursor`: one for each reading of a range, from its begin.
   The same range read again, with a new cursor, gets the same numbers, however it is cut into batches.
3. All columns are nullable, and of the types Spark reads.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

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

    def cursor(self) -> "MountCursor":
        """Begin to read a range."""
        return MountCursor(self)

    def mount(self, raw: pa.RecordBatch, first_seq: int = 0) -> pa.RecordBatch:
        """Mount one batch of `RAW_SCHEMA`, whose first transaction has `first_seq` rows in earlier batches.

        Deletes carry the old row; without it, only what the key tells.

        Raises:
            CorruptError: a key or row is not what TiDB writes for this table.
        """
        deletes = pc.equal(raw["op"], pa.scalar(DELETE, pa.uint8()))
        rows = pc.if_else(deletes, raw["old_value"], raw["value"]) if pc.any(deletes).as_py() else raw["value"]
        block = RowBlock(rows)
        keys = HandleCells(self.table, raw["key"])
        columns = [self._column(column, block, keys) for column in self._columns]
        return pa.RecordBatch.from_arrays([*_meta(raw, first_seq), *columns], schema=self.schema)

    def _column(self, column: Column, block: RowBlock, keys: HandleCells) -> pa.Array:
        if column is self.table.handle_column:
            return arrow_integers(column, keys.integers(), None)
        cells = block.cells(column.id)
        values = arrow_array(column, cells)
        if column.id in keys.column_ids and bool(np.any(cells.unknown)):
            return pc.if_else(pa.array(cells.unknown), arrow_array(column, keys.cells(column.id)), values)
        default = self._defaults.get(column.id)
        if default is not None and bool(np.any(cells.missing)):
            return pc.if_else(pa.array(cells.missing), default, values)
        return values


class MountCursor:
    """Mounts the consecutive batches of one range, counting on where a transaction crosses from one to the next."""

    def __init__(self, mounter: Mounter) -> None:
        self._mounter = mounter
        self._last: tuple[int, int] | None = None
        self._rows = 0

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Mount the next batch; see `Mounter.mount`."""
        if not raw.num_rows:
            return self._mounter.mount(raw)
        first = (raw["commit_ts"][0].as_py(), raw["start_ts"][0].as_py())
        mounted = self._mounter.mount(raw, self._rows if first == self._last else 0)
        last = mounted.num_rows - 1
        self._last = (raw["commit_ts"][last].as_py(), raw["start_ts"][last].as_py())
        self._rows = mounted["_seq"][last].as_py() + 1
        return mounted


def _default(column: Column) -> pa.Scalar:
    return pa.scalar(arrow_value(column, parse_default(column)), arrow_type(column))


def _meta(raw: pa.RecordBatch, first_seq: int) -> list[pa.Array]:
    commit_ts, start_ts = (np.asarray(raw[name]).astype(np.int64) for name in ("commit_ts", "start_ts"))
    ops = _OP_NAMES.take(raw["op"].cast(pa.int64()))
    return [ops, pa.array(commit_ts), pa.array(start_ts), pa.array(_seq(commit_ts, start_ts, first_seq))]


def _seq(commit_ts: npt.NDArray[np.int64], start_ts: npt.NDArray[np.int64], first_seq: int) -> npt.NDArray[np.int64]:
    """The row number within its transaction, `first_seq` at the first row."""
    rows = np.arange(len(commit_ts), dtype=np.int64)
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (commit_ts[1:] != commit_ts[:-1]) | (start_ts[1:] != start_ts[:-1])
    begin = np.maximum.accumulate(np.where(begins, rows, 0))
    return rows - begin + np.where(begin == 0, first_seq, 0)
