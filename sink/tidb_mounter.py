"""The mounter: raw key-value changes in, typed rows in columns out;
the last step before a consumer sees a table.

Invariants:
1. The rows of the output are the rows of the input, in the same order, except that an update of the
   key columns of a table whose rows are not stored by them becomes a delete and an insert
   (`sink.key_change`).
2. Mounting has no state: the same batch always gives the same rows. `_seq` numbers the rows of one
   transaction (commit_ts, start_ts) from 0 within the batch; a transaction that crosses batches is
   numbered on by whoever reads them in order, from the begin of a range
   (`sink.mounts.SequenceMount`), so reading the range again gives the same.
3. All columns are nullable, and of the types Spark reads.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sink.key_change import split_key_changes
from sink.mounter import (
    META_FIELDS,
    check_dates,
    meta_columns,
    plain,
    row_values,
    with_column_id,
    with_default,
)
from storage.model.errors import CorruptError, InvalidError
from storage.model.event import DELETE
from storage.tidb.cell import arrow_array, arrow_integers, arrow_type, arrow_value, parse_default
from storage.tidb.document import TableInfoError
from storage.tidb.field_type import DATES, Type
from storage.tidb.record import HandleCells
from storage.tidb.row_layout import RowBlock
from storage.tidb.schema import Column, TableInfo

_FLOATS: Final = frozenset({Type.FLOAT, Type.DOUBLE})


class TidbMounter:
    """Mounts the changes of one table; immutable, so any number of threads may share it."""

    def __init__(
        self, table: TableInfo, schema_name: str, identities: Mapping[int, int] | None = None
    ) -> None:
        """`identities` are those of columns that do not have their own TiDB id as their identity,
        by that id.

        Raises:
            TableInfoError: what rows hold that are older than a column is no value of its type.
        """
        self.table = table
        self._identities = identities or {}
        self.name: str = f"{schema_name}.{table.name}"
        self.key_columns: tuple[str, ...] = tuple(column.name for column in table.key_columns)
        self._columns = table.stored_columns
        self._defaults = {
            column.id: _default(table, column)
            for column in self._columns
            if column.origin_default is not None
        }
        fields = [self._field(column) for column in self._columns]
        self._key_places = [self._columns.index(column) for column in table.key_columns]
        self._float_keys = [
            place for place in self._key_places if self._columns[place].type in _FLOATS
        ]
        dates = (place for place in self._key_places if self._columns[place].type in DATES)
        self._date_keys = [place for place in dates if not self._columns[place].as_text]
        self.schema: pa.Schema = pa.schema([*META_FIELDS, *fields])

    @property
    def moves_keys(self) -> bool:
        """Whether rows are stored under another key than the table's: an update may change the
        latter.
        """
        return not self.table.handle_is_key

    def split(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.split`."""
        return split_key_changes(raw, self.table.key_columns) if self.moves_keys else raw

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Mount one batch of `RAW_SCHEMA`, sorted as the sorter gives it.

        Deletes carry the old row; without it, only what the key tells (pulled with old values, such
        a delete found no row to delete).

        Raises:
            CorruptError: a key or row is not what TiDB writes for this table, or a delete does not
                tell its key.
            KeyValueError: a key that a reader cannot tell from others.
        """
        raw = self.split(raw)
        block = RowBlock(row_values(raw))
        keys = HandleCells(self.table, raw["key"])
        columns = [self._column(column, block, keys) for column in self._columns]
        self._check_deletes(raw, columns)
        self._check_keys(block, keys, columns)
        return pa.RecordBatch.from_arrays([*meta_columns(raw), *columns], schema=self.schema)

    def _check_deletes(self, raw: pa.RecordBatch, columns: list[pa.Array]) -> None:
        """See that each delete which came without its row tells its key."""
        if self.table.handle_is_key:
            return
        bare = pc.and_(
            pc.equal(raw["op"], pa.scalar(DELETE, pa.uint8())), pc.is_null(raw["old_value"])
        )
        if not pc.any(bare, min_count=0).as_py():
            return
        for place in self._key_places:
            unknown = pc.and_(bare, pc.is_null(columns[place]))
            if pc.any(unknown).as_py():
                commit_ts = raw["commit_ts"][pc.index(unknown, True).as_py()]
                raise CorruptError(
                    f"a delete of {self.name} at {commit_ts} came without the row that it "
                    f"deleted, and the record key does not hold {self._columns[place].name}: see "
                    "that the store sends old values, then resume"
                )

    def _check_keys(self, block: RowBlock, keys: HandleCells, columns: list[pa.Array]) -> None:
        """See that keys which differ at the source differ in `columns`,
        and that those which are equal there do not.
        """
        for place in self._float_keys:
            # -0.0 becomes 0.0: they are equal in the source, but not in a target that compares
            # bytes.
            columns[place] = pc.add(columns[place], pa.scalar(0, columns[place].type))
        if any(columns[place].null_count for place in self._date_keys):
            key = {self._columns[place].name: columns[place] for place in self._key_places}
            for column in (self._columns[place] for place in self._date_keys):
                cells = block.cells(column.id)
                has_row = cells.rows.valid
                has_key = pa.array(
                    has_row | keys.cells(column.id, cells.missing).present
                    if column.id in keys.column_ids
                    else has_row
                )
                check_dates(self.name, key, [column.name], has_key)

    def _field(self, column: Column) -> pa.Field:
        default = self._defaults.get(column.id)
        identity = self._identities.get(column.id, column.id)
        field = with_column_id(pa.field(column.name, arrow_type(column)), identity)
        return field if default is None else with_default(field, plain(default.as_py()))

    def _column(self, column: Column, block: RowBlock, keys: HandleCells) -> pa.Array:
        if column is self.table.handle_column:
            return arrow_integers(column, keys.integers(), np.ones(len(block), np.bool_))
        cells = block.cells(column.id)
        values = arrow_array(column, cells)
        if column.id in keys.column_ids and bool(np.any(cells.unknown)):
            of_key = arrow_array(column, keys.cells(column.id, cells.missing))
            return pc.if_else(pa.array(cells.unknown), of_key, values)
        default = self._defaults.get(column.id)
        if default is not None and bool(np.any(cells.missing)):
            return pc.if_else(pa.array(cells.missing), default, values)
        return values


def _default(table: TableInfo, column: Column) -> pa.Scalar:
    try:
        return pa.scalar(arrow_value(column, parse_default(column)), arrow_type(column))
    except (InvalidError, pa.ArrowException, ArithmeticError, TypeError, ValueError) as err:
        raise TableInfoError(
            f"the TableInfo of {table.name!r}: $.cols[{column.offset}].origin_default: "
            f"{column.origin_default!r:.200} "
            f"is no value of the {column.type.name} column {column.name!r}"
        ) from err
