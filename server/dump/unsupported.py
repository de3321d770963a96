"""The dump of a changefeed whose tables are dealt to worker processes: refused by name, never left undone silently."""

import asyncio
from typing import Final

import structlog

from server.dump.errors import DumpUnsupportedError
from server.dump.job import RUNNING, DumpRecords
from server.dump.progress import TableProgress, TableState
from storage.model.errors import TidemarkError

EVERY_TABLE: Final = 0
"""The table id of what is said of all tables."""
_LOOK_S: Final = 1.0
_log = structlog.get_logger(__name__)


def workers_unsupported() -> DumpUnsupportedError:
    """Why it is refused, and what to do."""
    return DumpUnsupportedError(
        "this capture deals its tables to worker processes, which do not dump tables of the cluster: start it with "
        "--workers 1, then start the dump again"
    )


class UnsupportedDump:
    """Fails every dump that is asked for: another capture may have taken the request."""

    def __init__(self, changefeed: str, records: DumpRecords) -> None:
        self._changefeed = changefeed
        self._records = records

    async def run(self) -> None:
        """Look after the job until cancelled."""
        while True:
            try:
                await self._refuse()
            except TidemarkError as err:
                _log.warning("dump waits", changefeed=self._changefeed, code=err.code, error=err.message)
            await asyncio.sleep(_LOOK_S)

    async def _refuse(self) -> None:
        job = await self._records.job()
        if job is None or job.state != RUNNING:
            return
        tables = await self._records.tables(job)
        if any(not each.state.is_over for each in tables) or not tables:
            error = str(workers_unsupported())
            _log.error("dump refused", changefeed=self._changefeed, error=error)
            refused = TableProgress("*", EVERY_TABLE, job.id, TableState.FAILED, error)
            if refused not in tables:
                await self._records.put_tables([refused])
