"""Watermarks: one row for each changefeed, in a table of their own, changed each time.

    changefeed_dump.changefeed_dump_event(id, changefeed_id, unique_identifier, event_type,
    create_time, update_time)

`unique_identifier` is new each time, as an UPDATE that changes nothing is not logged. MySQL has no
AUTO_RANDOM. `WatermarkWriter` writes those of one dump, and measures how far their place in the log
lags behind their commit.
"""

import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from server.dump import metrics
from server.dump.mysql.listener import DumpListener
from server.dump.mysql.pace import LagGuard
from server.dump.mysql.window import LOW
from server.puller.mysql.listener import WATERMARK_TABLE
from server.puller.mysql.session.connection import Session
from storage.model.errors import TidemarkError
from storage.model.system_schemas import WATERMARK_SCHEMA

TABLE: Final = f"{WATERMARK_SCHEMA}.{WATERMARK_TABLE}"
CREATE: Final = (
    f"CREATE DATABASE IF NOT EXISTS {WATERMARK_SCHEMA}",
    f"""CREATE TABLE IF NOT EXISTS {TABLE} (
id BIGINT NOT NULL AUTO_INCREMENT COMMENT 'primary key',
changefeed_id VARCHAR(128) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL COMMENT 'changefeed_id',
unique_identifier VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'uuid - optimistic lock',
event_type TINYINT NOT NULL COMMENT '1-low watermark; 2-high watermark',
create_time INT NOT NULL COMMENT 'create timestamp',
update_time INT NOT NULL COMMENT 'update timestamp',
PRIMARY KEY (id),
UNIQUE KEY (changefeed_id)
) ENGINE=InnoDB COMMENT 'written by tidemark while it dumps tables'""",
)
_EXISTS = (
    "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
)
_WRITE = (
    f"INSERT INTO {TABLE} (changefeed_id, unique_identifier, event_type, create_time, update_time)"  # noqa: S608 - names of ours
    " VALUES (%s, %s, %s, UNIX_TIMESTAMP(), UNIX_TIMESTAMP()) ON DUPLICATE KEY UPDATE"
    " unique_identifier = VALUES(unique_identifier), event_type = VALUES(event_type), update_time "
    "= VALUES(update_time)"
)
_QUIET_S: Final = 1.0
"""More lag than this, while nothing is read, is not waited for."""
LOST_S: Final = 10.0
"""How long a round waits for its watermarks before they count as lost."""


def prepare(session: Session) -> None:
    """Make the table, if it is not there.

    Raises:
        MySqlPrivilegeError, MySqlStatementError: the user may not, or the server only reads.
    """
    # Looked up first: CREATE … IF NOT EXISTS needs the right to create also where the table is
    # there.
    if not session.row(_EXISTS, (WATERMARK_SCHEMA, WATERMARK_TABLE))[0]:
        for statement in CREATE:
            session.execute(statement)


def write(session: Session, changefeed: str, unique_identifier: str, kind: int) -> None:
    """Write one; it is committed when this returns. Raises as `prepare`."""
    session.execute(_WRITE, (changefeed, unique_identifier, kind))


class WatermarkWriter:
    """Writes watermarks: `commit` writes one at the server and passes its time to the listener;
    `wait` waits for the log, with a limit.
    """

    def __init__(
        self,
        changefeed: str,
        listener: DumpListener,
        commit: Callable[[str, int], Awaitable[None]],
        wait: Callable[[float], Awaitable[None]],
    ) -> None:
        self.guard = LagGuard()
        self._changefeed = changefeed
        self._listener = listener
        self._commit = commit
        self._wait = wait

    async def write(self, unique_identifier: str, kind: int) -> None:
        """Write one whose lag is looked at; raises what `commit` does."""
        # Expected before it is committed: the log may bring it before `commit` returns.
        self._listener.expect(unique_identifier)
        try:
            await self._commit(unique_identifier, kind)
        except TidemarkError:
            self._listener.forget(unique_identifier)
            raise

    def seem_lost(self) -> bool:
        """Whether rounds have waited so long that the log may never bring their watermarks, as
        after a failover to a server that does not have them.
        """
        # The more rounds wait, the longer: a log that only lags does not get a row every few
        # seconds.
        rounds = self._listener.rounds
        return rounds > 0 and self._listener.idle_s > LOST_S * rounds

    async def measure_lag(self) -> bool:
        """Measure the delay of rounds, and now and then the usual delay; False: the log must pass
        the rounds first.
        """
        self._busy(self._listener.lags().values())
        metrics.EASE.labels(self._changefeed).set(self.guard.ease)
        while self.guard.quiet_wanted(time.monotonic()):
            if self._listener.rounds:
                return False
            await self._measure()
        return True

    async def _measure(self) -> None:
        """The lag of a watermark of no round."""
        mark, began = uuid.uuid4().hex, time.monotonic()
        await self.write(mark, LOW)
        lags = self._listener.lags()
        while mark not in lags and time.monotonic() < began + _QUIET_S:
            await self._wait(_QUIET_S)
            lags |= self._listener.lags()
        self.guard.quiet(lags.pop(mark, _QUIET_S), time.monotonic())
        self._listener.forget(mark)
        self._busy(lags.values())  # of a round that the log passed just before

    def _busy(self, lags_s: Iterable[float]) -> None:
        for lag_s in lags_s:
            self.guard.busy(lag_s)
            metrics.LAG_SECONDS.observe(lag_s)
