"""What a DDL means to one changefeed: its tables in their new form, or a refusal."""

from server.changefeed.table import SourceTable
from server.puller.source import Catalog, TableChange
from server.puller.tidb.errors import DdlUnsupportedError
from server.puller.tidb.table import record_of, reread_of
from storage.tidb.schema_history import Change, Table


def table_change(change: Change, catalog: Catalog) -> TableChange | None:
    """The change as the catalog takes it; None: it does not concern the changefeed.

    Raises:
        DdlUnsupportedError: its rows would not be told.
        TableIneligibleError: the changefeed wants a table that cannot be replicated.
    """
    if change.moved:
        _refuse(change, catalog)
    records = (catalog.table(record_of(table), change.commit_ts) for table in change.tables)
    tables = tuple(table for table in records if table is not None)
    begun_anew = tuple(table.name for table in tables if _begins_anew(table, change.commit_ts))
    truncated = (
        tuple(table.name for table in change.truncated if _wanted(table, catalog)) + begun_anew
    )
    if not (tables or truncated or any(_wanted(table, catalog) for table in change.dropped)):
        return None
    # all: a table that is renamed may come from outside
    dropped = tuple(table.name for table in change.dropped)
    return TableChange(change.commit_ts, change.query, tables, dropped, truncated)


def _refuse(change: Change, catalog: Catalog) -> None:
    names = [table.name for table in change.tables if _wanted(table, catalog)]
    if names or not change.tables:
        raise DdlUnsupportedError(
            f"at {change.commit_ts} {', '.join(names) or 'every table'}: {change.moved}: "
            f"{change.query}. Everything before it is delivered first. Create another changefeed "
            f"with --start-ts {change.commit_ts} and another --sink-uri, and copy its tables by "
            "`tidemark cli changefeed dumpstart`; a --filter may leave some out"
        )


def _begins_anew(table: SourceTable, commit_ts: int) -> bool:
    reread = reread_of(table.record)
    return reread.ts == commit_ts and reread.emptied


def _wanted(table: Table, catalog: Catalog) -> bool:
    return catalog.wants(table.schema_name, table.table_name)
