"""The puller of schema changes: it follows the rows of mysql.tidb_ddl_job in the cluster's change feed.

Invariants:
1. A schema change is reported in the order of commit_ts, before `Catalog.resolve` reaches it.
2. What it knows at its start is what the meta keys say at `start_ts`; nothing is kept.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import structlog

from server.puller.source import Catalog, SourceContext
from server.puller.tidb.change import table_change
from server.puller.tidb.schemas import Schemas
from server.puller.tikv.puller import TablePuller, Upstream
from storage.model.errors import CorruptError, InvalidError
from storage.model.span import Span
from storage.tidb.ddl import Job
from storage.tidb.meta_key import job_span
from storage.tidb.schema_history import SchemaHistory

_log = structlog.get_logger(__name__)


class SchemaPuller:
    """Reports the schema changes above `start_ts` to `catalog` until cancelled."""

    def __init__(self, context: SourceContext, start_ts: int, catalog: Catalog) -> None:
        self.resolved_ts = start_ts
        self._context = context
        self._catalog = catalog
        self._schemas = Schemas(context.pd, context.kv)
        self._jobs = JobRows(start_ts)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ddl")
        upstream = Upstream(context.pd, context.feeds, self._executor)
        self.table_pullers = (TablePuller(job_span(), start_ts, upstream, self._jobs),)

    async def run(self) -> None:
        """See `Puller.run`.

        Raises:
            DdlUnsupportedError, TableIneligibleError: a wanted table cannot be followed any further.
            HistoryLostError: the schemas at the start are gone.
        """
        history = await self._schemas.at(self.resolved_ts)
        self._jobs.loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.table_pullers[0].run(), name="puller of DDL jobs")
                tasks.create_task(self._report(history), name="schema changes")
        finally:
            self._executor.shutdown(wait=False)

    async def _report(self, history: SchemaHistory) -> None:
        while True:
            resolved_ts = await self._jobs.wait_resolved(self.resolved_ts)
            for commit_ts, job in self._jobs.take(resolved_ts):
                try:
                    await self._change(history, commit_ts, job)
                except (InvalidError, CorruptError) as err:
                    await self._catalog.refuse(commit_ts - 1, err)
            self._catalog.resolve(resolved_ts)
            self.resolved_ts = resolved_ts

    async def _change(self, history: SchemaHistory, commit_ts: int, job: Job) -> None:
        change = history.apply(job, commit_ts)
        told = table_change(change, self._catalog) if change else None
        if told is not None:
            _log.info("schema change", commit_ts=commit_ts, job_id=job.id, tables=len(told.tables))
            await self._catalog.change(told)


class JobRows:
    """Where the change feed's rows of DDL jobs go; both calls of a sorter come from another thread."""

    def __init__(self, start_ts: int) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._start_ts = start_ts
        self._resolved_ts = start_ts
        self._jobs: dict[tuple[int, int], Job] = {}
        self._moved = asyncio.Event()

    def add(self, _span: Span, batch: pa.RecordBatch) -> None:
        """Take changes of RAW_SCHEMA: jobs that are done are kept, once each."""
        for commit_ts, value in zip(batch["commit_ts"].to_pylist(), batch["value"].to_pylist(), strict=True):
            job = Job.of_row(value) if value is not None and commit_ts > self._start_ts else None
            if job is not None and job.is_done:
                self._jobs[commit_ts, job.id] = job

    def resolve(self, _span: Span, ts: int) -> None:
        """All jobs up to `ts` were added."""
        self._resolved_ts = ts
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._moved.set)

    async def wait_resolved(self, above_ts: int) -> int:
        """The resolved_ts, as soon as it is above `above_ts`."""
        while self._resolved_ts <= above_ts:
            self._moved.clear()
            await self._moved.wait()
        return self._resolved_ts

    def take(self, ts: int) -> list[tuple[int, Job]]:
        """The jobs up to `ts`, in order; they are forgotten."""
        found = sorted(key for key in list(self._jobs) if key[0] <= ts)
        return [(key[0], self._jobs.pop(key)) for key in found]
