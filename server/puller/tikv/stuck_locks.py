"""Frees regions whose resolved_ts stands still because a dead client left its locks.

A region's resolved_ts cannot pass an open lock, and a store never ends a transaction by itself.
Whoever waits for the region must ask the lock's primary, as a reader would; live transactions are
left alone.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from server.puller import metrics
from server.puller.tikv.puller import TablePuller
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.codec import decode_bytes
from storage.model.errors import TidemarkError
from storage.model.span import KeyRange

_EVERY_S = 1.0
_LAG_MS = 2_000
_PAGE = 256
_RANGE_S = 30.0

_log = structlog.get_logger(__name__)


class StuckLocks:
    """Looks after all pullers of a process."""

    def __init__(
        self, pd: PdClient, kv: KvClient, pullers: Callable[[], Iterable[TablePuller]]
    ) -> None:
        self._pd = pd
        self._kv = kv
        self._resolver = LockResolver(pd, kv)
        self._pullers = pullers

    async def run(self) -> None:
        """Look every second until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self._free_all()
            except (TidemarkError, TimeoutError) as err:
                _log.warning("stuck locks cannot be resolved now", error=str(err))

    async def _free_all(self) -> None:
        pullers = [puller for puller in self._pullers() if puller.regions]
        if not pullers:
            return
        now_ts = await self._pd.tso()
        for part in {part for puller in pullers for part in puller.stuck(now_ts, _LAG_MS)}:
            async with asyncio.timeout(_RANGE_S):
                await self._free(part, now_ts)

    async def _free(self, part: KeyRange, now_ts: int) -> None:
        key: bytes | None
        key, end_key = raw_bounds(part)
        while key is not None:
            page = await self._kv.scan_lock(key, end_key, now_ts, _PAGE)
            if page.locks:
                metrics.LOCKS_RESOLVED.inc(len(page.locks))
                await self._resolver.resolve(page.locks, 0)
            key = page.next_key


def raw_bounds(part: KeyRange) -> tuple[bytes, bytes]:
    """The raw keys of a range of encoded ones; an empty end key is no end."""
    return _raw(part.start_key), _raw(part.end_key)


def _raw(encoded: bytes) -> bytes:
    return decode_bytes(encoded)[0] if encoded else b""
