"""What a pump does by itself: heartbeat binlogs when nobody writes, GC of what is older than the retention."""

import asyncio
import time

import structlog

from server.pump.service import PumpService
from server.rpc.pd import PdClient
from storage.model.errors import TidemarkError
from storage.model.ts import compose, physical_ms
from storage.pump.append import Append
from storage.pump.binlog import fake, parse

_log = structlog.get_logger(__name__)


async def write_heartbeats(service: PumpService, storage: Append, pd: PdClient, interval_seconds: float) -> None:
    """Store a fake binlog whenever no binlog came for the interval, so that readers see time pass; until cancelled."""
    while True:
        idle_seconds = time.monotonic() - service.last_write
        if idle_seconds < interval_seconds:
            await asyncio.sleep(interval_seconds - idle_seconds)
            continue
        try:
            await storage.write([parse(fake(await pd.tso()))])
        except TidemarkError as err:
            _log.warning("heartbeat binlog not written", error=str(err))
        service.last_write = time.monotonic()


async def collect_garbage(storage: Append, pd: PdClient, retention_seconds: int, interval_seconds: float) -> None:
    """Remove what is older than the retention, again and again until cancelled."""
    while True:
        await asyncio.sleep(interval_seconds)
        try:
            gc_ts = compose(physical_ms(await pd.tso()) - retention_seconds * 1000)
            deleted = await storage.gc(gc_ts)
            _log.info("gc ran", gc_ts=storage.gc_ts, index_keys=deleted, log_bytes=storage.statistics().log_bytes)
        except TidemarkError as err:
            _log.error("gc failed", error=str(err))
