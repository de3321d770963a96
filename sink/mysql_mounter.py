"""The mounter of MySQL and MariaDB tables: row images and rows of SELECTs in,
typed rows in columns out.

Invariants:
1. The rows of the output are the rows of the input, in the same order: the log's reader has made
   updates that change a key into a delete and an insert already.
2. Mounting has no state; `_seq` as in `sink.tidb_mounter`.
3. The same row has the same values, whichever of the two forms it came in.
docs/format/mysql-rows.md.
"""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from sink.mounter import (
    META_FIELDS,
    Plain,
    check_dates,
    inexact,
    meta_columns,
    row_values,
    with_column_id,
    with_default,
)
from storage.mysql.arrow import (
    ambiguous_key,
    arrow_columns,
    arrow_type,
    has_ambiguous_values,
    may_hold_surrogates,
)
from storage.mysql.schema import DATES, Column, Table, Type
from storage.tidb.time import CoreTime

_FLOATS: Final = frozenset({Type.FLOAT, Type.DOUBLE})


class MysqlMounter:
    """Mounts the changes of one table; immutable, so any number of threads may share it.

    Raises:
        ColumnUnsupportedError: a column of the table cannot be read.
    """

    def __init__(self, table: Table, schema_name: str) -> None:
        table.check()
        self.table = table
        self.name: str = f"{schema_name}.{table.name}"
        self.key_columns: tuple[str, ...] = table.primary_key
        keys = [table.columns[place] for place in table.key_places]
        self._dates = [
            column.name for column in keys if column.type in DATES and not column.as_text
        ]
        self._floats = [place for place in table.key_places if table.columns[place].type in _FLOATS]
        self._has_ambiguous_values = any(map(has_ambiguous_values, keys))
        fields = [
            with_column_id(
                with_default(pa.field(column.name, arrow_type(column)), _held(column)), column.id
            )
            for column in table.columns
        ]
        self.schema: pa.Schema = pa.schema([*META_FIELDS, *fields])

    @property
    def moves_keys(self) -> bool:
        """Never: the puller gives an update that changes the key as a delete and an insert."""
        return False

    def split(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.split`: they are so already."""
        return raw

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Mount one batch of `RAW_SCHEMA`, in its order.

        Raises:
            CorruptError: a row is not one of this table in this version.
            KeyValueError: a key that a reader cannot tell from others.
        """
        rows = row_values(raw)
        columns = arrow_columns(self.table, rows)
        self._check_keys(rows, columns)
        return pa.RecordBatch.from_arrays([*meta_columns(raw), *columns], schema=self.schema)

    def _check_keys(self, rows: pa.Array, columns: list[pa.Array]) -> None:
        """See that keys which differ at the source differ in `columns`,
        and that those which are equal there do not.
        """
        for place in self._floats:
            # -0.0 becomes 0.0: the source holds them equal, and a target that compares bytes does
            # not.
            columns[place] = pc.add(columns[place], pa.scalar(0, columns[place].type))
        is_odd = self._has_ambiguous_values or any(
            may_hold_surrogates(self.table.columns[place], columns[place])
            for place in self.table.key_places
        )
        if not (self._dates or is_odd):
            return
        key = {self.table.columns[place].name: columns[place] for place in self.table.key_places}
        if any(key[name].null_count > rows.null_count for name in self._dates):
            check_dates(self.name, key, self._dates, rows.is_valid())
        if is_odd and (bad_value := ambiguous_key(self.table, rows)) is not None:
            raise inexact(self.name, key, *bad_value)


def _held(column: Column) -> Plain | None:
    """The value that older rows have, as batches show it."""
    value = column.initial_default
    if column.type not in DATES or not isinstance(value, str):
        return value
    if not column.as_text:
        return None if value.startswith("0000") else value
    day, _, clock = value.partition("T")
    return day if column.type is Type.DATE else CoreTime.parse(f"{day} {clock}").text(column.meta)
