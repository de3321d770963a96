"""A changefeed that runs in this process: a puller per table, one sorter, one sink manager."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tidemarkpb.v1 import capture_pb2 as pb

from server.capture.cut import CutPart, cut_part
from server.capture.processor import ProcessorStats
from server.capture.stragglers import add_locks, slowest_tables
from server.puller.table import SourceTable
from server.puller.tikv.feed import EventFeeds
from server.puller.tikv.puller import TablePuller, Upstream
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from sink.cut import Bounds
from sink.manager import SinkManager, Slice
from sorter import Sorter
from storage.model.span import Span

_THREADS = 2
_SINK_WORKERS = 2
_SORTER_SHARE = 4  # of the memory quota, at most _SORTER_BYTES
_SORTER_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Resources:
    """What the processors of a process share."""

    pd: PdClient
    feeds: EventFeeds
    kv: KvClient
    directory: Path
    memory_quota_bytes: int
    """For each changefeed."""


class LocalSink(SinkManager):
    """A sink manager that answers for several tables at once, and for its part of a cut over several processes."""

    def __init__(self, sorter: Sorter, spans: Sequence[Span], *, memory_quota_bytes: int, workers: int = 2) -> None:
        """`spans` are the tables that will be added."""
        super().__init__(sorter, memory_quota_bytes=memory_quota_bytes, workers=workers)
        self._rows = sorter
        self._spans = tuple(spans)

    def cut_part(self, start_ts: int, upper_ts: int, bounds: Bounds) -> CutPart:
        """See `server.capture.cut`; raises as `cut`."""
        end_ts = min(upper_ts, self.cut(start_ts, bounds.max_rows, bounds.max_bytes))
        if bounds.is_open or end_ts <= start_ts:
            return CutPart(end_ts)
        extents = (self._rows.extents(span, start_ts + 1, end_ts) for span in self._spans)
        return cut_part(itertools.chain.from_iterable(extents), start_ts, end_ts)

    def plan_tables(self, spans: Sequence[Span], start_ts: int, end_ts: int) -> list[Slice]:
        """See `Sink.plan_tables`."""
        return [self.plan(span, start_ts, end_ts) for span in spans]


class LocalProcessor:
    """Pulls, sorts and serves `tables` from `checkpoint_ts` (exclusive), up to `target_ts` if it is not 0."""

    def __init__(
        self, resources: Resources, name: str, tables: tuple[SourceTable, ...], checkpoint_ts: int, target_ts: int
    ) -> None:
        self.tables = tables
        self.start_ts = checkpoint_ts
        self.sink: LocalSink | None = None
        self.pullers: tuple[TablePuller, ...] = ()
        self._name = name
        self._target_ts = target_ts
        self._resources = resources
        self._directory = resources.directory / name
        self._sorter: Sorter | None = None

    @property
    def checkpoint_ts(self) -> int:
        """Everything up to it is at the target."""
        return self.sink.checkpoint_ts() if self.sink else self.start_ts

    @property
    def resolved_ts(self) -> int:
        """Everything up to it can be read."""
        return self.sink.resolved_ts() if self.sink else self.start_ts

    def stats(self) -> ProcessorStats:
        """See `Processor.stats`."""
        sink, sorter = self.sink, self._sorter
        if sink is None or sorter is None:
            return ProcessorStats()
        regions = sum(puller.regions for puller in self.pullers)
        sorted_rows = sorter.stats()
        return ProcessorStats(regions, sink.stats().used_bytes, sorted_rows.memory_bytes, sorted_rows.disk_bytes)

    def locations(self, span: Span) -> tuple[str, ...]:  # noqa: ARG002 - all tables are here
        """None but the capture's own."""
        return ()

    async def blockers(self, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
        """See `Processor.blockers`."""
        tables, stands = slowest_tables(self, most)
        if with_locks:
            await add_locks(stands, self._resources.kv, most)
        return tables

    async def run(self) -> None:
        """See `Processor.run`."""
        quota = self._resources.memory_quota_bytes
        sorter_bytes = min(quota // _SORTER_SHARE, _SORTER_BYTES)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix=f"puller {self._name}") as executor:
            sorter = await _opened(self._directory, sorter_bytes)
            spans = [table.span for table in self.tables]
            sink = LocalSink(sorter, spans, memory_quota_bytes=quota - sorter_bytes, workers=_SINK_WORKERS)
            async with self._serving(sorter, sink):
                await self._pull(sorter, Upstream(self._resources.pd, self._resources.feeds, executor))

    def wipe(self) -> None:
        """See `Processor.wipe`."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @asynccontextmanager
    async def _serving(self, sorter: Sorter, sink: LocalSink) -> AsyncIterator[None]:
        if self._target_ts:
            sink.update_barrier_ts(self._target_ts)
        for table in self.tables:
            sorter.add_table(table.span, self.start_ts)
            sink.add_table(table.span, self.start_ts, table.mounter.mount)
        sink.start()
        self._sorter, self.sink = sorter, sink
        try:
            yield
        finally:
            self.start_ts = sink.checkpoint_ts()
            self._sorter, self.sink = None, None
            await asyncio.shield(asyncio.to_thread(self._close, sorter, sink))  # whoever cancels twice, too

    def _close(self, sorter: Sorter, sink: LocalSink) -> None:
        sink.stop()
        for table in self.tables:
            sink.remove_table(table.span)
        sorter.close()

    async def _pull(self, sorter: Sorter, upstream: Upstream) -> None:
        self.pullers = tuple(TablePuller(table.span, self.start_ts, upstream, sorter) for table in self.tables)
        try:
            async with asyncio.TaskGroup() as tasks:
                for puller in self.pullers:
                    tasks.create_task(puller.run(), name=f"puller {self._name} {puller.span.table_id}")
        finally:
            self.pullers = ()


async def _opened(directory: Path, memory_bytes: int) -> Sorter:
    """A sorter; one that nobody waits for any more when it has been opened is closed again."""
    opening = asyncio.get_running_loop().run_in_executor(None, partial(Sorter, directory, memory_bytes=memory_bytes))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(opened: asyncio.Future[Sorter]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()
