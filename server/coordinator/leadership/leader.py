"""One coordinator's right to answer and to write: ends by the clock, not by hearing of it.

Invariants:
1. Nothing is answered at or after `deadline`: it is counted from before the lease's renewal was asked for, so no other
   coordinator can lead earlier, and a process that was stopped and continued knows before it hears anything.
2. Every write carries `fence`, the create revision of the leader key: what was on its way when the lease ended fails.
3. A right that ended never comes back; whoever leads again has a new one, and a new term's memory.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from server.coordinator.errors import NotLeaderError
from storage.meta.meta import Compare


class Leadership:
    """A held leader key; without arguments it is of a coordinator whose metadata nobody else can reach."""

    def __init__(
        self,
        fence: Sequence[Compare] = (),
        deadline: Callable[[], float] = lambda: math.inf,
        refusal: Callable[[], NotLeaderError] = NotLeaderError,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fence = tuple(fence)
        self.ended = asyncio.Event()
        self.reason = ""
        """Why it was given up, if there is more to say than that the lease is over."""
        self.since = clock()
        """Monotonic seconds; what was seen before says nothing about it."""
        self._deadline = deadline
        self.refusal = refusal
        """What is answered once it has ended."""
        self._clock = clock
        self._limits: set[asyncio.Timeout] = set()

    @property
    def held(self) -> bool:
        """Whether nobody else can lead now."""
        return not self.ended.is_set() and self._clock() < self._deadline()

    def check(self) -> None:
        """Raises: NotLeaderError: another coordinator may lead; nothing in memory is to be trusted."""
        if not self.held:
            raise self.refusal()

    def end(self, reason: str = "") -> None:
        """Give it up: `throughout` blocks are interrupted. The first reason counts."""
        if not self.ended.is_set():
            self.reason = reason
        self.ended.set()
        for limit in self._limits:
            limit.reschedule(0)

    @asynccontextmanager
    async def throughout(self) -> AsyncIterator[None]:
        """Run the block only while it is held.

        Raises:
            NotLeaderError: it was not, or ended meanwhile.
        """
        self.check()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if limit.expired():
                raise self.refusal() from None
            raise
