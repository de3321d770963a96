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
from server.puller.mysql import metrics
from server.puller.mysql.log.clock import Clock
from server.puller.mysql.log.opening import began
from server.puller.mysql.log.position import Anchor
from server.puller.mysql.session.checks import kept_s
from server.puller.mysql.session.connection import Session, log_in, log_in_to
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.meta import Compare, Delete, Meta, Put
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.ts import physical_ms

SAVE_EVERY_S: Final = 10.0
RETENTION_EVERY_S: Final = 60.0
_AGE_SHARE = 32
_log = structlog.get_logger(__name__)


class Anchors:
    """Those of one changefeed."""

    def __init__(self, meta: Meta, changefeed: str, clock: Callable[[], float] = time.time) -> None:
        self._meta = meta
        self._prefix = prefix(changefeed)
        self._clock = clock
        self._kept: list[int] = []

    async def begin(self, start_ts: int) -> Anchor | None:
        """The anchor to begin with for that checkpoint; None: there is none at or below it.

        Raises:
            CorruptError, MetaUnavailableError: they cannot be read.
        """
        anchors = [
            Anchor.from_json(pair.value) for pair in await self._meta.get_prefix(self._prefix)
        ]
        usable = [anchor for anchor in anchors if anchor.ts <= start_ts]
        await self._meta.write_all(
            [Delete(self._key(anchor.ts)) for anchor in anchors if anchor.ts > start_ts]
        )
        self._kept = [anchor.ts for anchor in usable]
        return usable[-1] if usable else None

    async def put(self, anchor: Anchor) -> None:
        """Keep one, and let those go that lie closer than their age asks for. Durable."""
        await self._meta.put(self._key(anchor.ts), anchor.to_json())
        self._kept.append(anchor.ts)
        spare = spare_anchors(self._kept, int(self._clock() * 1000))
        await self._meta.write_all([Delete(self._key(ts)) for ts in spare])
        gone = set(spare)
        self._kept = [ts for ts in self._kept if ts not in gone]

    def _key(self, ts: int) -> bytes:
        return self._prefix + b"%020d" % ts


class ClockRecord:
    """The changefeed's clock in the metadata; of two captures that read one log,
    only one can write it.
    """

    def __init__(self, meta: Meta, changefeed: str) -> None:
        self._meta = meta
        self._key = keys.source(changefeed) + b"clock"
        self._revision = 0

    async def load(self) -> Clock | None:
        """What was decided; None: nothing yet.

        Raises:
            CorruptError, MetaUnavailableError: it cannot be read.
        """
        pair = await self._meta.get(self._key)
        self._revision = pair.mod_revision if pair else 0
        return Clock.from_json(pair.value) if pair else None

    async def save(self, clock: Clock) -> None:
        """Keep it. Durable.

        Raises:
            UnavailableError: somebody else has written it since it was loaded.
        """
        unchanged = Compare.unchanged(self._key, self._revision)
        result = await self._meta.txn([unchanged], [Put(self._key, clock.to_json())])
        if not result.succeeded:
            raise UnavailableError(
                "another capture has judged times of the log, which is read again by them"
            )
        self._revision = result.revision


def prefix(changefeed: str) -> bytes:
    """What the keys of a changefeed's anchors start with."""
    return keys.source(changefeed) + b"anchor/"


def spare_anchors(kept: Sequence[int], now_ms: int) -> list[int]:
    """Which of the ascending anchors are not needed: the first and the last always are. Pure."""
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
                await asyncio.sleep(RETENTION_EVERY_S)
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
