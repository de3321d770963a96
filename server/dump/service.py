"""The API of dumps, `tidemarkpb.v1.DumpService`, which any capture serves.

It writes the dump's job into the metadata and reads its progress there; the capture that runs the
changefeed carries the job out.

`DumpScope` knows which tables a changefeed has. A name that no table has is refused, or reported: a
misspelled table would never be read, and a condition for a misspelled table would never be applied.
Patterns with wildcards may match tables that come later.
"""

import glob
import re
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import grpc.aio
from tidemarkpb.v1 import dump_pb2 as pb

from server.changefeed import keys
from server.changefeed.filter import TableFilter
from server.changefeed.history import History
from server.changefeed.info import ChangefeedInfo, State
from server.changefeed.records import loaded_changes
from server.changefeed.source import KINDS, find_kind
from server.dump.job import PARALLEL_MAX, PAUSED, RUNNING, DumpRecords, DumpStateError, Job
from server.dump.progress import TableState
from server.dump.status import dump_message, is_over, table_messages
from sink.flight.feeds import ChangefeedNotExistsError
from storage.meta.meta import Meta
from storage.model.errors import InvalidError, NotFoundError
from storage.model.ts import MAX_TS

_TABLES_SHOWN: Final = 20
_WILDCARD: Final = re.compile(r"[*?[]")
IGNORED: Final = "ignored"
_KEYLESS: Final = "it has no key, so it cannot be read in chunks; its changes are replicated"
Context = grpc.aio.ServicerContext[Any, Any]


class DumpNotFoundError(NotFoundError):
    """The changefeed has no dump."""

    code = "ErrDumpNotExists"


class DumpInvalidError(InvalidError):
    """The dump cannot be made as requested."""

    code = "ErrDumpInvalid"


class DumpUnsupportedError(InvalidError):
    """Changefeeds of this kind cannot be dumped as requested."""

    code = "ErrDumpUnsupported"


@dataclass(frozen=True, slots=True)
class DumpScope:
    """The tables of one changefeed, as the metadata has them."""

    changefeed: str
    scheme: str
    """The scheme of its source; empty: the cluster."""
    names: frozenset[str]
    """Its tables, as far as its log was read."""
    ignored: tuple[str, ...] = ()
    """Tables that its filter takes, and that it leaves out."""
    keyless: frozenset[str] = frozenset()
    """Its tables that have no key, of which only changes are known (MySQL)."""
    awaited: tuple[str, ...] = ()
    """The filter of a changefeed that does not run: it may have stopped before the statement that
    creates a table, so names that the filter takes are allowed.
    """
    stopped_by: str = ""
    """Why it does not run."""

    @classmethod
    async def of(cls, meta: Meta, changefeed: str) -> Self:
        """Read the changefeed's records.

        Raises:
            ChangefeedNotExistsError: there is none.
        """
        pair = await meta.get(keys.info(changefeed))
        if pair is None:
            raise ChangefeedNotExistsError(f"there is no changefeed {changefeed}")
        info = ChangefeedInfo.from_json(pair.value)
        tables = History(await loaded_changes(meta, changefeed)).at(MAX_TS)
        keyless = frozenset(name for name, (_, record) in tables.items() if record.is_keyless)
        names = frozenset(tables) - keyless
        scheme = info.source_uri.partition(":")[0]
        scope = cls(changefeed, scheme, names, info.ignored, keyless)
        if info.state.is_running:
            return scope
        return replace(scope, awaited=info.rules, stopped_by=_stop_reason(info))

    def check(self, job: Job) -> None:
        """Refuse names that no table has.

        Raises:
            DumpInvalidError: with the names there are.
        """
        for option, given in (
            ("--table", job.tables),
            ("--where", job.where),
            ("--priority", job.priority),
        ):
            for name in _exact(given):
                if name in self.ignored:
                    raise DumpInvalidError(f"{option} {name}: {_left_out(name)}")
                if name in self.keyless:
                    raise DumpInvalidError(f"{option} {name}: {_KEYLESS}")
                if name not in self.names and not self._may_come(name):
                    names = ", ".join(sorted(self.names)[:_TABLES_SHOWN]) or "none"
                    raise DumpInvalidError(
                        f"{option} {name}: changefeed {self.changefeed} has no such table; its "
                        f"tables are {names}"
                    )
        for name in job.where:
            if _WILDCARD.search(name) or not job.takes(name):
                raise DumpInvalidError(
                    f"--where {name}: it is to be one table that is dumped, by its name"
                )

    def _may_come(self, name: str) -> bool:
        schema_name, _, table_name = name.partition(".")
        return TableFilter(self.awaited).takes(schema_name, table_name)

    def others(self, job: Job, listed: Collection[str]) -> dict[str, tuple[str, str]]:
        """Tables that the job takes, of which nothing is read and which are not `listed` yet:
        a state for each, and why.
        """
        gone = self.gone(job)
        missing = {
            name: (
                (TableState.DROPPED if name in gone else TableState.WAITING).value,
                "no table of the changefeed has this name now",
            )
            for name in _exact(job.tables)
            if name not in self.names | self.keyless
        }
        missing |= {name: (IGNORED, _KEYLESS) for name in self.keyless if job.takes(name)}
        left_out = {name: (IGNORED, _left_out(name)) for name in self.ignored if job.takes(name)}
        return {name: each for name, each in (missing | left_out).items() if name not in listed}

    def gone(self, job: Job) -> frozenset[str]:
        """Return the tables that the job names and that were dropped or renamed."""
        return frozenset(
            name
            for name in _exact(job.tables)
            if name not in self.names | self.keyless and not self._may_come(name)
        )


