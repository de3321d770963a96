"""What the log asks of a dump: rows that no event brings, of partitions that come and go, or tables renamed to be ours.

And a key of other columns, or in another order, by which nobody can tell any more what was read before.
Invariants:
1. What a table is set back to is durable before its change is in force at the target: no crash leaves rows out.
2. A table whose dump is done is not begun anew by itself: emptying it at the target is somebody's decision.
"""

import asyncio
from collections.abc import Collection

import structlog

from server.dump.job import Job
from server.dump.keeper import ProgressKeeper
from server.dump.mysql.listener import DumpListener

_log = structlog.get_logger(__name__)


class DumpCopying:
    """Implements `server.puller.mysql.listener.Copying` for one changefeed; on the event loop."""

    def __init__(self, changefeed: str, listener: DumpListener, keeper: ProgressKeeper) -> None:
        self._changefeed = changefeed
        self._listener = listener
        self._keeper = keeper
        self._job: Job | None = None
        self._looked = asyncio.Event()

    def taken_up(self, job: Job | None) -> None:
        """This is what the metadata asks for."""
        self._job = job
        self._looked.set()

    async def copies(self, names: Collection[str]) -> bool:
        """See `Copying.copies`."""
        await self._looked.wait()
        return self._job is not None and all(map(self._job.takes, names))

    async def copies_anew(self, names: Collection[str]) -> bool:
        """See `Copying.copies_anew`."""
        await self._looked.wait()
        if self._job is None or not self._listener.begin_anew(names, self._job):
            return False
        await self._keeper.settle()
        _log.warning("tables are dumped anew", changefeed=self._changefeed, tables=sorted(names))
        return True
