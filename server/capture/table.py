"""The tables of a changefeed that follows TiKV's change feed. Pure."""

from collections import Counter

from server.capture.errors import ParameterError, TableIneligibleError
from server.puller.table import SourceTable, TableRecord
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


def source_tables(records: tuple[TableRecord, ...]) -> tuple[SourceTable, ...]:
    """All tables of a changefeed.

    Raises:
        ParameterError: there is none, or one twice.
        InvalidError, TableIneligibleError: see `tidb_table`.
    """
    tables = tuple(map(tidb_table, records))
    if not tables:
        raise ParameterError("a changefeed needs at least one table: give their schemas (--tables FILE.json)")
    twice = [key for key, count in Counter(table.name for table in tables).items() if count > 1]
    twice += [f"id {key}" for key, count in Counter(table.span.table_id for table in tables).items() if count > 1]
    if twice:
        raise ParameterError(f"tables given twice: {', '.join(twice)}")
    return tables
