"""Which captures run the changefeeds of logs (MySQL, pumps): one capture each, and different
changefeeds on different captures.

The owner writes its decisions into the metadata (`keys.placement`), and the captures carry them out
(`server.capture.maintainers`). A log stays where it is while its capture lives; those of a capture
that is gone, or is drained, go to the captures with the fewest logs. A capture that joins gets so
many that the captures' counts differ by one at most.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import structlog

from server.capture import metrics
from server.capture.fence import Fence, FencedMeta
from server.changefeed import keys
from server.changefeed.info import ChangefeedInfo
from storage.meta.meta import Delete, Meta, Op, Put
from storage.model.errors import UnavailableError
from storage.tasks import wait_at_most

_LOOK_EVERY_S: Final = 1.0
_SETTLED_S: Final = 10.0
"""For so long the captures are the same before logs move for balance alone."""

_log = structlog.get_logger(__name__)


def is_log(source_uri: str) -> bool:
    """Whether a changefeed is of one log for all tables, which one capture reads."""
    return bool(source_uri)


def places(
    logs: Collection[str], now: Mapping[str, str], captures: Collection[str], *, balanced: bool
) -> dict[str, str]:
    """The capture of each log, where `now` says which it has; `balanced`: logs also move for
    nothing but equal counts. Pure.

    Without captures nothing moves.
    """
    if not captures:
        return {log: now[log] for log in logs if log in now}
    staying = {log: now[log] for log in logs if now.get(log) in captures}
    logs_of: dict[str, list[str]] = {capture: [] for capture in sorted(captures)}
    for log in sorted(staying):
        logs_of[staying[log]].append(log)

    def least() -> list[str]:
        return min(logs_of.values(), key=len)

    for log in sorted(set(logs) - staying.keys()):
        least().append(log)
    while balanced and len(most := max(logs_of.values(), key=len)) > len(least()) + 1:
        least().append(most.pop())
    return {log: capture for capture, of_capture in logs_of.items() for log in of_capture}


class Placement:
    """The owner's decisions. `refused` are captures that the owner cannot reach, or whose version
    is not its own. `changed` is set when a changefeed was created, `decided` after decisions.
    """

    def __init__(
        self, meta: Meta, fence: Fence, refused: Callable[[], Collection[str]] = frozenset
    ) -> None:
        self.changed = asyncio.Event()
        self.decided = asyncio.Event()
        self._meta = FencedMeta(meta, fence)
        self._refused = refused
        self._captures: frozenset[str] = frozenset()
        self._settled_at_s = 0.0

    async def run(self) -> None:
        """Decide until cancelled."""
        try:
            while True:
                self.changed.clear()
                try:
                    await self._decide()
                except UnavailableError as err:
                    _log.warning("logs cannot be placed now", error=str(err))
                await wait_at_most(self.changed, _LOOK_EVERY_S)
        finally:
            metrics.UNMAINTAINED.set(0)

    async def _decide(self) -> None:
        logs = [
            info.id
            for pair in await self._meta.get_prefix(keys.INFOS)
            if is_log((info := ChangefeedInfo.from_json(pair.value)).source_uri)
        ]
        running = await captures_of(self._meta, keys.MAINTAINERS)
        metrics.UNMAINTAINED.set(len(set(logs) - running.keys()))
        now = await captures_of(self._meta, keys.PLACEMENTS)
        placed = places(logs, now, await self._eligible(), balanced=self._is_settled())
        moves = {log: capture for log, capture in placed.items() if now.get(log) != capture}
        ops: list[Op] = [Put(keys.placement(log), each.encode()) for log, each in moves.items()]
        ops += [Delete(keys.placement(log)) for log in now.keys() - placed.keys()]
        if not ops:
            return
        await self._meta.write_all(ops)
        self.decided.set()
        for log, capture in moves.items():
            if log in now:
                metrics.MOVES.labels(log).inc()
            _log.info("changefeed placed", changefeed=log, capture=capture, before=now.get(log, ""))

    async def _eligible(self) -> frozenset[str]:
        """The captures that may run logs."""
        alive = await self._meta.get_prefix(keys.CAPTURES)
        draining = await self._meta.get_prefix(keys.DRAINING)
        names = {pair.key.removeprefix(keys.CAPTURES).decode() for pair in alive}
        names -= {pair.key.removeprefix(keys.DRAINING).decode() for pair in draining}
        captures = frozenset(names - set(self._refused()))
        if captures != self._captures:
            self._captures = captures
            self._settled_at_s = time.monotonic() + _SETTLED_S
        return captures

    def _is_settled(self) -> bool:
        # A capture that dies again and again would take logs each time, and lose them.
        return time.monotonic() >= self._settled_at_s


async def captures_of(meta: Meta, prefix: bytes) -> dict[str, str]:
    """The capture of each log: that is to run it (`keys.PLACEMENTS`), or runs it
    (`keys.MAINTAINERS`).
    """
    pairs = await meta.get_prefix(prefix)
    return {pair.key.removeprefix(prefix).decode(): pair.value.decode() for pair in pairs}
