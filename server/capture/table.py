"""The tables of a changefeed that follows TiKV's change feed. Pure."""

from server.puller.table import SourceTable, TableIneligibleError, TableRecord
from sink.mounter import Mounter
from storage.tidb.key import table_span
from storage.tidb.schema import TableInfo


def tidb_table(record: TableRecord) -> SourceTable:
    """Read TiDB's TableInfo.

    Raises:
        InvalidError: the TableInfo cannot be read.
        TableIneligibleError: the table cannot be replicated.
    """
    info = TableInfo.parse(record.table_info_json)
    name = f"{record.schema_name}.{info.name}"
    if info.is_view or info.is_sequence:
        raise TableIneligibleError(f"{name} is a view or a sequence: it has no rows of its own")
    if info.partition_ids:
        raise TableIneligibleError(f"{name} is partitioned: partitioned tables are not replicated yet")
    if not info.key_columns:
        raise TableIneligibleError(f"{name} has neither a primary key nor a unique key over NOT NULL columns")
    return SourceTable(record, table_span(info.id), Mounter(info, record.schema_name))