def _exact(patterns: Iterable[str]) -> Iterable[str]:
    return (pattern for pattern in patterns if not _WILDCARD.search(pattern))


def _stop_reason(info: ChangefeedInfo) -> str:
    """Return why it does not run, and the remedy: resuming alone does not help against an error
    that would return.
    """
    if info.state is State.STOPPED:
        return (
            f"the changefeed is stopped; `tidemark cli changefeed resume -c {info.id}` lets it go "
            "on"
        )
    why = f": [{info.error.code}] {info.error.message}" if info.error else ""
    if info.state is not State.FAILED:
        return f"the changefeed is {info.state.value}{why}"
    return (
        f"the changefeed is failed{why}. Do what this error says; where its cause is gone, "
        f"`tidemark cli changefeed resume -c {info.id}` lets it go on"
    )


def _left_out(name: str) -> str:
    return (
        f"the changefeed leaves {name} out, as it could not be replicated when it was created "
        "(--ignore-ineligible-"
        "table): see `tidemark cli source check` for why; once mended, replicate it by another "
        "changefeed"
    )


class DumpService:
    """`tidemarkpb.v1.DumpService`; its state is in the metadata."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta

    async def StartDump(
        self, request: pb.StartDumpRequest, context: Context
    ) -> pb.StartDumpResponse:
        """Start a dump; one that is over is started anew."""
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
        # The same request once more, as after an answer that was lost, changes nothing.
        if before is not None and replace(job, id=before.id, attempt=before.attempt) == before:
            job = before
        if before is not job:
            if before is not None and not await self._is_over(scope, records, before):
                raise DumpStateError(
                    "a dump of the changefeed is under way: pause, resume, update or restart it"
                )
            await records.put_job(before, job)
        elif await self._is_over(scope, records, job):
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
        """Continue, and try failed tables again."""
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
        """The state and the progress of the dump, table by table."""
        del context
        return pb.GetDumpStatusResponse(**await self._status(request.changefeed_id))

    async def _scope(self, changefeed: str) -> DumpScope:
        """The tables of a changefeed.

        Raises:
            ChangefeedNotExistsError, DumpUnsupportedError: there is none, or it cannot be dumped.
        """
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
        gone = scope.gone(job)
        waits_for = scope.stopped_by or (
            await self._waits(records, job) if job.state == PAUSED else ""
        )
        if scope.stopped_by:
            tables = [replace(each, rows_per_s=0) for each in tables]
        return {
            "dump": dump_message(changefeed, job, tables, waits_for, gone),
            "status": table_messages(changefeed, job, tables, others),
        }

    async def _with_rereads(self, records: DumpRecords, before: Job, job: Job) -> Job:
        """Add to a new job the tables that the previous one was to read again, if cuts still wait
        for them.
        """
        checkpoint_ts = await records.checkpoint_ts()
        since_ts = {name: ts for name, ts in before.since_ts.items() if ts >= checkpoint_ts}
        if not since_ts:
            return job
        missing = [glob.escape(name) for name in since_ts if not job.takes(name)]
        reasons = {name: before.reasons[name] for name in since_ts if name in before.reasons}
        return replace(job, tables=(*job.tables, *missing), reasons=reasons, since_ts=since_ts)

    @staticmethod
    async def _is_over(scope: DumpScope, records: DumpRecords, job: Job) -> bool:
        return is_over(job, await records.tables(job), scope.gone(job))

    async def _waits(self, records: DumpRecords, job: Job) -> str:
        """The reason why cuts wait while the dump is paused: for tables that are read again."""
        checkpoint_ts = await records.checkpoint_ts()
        names = sorted(name for name, ts in job.since_ts.items() if ts >= checkpoint_ts)
        if not names:
            return ""
        return f"cuts wait until {', '.join(names)} are read again: resume the dump"


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
    updated = replace(job, priority={**job.priority, **request.priority})
    if request.HasField("rows_per_second_max"):
        updated = replace(updated, rows_per_s=request.rows_per_second_max)
    if request.HasField("bytes_per_second_max"):
        updated = replace(updated, bytes_per_s=request.bytes_per_second_max)
    if request.HasField("parallel"):
        updated = replace(updated, parallel=_checked(request.parallel))
    return updated


def _checked(parallel: int) -> int:
    if not 0 < parallel <= PARALLEL_MAX:
        raise DumpInvalidError(f"parallel is at least 1 and at most {PARALLEL_MAX}, not {parallel}")
    return parallel
