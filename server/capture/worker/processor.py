"""A changefeed whose tables are dealt to the capture's worker processes; behaves as one that runs in one process.

An error of one share ends them all: the runner decides, as ever, whether to begin again at the checkpoint. So does the
death of a worker, which is started again meanwhile. No range changes by that: what is above the checkpoint is pulled
anew, and is the same.
"""

import asyncio
import heapq
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from tidemarkpb.v1 import capture_pb2 as pb

from server.capture.processor import Assignment, ProcessorStats
from server.capture.worker.combined import CombinedSink
from server.capture.worker.directory import sorter_directory
from server.capture.worker.pool import Pool, Worker
from server.capture.worker.remote import RemoteShare
from server.puller.table import SourceTable
from server.puller.tikv.puller import TablePuller
from storage.model.errors import TidemarkError
from storage.model.span import Span


class WorkersProcessor:
    """Implements `server.capture.processor.Processor` over the workers of `pool`."""

    def __init__(
        self,
        pool: Pool,
        directory: Path,
        assignment: Assignment,
    ) -> None:
        self.start_ts = assignment.checkpoint_ts
        self.sink: CombinedSink | None = None
        self.table_pullers: tuple[TablePuller, ...] = ()
        self._pool = pool
        self._directory = directory
        self._name = assignment.changefeed
        self._catalog = assignment.catalog
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

    @property
    def checkpoint_ts(self) -> int:
        """Everything up to it is at the target."""
        sink = self.sink
        return sink.checkpoint_ts() if sink else self.start_ts

    @property
    def resolved_ts(self) -> int:
        """Everything up to it can be read."""
        sink = self.sink
        return sink.resolved_ts() if sink else self.start_ts

    def stats(self) -> ProcessorStats:
        """The sum over the workers."""
        return sum((share.mirror.stats for share in self._shares), ProcessorStats())

    def locations(self, span: Span) -> tuple[str, ...]:
        """Where the table's worker serves its rows itself."""
        return (self._pool.owner(span).location,)

    async def blockers(self, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
        """See `Processor.blockers`; of a worker that is silent, what was known of its tables before."""
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_blockers(share, most, with_locks=with_locks)) for share in self._shares]
        found = [table for task in asked for table in task.result()]
        return heapq.nsmallest(most, found, key=lambda table: table.resolved_ts)

    async def run(self) -> None:
        """See `Processor.run`."""
        shares = self._dealt()
        owners = {span: share for share in shares for span in share.tables}
        sink = CombinedSink(owners, self._pool.executor)
        async with self._serving(shares, sink), asyncio.TaskGroup() as tasks:
            for share in shares:
                tasks.create_task(share.run(self._target_ts, sink.notify), name=f"share of {self._name}")
            for share in shares:
                await share.running.wait()
            self.sink = sink

    def wipe(self) -> None:
        """See `Processor.wipe`."""
        for worker in self._pool.workers:
            shutil.rmtree(sorter_directory(self._directory, worker.number) / self._name, ignore_errors=True)

    @asynccontextmanager
    async def _serving(self, shares: tuple[RemoteShare, ...], sink: CombinedSink) -> AsyncIterator[None]:
        self._shares = shares
        try:
            yield
        finally:
            self.start_ts = max(self.start_ts, sink.checkpoint_ts())
            self._shares, self.sink = (), None

    def _dealt(self) -> tuple[RemoteShare, ...]:
        """One share for each worker that has tables of this changefeed."""
        dealt: dict[Worker, list[SourceTable]] = {}
        for table in self._catalog.at(self.start_ts):
            dealt.setdefault(self._pool.owner(table.span), []).append(table)
        return tuple(RemoteShare(worker, self._name, tables, self.start_ts) for worker, tables in dealt.items())


async def _blockers(share: RemoteShare, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
    try:
        return await asyncio.to_thread(share.blockers, most, with_locks=with_locks)
    except TidemarkError as err:
        return share.known_blockers(most, str(err))
