"""A changefeed whose tables are divided among workers; behaves as one that runs in one process.

An error of one share ends them all: the runner decides, as ever, whether to begin again at the
checkpoint. So does the death of a worker. No range changes by that: what is above the checkpoint is
pulled anew, and is the same.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from tidemarkpb.v1 import capture_pb2 as pb

from server.capture.processor import Assignment, ProcessorPosition, ProcessorStats
from server.capture.worker.combined import CombinedSink
from server.capture.worker.dealing import Dealing
from server.capture.worker.dumping import WorkerChunks
from server.capture.worker.pool import Worker, Workers
from server.capture.worker.remote import RemoteShare
from server.capture.worker.schema_changes import SchemaChangeRouter, changes_by_worker
from server.changefeed.table import SourceTable
from server.dump.cluster.chunks import Dumpable
from server.puller.source import Puller, TableChange
from server.puller.tikv.puller import TablePuller
from storage.model.errors import TidemarkError
from storage.model.span import Span


class WorkersProcessor(ProcessorPosition):
    """Implements `server.capture.processor.Processor` over the workers of `workers`."""

    sink: CombinedSink | None = None

    def __init__(
        self,
        workers: Workers,
        assignment: Assignment,
    ) -> None:
        self.start_ts = assignment.checkpoint_ts
        self.table_pullers: tuple[TablePuller, ...] = ()
        self._workers = workers
        self._dealing: Dealing[Worker] | None = None
        self._name = assignment.changefeed
        self._catalog = assignment.catalog
        self._source = assignment.source
        self._target_ts = assignment.target_ts
        self._shares: tuple[RemoteShare, ...] = ()

    @property
    def repairing(self) -> Collection[Span]:
        """See `Processor.repairing`; the workers repair their tables by themselves, and log it."""
        return ()

    @property
    def damage(self) -> TidemarkError | None:
        """See `Processor.damage`."""
        return None

    def stats(self) -> ProcessorStats:
        """The sum over the workers."""
        return sum((share.mirror.stats for share in self._shares), ProcessorStats())

    def locations(self, span: Span) -> tuple[str, ...]:
        """Where the table's worker serves its rows itself."""
        dealing = self._dealing
        return (dealing.worker(span).location,) if dealing else ()

    async def blockers(self, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
        """See `Processor.blockers`; of a worker that is silent,
        what was known of its tables before.
        """
        async with asyncio.TaskGroup() as tasks:
            lookups = [
                tasks.create_task(_blockers(share, most, with_locks=with_locks))
                for share in self._shares
            ]
        tables = [table for task in lookups for table in task.result()]
        return heapq.nsmallest(most, tables, key=lambda table: table.resolved_ts)

    async def run(self) -> None:
        """See `Processor.run`."""
        schemas = self._source.schema_puller(self.start_ts, self._catalog, dumps=False)
        spans = [table.span for table in self._catalog.at(self.start_ts)]
        self._dealing = dealing = Dealing(self._workers.workers(), self._name, spans)
        shares = self._shared_out(dealing, () if schemas is None else dealing.workers)
        owners = {span: share for share in shares.values() for span in share.tables}
        sink = CombinedSink(owners, self._workers.executor, shares.values())
        router = SchemaChangeRouter(self._catalog, shares, dealing.worker, sink)
        async with self._serving(tuple(shares.values()), sink), asyncio.TaskGroup() as tasks:
            for share in shares.values():
                run = share.run(self._target_ts, sink.notify, limited=schemas is not None)
                tasks.create_task(run, name=f"share of {self._name}")
            for share in shares.values():
                await share.running.wait()
            self.sink = sink
            if schemas is not None:
                self._follow(schemas, router, tasks)
                self._dump(WorkerChunks(self._catalog, shares, dealing.worker), tasks)

    def wipe(self) -> None:
        """See `Processor.wipe`."""
        self._workers.wipe(self._name)

    @asynccontextmanager
    async def _serving(
        self, shares: tuple[RemoteShare, ...], sink: CombinedSink
    ) -> AsyncIterator[None]:
        self._shares = shares
        try:
            yield
        finally:
            self.start_ts = max(self.start_ts, sink.checkpoint_ts())
            self._shares, self.sink, self.table_pullers = (), None, ()
            self._dealing = None
            self._catalog.listener = None

    def _follow(
        self, schemas: Puller, router: SchemaChangeRouter, tasks: asyncio.TaskGroup
    ) -> None:
        """Pull the schema changes here, and deal them to the shares."""
        self._catalog.listener = router
        self.table_pullers = tuple(getattr(schemas, "table_pullers", ()))
        tasks.create_task(router.run(), name=f"router of {self._name}")
        tasks.create_task(schemas.run(), name=f"schemas of {self._name}")

    def _dump(self, chunks: WorkerChunks, tasks: asyncio.TaskGroup) -> None:
        """Dump the tables as somebody asks for it."""
        dump = self._source.dump(chunks) if isinstance(self._source, Dumpable) else None
        if dump is not None:
            tasks.create_task(dump.run(), name=f"dump of {self._name}")

    def _shared_out(
        self, dealing: Dealing[Worker], workers: Sequence[Worker]
    ) -> dict[Worker, RemoteShare]:
        """One share for each worker that has tables of this changefeed,
        and for each of `workers`.
        """
        tables: dict[Worker, list[SourceTable]] = {worker: [] for worker in workers}
        changes: dict[Worker, list[TableChange]] = {}
        for table in self._catalog.at(self.start_ts):
            tables.setdefault(dealing.worker(table.span), []).append(table)
        for ddl in self._catalog.versions.ddls(self.start_ts + 1, len(self._catalog.history)):
            for worker, change in changes_by_worker(self._catalog, ddl, dealing.worker).items():
                changes.setdefault(worker, []).append(change)
        return {
            worker: RemoteShare(
                worker,
                self._name,
                tables.get(worker, ()),
                self.start_ts,
                changes.get(worker, ()),
                term=self._workers.term,
            )
            for worker in tables.keys() | changes.keys()
        }


async def _blockers(share: RemoteShare, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
    try:
        return await asyncio.to_thread(share.blockers, most, with_locks=with_locks)
    except TidemarkError as err:
        return share.known_blockers(most, str(err))
