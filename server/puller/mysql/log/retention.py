"""How long a server still keeps the log that a changefeed needs: what it would begin with,
were it to begin now.

A server removes a log file when nothing was written to it for as long as logs are kept, never the
one it writes. When a file was written last is when the next one began. What another server numbers
otherwise is known by its time only: its file was written at that time or later, so that it is kept
at least so long.
"""

import asyncio
import math
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import structlog

from server.changefeed import keys
from server.changefeed.info import checkpoint_of
from server.puller.mysql import metrics
from server.puller.mysql.log.opening import began
from server.puller.mysql.log.position import Anchor
from server.puller.mysql.log.saved_positions import prefix
from server.puller.mysql.session.checks import kept_s
from server.puller.mysql.session.connection import Session, log_in, log_in_to
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.meta import Meta
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.ts import physical_ms

EVERY_S: Final = 60.0
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Left:
    """How long logs are kept, and for how long still the one that is needed; less than nothing:
    it may be gone.
    """

    kept_s: float
    left_s: float


class Retention:
    """Of the log of one changefeed."""

    def __init__(self, changefeed: str, options: MySqlOptions, meta: Meta) -> None:
        self._changefeed = changefeed
        self._options = options
        self._meta = meta
        self._ended: dict[str, int] = {}
        """The second in which the file after a file begins; of the last one that was asked for."""
        self._told = ""

    async def run(self, executor: Executor) -> None:
        """Look from time to time, until cancelled; what keeps a server from telling is said
        once.
        """
        try:
            while True:
                await self._look(executor)
                await asyncio.sleep(EVERY_S)
        finally:
            for gauge in (metrics.UNTIL_PURGE, metrics.RETENTION):
                gauge.remove(self._changefeed)

    async def _look(self, executor: Executor) -> None:
        try:
            anchor = await self._needed()
            if anchor is not None:
                self._show(
                    await asyncio.get_running_loop().run_in_executor(executor, self.left, anchor)
                )
        except TidemarkError as err:
            # who reads the log says the former
            if not isinstance(err, UnavailableError) and err.message != self._told:
                self._told = err.message
                _log.warning(
                    "how long the log is kept is not known",
                    changefeed=self._changefeed,
                    error=err.message,
                )

    def left(self, anchor: Anchor) -> Left:
        """For how long the log behind an anchor is kept; blocks.

        Raises:
            MySqlUnavailableError, MySqlPrivilegeError, …: no server tells.
        """
        with log_in(self._options) as session:
            keep_s = kept_s(session.variables())
            if math.isinf(keep_s):
                return Left(keep_s, keep_s)
            now_s = float(session.row("SELECT UNIX_TIMESTAMP()")[0])
            return Left(keep_s, keep_s - max(now_s - self._written_s(session, anchor, now_s), 0.0))

    def _written_s(self, session: Session, anchor: Anchor, now_s: float) -> float:
        """When the file of an anchor was written last."""
        files = [str(row[0]) for row in session.execute("SHOW BINARY LOGS")]
        if anchor.file not in files:
            return physical_ms(anchor.ts) / 1000
        if anchor.file == files[-1]:
            return now_s
        if anchor.file not in self._ended:
            following = files[files.index(anchor.file) + 1]
            self._ended = {
                anchor.file: began(
                    log_in_to(session.address, self._options), following, self._options
                )
            }
        return self._ended[anchor.file]

    async def _needed(self) -> Anchor | None:
        """What the changefeed would begin with at its durable checkpoint."""
        status = await self._meta.get(keys.status(self._changefeed))
        anchors = [
            Anchor.from_json(pair.value)
            for pair in await self._meta.get_prefix(prefix(self._changefeed))
        ]
        checkpoint_ts = checkpoint_of(status.value) if status else anchors[0].ts if anchors else 0
        return next(
            (each for each in reversed(anchors) if each.ts <= checkpoint_ts),
            anchors[0] if anchors else None,
        )

    def _show(self, left: Left) -> None:
        metrics.UNTIL_PURGE.labels(self._changefeed).set(left.left_s)
        metrics.RETENTION.labels(self._changefeed).set(left.kept_s)
