"""A changefeed that runs in this process: its pullers, one sorter, one sink manager."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from tidemarkpb.v1 import capture_pb2 as pb

from server.capture.processor import Assignment, ProcessorPosition, ProcessorStats
from server.capture.rows import SorterRows
from server.capture.run import LocalSink, Run
from server.capture.slowest_tables import add_locks, slowest_tables
from server.puller.source import Peer, SourceContext
from server.puller.tikv.open_transactions import OpenTransactions
from server.puller.tikv.puller import TablePuller
from sorter import Sorter, SorterSettings
from storage.model.errors import TidemarkError
from storage.model.span import Span

_THREADS = 2
_SINK_WORKERS = 2
_SORTER_SHARE = 4  # of the memory quota, at most _SORTER_BYTES
_SORTER_BYTES = 128 << 20
# of the memory quota, for rows of transactions that have not ended, at most _OPEN_BYTES
_OPEN_SHARE = 8
_OPEN_BYTES = 64 << 20
# in the sorter's, which is emptied at start
_OPEN_DIRECTORY = "open-transactions"


@dataclass(frozen=True, slots=True)
class Resources:
    """What the processors of a process share."""

    context: SourceContext
    directory: Path
    memory_quota_bytes: int
    """For each changefeed."""


class LocalProcessor(ProcessorPosition):
    """Implements `server.capture.processor.Processor`."""

    sink: LocalSink | None = None

    def __init__(self, resources: Resources, assignment: Assignment) -> None:
        self.start_ts = assignment.checkpoint_ts
        self._assignment = assignment
        self._resources = resources
        self._directory = resources.directory / assignment.changefeed
        self._run: Run | None = None

    @property
    def table_pullers(self) -> tuple[TablePuller, ...]:
        """Those of this process that pull regions."""
        run = self._run
        return tuple(run.pulling.table_pullers) if run and run.pulling else ()

    @property
    def slowest_peers(self) -> tuple[Peer, ...]:
        """See `server.capture.slowest_tables.Pulled`."""
        run = self._run
        return tuple(run.pulling.slowest_peers) if run and run.pulling else ()

    @property
    def repairing(self) -> Collection[Span]:
        """See `Processor.repairing`."""
        run = self._run
        return run.repairs.spans if run else ()

    @property
    def damage(self) -> TidemarkError | None:
        """See `Processor.damage`."""
        run = self._run
        return run.repairs.error if run else None

    def stats(self) -> ProcessorStats:
        """See `Processor.stats`."""
        run = self._run
        if run is None:
            return ProcessorStats()
        sorter, sink, waiting = (
            run.rows.sorter.stats(),
            run.sink.stats(),
            run.rows.open_transactions,
        )
        return ProcessorStats(
            regions=sum(puller.regions for puller in self.table_pullers),
            staged_bytes=sink.used_bytes,
            sorter_memory_bytes=sorter.memory_bytes,
            sorter_disk_bytes=sorter.disk_bytes,
            disk_error=sorter.disk_error or waiting.disk_error,
            waiting=sorter.waiting + waiting.waiting,
            pulled_ts=run.pulling.resolved_ts if run.pulling else 0,
            sorted_ts=sink.sorted_ts,
        )

    def locations(self, span: Span) -> tuple[str, ...]:  # noqa: ARG002 - all tables are here
        """None but the capture's own."""
        return ()

    async def blockers(self, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
        """See `Processor.blockers`."""
        tables, stands = slowest_tables(self, self._assignment.catalog.tables, most)
        if with_locks:
            await add_locks(stands, self._resources.context.kv, most)
        return tables

    async def run(self) -> None:
        """See `Processor.run`."""
        name, quota = self._assignment.changefeed, self._resources.memory_quota_bytes
        sorter_bytes = min(quota // _SORTER_SHARE, _SORTER_BYTES)
        open_bytes = min(quota // _OPEN_SHARE, _OPEN_BYTES)
        # and as much again for what has arrived
        sink_bytes = quota - sorter_bytes - 2 * open_bytes
        with (
            closing(
                OpenTransactions(self._directory / _OPEN_DIRECTORY, open_bytes)
            ) as open_transactions,
            ThreadPoolExecutor(_THREADS, thread_name_prefix=f"puller {name}") as executor,
        ):
            sorter = await _opened(self._directory, sorter_bytes)
            sink = LocalSink(sorter, memory_quota_bytes=sink_bytes, workers=_SINK_WORKERS)
            run = Run(
                self._assignment,
                self.start_ts,
                SorterRows(sorter, executor, open_transactions),
                sink,
            )
            try:
                async with self._serving(run):
                    await run.keep()
            finally:
                open_transactions.stop()

    def wipe(self) -> None:
        """See `Processor.wipe`."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @asynccontextmanager
    async def _serving(self, run: Run) -> AsyncIterator[None]:
        try:
            run.open()
            self._run, self.sink = run, run.sink
            yield
        finally:
            self.start_ts = max(self.start_ts, run.sink.checkpoint_ts())
            self._run = self.sink = None
            # whoever cancels twice, too
            await asyncio.shield(asyncio.to_thread(run.close))


async def _opened(directory: Path, memory_bytes: int) -> Sorter:
    """A sorter; one that nobody waits for any more when it has been opened is closed again."""
    opening = asyncio.get_running_loop().run_in_executor(
        None, Sorter, directory, SorterSettings(memory_bytes=memory_bytes)
    )
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(opened: asyncio.Future[Sorter]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()
