"""The tables of the cluster that the capture belongs to, however their changes come: the store has their schemas."""

from collections.abc import Sequence

from server.puller.source import SourceContext
from server.puller.table import SourceTable, TableRecord
from server.puller.tidb.schemas import Schemas
from server.puller.tidb.table import record_of, tidb_table


class ClusterTables:
    """What of `server.puller.source.Source` the cluster's sources answer alike; records are TiDB's TableInfo."""

    keeps_history = True

    def __init__(self, context: SourceContext) -> None:
        self._context = context
        self._schemas = Schemas(context.pd, context.kv)

    async def now(self) -> int:
        """See `Source.now`."""
        return await self._context.pd.tso()

    async def snapshot(self, ts: int) -> Sequence[TableRecord]:
        """See `Source.snapshot`: what the meta keys say at `ts`."""
        return [record_of(table) for table in await self._schemas.at(ts)]

    def table(self, record: TableRecord) -> SourceTable:
        """See `Source.table`."""
        return tidb_table(record)
