"""The dumps' API: `tidemarkpb.v1.DumpService`, at any capture.

It writes what is wanted into the metadata and reads how far it is; the capture that runs the
changefeed does it.
"""

import glob
import uuid
from dataclasses import replace
from typing import Any

import grpc.aio
from tidemarkpb.v1 import dump_pb2 as pb

from server.changefeed.source import KINDS, find_kind
from server.dump.errors import (
    DumpInvalidError,
    DumpNotFoundError,
    DumpStateError,
    DumpUnsupportedError,
)
from server.dump.job import PARALLEL_MAX, PAUSED, RUNNING, DumpRecords, Job
from server.dump.scope import DumpScope
from server.dump.status import dump_message, is_over, table_messages
from storage.meta.meta import Meta

Context = grpc.aio.ServicerContext[Any, Any]


class DumpService:
    """Any capture's."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta

    async def StartDump(
        self, request: pb.StartDumpRequest, context: Context
    ) -> pb.StartDumpResponse:
        """Ask for a dump; one that is over is done anew."""
        del context
        scope = await self._scope(request.changefeed_id)
        records = DumpRecords(self._meta, request.changefeed_id)
        before = await records.job()
        job = _job(request)
        by_sql = find_kind(scope.scheme).dumps_by_sql
        if request.where and not by_sql:
            raise DumpUnsupportedError(
                "tables of the cluster are read from the store, which knows no SQL: leave the "
                "conditions out"
            )
        if request.verify and not by_sql:
            raise DumpUnsupportedError(
                "the store sums no rows: leave --verify out, and compare the lake by tidemark cli "
                "verify"
            )
        scope.check(job)
        if before is not None and before.since_ts:
            job = await self._with_rereads(records, before, job)
        if before is not None and replace(job, id=before.id, attempt=before.attempt) == before:
            job = before  # the same once more
        if before is not job:
            if before is not None and not is_over(await records.tables(before)):
                raise DumpStateError(
                    "a dump of the changefeed is under way: pause, resume, update or restart it"
                )
            await records.put_job(before, job)
        elif is_over(await records.tables(job)):
            await records.put_job(before, replace(job, id=uuid.uuid4().hex))
        return pb.StartDumpResponse(**await self._status(request.changefeed_id))

    async def PauseDump(
        self, request: pb.PauseDumpRequest, context: Context
    ) -> pb.PauseDumpResponse:
        """Read no more chunks."""
        del context
        _, records, job = await self._existing(request.changefeed_id)
        await records.put_job(job, replace(job, state=PAUSED))
        return pb.PauseDumpResponse(**await self._status(request.changefeed_id))

    async def ResumeDump(
        self, request: pb.ResumeDumpRequest, context: Context
    ) -> pb.ResumeDumpResponse:
        """Go on, and try again what has failed."""
        del context
        _, records, job = await self._existing(request.changefeed_id)
        await records.put_job(job, replace(job, state=RUNNING, attempt=job.attempt + 1))
        return pb.ResumeDumpResponse(**await self._status(request.changefeed_id))

    async def UpdateDump(
        self, request: pb.UpdateDumpRequest, context: Context
    ) -> pb.UpdateDumpResponse:
        """Go on in another order, or at another pace."""
        del context
        scope, records, job = await self._existing(request.changefeed_id)
        updated = _updated(job, request)
        scope.check(Job(job.id, priority=dict(request.priority)))
        if updated != job:
            await records.put_job(job, updated)
        return pb.UpdateDumpResponse(**await self._status(request.changefeed_id))

    async def RestartDump(
        self, request: pb.RestartDumpRequest, context: Context
    ) -> pb.RestartDumpResponse:
        """Begin anew."""
        del context
        _, records, job = await self._existing(request.changefeed_id)
        await records.put_job(job, replace(job, state=RUNNING, id=uuid.uuid4().hex))
        return pb.RestartDumpResponse(**await self._status(request.changefeed_id))

    async def GetDumpStatus(
        self, request: pb.GetDumpStatusRequest, context: Context
    ) -> pb.GetDumpStatusResponse:
        """How far it is."""
        del context
        return pb.GetDumpStatusResponse(**await self._status(request.changefeed_id))

    async def _scope(self, changefeed: str) -> DumpScope:
        """Refused where it cannot be dumped."""
        scope = await DumpScope.of(self._meta, changefeed)
        if scope.scheme not in KINDS:
            *kinds, last = (kind.shown for kind in KINDS.values())
            raise DumpUnsupportedError(
                f"changefeed {changefeed} is of a {scope.scheme}:// source, which cannot be "
                f"dumped; {', '.join(kinds)} and {last} can"
            )
        return scope

    async def _existing(self, changefeed: str) -> tuple[DumpScope, DumpRecords, Job]:
        scope = await self._scope(changefeed)
        records = DumpRecords(self._meta, changefeed)
        job = await records.job()
        if job is None:
            raise DumpNotFoundError(f"changefeed {changefeed} has no dump; begin one by dumpstart")
        return scope, records, job

    async def _status(self, changefeed: str) -> dict[str, Any]:
        scope, records, job = await self._existing(changefeed)
        tables = await records.tables(job)
        others = scope.others(job, {each.name for each in tables})
        stands = scope.stands or (await self._waits(records, job) if job.state == PAUSED else "")
        if scope.stands:
            tables = [replace(each, rows_per_s=0) for each in tables]
        return {
            "dump": dump_message(changefeed, job, tables, stands),
            "status": table_messages(changefeed, job, tables, others),
        }

    async def _with_rereads(self, records: DumpRecords, before: Job, job: Job) -> Job:
        """A new job also reads what the one before was to read again, if cuts still wait for it."""
        checkpoint_ts = await records.checkpoint_ts()
        since_ts = {name: ts for name, ts in before.since_ts.items() if ts >= checkpoint_ts}
        if not since_ts:
            return job
        missing = [glob.escape(name) for name in since_ts if not job.takes(name)]
        reasons = {name: before.reasons[name] for name in since_ts if name in before.reasons}
        return replace(job, tables=(*job.tables, *missing), reasons=reasons, since_ts=since_ts)

    async def _waits(self, records: DumpRecords, job: Job) -> str:
        """What a pause keeps from going on, beside the dump:
        cuts wait for tables that are read again.
        """
        checkpoint_ts = await records.checkpoint_ts()
        names = sorted(name for name, ts in job.since_ts.items() if ts >= checkpoint_ts)
        return (
            f"cuts wait until {', '.join(names)} are read again: resume the dump" if names else ""
        )


def _job(request: pb.StartDumpRequest) -> Job:
    return Job(
        id=uuid.uuid4().hex,
        tables=tuple(request.tables),
        where=dict(request.where),
        priority=dict(request.priority),
        rows_per_s=request.rows_per_second_max,
        bytes_per_s=request.bytes_per_second_max,
        parallel=_checked(request.parallel or Job("").parallel),
        verify=request.verify,
    )


def _updated(job: Job, request: pb.UpdateDumpRequest) -> Job:
    return replace(
        job,
        priority={**job.priority, **request.priority},
        rows_per_s=request.rows_per_second_max
        if request.HasField("rows_per_second_max")
        else job.rows_per_s,
        bytes_per_s=request.bytes_per_second_max
        if request.HasField("bytes_per_second_max")
        else job.bytes_per_s,
        parallel=_checked(request.parallel) if request.HasField("parallel") else job.parallel,
    )


def _checked(parallel: int) -> int:
    if not 0 < parallel <= PARALLEL_MAX:
        raise DumpInvalidError(f"parallel is at least 1 and at most {PARALLEL_MAX}, not {parallel}")
    return parallel
