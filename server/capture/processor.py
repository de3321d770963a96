"""One running changefeed: a puller per table, one sorter, one sink manager; lives as long as `run`.

Everything here is a cache of the upstream. `run` begins at the checkpoint; when it ends, nothing needs to be kept.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from server.capture.table import SourceTable
from server.puller.tikv.feed import EventFeeds
from server.puller.tikv.puller import TablePuller, Upstream
from server.rpc.pd import PdClient
from sink.manager import SinkManager
from sorter import Sorter, SorterStats

_THREADS = 2
_SINK_WORKERS = 2
_SORTER_SHARE = 4  # of the memory quota, at most _SORTER_BYTES
_SORTER_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Resources:
    """What the processors of a capture share."""

    pd: PdClient
    feeds: EventFeeds
    directory: Path
    memory_quota_bytes: int


class Processor:
    """Pulls, sorts and serves `tables` from `checkpoint_ts` (exclusive), up to `target_ts` if it is not 0."""

    def __init__(
        self, name: str, tables: tuple[SourceTable, ...], checkpoint_ts: int, target_ts: int, resources: Resources
    ) -> None:
        self.tables = {table.name: table for table in tables}
        self.start_ts = checkpoint_ts
        self.sink: SinkManager | None = None
        """Set while it runs; any thread may use it."""
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

    @property
    def sorter_stats(self) -> SorterStats | None:
        """Of this moment; None when it does not run."""
        return self._sorter.stats() if self._sorter else None

    async def run(self) -> None:
        """Pull until cancelled.

        Raises:
            TidemarkError: in a group; the changefeed cannot go on as it is.
        """
        quota = self._resources.memory_quota_bytes
        sorter_bytes = min(quota // _SORTER_SHARE, _SORTER_BYTES)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix=f"puller {self._name}") as executor:
            sorter = await asyncio.to_thread(Sorter, self._directory, memory_bytes=sorter_bytes)
            sink = SinkManager(sorter, memory_quota_bytes=quota - sorter_bytes, workers=_SINK_WORKERS)
            async with self._serving(sorter, sink):
                await self._pull(sorter, Upstream(self._resources.pd, self._resources.feeds, executor))

    def wipe(self) -> None:
        """Delete its directory; it does not run any more."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @asynccontextmanager
    async def _serving(self, sorter: Sorter, sink: SinkManager) -> AsyncIterator[None]:
        if self._target_ts:
            sink.update_barrier_ts(self._target_ts)
        for table in self.tables.values():
            sorter.add_table(table.span, self.start_ts)
            sink.add_table(table.span, self.start_ts, table.mounter.mount)
        sink.start()
        self._sorter, self.sink = sorter, sink
        try:
            yield
        finally:
            self.start_ts = sink.checkpoint_ts()
            self._sorter, self.sink = None, None
            await asyncio.to_thread(self._close, sorter, sink)

    def _close(self, sorter: Sorter, sink: SinkManager) -> None:
        sink.stop()
        for table in self.tables.values():
            sink.remove_table(table.span)
        sorter.close()

    async def _pull(self, sorter: Sorter, upstream: Upstream) -> None:
        self.pullers = tuple(TablePuller(table.span, self.start_ts, upstream, sorter) for table in self.tables.values())
        try:
            async with asyncio.TaskGroup() as tasks:
                for puller in self.pullers:
                    tasks.create_task(puller.run(), name=f"puller {self._name} {puller.span.table_id}")
        finally:
            self.pullers = ()
