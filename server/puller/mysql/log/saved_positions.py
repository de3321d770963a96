"""The saved positions of a changefeed's log: where to begin for a checkpoint, which times were
accepted, and how long the server still keeps the log that the changefeed needs.

Invariants:
1. Whoever begins for a checkpoint takes the largest saved position at or below it, and drops all
   above: they are written again.
2. The distance of two saved positions is at most a 32nd of their age, or `SAVE_EVERY_S`: little is
   read twice, few are kept.

A server removes a log file when nothing was written to it for as long as logs are kept
(binlog_expire_logs_seconds), never the file it writes. The time of a file's last write is the time
at which the next file begins. After a failover the new server has other file names: then only the
commit_ts of a saved position is known, and its file was written at that time or later, so that it
is kept at least as long.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import structlog

from server.changefeed import keys
from server.changefeed.info import checkpoint_of
from server.puller import metrics
from server.puller.mysql.log.opening import began
from server.puller.mysql.log.position import SavedPosition, TimeLimits
from server.puller.mysql.session.checks import kept_s
from server.puller.mysql.session.connection import Session, log_in
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.meta import Compare, Delete, Meta, Put
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.ts import physical_ms

SAVE_EVERY_S: Final = 10.0
RETENTION_EVERY_S: Final = 60.0
_AGE_SHARE = 32
_log = structlog.get_logger(__name__)


class PositionStore:
    """Saves, thins out and finds the positions of one changefeed."""

    def __init__(self, meta: Meta, changefeed: str, clock: Callable[[], float] = time.time) -> None:
        self._meta = meta
        self._prefix = prefix(changefeed)
        self._clock = clock
        self._kept: list[int] = []

    async def begin(self, start_ts: int) -> SavedPosition | None:
        """Find the saved position to begin with; None: there is none at or below `start_ts`.

        Raises:
            CorruptError, MetaUnavailableError: they cannot be read.
        """
        saved_positions = [
            SavedPosition.from_json(pair.value)
            for pair in await self._meta.get_prefix(self._prefix)
        ]
        usable = [position for position in saved_positions if position.ts <= start_ts]
        later = [position for position in saved_positions if position.ts > start_ts]
        # Those above are written again while the log is read again (invariant 1).
        await self._meta.write_all([Delete(self._key(position.ts)) for position in later])
        self._kept = [position.ts for position in usable]
        return usable[-1] if usable else None

    async def has_position(self, start_ts: int) -> bool:
        """Whether `begin` would find one; changes nothing."""
        pairs = await self._meta.get_prefix(self._prefix)
        return any(SavedPosition.from_json(pair.value).ts <= start_ts for pair in pairs)

    async def put(self, saved_position: SavedPosition) -> None:
        """Save a position, and delete those that lie closer than their age asks for. Durable."""
        # The new one is durable before any is deleted: a crash in between leaves one too many.
        await self._meta.put(self._key(saved_position.ts), saved_position.to_json())
        self._kept.append(saved_position.ts)
        spare = spare_positions(self._kept, int(self._clock() * 1000))
        await self._meta.write_all([Delete(self._key(ts)) for ts in spare])
        gone = set(spare)
        self._kept = [ts for ts in self._kept if ts not in gone]

    def _key(self, ts: int) -> bytes:
        return self._prefix + b"%020d" % ts


class TimeLimitsRecord:
    """The changefeed's time limits in the metadata; of two captures that read one log,
    only one can write it.
    """

    def __init__(self, meta: Meta, changefeed: str) -> None:
        self._meta = meta
        self._key = keys.source(changefeed) + b"clock"
        self._revision = 0

    async def load(self) -> TimeLimits | None:
        """Load the decisions about times; None: nothing was decided yet.

        Raises:
            CorruptError, MetaUnavailableError: it cannot be read.
        """
        pair = await self._meta.get(self._key)
        self._revision = pair.mod_revision if pair else 0
        return TimeLimits.from_json(pair.value) if pair else None

    async def save(self, time_limits: TimeLimits) -> None:
        """Save the decisions about times. Durable.

        Raises:
            UnavailableError: somebody else has written it since it was loaded.
        """
        unchanged = Compare.unchanged(self._key, self._revision)
        result = await self._meta.txn([unchanged], [Put(self._key, time_limits.to_json())])
        if not result.succeeded:
            raise UnavailableError(
                "another capture has decided about times of the log, which is read again by its decisions"
            )
        self._revision = result.revision


def prefix(changefeed: str) -> bytes:
    """The prefix of the keys of a changefeed's saved positions."""
    return keys.source(changefeed) + b"anchor/"


