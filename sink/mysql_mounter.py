"""The mounter of MySQL and MariaDB tables: row images and rows of SELECTs in, typed rows in columns out.

Invariants:
1. The rows of the output are the rows of the input, in the same order: the log's reader has made updates that change a
   key into a delete and an insert already.
2. Mounting has no state; `_seq` as in `sink.mounter`.
3. The same row has the same values, whichever of the two forms it came in.
docs/format/mysql-rows.md.
"""

import pyarrow as pa

from sink.change_columns import META_FIELDS, meta_columns, told_rows
from sink.defaults import with_default
from storage.mysql.arrow import arrow_columns, arrow_type
from storage.mysql.schema import Table


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
        fields = [with_default(pa.field(column.name, arrow_type(column)), column.held) for column in table.columns]
        self.schema: pa.Schema = pa.schema([*META_FIELDS, *fields])

    def split(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.split`: they are so already."""
        return raw

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Mount one batch of `RAW_SCHEMA`, in its order.

        Raises:
            CorruptError: a row is not one of this table in this version.
        """
        columns = arrow_columns(self.table, told_rows(raw))
        return pa.RecordBatch.from_arrays([*meta_columns(raw), *columns], schema=self.schema)
