"""Refuses timestamps that the oracle cannot have given out yet.

One read at a timestamp of next year would lift every later commit_ts that the store computes to next year as well (see
`storage.mvcc.read_fence`). So a request may be at most a minute ahead of what the store knows of the oracle; before it
refuses one, it asks the oracle. Timestamps up to that need nobody: old snapshots stay readable without a coordinator.
"""

import asyncio
from collections.abc import Awaitable, Callable

from storage.model.errors import InvalidError
from storage.model.ts import MAX_TS, compose
from storage.mvcc.errors import MvccError

_AHEAD = compose(60_000)


class TimestampAheadError(MvccError, InvalidError):
    """A request's timestamp is of the future."""

    code = "ErrTimestampAhead"

    def __init__(self, ts: int, now_ts: int) -> None:
        super().__init__(f"timestamp {ts} is more than a minute ahead of the oracle's {now_ts}; take it from the TSO")


class Horizon:
    """How far timestamps may go."""

    def __init__(self, clock: Callable[[], Awaitable[int]], now_ts: int) -> None:
        """`clock` is the oracle; `now_ts` one of its timestamps."""
        self._clock = clock
        self._now_ts = now_ts
        self._asking = asyncio.Lock()

    async def reach(self, ts: int) -> None:
        """Learn the oracle's time if `ts` is beyond what is known of it; `fault` knows it then.

        Raises:
            UnavailableError: no coordinator answers.
        """
        if self.fault(ts) is None:
            return
        async with self._asking:
            if self.fault(ts) is not None:
                self._now_ts = max(self._now_ts, await self._clock())

    def fault(self, ts: int) -> TimestampAheadError | None:
        """Why `ts` is not taken, or None; MAX_TS stands for "the newest" and is no time."""
        return TimestampAheadError(ts, self._now_ts) if self._now_ts + _AHEAD < ts < MAX_TS else None
