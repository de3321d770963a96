"""Schema changes sent to the shares that have their tables, and how far these are known.

Pure but for its sending.

A span stays with its worker whatever it is called; a name may go from one worker to another, when
its table gets a new span. So each worker gets the names that end in its spans and those that begin
there, and nothing of the others.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from server.capture.catalog import FeedCatalog
from server.capture.worker.combined import CombinedSink
from server.capture.worker.pool import Worker
from server.capture.worker.remote import RemoteShare
from server.changefeed.table import SourceTable
from server.puller.source import TableChange
from sink.versions import Ddl
from storage.model.span import Span

_BARRIER_EVERY_S = 0.05
_DELIVERED_EVERY_S = 0.1


@dataclass(slots=True)
class _Part:
    """What a change means to one worker."""

    ended: set[str] = field(default_factory=set)
    begun: list[SourceTable] = field(default_factory=list)

    def change(self, ddl: Ddl) -> TableChange:
        names = {table.name for table in self.begun}
        return TableChange(
            ddl.ts, ddl.query, tuple(self.begun), tuple(sorted(self.ended - names)), ddl.truncated
        )


def changes_by_worker(
    catalog: FeedCatalog, ddl: Ddl, owner: Callable[[Span], Worker]
) -> dict[Worker, TableChange]:
    """A change that is in force in `catalog`, as it is sent to the workers concerned."""
    parts: dict[Worker, _Part] = {}
    for versions in catalog.versions.spans_of(ddl):
        part = parts.setdefault(owner(versions[0].span), _Part())
        part.ended |= {version.name for version in versions if version.to_ts == ddl.ts}
        part.begun += [catalog.of(version) for version in versions if version.from_ts == ddl.ts]
    return {worker: part.change(ddl) for worker, part in parts.items()}


class SchemaChangeRouter:
    """Implements `server.capture.catalog.Listener` for shares that run."""

    def __init__(
        self,
        catalog: FeedCatalog,
        shares: Mapping[Worker, RemoteShare],
        owner: Callable[[Span], Worker],
        sink: CombinedSink,
    ) -> None:
        self._catalog = catalog
        self._shares = shares
        self._owner = owner
        self._sink = sink
        self._barrier_ts = 0
        self._moved = asyncio.Event()

    async def changed(self, ddl: Ddl) -> None:
        """See `Listener.changed`; raises WorkerLostError."""
        for worker, change in changes_by_worker(self._catalog, ddl, self._owner).items():
            share = self._shares[worker]
            # Readers find a table here only when its worker has it.
            await asyncio.to_thread(share.change, change)
            for table in change.tables:
                self._sink.adopt(table.span, share)

    def resolved(self, ts: int) -> None:
        """See `Listener.resolved`."""
        self._barrier_ts = max(ts, self._barrier_ts)
        self._moved.set()

    async def wait_delivered(self, ts: int) -> None:
        """See `Listener.wait_delivered`."""
        while self._sink.checkpoint_ts() < ts:  # noqa: ASYNC110 - an acknowledgement comes from a reader's thread
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
                for share in self._shares.values():
                    tasks.create_task(asyncio.to_thread(share.limit, barrier_ts))
            await asyncio.sleep(_BARRIER_EVERY_S)
