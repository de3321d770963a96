"""A changefeed whose tables are divided among workers; behaves as one that runs in one process.

`TablePlacement` says which worker has which table: the one with the fewest tables of the
changefeed, for the whole run. `WorkersProcessor` runs one share on each worker. An error of one
share ends them all, and so does the death of a worker: the runner decides, as for any processor,
whether to begin again at the checkpoint.

`RebalancingProcessor` chooses between that and a local processor, which runs the changefeed while
this capture is the only worker. When workers come or go it begins again at its checkpoint, among
those that are there then; this is reported to nobody as an error.

No range changes by any of this: what is above the checkpoint is pulled anew, and is the same.
"""

import asyncio
import heapq
import threading
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import structlog
from tidemarkpb.v1 import capture_pb2 as pb

from server.capture import metrics
from server.capture.processor import (
    Assignment,
    MakeProcessor,
    Processor,
    ProcessorPosition,
    ProcessorStats,
    Sink,
)
from server.capture.worker.combined import (
    CombinedSink,
    SchemaChangeRouter,
    WorkerChunks,
    changes_by_worker,
)
from server.capture.worker.pool import Worker, Workers
from server.capture.worker.remote import RemoteShare
from server.changefeed.table import SourceTable
from server.dump.cluster.chunks import Dumpable
from server.puller.source import Puller, TableChange
from server.puller.tikv.puller import TablePuller
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.tasks import apart, beside

W = TypeVar("W")
_LOOK_EVERY_S = 0.5
_SETTLED_S = 2.0
"""Workers that come or go do so one after the other, as when all are restarted."""
_log = structlog.get_logger(__name__)


class TablePlacement(Generic[W]):
    """Which worker has which table, for one run of a changefeed; any thread may ask."""

    def __init__(self, workers: Sequence[W], changefeed: str, spans: Iterable[Span] = ()) -> None:
        """`spans` are placed at once, in their order."""
        # Among equals the first worker is another one for each changefeed: many changefeeds of one
        # table each are spread, too.
        first = zlib.crc32(changefeed.encode()) % len(workers)
        self.workers = (*workers[first:], *workers[:first])
        self._tables = Counter[int]()
        self._places: dict[Span, int] = {}
        self._lock = threading.Lock()
        for span in spans:
            self.worker(span)

    def worker(self, span: Span) -> W:
        """The table's worker; a table that was not known gets one."""
        place = self._places.get(span)
        return self.workers[self._place(span) if place is None else place]

    def _place(self, span: Span) -> int:
        with self._lock:
            place = self._places.get(span)
            if place is None:
                place = min(range(len(self.workers)), key=lambda each: (self._tables[each], each))
                self._tables[place] += 1
                self._places[span] = place
            return place


class WorkersProcessor(ProcessorPosition):
    """Implements `server.capture.processor.Processor` over the workers of `workers`."""

    sink: CombinedSink | None = None

    def __init__(self, workers: Workers, assignment: Assignment) -> None:
        self.start_ts = assignment.checkpoint_ts
        self.table_pullers: tuple[TablePuller, ...] = ()
        self._workers = workers
        self._placement: TablePlacement[Worker] | None = None
        self._name = assignment.changefeed
        self._catalog = assignment.catalog
        self._source = assignment.source
        self._stop_ts = assignment.stop_ts
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
        placement = self._placement
        return (placement.worker(span).location,) if placement else ()

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
        self._placement = placement = TablePlacement(self._workers.workers(), self._name, spans)
        shares = self._shared_out(placement, () if schemas is None else placement.workers)
        owners = {span: share for share in shares.values() for span in share.tables}
        sink = CombinedSink(owners, self._workers.executor, shares.values())
        router = SchemaChangeRouter(self._catalog, shares, placement.worker, sink)
        async with self._serving(tuple(shares.values()), sink), asyncio.TaskGroup() as tasks:
            for share in shares.values():
                run = share.run(self._stop_ts, sink.notify, limited=schemas is not None)
                tasks.create_task(run, name=f"share of {self._name}")
            # Readers may ask when every share serves: a position of one that has not reported yet
            # would be the start's.
            for share in shares.values():
                await share.running.wait()
            self.sink = sink
            if schemas is not None:
                self._follow(schemas, router, tasks)
                self._dump(WorkerChunks(self._catalog, shares, placement.worker), tasks)

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
            self._placement = None
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
        """Dump the tables as somebody asks for it."""
        dump = self._source.dump(chunks) if isinstance(self._source, Dumpable) else None
        if dump is not None:
            tasks.create_task(dump.run(), name=f"dump of {self._name}")

    def _shared_out(
        self, placement: TablePlacement[Worker], workers: Sequence[Worker]
    ) -> dict[Worker, RemoteShare]:
        """Make a share for each worker that has tables of this changefeed,
        and for each of `workers`.
        """
        tables: dict[Worker, list[SourceTable]] = {worker: [] for worker in workers}
        changes: dict[Worker, list[TableChange]] = {}
        for table in self._catalog.at(self.start_ts):
            tables.setdefault(placement.worker(table.span), []).append(table)
        for ddl in self._catalog.versions.ddls(self.start_ts + 1, len(self._catalog.history)):
            for worker, change in changes_by_worker(self._catalog, ddl, placement.worker).items():
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


