"""The dumps' API: `tidemarkpb.v1.DumpService`, at any capture.

It writes what is wanted into the metadata and reads how far it is; the capture that runs the changefeed does it.
"""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
from tidemarkpb.v1 import dump_pb2 as pb

from server.capture import keys
from server.capture.changefeed import ChangefeedInfo
from server.capture.errors import ChangefeedNotExistsError
from server.dump.errors import DumpInvalidError, DumpNotFoundError, DumpStateError, DumpUnsupportedError
from server.dump.job import PARALLEL_MAX, PAUSED, RUNNING, DumpRecords, Job
from server.dump.progress import TableProgress, TableState
from server.dump.unsupported import workers_unsupported
from storage.meta.meta import Meta

Context = grpc.aio.ServicerContext[Any, Any]


class DumpService:
    """Any capture's."""

    def __init__(self, meta: Meta, *, tables_here: bool = True) -> None:
        self._meta = meta
        self._tables_here = tables_here
        """Whether this capture pulls the cluster's tables itself; else its workers do."""

    async def StartDump(  # noqa: N802 - the proto's name
        self, request: pb.StartDumpRequest, context: Context
    ) -> pb.StartDumpResponse:
        """Ask for a dump; one that is over is done anew."""
        del context
        records = await self._records(request.changefeed_id, begin=True)
        before = await records.job()
        wanted = _job(request)
        if request.where and not await self._scheme(request.changefeed_id):
            raise DumpUnsupportedError(
                "tables of the cluster are read from the store, which knows no SQL: leave the conditions out"
            )
        if before is not None and replace(wanted, id=before.id, attempt=before.attempt) == before:
            wanted = before  # the same once more
        if before is not wanted:
            if before is not None and not _is_over(await records.tables(before)):
                raise DumpStateError("a dump of the changefeed is under way: pause, resume or restart it")
            await records.put_job(before, wanted)
        elif _is_over(await records.tables(wanted)):
            await records.put_job(before, replace(wanted, id=uuid.uuid4().hex))
        return pb.StartDumpResponse(**await self._status(request.changefeed_id))

    async def PauseDump(  # noqa: N802 - the proto's name
        self, request: pb.PauseDumpRequest, context: Context
    ) -> pb.PauseDumpResponse:
        """Read no more chunks."""
        del context
        records, job = await self._existing(request.changefeed_id)
        await records.put_job(job, replace(job, state=PAUSED))
        return pb.PauseDumpResponse(**await self._status(request.changefeed_id))

    async def ResumeDump(  # noqa: N802 - the proto's name
        self, request: pb.ResumeDumpRequest, context: Context
    ) -> pb.ResumeDumpResponse:
        """Go on, and try again what has failed."""
        del context
        records, job = await self._existing(request.changefeed_id, begin=True)
        await records.put_job(job, replace(job, state=RUNNING, attempt=job.attempt + 1))
        return pb.ResumeDumpResponse(**await self._status(request.changefeed_id))

    async def RestartDump(  # noqa: N802 - the proto's name
        self, request: pb.RestartDumpRequest, context: Context
    ) -> pb.RestartDumpResponse:
        """Begin anew."""
        del context
        records, job = await self._existing(request.changefeed_id, begin=True)
        await records.put_job(job, replace(job, state=RUNNING, id=uuid.uuid4().hex))
        return pb.RestartDumpResponse(**await self._status(request.changefeed_id))

    async def GetDumpStatus(  # noqa: N802 - the proto's name
        self, request: pb.GetDumpStatusRequest, context: Context
    ) -> pb.GetDumpStatusResponse:
        """How far it is."""
        del context
        return pb.GetDumpStatusResponse(**await self._status(request.changefeed_id))

    async def _records(self, changefeed: str, *, begin: bool = False) -> DumpRecords:
        """Refused where it cannot be dumped; `begin`: something is to be read, so also where it cannot be now."""
        scheme = await self._scheme(changefeed)
        if scheme not in {"", "mysql"}:
            raise DumpUnsupportedError(
                f"changefeed {changefeed} is of a {scheme}:// source, which cannot be dumped; the cluster's own change "
                "feed and mysql:// can"
            )
        if begin and not scheme and not self._tables_here:
            raise workers_unsupported()
        return DumpRecords(self._meta, changefeed)

    async def _scheme(self, changefeed: str) -> str:
        """Of its source; empty: the cluster."""
        found = await self._meta.get(keys.info(changefeed))
        if found is None:
            raise ChangefeedNotExistsError(f"there is no changefeed {changefeed}")
        return ChangefeedInfo.from_json(found.value).source_uri.partition(":")[0]

    async def _existing(self, changefeed: str, *, begin: bool = False) -> tuple[DumpRecords, Job]:
        records = await self._records(changefeed, begin=begin)
        job = await records.job()
        if job is None:
            raise DumpNotFoundError(f"changefeed {changefeed} has no dump; begin one by dumpstart")
        return records, job

    async def _status(self, changefeed: str) -> dict[str, Any]:
        records, job = await self._existing(changefeed)
        tables = await records.tables(job)
        state = "finished" if _is_over(tables) else job.state
        dump = pb.Dump(
            changefeed_id=changefeed,
            job_id=job.id,
            state=state,
            tables=job.tables,
            where=dict(job.where),
            rows_per_second_max=job.rows_per_s,
            bytes_per_second_max=job.bytes_per_s,
            parallel=job.parallel,
        )
        by_name = sorted(tables, key=lambda each: each.name)
        return {"dump": dump, "status": [_table(changefeed, each) for each in by_name]}


def _job(request: pb.StartDumpRequest) -> Job:
    parallel = request.parallel or Job("").parallel
    if parallel > PARALLEL_MAX:
        raise DumpInvalidError(f"parallel is at most {PARALLEL_MAX}, not {parallel}")
    return Job(
        id=uuid.uuid4().hex,
        tables=tuple(request.tables),
        where=dict(request.where),
        rows_per_s=request.rows_per_second_max,
        bytes_per_s=request.bytes_per_second_max,
        parallel=parallel,
    )


def _is_over(tables: Sequence[TableProgress]) -> bool:
    return bool(tables) and all(each.state.is_over for each in tables)


def _table(changefeed: str, each: TableProgress) -> pb.DumpStatus:
    left = max(each.rows_estimated - each.rows, 0)
    known = each.rows_estimated > 0
    share = (
        100.0 if each.state is TableState.DONE else min(100.0 * each.rows / each.rows_estimated, 99.9) if known else 0
    )
    eta = 0 if each.state is TableState.DONE else left // each.rows_per_s if each.rows_per_s and known else -1
    return pb.DumpStatus(
        changefeed_id=changefeed,
        state=each.state.value,
        table=each.name,
        rows_done=each.rows,
        rows_estimated=each.rows_estimated,
        bytes_done=each.bytes,
        eta_seconds=eta,
        progress_percent=share,
        error=each.error,
        chunks_done=each.chunks,
        rows_per_second=each.rows_per_s,
        high_ts=each.high_ts,
        rows_read=each.rows_read,
    )
