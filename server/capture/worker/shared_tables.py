"""The tables of a changefeed that are divided among workers, and the schema changes that they get:
`SchemaChangeRouter` is the one listener of the changefeed's catalog.

A schema change is sent to the shares that have its tables. A span stays with its worker whatever it
is called; a name may go from one worker to another, when its table gets a new span. So each worker
gets the names that end in its spans and those that begin there, and nothing of the others.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from server.capture.catalog import FeedCatalog
from server.capture.traffic import Traffic
from server.capture.worker.combined import CombinedSink
from server.capture.worker.placement import TablePlacement
from server.capture.worker.pool import Worker
from server.capture.worker.share import WorkerShare
from server.capture.worker.splitting import Splitting
from server.changefeed.table import SourceTable
from server.puller.source import Splittable, TableChange
from sink.versions import Ddl
from storage.model.errors import TidemarkError
from storage.model.span import Span

_BARRIER_EVERY_S = 0.05
_DELIVERED_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class SharedTables:
    """The tables of one run of a changefeed, and the shares that have them."""

    changefeed: str
    catalog: FeedCatalog
    placement: TablePlacement[Worker]
    shares: dict[Worker, WorkerShare]
    sink: CombinedSink
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a schema change is sent to the shares, and while a table goes over."""
    splitting: Splitting | None = None
    """Set where tables may be split."""

    def placed(self, table: SourceTable) -> list[tuple[SourceTable, Worker]]:
        """See `placed_of`."""
        source = self.splitting.source if self.splitting else None
        return placed_of(self.placement, source, table)

    def traffic(self) -> dict[Span, Traffic]:
        """Return how much tables and parts of tables change, as reported by their workers."""
        return {
            span: each
            for worker, share in self.shares.items()
            for span, each in share.traffic().items()
            if self.placement.has(worker, span)
        }


class SchemaChangeRouter:
    """Implements `server.capture.catalog.Listener` for shares that run."""

    def __init__(self, tables: SharedTables) -> None:
        self._tables = tables
        self._barrier_ts = 0
        self._moved = asyncio.Event()

    async def changed(self, ddl: Ddl) -> None:
        """See `Listener.changed`; raises WorkerLostError."""
        tables = self._tables
        # A table that went to another worker between the look and the call would not be changed.
        async with tables.changing:
            changes = changes_by_worker(tables.catalog, ddl, tables.placed)
            for worker, change in changes.items():
                share = tables.shares[worker]
                # Readers find a table here only when its worker has it.
                await asyncio.to_thread(share.change, change)
                for table in change.tables:
                    tables.sink.adopt(table.span, share)

    def resolved(self, ts: int) -> None:
        """See `Listener.resolved`."""
        self._barrier_ts = max(ts, self._barrier_ts)
        self._moved.set()

    async def wait_delivered(self, ts: int) -> None:
        """See `Listener.wait_delivered`."""
        while self._tables.sink.checkpoint_ts() < ts:  # noqa: ASYNC110 - an acknowledgement comes from a reader's thread
            await asyncio.sleep(_DELIVERED_EVERY_S)

    async def run(self) -> None:
        """Tell the shares how far the schema changes are known, until cancelled;
        raises WorkerLostError.
        """
        while True:
            await self._moved.wait()
            # Cleared before the barrier is read: a change that comes in between sets it again.
            self._moved.clear()
            barrier_ts = self._barrier_ts
            async with asyncio.TaskGroup() as tasks:
                for worker, share in self._tables.shares.items():
                    tasks.create_task(self._limit(worker, share, barrier_ts))
            await asyncio.sleep(_BARRIER_EVERY_S)

    async def _limit(self, worker: Worker, share: WorkerShare, barrier_ts: int) -> None:
        try:
            await asyncio.to_thread(share.limit, barrier_ts)
        except TidemarkError:
            # A share that has no tables any more may end while it is asked.
            if self._tables.shares.get(worker) is share:
                raise


def placed_of(
    placement: TablePlacement[Worker], source: Splittable | None, table: SourceTable
) -> list[tuple[SourceTable, Worker]]:
    """Return a table, or its parts as its workers know them, each with its worker; an unplaced
    table is placed.
    """
    spans = placement.parts(table.span)
    if source is None or spans == (table.span,):
        return [(table, placement.worker(table.span))]
    return [(source.part(table, span), placement.worker(span)) for span in spans]


def changes_by_worker(
    catalog: FeedCatalog,
    ddl: Ddl,
    placed: Callable[[SourceTable], Iterable[tuple[SourceTable, Worker]]],
) -> dict[Worker, TableChange]:
    """A change that is in force in `catalog`, as it is sent to the workers concerned."""
    parts: dict[Worker, _ChangePart] = {}
    for versions in catalog.versions.spans_of(ddl):
        for version in versions:
            # A worker's catalog is told a change as ours was, by the source's names.
            for table, worker in placed(catalog.of(version)):
                part = parts.setdefault(worker, _ChangePart())
                if version.to_ts == ddl.ts:
                    part.ended.add(table.name)
                if version.from_ts == ddl.ts:
                    part.begun.append(table)
    truncated = catalog.source_names(ddl.truncated, ddl.ts)
    return {worker: part.change(ddl, truncated) for worker, part in parts.items()}


@dataclass(slots=True)
class _ChangePart:
    """The part of a schema change that one worker needs."""

    ended: set[str] = field(default_factory=set)
    begun: list[SourceTable] = field(default_factory=list)

    def change(self, ddl: Ddl, truncated: tuple[str, ...]) -> TableChange:
        names = {table.name for table in self.begun}
        return TableChange(
            ddl.ts, ddl.query, tuple(self.begun), tuple(sorted(self.ended - names)), truncated
        )
