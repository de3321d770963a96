"""The watermarks of one dump as they are written, and what they lag behind their commit in the log."""

import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from server.dump import metrics
from server.dump.mysql.lag import LagGuard
from server.dump.mysql.listener import DumpListener
from server.dump.mysql.window import LOW
from storage.model.errors import TidemarkError

_QUIET_S: Final = 1.0
"""More lag than this, while nothing is read, is not waited for."""


class Marks:
    """`commit` writes one at the server and tells the listener when; `wait` is for news of the log, at most so long."""

    def __init__(
        self,
        listener: DumpListener,
        commit: Callable[[str, int], Awaitable[None]],
        wait: Callable[[float], Awaitable[None]],
    ) -> None:
        self.guard = LagGuard()
        self._listener = listener
        self._commit = commit
        self._wait = wait

    async def write(self, unique_identifier: str, kind: int) -> None:
        """Write one whose lag is looked at; raises what `commit` does."""
        self._listener.expect(unique_identifier)
        try:
            await self._commit(unique_identifier, kind)
        except TidemarkError:
            self._listener.forget(unique_identifier)
            raise

    async def looked(self) -> bool:
        """What rounds lag, and now and then what is usual; False: the log must pass the rounds first."""
        self._busy(self._listener.lags().values())
        metrics.EASE.set(self.guard.ease)
        while self.guard.quiet_wanted(time.monotonic()):
            if self._listener.rounds:
                return False
            await self._measure()
        return True

    async def _measure(self) -> None:
        """The lag of a watermark of no round."""
        mark, began = uuid.uuid4().hex, time.monotonic()
        await self.write(mark, LOW)
        found = self._listener.lags()
        while mark not in found and time.monotonic() < began + _QUIET_S:
            await self._wait(_QUIET_S)
            found |= self._listener.lags()
        self.guard.quiet(found.pop(mark, _QUIET_S), time.monotonic())
        self._listener.forget(mark)
        self._busy(found.values())  # of a round that the log passed just before

    def _busy(self, lags_s: Iterable[float]) -> None:
        for lag_s in lags_s:
            self.guard.busy(lag_s)
            metrics.LAG_SECONDS.observe(lag_s)
