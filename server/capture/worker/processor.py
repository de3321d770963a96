"""A changefeed whose tables are divided among the capture's worker processes;
behaves as one that runs in one process.

An error of one share ends them all: the runner decides, as ever, whether to begin again at the
checkpoint. So does the death of a worker, which is started again meanwhile. No range changes by
that: what is above the checkpoint is pulled anew, and is the same.
"""

import asyncio
import heapq
import shutil
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tidemarkpb.v1 import capture_pb2 as pb

from server.capture.processor import Assignment, ProcessorPosition, ProcessorStats
from server.capture.worker.combined import CombinedSink
from server.capture.worker.directory import sorter_directory
from server.capture.worker.dumping import WorkerChunks
from server.capture.worker.pool import Pool, Worker
from server.capture.worker.remote import RemoteShare
from server.capture.worker.schema_changes import SchemaChangeRouter, changes_by_worker
from server.changefeed.table import SourceTable
from server.dump.cluster.chunks import Dumpable
from server.puller.source import Puller, TableChange
from server.puller.tikv.puller import TablePuller
from storage.model.errors import TidemarkError
from storage.model.span import Span


class WorkersProcessor(ProcessorPosition):
    """Implements `server.capture.processor.Processor` over the workers of `pool`."""

    sink: CombinedSink | None = None

    def __init__(
        self,
        pool: Pool,
        directory: Path,
        assignment: Assignment,
    ) -> None:
        self.start_ts = assignment.checkpoint_ts
        self.table_pullers: tuple[TablePuller, ...] = ()
        self._pool = pool
        self._directory = directory
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
        return (self._pool.owner(span).location,)

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
        schemas = self._source.schema_puller(self.start_ts, self._catalog)
        shares = self._dealt(self._pool.workers if schemas else ())
        owners = {span: share for share in shares.values() for span in share.tables}
        sink = CombinedSink(owners, self._pool.executor, shares.values())
        router = SchemaChangeRouter(self._catalog, shares, self._pool.owner, sink)
        async with self._serving(tuple(shares.values()), sink), asyncio.TaskGroup() as tasks:
            for share in shares.values():
                run = share.run(self._target_ts, sink.notify, limited=schemas is not None)
                tasks.create_task(run, name=f"share of {self._name}")
            for share in shares.values():
                await share.running.wait()
            self.sink = sink
            if schemas is not None:
                self._follow(schemas, router, tasks)
                self._dump(WorkerChunks(self._catalog, shares, self._pool.owner), tasks)

    def wipe(self) -> None:
        """See `Processor.wipe`."""
        for worker in self._pool.workers:
            shutil.rmtree(
                sorter_directory(self._directory, worker.number) / self._name, ignore_errors=True
            )

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

    def _dealt(self, workers: Sequence[Worker]) -> dict[Worker, RemoteShare]:
        """One share for each worker that has tables of this changefeed,
        and for each of `workers`.
        """
        tables: dict[Worker, list[SourceTable]] = {worker: [] for worker in workers}
        changes: dict[Worker, list[TableChange]] = {}
        for table in self._catalog.at(self.start_ts):
            tables.setdefault(self._pool.owner(table.span), []).append(table)
        for ddl in self._catalog.versions.ddls(self.start_ts + 1, len(self._catalog.history)):
            for worker, change in changes_by_worker(self._catalog, ddl, self._pool.owner).items():
                changes.setdefault(worker, []).append(change)
        return {
            worker: RemoteShare(
                worker, self._name, tables.get(worker, ()), self.start_ts, changes.get(worker, ())
            )
            for worker in tables.keys() | changes.keys()
        }


async def _blockers(share: RemoteShare, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
    try:
        return await asyncio.to_thread(share.blockers, most, with_locks=with_locks)
    except TidemarkError as err:
        return share.known_blockers(most, str(err))
