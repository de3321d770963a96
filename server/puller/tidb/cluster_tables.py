"""The tables of the cluster that the capture belongs to, however their changes come:
the store has their schemas.
"""

from collections.abc import Sequence

from server.changefeed.table import SourceTable, TableRecord
from server.puller.source import SourceContext
from server.puller.tidb.schemas import Schemas
from server.puller.tidb.table import following, keeping_identities, record_of, tidb_table


class ClusterTables:
    """What of `server.puller.source.Source` the cluster's sources answer alike;
    records are TiDB's TableInfo.
    """

    keeps_history = True
    warnings: Sequence[str] = ()

    def __init__(self, context: SourceContext) -> None:
        self._context = context
        self._schemas = Schemas(context.pd, context.kv)

    async def now(self) -> int:
        """See `Source.now`."""
        return await self._context.pd.tso()

    async def snapshot(self, ts: int, before: Sequence[TableRecord] = ()) -> Sequence[TableRecord]:
        """See `Source.snapshot`: what the meta keys say at `ts`;
        TiDB gives a reorganized column another id.
        """
        earlier = {each.table_info.get("id"): each for each in before}
        records = map(record_of, await self._schemas.at(ts))
        pairs = ((record, earlier.get(record.table_info.get("id"))) for record in records)
        return [
            keeping_identities(record, before_it) if before_it else record
            for record, before_it in pairs
        ]

    def table(self, record: TableRecord, before: TableRecord | None = None) -> SourceTable:
        """See `Source.table`."""
        return tidb_table(record if before is None else following(record, before))
