"""A changefeed that runs in this process: its pullers, one sorter, one sink manager.

`LocalProcessor` opens them for a `Run` and closes them after it. It also reports what holds the
changefeed back: the tables that are furthest behind, their slowest regions, and the locks that hold
those. Locks are read from the store when somebody asks, only of a region that has stood still, and
with a deadline: that a store does not answer is an answer, too.
"""

import asyncio
import heapq
import shutil
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from kvproto import kvrpcpb_pb2 as kvrpcpb
from pyspark_tidemark import tracing
from tidemarkpb.v1 import capture_pb2 as pb

from server.capture import long_lived
from server.capture.errors import ChangefeedNotRunningError, TableMoveError
from server.capture.processor import Assignment, ProcessorPosition, ProcessorStats
from server.capture.pulling import SorterRows
from server.capture.run import LocalSink, Run
from server.capture.traffic import Traffic
from server.changefeed.table import SourceTable
from server.puller.open_transactions import OpenTransactions
from server.puller.source import Peer, SourceContext
from server.puller.tikv.puller import RegionProgress, TablePuller, raw_bounds
from server.rpc.enum_name import enum_name
from server.rpc.tikv import KvClient
from sink.range_times import RangeTimes
from sorter import Sorter, SorterSettings
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import physical_ms
from storage.spill_codec import PLAIN, SpillCodec

