"""A changefeed whose tables are divided among workers; behaves as one that runs in one process.

`TablePlacement` says which worker has which table. `WorkersProcessor` runs one share on each
worker, and tables move between them as workers come and go (`moves`). Where this capture is alone,
it is the only worker. An error of one share ends them all, and so does the death of a worker: the
runner decides, as for any processor, whether to begin again at the checkpoint.

No range changes by any of this: what is above the checkpoint is pulled anew, and is the same.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from tidemarkpb.v1 import capture_pb2 as pb

from server.capture import long_lived
from server.capture.errors import ChangefeedNotRunningError, TableMoveError
from server.capture.processor import Assignment, ProcessorPosition, ProcessorStats
from server.capture.traffic import NO_TRAFFIC, Traffic
from server.capture.worker.combined import CombinedSink
from server.capture.worker.dump_chunks import WorkerChunks
from server.capture.worker.moves import TableMover
from server.capture.worker.placement import TablePlacement
from server.capture.worker.pool import Worker, Workers
from server.capture.worker.share import ShareStart, WorkerShare, known_blockers
from server.capture.worker.shared_tables import (
    SchemaChangeRouter,
    SharedTables,
    changes_by_worker,
    placed_of,
)
from server.capture.worker.splitting import Splitting
from server.changefeed.table import SourceTable
from server.dump.cluster.chunks import Dumpable
from server.puller.source import Puller, Splittable, TableChange
from server.puller.tikv.puller import TablePuller
from storage.model.errors import TidemarkError
from storage.model.span import Span


class WorkersProcessor(ProcessorPosition):
    """Implements `server.capture.processor.Processor` over the workers of `workers`."""

    sink: CombinedSink | None = None
    mover: TableMover | None = None
    """Set while tables can move."""

    def __init__(self, workers: Workers, assignment: Assignment) -> None:
        self.start_ts = assignment.checkpoint_ts
        self.table_pullers: tuple[TablePuller, ...] = ()
        self._workers = workers
        self._name = assignment.changefeed
        self._catalog = assignment.catalog
        self._source = assignment.source
        self.stop_ts = assignment.stop_ts
        self._keeps_history = assignment.keep_ts > 0
        self._least_regions = assignment.region_threshold
        self._tables: SharedTables | None = None
        self._sharing: dict[WorkerShare, Worker] = {}
        """Shares that have not ended, from before they begin."""

    @property
    def repairing(self) -> Collection[Span]:
        """See `Processor.repairing`; of the tables that this process pulls."""
        tables = self._tables
        if tables is None:
            return ()
        spans = {span for share in self._shares() for span in share.repairing}
        return tuple(map(tables.placement.whole, spans))

    @property
    def damage(self) -> TidemarkError | None:
        """See `Processor.damage`."""
        return next((share.damage for share in self._shares() if share.damage), None)

    def stats(self) -> ProcessorStats:
        """The sum over the workers."""
        return sum((share.stats for share in self._shares()), ProcessorStats())

    def traffic(self) -> Mapping[Span, Traffic]:
        """See `Processor.traffic`."""
        tables, traffic = self._tables, dict[Span, Traffic]()
        if tables is None:
            return traffic
        for span, part in tables.traffic().items():
            whole = tables.placement.whole(span)
            before = traffic.get(whole, NO_TRAFFIC)
            traffic[whole] = Traffic(
                before.rows_per_s + part.rows_per_s, before.bytes_per_s + part.bytes_per_s
            )
        return traffic

    def locations(self, span: Span) -> tuple[str, ...]:
        """Return the addresses where the table's worker serves its rows directly; none for a split
        table, whose parts are merged here.
        """
        tables = self._tables
        is_split = tables is not None and tables.placement.parts(span) != (span,)
        return () if is_split else self.places(span)

    def places(self, span: Span) -> tuple[str, ...]:
        """See `Processor.places`."""
        return tuple(worker.location for worker in self._workers_of(span) if worker.location)

    def worker_of(self, span: Span) -> str:
        """See `Processor.worker_of`; several, in the order of their keys, of a table that is
        split.
        """
        return ", ".join(worker.id for worker in self._workers_of(span))

    def _workers_of(self, span: Span) -> list[Worker]:
        tables = self._tables
        if tables is None:
            return []
        # A table that is split or put together meanwhile has other parts by now, without a worker.
        workers = (tables.placement.find(part) for part in tables.placement.parts(span))
        return [worker for worker in workers if worker is not None]

    def has_share_at(self, capture: str) -> bool:
        """See `Processor.has_share_at`."""
        return any(worker.id == capture for worker in self._sharing.values())

    def moving_to(self, span: Span) -> tuple[str, int]:
        """See `Processor.moving_to`."""
        return self.mover.operators.progress(span) if self.mover else ("", 0)

    async def move_table(self, span: Span, worker: str) -> None:
        """See `Processor.move_table`."""
        tables, mover = self._running()
        there = {each.id: each for each in tables.placement.workers}
        if worker not in there:
            raise TableMoveError(
                f"changefeed {self._name} has no share on {worker[:256]!r}; it has on "
                f"{', '.join(sorted(there))}"
            )
        await mover.move(span, there[worker])

    async def split_table(self, span: Span, *, put_together: bool) -> None:
        """See `Processor.split_table`."""
        _, mover = self._running()
        await mover.split(span, put_together=put_together)

    def _running(self) -> tuple[SharedTables, TableMover]:
        if self._tables is None or self.mover is None:
            raise ChangefeedNotRunningError(
                f"changefeed {self._name} does not run yet, or no more; try again"
            )
        return self._tables, self.mover

    async def blockers(self, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
        """See `Processor.blockers`; of a worker that is silent,
        what was known of its tables before.
        """
        async with asyncio.TaskGroup() as tasks:
            lookups = [
                tasks.create_task(_blockers(share, most, with_locks=with_locks))
                for share in self._shares()
            ]
        tables = [table for task in lookups for table in task.result()]
        return heapq.nsmallest(most, tables, key=lambda table: table.resolved_ts)

    async def run(self) -> None:
        """See `Processor.run`."""
        schemas = self._source.schema_puller(self.start_ts, self._catalog, dumps=False)
        await self._workers.wait_known()
        source = self._source if isinstance(self._source, Splittable) else None
        # A million tables take seconds to divide.
        with long_lived.building_tables(len(self._catalog.read())):
            placement, splitting = await self._placed(source)
            has_all = placement.workers if schemas is not None else ()
            parts = await asyncio.to_thread(self._divided, placement, source, has_all)
            shares: dict[Worker, WorkerShare] = {}
            for worker, part in parts.items():
                shares[worker] = self.share(worker, self.start_ts, part.tables, part.changes)
                await asyncio.sleep(0)
            sink = await asyncio.to_thread(_combined, shares.values(), self._workers.executor)
        sink.keep_ts = self.start_ts if self._keeps_history else 0
        for whole in placement.split():
            shape = {span: shares[placement.worker(span)] for span in placement.parts(whole)}
            sink.reshape(whole, shape)
        tables = SharedTables(
            self._name,
            self._catalog,
            placement,
            shares,
            sink,
            splitting=splitting,
        )
        async with self._serving(tables), asyncio.TaskGroup() as tasks:
            running = _RunningShares(self, tables, tasks)
            for share in shares.values():
                running.run(share, limited=schemas is not None)
            # Readers may ask when every share serves: a position of one that has not reported yet
            # would be the start's.
            for share in shares.values():
                await share.running.wait()
            self.sink = sink
            if schemas is not None:
                self._follow(schemas, SchemaChangeRouter(tables), tasks)
                self._dump(WorkerChunks(tables), tasks)
                self.mover = mover = TableMover(tables)
                balancing = mover.run(self._workers.workers, running)
                tasks.create_task(balancing, name=f"balance of {self._name}")

    def wipe(self) -> None:
        """See `Processor.wipe`."""
        self._workers.wipe(self._name)

    @asynccontextmanager
    async def _serving(self, tables: SharedTables) -> AsyncIterator[None]:
        self._tables = tables
        try:
            yield
        finally:
            self.start_ts = max(self.start_ts, tables.sink.checkpoint_ts())
            self._tables = self.sink = self.mover = None
            self._sharing.clear()
            self.table_pullers = ()
            self._catalog.listener = None

    def _follow(
        self, schemas: Puller, router: SchemaChangeRouter, tasks: asyncio.TaskGroup
    ) -> None:
        """Pull the schema changes here, and pass them on to the shares."""
        self._catalog.listener = router
        self.table_pullers = tuple(getattr(schemas, "table_pullers", ()))
        tasks.create_task(router.run(), name=f"router of {self._name}")
        tasks.create_task(schemas.run(), name=f"schemas of {self._name}")

    def _dump(self, chunks: WorkerChunks, tasks: asyncio.TaskGroup) -> None:
        """Run the dump of the tables while a job asks for it."""
        dump = self._source.dump(chunks) if isinstance(self._source, Dumpable) else None
        if dump is not None:
            tasks.create_task(dump.run(), name=f"dump of {self._name}")

    def _shares(self) -> tuple[WorkerShare, ...]:
        return tuple(self._tables.shares.values()) if self._tables else ()

    async def _placed(
        self, source: Splittable | None
    ) -> tuple[TablePlacement[Worker], Splitting | None]:
        """Place each table on a worker; the second result splits tables, if the source
        allows that.
        """
        placement = await asyncio.to_thread(self._placement, self._workers.workers())
        if source is None or not self._least_regions:
            return placement, None
        splitting = Splitting(self._catalog, placement, source, self._least_regions)
        for whole, shape in await splitting.shapes(placement.workers):
            placement.reshape(whole, shape)
        return placement, splitting

    def _placement(self, workers: Sequence[Worker]) -> TablePlacement[Worker]:
        spans = [table.span for table in self._catalog.at(self.start_ts)]
        return TablePlacement(workers, self._name, spans)

    def _divided(
        self,
        placement: TablePlacement[Worker],
        source: Splittable | None,
        workers: Sequence[Worker],
    ) -> dict[Worker, "_Part"]:
        """The part of each worker that has tables of this changefeed, and of each of `workers`."""
        placed = partial(placed_of, placement, source)
        parts = {worker: _Part() for worker in workers}
        for table in self._catalog.at(self.start_ts):
            for part, worker in placed(table):
                parts.setdefault(worker, _Part()).tables.append(part)
        for ddl in self._catalog.versions.ddls(self.start_ts + 1, len(self._catalog.history)):
            for worker, change in changes_by_worker(self._catalog, ddl, placed).items():
                parts.setdefault(worker, _Part()).changes.append(change)
        return parts

    def share(
        self,
        worker: Worker,
        start_ts: int,
        tables: Sequence[SourceTable] = (),
        changes: Sequence[TableChange] = (),
    ) -> WorkerShare:
        """A share of the changefeed, which does not run yet."""
        keep_ts = 0
        if self._keeps_history:
            # One that joins later has no tables yet: what the others keep is kept still.
            keep_ts = self.sink.keep_ts if self.sink is not None else start_ts
        start = ShareStart(
            self._name, tuple(tables), start_ts, tuple(changes), self._workers.term, keep_ts
        )
        share = worker.share(start)
        self._sharing[share] = worker
        return share

    def ended(self, share: WorkerShare) -> None:
        """A share has ended, as far as its worker could be told."""
        self._sharing.pop(share, None)


@dataclass(slots=True)
class _Part:
    """The tables that one worker begins with."""

    tables: list[SourceTable] = field(default_factory=list)
    changes: list[TableChange] = field(default_factory=list)


def _combined(shares: Collection[WorkerShare], executor: Executor) -> CombinedSink:
    owners = {span: share for share in shares for span in share.tables}
    return CombinedSink(owners, executor, shares)


class _RunningShares:
    """Implements `server.capture.worker.moves.Shares`: tasks of one run."""

    def __init__(
        self, processor: WorkersProcessor, tables: SharedTables, tasks: asyncio.TaskGroup
    ) -> None:
        self._processor = processor
        self._tables = tables
        self._tasks = tasks
        self._task_of: dict[WorkerShare, asyncio.Task[None]] = {}

    def run(self, share: WorkerShare, *, limited: bool = True) -> None:
        """Run a share as a task of the run."""
        run = share.run(self._processor.stop_ts, self._tables.sink.notify, limited=limited)
        name = f"share of {self._tables.changefeed}"
        self._task_of[share] = task = self._tasks.create_task(run, name=name)
        task.add_done_callback(lambda _: self._processor.ended(share))

    async def start(self, worker: Worker) -> WorkerShare:
        """See `Shares.start`."""
        share = self._processor.share(worker, self._tables.sink.checkpoint_ts())
        self.run(share)
        await share.running.wait()
        return share

    def end(self, share: WorkerShare) -> None:
        """See `Shares.end`."""
        self._task_of.pop(share).cancel()


async def _blockers(share: WorkerShare, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
    try:
        return await asyncio.to_thread(share.blockers, most, with_locks=with_locks)
    except TidemarkError as err:
        return known_blockers(share, most, str(err))
