"""The timestamp oracle.

Invariants (PD's pkg/tso):
1. Every timestamp is greater than all before it, whatever the wall clock does.
2. No timestamp's physical part reaches `limit_ms`, which is durable before it is used; a restart begins at the limit.
   So a kill -9 never makes one go back, at the price of a step of at most `WINDOW_MS`.
"""

import asyncio
import struct
import time
from collections.abc import Callable

import structlog

from server.coordinator import metrics
from server.coordinator.errors import RequestError
from server.coordinator.ledger import Ledger
from storage.meta.errors import MetaUnavailableError
from storage.meta.meta import Put
from storage.model.ts import LOGICAL_MAX

WINDOW_MS = 3000
_SPARE_MS = 1500
_CHECK_SECONDS = 0.5
_NANOSECONDS_PER_MS = 1_000_000
_SAVED = struct.Struct(">Q")
_RETRIES_TEXT = (
    "[PD:tso:ErrGenerateTimestamp]generate timestamp failed, generate tso maximum number of retries exceeded"
)
_COUNT_TEXT = "[PD:tso:ErrGenerateTimestamp]generate timestamp failed, tso count should be positive"

_log = structlog.get_logger(__name__)


class Oracle:
    """The pure half: `(physical_ms, logical)` and the limit."""

    def __init__(self, limit_ms: int) -> None:
        self.limit_ms = limit_ms
        self._physical_ms = limit_ms
        self._logical = 0

    def take(self, count: int, now_ms: int) -> tuple[int, int] | None:
        """Reserve `count` timestamps; returns physical and the last logical, or None when the limit must grow first."""
        physical_ms, last = self._next(count, now_ms)
        if physical_ms >= self.limit_ms:
            return None
        self._physical_ms, self._logical = physical_ms, last
        return physical_ms, last

    def wanted_limit(self, now_ms: int) -> int:
        """The limit to save for the time ahead."""
        return max(now_ms, self._physical_ms + 1) + WINDOW_MS

    def _next(self, count: int, now_ms: int) -> tuple[int, int]:
        if now_ms > self._physical_ms:
            return now_ms, count
        if self._logical + count > LOGICAL_MAX:
            return self._physical_ms + 1, count
        return self._physical_ms, self._logical + count


class TimestampOracle:
    """The shell: the wall clock, and the limit kept in metadata (`/pd/<cluster>/timestamp`, ns, 8 bytes)."""

    def __init__(self, ledger: Ledger, key: bytes, limit_ms: int, clock_ns: Callable[[], int]) -> None:
        self._ledger = ledger
        self._key = key
        self._oracle = Oracle(limit_ms)
        self._clock_ns = clock_ns
        self._growing = asyncio.Lock()

    @classmethod
    async def load(cls, ledger: Ledger, key: bytes, clock_ns: Callable[[], int] = time.time_ns) -> "TimestampOracle":
        """Continue above everything that was ever handed out; the first window is durable when it returns."""
        saved = await ledger.meta.get(key)
        limit_ms = -(-_SAVED.unpack(saved.value)[0] // _NANOSECONDS_PER_MS) if saved else 0
        oracle = cls(ledger, key, limit_ms, clock_ns)
        await oracle._grow()
        return oracle

    async def run(self) -> None:
        """Keep the limit ahead of the clock, so that callers need not wait for it."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if self._oracle.limit_ms >= self._now_ms() + _SPARE_MS:
                continue
            try:
                await self._grow()
            except MetaUnavailableError as err:
                _log.warning("the TSO window cannot grow", reason=err.message)

    async def take(self, count: int) -> tuple[int, int]:
        """Reserve `count` timestamps; returns physical ms and the largest logical.

        Raises:
            RequestError: `count` is 0 or does not fit into one millisecond.
        """
        if count <= 0:
            raise RequestError(_COUNT_TEXT)
        if count > LOGICAL_MAX:
            raise RequestError(_RETRIES_TEXT)
        while (taken := self._oracle.take(count, self._now_ms())) is None:
            await self._grow()
        metrics.TSO_TOTAL.inc(count)
        return taken

    async def _grow(self) -> None:
        before_ms = self._oracle.limit_ms
        async with self._growing:
            if self._oracle.limit_ms > before_ms:
                return
            limit_ms = self._oracle.wanted_limit(self._now_ms())
            await self._ledger.txn((), [Put(self._key, _SAVED.pack(limit_ms * _NANOSECONDS_PER_MS))])
            self._oracle.limit_ms = limit_ms

    def _now_ms(self) -> int:
        return self._clock_ns() // _NANOSECONDS_PER_MS
