"""The change feed of the cluster that the capture belongs to: one puller for each table, in any process."""

from collections.abc import Sequence

from server.capture.table import tidb_table
from server.puller.source import Catalog, Puller, Rows, SourceContext
from server.puller.table import SourceTable, TableRecord
from server.puller.tikv.puller import TablePuller, Upstream
from storage.model.errors import InvalidError


class TikvSource:
    """Implements `server.puller.source.Source`; the tables' schemas are TiDB's TableInfo."""

    keeps_history = True
    per_table = True

    def __init__(self, context: SourceContext) -> None:
        self._context = context

    async def now(self) -> int:
        """See `Source.now`."""
        return await self._context.pd.tso()

    async def snapshot(self, ts: int) -> Sequence[TableRecord]:
        """See `Source.snapshot`."""
        raise InvalidError(f"the tables of this cluster at {ts} are not known; give their schemas (--tables FILE.json)")

    def table(self, record: TableRecord) -> SourceTable:
        """See `Source.table`."""
        return tidb_table(record)

    def pullers(self, tables: Sequence[SourceTable], start_ts: int, rows: Rows, catalog: Catalog) -> Sequence[Puller]:
        """See `Source.pullers`."""
        del catalog
        upstream = Upstream(self._context.pd, self._context.feeds, rows.executor)
        return [TablePuller(table.span, start_ts, upstream, rows) for table in tables]

    def schema_puller(self, start_ts: int, catalog: Catalog) -> Puller | None:
        """See `Source.schema_puller`."""
        del start_ts, catalog
        return None
