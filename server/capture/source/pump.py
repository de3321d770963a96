"""`pump://`: the binlogs of the cluster that the capture belongs to,
through its registered pumps.
"""

from collections.abc import Sequence
from typing import Final

from server.changefeed.source import SourceUri, SourceUriError
from server.changefeed.table import SourceTable
from server.dump.cluster.chunks import ClusterStore, LocalChunks
from server.dump.cluster.engine import ClusterDump
from server.dump.cluster.holds import HoldableLogCatalog, HoldableLogRows
from server.dump.cluster.survey import Surveyor
from server.dump.job import DumpRecords
from server.dump.puller import DumpingPuller
from server.puller.pump.puller import Feed, PumpPuller
from server.puller.pump.registry import Registration
from server.puller.pump.transactions import binlog_keys
from server.puller.source import Catalog, Puller, Rows, SourceContext
from server.puller.tidb.cluster import ClusterTables
from storage.meta.meta import Meta
from storage.model.errors import InvalidError

SCHEME: Final = "pump"


class PumpSource(ClusterTables):
    """Implements `server.puller.source.Source`; schemas come from the store,
    so its history is kept as well.
    """

    per_table = False

    def __init__(self, changefeed: str, uri: SourceUri, context: SourceContext) -> None:
        """Raises: SourceUriError: the URI says more than the scheme."""
        uri.check_options(())
        if uri.addresses or uri.user or uri.path.strip("/"):
            raise SourceUriError(
                f"pumps are found in the registry of the cluster: write {SCHEME}:// alone"
            )
        super().__init__(context)
        self._changefeed = changefeed

    def pullers(
        self, tables: Sequence[SourceTable], start_ts: int, rows: Rows, catalog: Catalog
    ) -> Sequence[Puller]:
        """See `Source.pullers`: one for all tables, with their dump beside it."""
        registration = Registration(self._changefeed, self._context.pd, self._meta, start_ts)
        log_rows = HoldableLogRows(tables, start_ts, rows)
        holdable = HoldableLogCatalog(catalog, log_rows)
        feed = Feed(self._changefeed, tables, start_ts, log_rows, holdable)
        store = ClusterStore(self._context.pd, self._context.kv)
        records = DumpRecords(self._meta, self._changefeed)
        dump = ClusterDump(
            self._changefeed,
            records,
            Surveyor(store),
            LocalChunks(log_rows.held, store, binlog_keys),
        )
        return [
            DumpingPuller(PumpPuller(self._context, self._meta, feed, registration.renew), dump)
        ]

    def schema_puller(
        self, start_ts: int, catalog: Catalog, *, dumps: bool = True
    ) -> Puller | None:
        """See `Source.schema_puller`: schema changes are in the binlogs."""
        del start_ts, catalog, dumps
        return None

    @property
    def _meta(self) -> Meta:
        if self._context.meta is None:
            raise InvalidError("pumps are read by the capture itself, not by its workers")
        return self._context.meta
