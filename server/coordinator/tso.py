"""The timestamp oracle.

Invariants (PD's pkg/tso):
1. Every timestamp is greater than all before it, whatever the wall clock does.
2. No timestamp's physical part reaches `limit_ms`, which is durable before it is used; a restart, and another leader,
   begin at the limit. So a kill -9 never makes one go back, at the price of a step of at most `WINDOW_MS`.
3. A millisecond whose logical numbers are used up is waited for the end of: however many timestamps are taken, and
   while the wall clock stands behind, the physical part runs no faster than time.
"""

import asyncio
import enum
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from server.coordinator import metrics
from server.coordinator.errors import NotLeaderError, RequestError
from server.coordinator.leadership.durable_limit import DurableLimit
from server.coordinator.leadership.ledger import Ledger
from storage.meta.errors import MetaUnavailableError
from storage.model.ts import LOGICAL_MAX

WINDOW_MS = 3000
_SPARE_MS = 1500
_CHECK_SECONDS = 0.5
_STEP_SECONDS = 0.001
_SAVE_SECONDS = 1.0
_NANOSECONDS_PER_MS = 1_000_000
_RETRIES_TEXT = (
    "[PD:tso:ErrGenerateTimestamp]generate timestamp failed, generate tso maximum number of retries exceeded"
)
_COUNT_TEXT = "[PD:tso:ErrGenerateTimestamp]generate timestamp failed, tso count should be positive"

_log = structlog.get_logger(__name__)


class Wanted(enum.Enum):
    """What must come before more timestamps."""

    LIMIT = "a greater limit"
    MILLISECOND = "the next millisecond"


class Oracle:
    """The pure half: `(physical_ms, logical)` and the limit."""

    def __init__(self, limit_ms: int) -> None:
        self.limit_ms = limit_ms
        self._physical_ms = limit_ms
        self._logical = 0

    @property
    def physical_ms(self) -> int:
        """The millisecond of the last timestamp."""
        return self._physical_ms

    def take(self, count: int, now_ms: int) -> "tuple[int, int] | Wanted":
        """Reserve `count` timestamps; returns physical and the last logical, or what has to be done first."""
        physical_ms, logical = self._physical_ms, self._logical
        if now_ms > physical_ms:
            physical_ms, logical = now_ms, 0
        if physical_ms >= self.limit_ms:
            return Wanted.LIMIT
        if logical + count > LOGICAL_MAX:
            return Wanted.MILLISECOND
        self._physical_ms, self._logical = physical_ms, logical + count
        return self._physical_ms, self._logical

    def step(self, used_up_ms: int) -> None:
        """A millisecond is over: go on with the next, unless somebody has since."""
        if self._physical_ms == used_up_ms:
            self._physical_ms, self._logical = used_up_ms + 1, 0

    def wanted_limit(self, now_ms: int) -> int:
        """The limit to save for the time ahead."""
        return max(now_ms, self._physical_ms + 1) + WINDOW_MS


class TimestampOracle:
    """The shell: the wall clock, and the limit kept in metadata (`/pd/<cluster>/timestamp`, ns, 8 bytes)."""

    def __init__(self, ledger: Ledger, limit: DurableLimit, clock_ns: Callable[[], int]) -> None:
        """`limit` is loaded."""
        self._ledger = ledger
        self._limit = limit
        self._oracle = Oracle(self._saved_ms)
        self._clock_ns = clock_ns
        self._growing = asyncio.Lock()
        self._stepping = asyncio.Lock()

    @classmethod
    async def load(
        cls, ledger: Ledger, key: bytes, clock_ns: Callable[[], int] = time.time_ns, *, must_exist: bool = False
    ) -> "TimestampOracle":
        """Continue above everything that was ever handed out; the first window is durable when it returns.

        Raises:
            StateLostError: it is not known what was handed out; without any record only if one `must_exist`.
        """
        limit = DurableLimit(ledger, key)
        await limit.load(must_exist=must_exist)
        oracle = cls(ledger, limit, clock_ns)
        await oracle._grow()
        ahead_ms = oracle._oracle.physical_ms - oracle._now_ms()
        if ahead_ms > WINDOW_MS:
            _log.warning("timestamps are ahead of the clock: it was, or another machine's is", ahead_ms=ahead_ms)
        return oracle

    async def put_back(self) -> None:
        """See `DurableLimit.put_back`."""
        await self._limit.put_back()

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
            except NotLeaderError:
                return  # the term is over

    async def take(self, count: int) -> tuple[int, int]:
        """Reserve `count` timestamps; returns physical ms and the largest logical.

        Raises:
            RequestError: `count` is 0 or does not fit into one millisecond.
            NotLeaderError: another coordinator may hand them out.
        """
        if count <= 0:
            raise RequestError(_COUNT_TEXT)
        if count > LOGICAL_MAX:
            raise RequestError(_RETRIES_TEXT)
        while True:
            self._ledger.leadership.check()
            taken = self._oracle.take(count, self._now_ms())
            if isinstance(taken, tuple):
                metrics.TSO_TOTAL.inc(count)
                return taken
            await (self._grow() if taken is Wanted.LIMIT else self._step())

    async def _grow(self) -> None:
        before_ms = self._oracle.limit_ms
        async with self._growing:
            while self._oracle.limit_ms <= before_ms:
                self._ledger.leadership.check()
                with suppress(TimeoutError):  # a member of etcd is silent: ask again, another is soon in use
                    async with asyncio.timeout(_SAVE_SECONDS):
                        await self._save(self._oracle.wanted_limit(self._now_ms()))

    async def _save(self, limit_ms: int) -> None:
        await self._limit.raise_to(max(limit_ms, self._saved_ms) * _NANOSECONDS_PER_MS)
        self._oracle.limit_ms = self._saved_ms

    @property
    def _saved_ms(self) -> int:
        return -(-self._limit.value // _NANOSECONDS_PER_MS)

    async def _step(self) -> None:
        used_up_ms = self._oracle.physical_ms
        async with self._stepping:
            if self._oracle.physical_ms == used_up_ms:
                await asyncio.sleep(_STEP_SECONDS)
                self._oracle.step(used_up_ms)

    def _now_ms(self) -> int:
        return self._clock_ns() // _NANOSECONDS_PER_MS