class _WorkersChangedError(Exception):
    """Other workers are there than those that have the changefeed's tables."""


class RebalancingProcessor:
    """Implements `server.capture.processor.Processor`.

    `workers` are those that can be used now, none but this process if it is empty; `here` and
    `divided` make the processor for the one and the other.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        here: MakeProcessor,
        divided: MakeProcessor,
        assignment: Assignment,
    ) -> None:
        self._workers = workers
        self._here = here
        self._divided = divided
        self._assignment = assignment
        self._inner: Processor = here(assignment)

    @property
    def start_ts(self) -> int:
        """See `Processor`."""
        return self._inner.start_ts

    @property
    def sink(self) -> Sink | None:
        """See `Processor`."""
        return self._inner.sink

    @property
    def checkpoint_ts(self) -> int:
        """See `Processor`."""
        return self._inner.checkpoint_ts

    @property
    def resolved_ts(self) -> int:
        """See `Processor`."""
        return self._inner.resolved_ts

    @property
    def table_pullers(self) -> Sequence[TablePuller]:
        """See `Processor`."""
        return self._inner.table_pullers

    @property
    def repairing(self) -> Collection[Span]:
        """See `Processor`."""
        return self._inner.repairing

    @property
    def damage(self) -> TidemarkError | None:
        """See `Processor`."""
        return self._inner.damage

    def stats(self) -> ProcessorStats:
        """See `Processor`."""
        return self._inner.stats()

    def locations(self, span: Span) -> tuple[str, ...]:
        """See `Processor`."""
        return self._inner.locations(span)

    async def blockers(self, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
        """See `Processor`."""
        return await self._inner.blockers(most, with_locks=with_locks)

    def wipe(self) -> None:
        """See `Processor`."""
        self._here(self._assignment).wipe()
        self._divided(self._assignment).wipe()

    async def run(self) -> None:
        """See `Processor`."""
        while True:
            workers = tuple(self._workers())
            make = self._divided if workers else self._here
            self._inner = make(replace(self._assignment, checkpoint_ts=self._inner.start_ts))
            try:
                await apart(self._run_among(workers))
            except* _WorkersChangedError:
                metrics.MOVES.labels(self._assignment.changefeed).inc()
                _log.info(
                    "tables are rebalanced",
                    changefeed=self._assignment.changefeed,
                    workers=[worker.name for worker in self._workers()],
                )

    async def _run_among(self, workers: Sequence[Worker]) -> None:
        """Run it until there are others; raises _WorkersChangedError then."""
        async with beside(self._inner.run()):
            await self._changed(workers)

    async def _changed(self, workers: Sequence[Worker]) -> None:
        """Wait until other workers are there; raises _WorkersChangedError."""
        # A worker that is gone for a moment, as one that is restarted, is no reason to pull all
        # tables anew: only workers that have been others for `_SETTLED_S` are.
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        while loop.time() - since_s < _SETTLED_S:
            await asyncio.sleep(_LOOK_EVERY_S)
            if tuple(self._workers()) == tuple(workers):
                since_s = loop.time()
        raise _WorkersChangedError