def spare_positions(kept: Sequence[int], now_ms: int) -> list[int]:
    """Which of the ascending saved positions can be deleted; never the first or the last. Pure."""
    spare: list[int] = []
    last = kept[0] if kept else 0
    for ts, following in itertools.pairwise(kept[1:]):
        age_ms = now_ms - physical_ms(last)
        if physical_ms(following) - physical_ms(last) <= age_ms // _AGE_SHARE:
            spare.append(ts)
        else:
            last = ts
    return spare


@dataclass(frozen=True, slots=True)
class LogRetention:
    """How long the server keeps its logs (`kept_s`), and how long still the file that the
    changefeed needs (`left_s`; negative: it may be gone).
    """

    kept_s: float
    left_s: float


class RetentionMonitor:
    """Watches how long the server still keeps the log that one changefeed needs."""

    def __init__(self, changefeed: str, options: MySqlOptions, meta: Meta) -> None:
        self._changefeed = changefeed
        self._options = options
        self._meta = meta
        self._ended: dict[str, int] = {}
        """The second in which the file after a file begins; of the last one that was asked for."""
        self._reported_error = ""

    async def run(self, executor: Executor) -> None:
        """Set the gauges each `RETENTION_EVERY_S` until cancelled; each reason why they cannot be
        known is logged once.
        """
        try:
            while True:
                await self._look(executor)
                await asyncio.sleep(RETENTION_EVERY_S)
        finally:
            for gauge in (metrics.UNTIL_PURGE, metrics.RETENTION):
                gauge.remove(self._changefeed)

    async def _look(self, executor: Executor) -> None:
        try:
            saved_position = await self._needed()
            if saved_position is not None:
                self._show(
                    await asyncio.get_running_loop().run_in_executor(
                        executor, self.left, saved_position
                    )
                )
        except TidemarkError as err:
            # The puller reports a server that does not answer.
            if not isinstance(err, UnavailableError) and err.message != self._reported_error:
                self._reported_error = err.message
                _log.warning(
                    "how long the log is kept is not known",
                    changefeed=self._changefeed,
                    error=err.message,
                )

    def left(self, saved_position: SavedPosition) -> LogRetention:
        """For how long the log behind a saved position is kept; blocks.

        Raises:
            MySqlUnavailableError, MySqlPrivilegeError, …: no server tells.
        """
        with log_in(self._options) as session:
            keep_s = kept_s(session.variables())
            if math.isinf(keep_s):
                return LogRetention(keep_s, keep_s)
            now_s = float(session.row("SELECT UNIX_TIMESTAMP()")[0])
            return LogRetention(
                keep_s, keep_s - max(now_s - self._written_s(session, saved_position, now_s), 0.0)
            )

    def _written_s(self, session: Session, saved_position: SavedPosition, now_s: float) -> float:
        """When the log file of a saved position was written last."""
        files = [str(row[0]) for row in session.execute("SHOW BINARY LOGS")]
        if saved_position.file not in files:
            return physical_ms(saved_position.ts) / 1000
        if saved_position.file == files[-1]:
            return now_s
        if saved_position.file not in self._ended:
            following = files[files.index(saved_position.file) + 1]
            self._ended = {saved_position.file: began(session, following, self._options)}
        return self._ended[saved_position.file]

    async def _needed(self) -> SavedPosition | None:
        """The saved position that the changefeed would begin with at its durable checkpoint."""
        status = await self._meta.get(keys.status(self._changefeed))
        saved_positions = [
            SavedPosition.from_json(pair.value)
            for pair in await self._meta.get_prefix(prefix(self._changefeed))
        ]
        if not saved_positions:
            return None
        oldest = saved_positions[0]
        checkpoint_ts = checkpoint_of(status.value) if status else oldest.ts
        usable = [position for position in saved_positions if position.ts <= checkpoint_ts]
        return usable[-1] if usable else oldest

    def _show(self, left: LogRetention) -> None:
        metrics.UNTIL_PURGE.labels(self._changefeed).set(left.left_s)
        metrics.RETENTION.labels(self._changefeed).set(left.kept_s)
