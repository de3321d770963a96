"""The pump's background tasks: heartbeat binlogs when there are no writes, GC of binlogs older than
the retention, and checks of the index, of the age of segments and of disk space.
"""

import asyncio
from pathlib import Path

import structlog

from server.pump import metrics
from server.pump.registry import slowest_drainer
from server.rpc.pd import PdClient
from storage.meta.meta import Meta
from storage.model.errors import TidemarkError
from storage.model.ts import compose, physical_ms
from storage.pump.binlog import fake, parse
from storage.pump.gc import Collected
from storage.pump.storage import PumpStorage
from storage.vfs import FS

_WATCH_SECONDS = 3.0
_DISK_SECONDS = 3.0

_log = structlog.get_logger(__name__)


async def write_heartbeats(storage: PumpStorage, pd: PdClient, interval_seconds: float) -> None:
    """Store a fake binlog whenever no binlog came for the interval,
    so that readers see time pass; until cancelled.
    """
    while True:
        written = storage.written
        await asyncio.sleep(interval_seconds)
        # Other binlogs came, which show readers the time, too.
        if storage.written > written:
            continue
        try:
            await storage.write([parse(fake(await pd.tso()))])
        except TidemarkError as err:
            _log.warning("heartbeat binlog not written", error=str(err))


class GarbageCollector:
    """Removes binlogs that are older than the retention, unless a reader needs them, and logs when
    a reader loses some.

    A connected reader needs what it has not received, a registered drainer what it has not brought
    downstream; both hold GC back up to the forced age.
    """

    def __init__(
        self,
        storage: PumpStorage,
        pd: PdClient,
        meta: Meta,
        retention_seconds: int,
        force_seconds: int,
    ) -> None:
        self._storage = storage
        self._pd = pd
        self._meta = meta
        self._retention_ms = retention_seconds * 1000
        self._force_ms = max(retention_seconds, force_seconds) * 1000

    async def run(self, interval_seconds: float) -> None:
        """Collect after each interval, until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            try:
                await self.collect()
            except TidemarkError as err:
                _log.error("gc failed", error=str(err))

    async def collect(self) -> Collected:
        """One GC, by age.

        Raises:
            TidemarkError: the coordinator gives no timestamp, or the disk refuses.
        """
        now_ms = physical_ms(await self._pd.tso())
        aged_ts, forced_ts = (
            compose(max(0, now_ms - age_ms)) for age_ms in (self._retention_ms, self._force_ms)
        )
        # Drainers that are not connected now count, too: they will go on from their position.
        needed_ts, drainer = await slowest_drainer(self._meta)
        if needed_ts < aged_ts:
            _log.warning(
                "gc waits for a drainer", drainer=drainer, at_ts=needed_ts, forced_ts=forced_ts
            )
        done = await self._storage.gc(min(aged_ts, needed_ts), force_ts=forced_ts)
        metrics.GC_KEYS.inc(done.keys)
        metrics.GC_PAUSES.inc(done.pauses)
        _log.info("gc ran", **done._asdict(), log_bytes=self._storage.statistics().log_bytes)
        if done.overtaken:
            metrics.GC_OVERTAKEN.inc(done.overtaken)
            _log.error(
                "gc removed binlogs that connected readers have not had; they must begin anew "
                "from a dump",
                readers=done.overtaken,
                gc_ts=done.gc_ts,
            )
        return done


async def watch_index(storage: PumpStorage) -> None:
    """Log when the index falls behind the log, and when it has caught up, until cancelled."""
    was_behind = False
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        statistics = storage.statistics()
        if statistics.index_behind and not was_behind:
            reason = storage.indexer.last_failure or "its writes are slow"
            _log.error(
                "the index is behind the log: readers wait, writers do not", reason=str(reason)
            )
        if was_behind and not statistics.index_behind:
            _log.warning("the index has caught up with the log", failures=statistics.index_failures)
        was_behind = statistics.index_behind


async def rotate_segments(storage: PumpStorage, interval_seconds: float) -> None:
    """Finalise the current segment after each interval, until cancelled."""
    while True:
        await asyncio.sleep(interval_seconds)
        await storage.rotate()


class DiskWatch:
    """The space left where the binlogs are, read again every few seconds."""

    def __init__(self, fs: FS, directory: Path, stop_write_at_bytes: int) -> None:
        self.stop_write_at_bytes = stop_write_at_bytes
        self.available_bytes = fs.available_bytes(directory)
        self._fs = fs
        self._directory = directory

    @property
    def is_low(self) -> bool:
        """Whether binlogs should be refused for want of disk space."""
        return self.available_bytes < self.stop_write_at_bytes

    async def run(self) -> None:
        """Keep reading until cancelled."""
        while True:
            await asyncio.sleep(_DISK_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the space again; a change of mind is logged,
        a file system that does not answer is taken as before.
        """
        was_low = self.is_low
        try:
            self.available_bytes = await asyncio.to_thread(
                self._fs.available_bytes, self._directory
            )
        # A network file system that does not answer: keep the last decision rather than refuse
        # everything.
        except OSError as err:
            _log.warning("disk space not known", error=err.strerror)
        if self.is_low != was_low:
            phrase = "disk is low, binlogs are refused" if self.is_low else "disk has room again"
            _log.warning(
                phrase, available=self.available_bytes, stop_write_at=self.stop_write_at_bytes
            )
