"""The cluster that the capture belongs to: TiKV's change feed of each table,
and of TiDB's DDL jobs.
"""

from collections.abc import Sequence

from server.changefeed.source import SourceUri
from server.changefeed.table import SourceTable
from server.dump.cluster.chunks import Chunks, ClusterStore, LocalChunks
from server.dump.cluster.engine import ClusterDump
from server.dump.cluster.holds import HoldablePuller, HoldableRows, PulledTables
from server.dump.cluster.survey import Surveyor
from server.dump.job import DumpRecords
from server.dump.puller import Dump, DumpingPuller
from server.puller.source import Catalog, Puller, Rows, SourceContext
from server.puller.tidb.cluster import ClusterTables
from server.puller.tidb.partitioned_puller import PartitionedPuller, without_empty_deletes
from server.puller.tidb.parts import WithinPart, regions_within
from server.puller.tidb.schema_puller import SchemaPuller
from server.puller.tidb.table import can_split, part, part_of, part_spans, reread_of
from server.puller.tikv.puller import TablePuller, Upstream
from storage.model.span import Span


class TidbSource(ClusterTables):
    """Implements `server.puller.source.Source`."""

    per_table = True

    def __init__(self, context: SourceContext, changefeed: str = "") -> None:
        """Without a changefeed's name nothing is dumped."""
        super().__init__(context)
        self._changefeed = changefeed
        self._held = PulledTables()
        self._store = ClusterStore(context.pd, context.kv)
        self._chunks = LocalChunks(self._held, self._store)

    def pullers(
        self, tables: Sequence[SourceTable], start_ts: int, rows: Rows, catalog: Catalog
    ) -> Sequence[Puller]:
        """See `Source.pullers`: one for each table."""
        del catalog
        upstream = Upstream(
            self._context.pd, self._context.feeds, rows.executor, rows.open_transactions
        )
        return [self._puller(table, start_ts, upstream, rows) for table in tables]

    def schema_puller(
        self, start_ts: int, catalog: Catalog, *, dumps: bool = True
    ) -> Puller | None:
        """See `Source.schema_puller`; a worker process, which has no metadata, pulls tables only.

        The dump is beside it, as there is one for each run of the changefeed.
        """
        if self._context.meta is None:
            return None
        schemas = SchemaPuller(self._context, start_ts, catalog)
        dump = self.dump(self.chunks) if dumps else None
        return schemas if dump is None else DumpingPuller(schemas, dump)

    @property
    def chunks(self) -> LocalChunks:
        """See `server.dump.cluster.chunks.Dumpable`."""
        return self._chunks

    def can_split(self, table: SourceTable) -> bool:
        """See `server.puller.source.Splittable.can_split`."""
        return can_split(table)

    async def regions(self, start_key: bytes, end_key: bytes) -> Sequence[bytes]:
        """See `Splittable.regions`."""
        return await regions_within(self._context.pd, start_key, end_key)

    def part(self, table: SourceTable, span: Span) -> SourceTable:
        """See `Splittable.part`."""
        return part(table, span)

    def dump(self, chunks: Chunks) -> Dump | None:
        """See `Dumpable.dump`."""
        if self._context.meta is None or not self._changefeed:
            return None
        records = DumpRecords(self._context.meta, self._changefeed)
        return ClusterDump(self._changefeed, records, Surveyor(self._store), chunks)

    def _puller(self, table: SourceTable, start_ts: int, upstream: Upstream, rows: Rows) -> Puller:
        if not self._changefeed:
            return self._bare_puller(table, start_ts, upstream, rows)
        holdable = HoldableRows(table.span, start_ts, rows)
        return HoldablePuller(
            table, holdable, self._bare_puller(table, start_ts, upstream, holdable), self._held
        )

    def _bare_puller(
        self, table: SourceTable, start_ts: int, upstream: Upstream, rows: Rows
    ) -> Puller:
        if part_spans(table.record) or reread_of(table.record).ts:
            return PartitionedPuller(table, start_ts, upstream, rows, self._schemas)
        sorter = without_empty_deletes(table.record, rows)
        if part_of(table.record) is not None:
            sorter = WithinPart(table.span, sorter)
        return TablePuller(table.span, start_ts, upstream, sorter)


def tidb_source(changefeed: str, uri: SourceUri, context: SourceContext) -> TidbSource:
    """The factory of the empty scheme."""
    del uri
    return TidbSource(context, changefeed)
