"""What the log asks of a dump: to copy rows that no event brings.

These are rows of partitions that come and go, of tables renamed into the changefeed, and of tables
whose key gets other columns or another order, so that a cursor no longer tells what was read.
Invariants:
1. What a table is set back to is durable before its change is in force at the target: no crash
   leaves rows out.
2. A table whose dump is done is not begun anew by itself where rows come or go by partitions:
   emptying it at the target is somebody's decision. Where a DDL changes values that no event tells,
   it is, unless the source's URI says `stop`: the job is made, or goes on, for that table
   (docs/design/0029).
"""

import asyncio
import glob
import uuid
from collections.abc import Collection
from dataclasses import replace

import structlog

from server.dump import metrics
from server.dump.errors import DumpStateError
from server.dump.job import DumpRecords, Job
from server.dump.mysql.listener import DumpListener
from server.dump.saver import ProgressSaver
from server.puller.mysql.listener import Reread

_log = structlog.get_logger(__name__)


class DumpCopying:
    """Implements `puller.mysql.listener.TableCopier` for one changefeed; on the event loop."""

    def __init__(
        self,
        changefeed: str,
        listener: DumpListener,
        saver: ProgressSaver,
        records: DumpRecords,
        *,
        rereads: bool = True,
    ) -> None:
        """Without `rereads` no job is made: what would be read again stops the changefeed."""
        self._changefeed = changefeed
        self._records = records
        self._rereads = rereads
        self._listener = listener
        self._saver = saver
        self._job: Job | None = None
        self._looked = asyncio.Event()
        self._earlier: set[str] = set()
        """Tables that an earlier life was reading again,
        and whose DDL the log has yet to tell once more.
        """

    def taken_up(self, job: Job | None) -> None:
        """Take up the job that is in the metadata."""
        self._job = job
        self._looked.set()

    async def copies(self, names: Collection[str]) -> bool:
        """See `TableCopier.copies`."""
        await self._looked.wait()
        if self._reads_again_any(names):
            return False
        return self._job is not None and all(map(self._job.takes, names))

    async def begin(self, start_ts: int) -> None:
        """See `TableCopier.begin`."""
        job = await self._records.job()
        if job is None:
            return
        self._earlier = {name for name, ts in job.since_ts.items() if ts > start_ts}
        names = {name for name, ts in job.since_ts.items() if ts == start_ts}
        tables = {
            table_id: each.name
            for table_id, each in self._listener.tables().items()
            if each.name in names
        }
        if tables:
            self._listener.read_again(start_ts, tables, job.reasons)
            _log.warning(
                "tables are still to be read again",
                changefeed=self._changefeed,
                tables=sorted(names),
            )

    async def reads_again(self, again: Reread) -> bool:
        """See `TableCopier.reads_again`."""
        if not self._rereads:
            return False
        await self._looked.wait()
        while True:
            before = await self._records.job()
            # An operator may change the job at the same time: read it again and extend that one.
            try:
                await self._records.put_job(before, _extended(before, again))
            except DumpStateError:
                continue
            break
        # The job is durable, then the cuts wait, then the progress is set back durably: the DDL is
        # not in force before this returns, so a crash anywhere repeats it all.
        self._earlier -= again.reasons.keys()
        self._listener.read_again(again.commit_ts, again.tables, again.reasons)
        await self._saver.settle()
        metrics.READ_AGAIN.inc(len(again.tables))
        _log.warning(
            "tables are read again, cuts wait for them",
            changefeed=self._changefeed,
            commit_ts=again.commit_ts,
            reasons=dict(again.reasons),
        )
        return True

    def _reads_again_any(self, names: Collection[str]) -> bool:
        """Whether cuts wait, or will wait, for one of these tables:
        that is no dump which shows it in part anyway.
        """
        again = {
            table.name
            for table_id, table in self._listener.tables().items()
            if table_id in self._listener.again
        }
        return not (self._earlier | again).isdisjoint(names)

    async def copies_anew(self, names: Collection[str]) -> bool:
        """See `TableCopier.copies_anew`."""
        await self._looked.wait()
        if self._reads_again_any(names):
            return False
        if self._job is None or not self._listener.begin_anew(names, self._job):
            return False
        await self._saver.settle()
        _log.warning("tables are dumped anew", changefeed=self._changefeed, tables=sorted(names))
        return True


def _extended(job: Job | None, again: Reread) -> Job:
    """The job with these tables in it, and why."""
    reasons, since_ts = dict(again.reasons), dict.fromkeys(again.reasons, again.commit_ts)
    if job is None:
        return Job(
            uuid.uuid4().hex,
            tables=tuple(map(glob.escape, reasons)),
            reasons=reasons,
            since_ts=since_ts,
        )
    missing = [glob.escape(name) for name in reasons if not job.takes(name)]
    return replace(
        job,
        tables=(*job.tables, *missing),
        reasons={**job.reasons, **reasons},
        since_ts={**job.since_ts, **since_ts},
    )
