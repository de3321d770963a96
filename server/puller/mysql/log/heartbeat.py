"""Heartbeat rows, which we write while nobody else writes: without a transaction there is no new
commit_ts (a server's own heartbeats have none), and cuts would not move on.

    changefeed_dump.tidemark_heartbeat(changefeed_id, seq, written_at)

Each changefeed has one row. It changes each time, as an UPDATE that changes nothing is not logged.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

import structlog

from server.puller import metrics
from server.puller.mysql.session.connection import Session, log_in
from server.puller.mysql.session.errors import MySqlPrivilegeError, MySqlUnavailableError
from server.puller.mysql.session.options import MySqlOptions
from storage.model.errors import TidemarkError
from storage.model.system_schemas import WATERMARK_SCHEMA

TABLE: Final = f"{WATERMARK_SCHEMA}.tidemark_heartbeat"
AGAIN_S: Final = 60.0
"""How long a server that refuses the row is left alone."""
CREATE: Final = (
    f"CREATE DATABASE IF NOT EXISTS {WATERMARK_SCHEMA}",
    f"""CREATE TABLE IF NOT EXISTS {TABLE} (
changefeed_id VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY COMMENT 'changefeed that is idle',
seq BIGINT UNSIGNED NOT NULL COMMENT 'grows with each heartbeat',
written_at TIMESTAMP(3) NOT NULL DEFAULT CURRENT_TIMESTAMP(3) ON UPDATE CURRENT_TIMESTAMP(3)
) ENGINE=InnoDB COMMENT 'written by tidemark while the server is idle'""",
)
_EXISTS = (
    "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = %s AND table_name = "
    "'tidemark_heartbeat'"
)
_log = structlog.get_logger(__name__)
_WRITE = (
    f"INSERT INTO {TABLE} (changefeed_id, seq) VALUES (%s, 1) ON DUPLICATE KEY UPDATE seq = seq + 1"  # noqa: S608 - ours
)


class HeartbeatWriter:
    """Writes heartbeat rows for one changefeed while its log stands still."""

    def __init__(self, changefeed: str, options: MySqlOptions) -> None:
        self._changefeed = changefeed
        self._options = options

    async def run(self, position_ts: Callable[[], int], executor: Executor) -> None:
        """Write a row whenever `position_ts` has not moved for `idle_row_ms`, until cancelled.

        A server that refuses the row is asked again now and then: it may only read for a while, or
        have had a lock on the row, or no room.
        """
        every_s = self._options.idle_row_ms / 1000
        loop = asyncio.get_running_loop()
        refused = ""
        while every_s:
            before = position_ts()
            await asyncio.sleep(every_s)
            if position_ts() != before:
                continue
            try:
                await loop.run_in_executor(executor, self._write)
                metrics.HEARTBEATS.inc()
                refused = ""
            except MySqlUnavailableError:
                continue  # the puller reports a server that does not answer
            except TidemarkError as err:
                if err.message != refused:
                    _log.warning(
                        "no heartbeat rows: cuts stand while the server is idle", error=err.message
                    )
                refused = err.message
                await asyncio.sleep(AGAIN_S)

    def _write(self) -> None:
        with log_in(self._options) as session:
            if session.row("SELECT @@global.read_only")[0]:
                raise MySqlPrivilegeError(
                    "the server only reads (read_only): a row of ours would part it from its "
                    "primary"
                )
            create_table(session)
            write_row(session, self._changefeed)


def create_table(session: Session) -> None:
    """Create the heartbeat table if it does not exist.

    Raises:
        MySqlPrivilegeError, MySqlStatementError: the user may not, or the server only reads.
    """
    if not session.row(_EXISTS, (WATERMARK_SCHEMA,))[0]:
        for statement in CREATE:
            session.execute(statement)


def write_row(session: Session, changefeed: str) -> None:
    """Write a heartbeat row; it is committed when this returns. Raises as `create_table`."""
    session.execute(_WRITE, (changefeed,))