_THREADS = 2
_SINK_WORKERS = 2
_STAGE_AFTER_S = 1.0  # a lake that keeps up cuts twice a second
# The sorter gets a quarter of the memory quota, up to _SORTER_BYTES.
_SORTER_SHARE = 4
_SORTER_BYTES = 128 << 20
# Rows of transactions that have not ended get an eighth of it, up to _OPEN_BYTES.
_OPEN_SHARE = 8
_OPEN_BYTES = 64 << 20
# It lies in the sorter's directory, which is emptied at the start.
_OPEN_DIRECTORY = "open-transactions"
LOCKS_MAX = 100
_THREAD_TABLES_MIN = 1000
"""From this number of tables on they are opened in a thread: opening a hundred thousand tables
takes seconds.
"""
_STUCK_MS = 2_000
_LOCKS_S = 1.0


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources shared by the processors of a process."""

    context: SourceContext
    directory: Path
    memory_quota_bytes: int
    """The memory quota of each changefeed."""
    codec: SpillCodec = PLAIN
    """The form of rows spilled to disk: compressed, encrypted, or plain."""


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
        """The pullers of this process that pull regions."""
        run = self._run
        return tuple(run.pulling.table_pullers) if run and run.pulling else ()

    @property
    def slowest_peers(self) -> tuple[Peer, ...]:
        """See `server.capture.local.Pulled`."""
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

    def traffic(self) -> Mapping[Span, Traffic]:
        """See `Processor.traffic`."""
        run = self._run
        return run.traffic() if run else {}

    def locations(self, span: Span) -> tuple[str, ...]:  # noqa: ARG002 - all tables are here
        """None but the capture's own."""
        return ()

    def places(self, span: Span) -> tuple[str, ...]:  # noqa: ARG002 - all tables are here
        """See `Processor.places`."""
        return ()

    def worker_of(self, span: Span) -> str:  # noqa: ARG002 - all tables are here
        """See `Processor.worker_of`."""
        return ""

    def has_share_at(self, capture: str) -> bool:  # noqa: ARG002 - all tables are here
        """See `Processor.has_share_at`."""
        return False

    def moving_to(self, span: Span) -> tuple[str, int]:  # noqa: ARG002 - none can
        """See `Processor.moving_to`."""
        return "", 0

    async def move_table(self, span: Span, worker: str) -> None:  # noqa: ARG002 - none can
        """See `Processor.move_table`."""
        raise self._cannot_move()

    async def split_table(self, span: Span, *, put_together: bool) -> None:  # noqa: ARG002 - none can
        """See `Processor.split_table`."""
        raise self._cannot_move()

    def _cannot_move(self) -> TableMoveError:
        return TableMoveError(
            f"all tables of changefeed {self._assignment.changefeed} are read by one capture: tables "
            "of a cluster move between captures when there are several; a log is read as a whole"
        )

    async def blockers(self, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
        """See `Processor.blockers`."""
        tables, stuck = slowest_tables(self, self._assignment.catalog.tables, most)
        if with_locks:
            await add_locks(stuck, self._resources.context.kv, most)
        return tables

    async def adopt(self, table: SourceTable, from_ts: int, start_ts: int) -> None:
        """See `Run.adopt`; raises ChangefeedNotRunningError, too."""
        await self._running().adopt(table, from_ts, start_ts)

    async def release(self, span: Span) -> None:
        """See `Run.release`; raises ChangefeedNotRunningError, too."""
        await self._running().release(span)

    def _running(self) -> Run:
        if self._run is None:
            raise ChangefeedNotRunningError(
                f"changefeed {self._assignment.changefeed} does not run here now; try again"
            )
        return self._run

    async def run(self) -> None:
        """See `Processor.run`."""
        name, quota = self._assignment.changefeed, self._resources.memory_quota_bytes
        sorter_bytes = min(quota // _SORTER_SHARE, _SORTER_BYTES)
        open_bytes = min(quota // _OPEN_SHARE, _OPEN_BYTES)
        # The open transactions' share counts twice: for the rows that are kept back, and as much
        # again for what has arrived.
        sink_bytes = quota - sorter_bytes - 2 * open_bytes
        with (
            closing(
                OpenTransactions(
                    self._directory / _OPEN_DIRECTORY, open_bytes, codec=self._resources.codec
                )
            ) as open_transactions,
            ThreadPoolExecutor(_THREADS, thread_name_prefix=f"puller {name}") as executor,
        ):
            settings = SorterSettings(memory_bytes=sorter_bytes, codec=self._resources.codec)
            sorter = await _opened(self._directory, settings)
            times = RangeTimes() if tracing.is_on() else None
            sink = LocalSink(
                sorter,
                memory_quota_bytes=sink_bytes,
                workers=_SINK_WORKERS,
                stage_after_s=_STAGE_AFTER_S,
                times=times,
            )
            run = Run(
                self._assignment,
                self.start_ts,
                SorterRows(sorter, executor, open_transactions, times),
                sink,
            )
            try:
                async with self._serving(run):
                    await run.pull()
            finally:
                open_transactions.stop()

    def wipe(self) -> None:
        """See `Processor.wipe`."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @asynccontextmanager
    async def _serving(self, run: Run) -> AsyncIterator[None]:
        try:
            await self._open(run)
            self._run, self.sink = run, run.sink
            yield
        finally:
            # The next run begins where readers have acknowledged, also if that is not durable yet:
            # what they have committed is not pulled again.
            self.start_ts = max(self.start_ts, run.sink.checkpoint_ts())
            # No new call may find the sink from here on; those under way get TableNotFoundError,
            # which is reported as "not running".
            self._run = self.sink = None
            # Closing goes on even if this task is cancelled a second time: the next run wipes and
            # opens the same directory.
            await asyncio.shield(asyncio.to_thread(run.close))

    async def _open(self, run: Run) -> None:
        tables = len(self._assignment.catalog.read())
        if tables < _THREAD_TABLES_MIN:
            run.open()
            return
        with long_lived.building_tables(tables):
            opening = asyncio.get_running_loop().run_in_executor(None, run.open)
            try:
                await asyncio.shield(opening)
            except asyncio.CancelledError:
                # A thread cannot be cancelled, and what it opens is closed next.
                await asyncio.shield(asyncio.wait([opening]))
                raise


async def _opened(directory: Path, settings: SorterSettings) -> Sorter:
    """Open a sorter; if the caller is cancelled meanwhile, it is closed before that goes on."""
    # A thread cannot be cancelled. Whoever cancels wipes the directory next, or opens it again: a
    # sorter that is opened meanwhile would make it anew, or have its lock.
    opening = asyncio.get_running_loop().run_in_executor(None, Sorter, directory, settings)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await asyncio.shield(_closed(opening))
        raise


async def _closed(opening: asyncio.Future[Sorter]) -> None:
    await asyncio.wait([opening])
    if opening.exception() is None:
        await asyncio.to_thread(opening.result().close)


def slowest_tables(
    processor: LocalProcessor, tables: Sequence[SourceTable], most: int
) -> tuple[list[pb.TableBlockers], list[tuple[pb.RegionBlockers, RegionProgress]]]:
    """The tables, the slowest first, and of the slowest one the region whose locks are to be read,
    if it has stood still.
    """
    pullers = {puller.span: puller for puller in processor.table_pullers}
    positions = [(table, _pulled_ts(processor, pullers, table)) for table in tables]
    shown: list[pb.TableBlockers] = []
    stuck: list[tuple[pb.RegionBlockers, RegionProgress]] = []
    for table, resolved_ts in heapq.nsmallest(most, positions, key=lambda item: item[1]):
        message = pb.TableBlockers(
            name=table.name, table_id=table.span.table_id, resolved_ts=resolved_ts
        )
        message.checkpoint_ts = (
            processor.sink.checkpoint_ts(table.span) if processor.sink else processor.start_ts
        )
        if table.span in pullers:
            for progress in pullers[table.span].slowest(most):
                region = message.regions.add(
                    region_id=progress.region_id,
                    resolved_ts=progress.resolved_ts,
                    store=progress.store,
                )
                # Locks of the slowest region are enough: it is the one that holds the table back.
                if not stuck and progress.part is not None and _is_stuck(progress.resolved_ts):
                    stuck.append((region, progress))
        else:
            for peer in processor.slowest_peers:
                message.regions.add(
                    pump=peer.name, store=peer.address, resolved_ts=peer.position_ts
                )
        shown.append(message)
    return shown, stuck


def _pulled_ts(
    processor: LocalProcessor, pullers: Mapping[Span, TablePuller], table: SourceTable
) -> int:
    """Return the ts up to which the table was pulled; tables of a log count as pulled up to the ts
    that was added.
    """
    if table.span in pullers:
        return pullers[table.span].resolved_ts
    return processor.sink.resolved_ts(table.span) if processor.sink else processor.start_ts


async def add_locks(
    stuck: Sequence[tuple[pb.RegionBlockers, RegionProgress]], kv: KvClient, most: int
) -> None:
    """The locks that the regions' resolved_ts cannot pass: it stands right before the oldest."""
    async with asyncio.TaskGroup() as tasks:
        for region, progress in stuck:
            tasks.create_task(_add_locks(region, progress, kv, most))


async def _add_locks(
    region: pb.RegionBlockers, progress: RegionProgress, kv: KvClient, most: int
) -> None:
    assert progress.part is not None
    start_key, end_key = raw_bounds(progress.part)
    try:
        # Blockers are asked for when something is wrong, so the store may be what is wrong.
        async with asyncio.timeout(_LOCKS_S):
            page = await kv.scan_lock(start_key, end_key, progress.resolved_ts + 1, LOCKS_MAX)
    except TimeoutError:
        region.problem = f"its store does not tell its locks within {_LOCKS_S:g} s"
    except TidemarkError as err:
        region.problem = str(err)
    else:
        region.locks.extend(
            map(_lock, heapq.nsmallest(most, page.locks, key=lambda lock: lock.lock_version))
        )


def _is_stuck(resolved_ts: int) -> bool:
    return time.time() * 1000 - physical_ms(resolved_ts) > _STUCK_MS


def _lock(info: kvrpcpb.LockInfo) -> pb.LockBlocker:
    return pb.LockBlocker(
        start_ts=info.lock_version,
        primary=info.primary_lock,
        key=info.key,
        ttl_ms=info.lock_ttl,
        kind=enum_name(kvrpcpb.Op, info.lock_type).lower(),
    )
