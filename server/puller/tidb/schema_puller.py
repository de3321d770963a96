"""The puller of schema changes: it follows the rows of mysql.tidb_ddl_job in the cluster's change
feed, and turns each job into changes of tables.

Invariants:
1. A schema change is reported in the order of commit_ts, before `Catalog.resolve` reaches it.
2. What it knows at its start is what the meta keys say at `start_ts`; nothing is kept.
3. A job that goes on when users have what it brings (an ALTER with several changes, DROP PARTITION)
   is reported at the commit_ts from which on they have it. The job says what that is when it is
   done, so until then nothing is known from there on.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import structlog

from server.changefeed.table import SourceTable
from server.puller.source import Catalog, SourceContext, TableChange
from server.puller.tidb.cluster import Schemas
from server.puller.tidb.table import record_of, reread_of
from server.puller.tikv.puller import TablePuller, Upstream
from storage.model.errors import CorruptError, InvalidError
from storage.model.span import Span
from storage.tidb.ddl import Job, job_span
from storage.tidb.schema_history import Change, SchemaHistory, Table

_log = structlog.get_logger(__name__)


class DdlUnsupportedError(InvalidError):
    """A DDL brings rows into a table, or changes them, without writing them."""

    code = "ErrDdlUnsupported"


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
            DdlUnsupportedError, TableIneligibleError: a wanted table cannot be followed any
                further.
            HistoryLostError: the schemas at the start are gone.
        """
        history = await self._schemas.at(self.resolved_ts)
        # Jobs that users have already, though they are not done: the meta keys show what they
        # bring, and when they are done they must not be applied once more.
        history.skip(await self._schemas.public_jobs(self.resolved_ts))
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
                # What lies before a DDL that cannot be followed is delivered first.
                try:
                    await self._change(history, commit_ts, job)
                except (InvalidError, CorruptError) as err:
                    await self._catalog.refuse(commit_ts - 1, err)
            # After the changes: rows above one of them must not be read by the schema before it.
            self._catalog.resolve(resolved_ts)
            self.resolved_ts = resolved_ts

    async def _change(self, history: SchemaHistory, commit_ts: int, job: Job) -> None:
        change = history.apply(job, commit_ts)
        taken = table_change(change, self._catalog) if change else None
        if taken is not None:
            _log.info("schema change", commit_ts=commit_ts, job_id=job.id, tables=len(taken.tables))
            await self._catalog.change(taken)


class JobRows:
    """Receives the change feed's rows of DDL jobs; both methods of a sorter are called from another
    thread.
    """

    def __init__(self, start_ts: int) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._start_ts = start_ts
        self._resolved_ts = start_ts
        self._done: dict[tuple[int, int], Job] = {}
        self._public: dict[int, int] = {}
        self._moved = asyncio.Event()

    def add(self, _span: Span, batch: pa.RecordBatch) -> None:
        """Take changes of RAW_SCHEMA: jobs that are done are kept, once each,
        and since when users have them.
        """
        for commit_ts, value in zip(
            batch["commit_ts"].to_pylist(), batch["value"].to_pylist(), strict=True
        ):
            # A delete: a job that is done moves from the table to the history.
            if value is None or commit_ts <= self._start_ts:
                continue
            job = Job.of_row(value)
            # The first time counts: a job's row is written again at each of its steps.
            if job.is_public:
                self._public[job.id] = min(commit_ts, self._public.get(job.id, commit_ts))
            if job.is_done:
                self._done[commit_ts, job.id] = job

    def resolve(self, _span: Span, ts: int) -> None:
        """Note that all jobs up to `ts` were added."""
        self._resolved_ts = ts
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._moved.set)

    async def wait_resolved(self, above_ts: int) -> int:
        """Wait until all jobs are known up to a ts above `above_ts`, and return that ts."""
        # The event is set on this loop only (`call_soon_threadsafe`), so none is missed between the
        # look and the wait.
        while (known_ts := self._known_ts()) <= above_ts:
            self._moved.clear()
            await self._moved.wait()
        return known_ts

    def take(self, ts: int) -> list[tuple[int, Job]]:
        """The jobs that are in force for users from a commit_ts up to `ts` on, in order;
        they are forgotten.
        """
        done = sorted(
            (self._public[job_id], job_id, done_ts) for done_ts, job_id in list(self._done)
        )
        taken = [
            (public_ts, self._done.pop((done_ts, job_id)))
            for public_ts, job_id, done_ts in done
            if public_ts <= ts
        ]
        for _, job in taken:
            self._public.pop(job.id, None)
        # A region that is scanned again brings jobs once more: they were reported.
        self._start_ts = max(self._start_ts, ts)
        return taken

    def _known_ts(self) -> int:
        # Copies, made at once: `add` changes the dictionaries in another thread.
        done = {job_id for _, job_id in list(self._done)}
        waiting = (ts - 1 for job_id, ts in list(self._public.items()) if job_id not in done)
        return min([self._resolved_ts, *waiting])


def table_change(change: Change, catalog: Catalog) -> TableChange | None:
    """The change as the catalog takes it; None: it does not concern the changefeed.

    Raises:
        DdlUnsupportedError: it changes rows that no change feed brings.
        TableIneligibleError: the changefeed wants a table that cannot be replicated.
    """
    if change.moved:
        _refuse(change, catalog)
    records = (catalog.table(record_of(table), change.commit_ts) for table in change.tables)
    tables = tuple(table for table in records if table is not None)
    begun_anew = tuple(table.name for table in tables if _begins_anew(table, change.commit_ts))
    truncated = (
        tuple(table.name for table in change.truncated if _wanted(table, catalog)) + begun_anew
    )
    if not (tables or truncated or any(_wanted(table, catalog) for table in change.dropped)):
        return None
    # All of them, also those that the filter leaves out: a table that is renamed may come from
    # outside.
    dropped = tuple(table.name for table in change.dropped)
    return TableChange(change.commit_ts, change.query, tables, dropped, truncated)


def _refuse(change: Change, catalog: Catalog) -> None:
    names = [table.name for table in change.tables if _wanted(table, catalog)]
    if change.database:
        names = [change.database] if catalog.wants_any_of(change.database) else []
    if names or not (change.tables or change.database):
        raise DdlUnsupportedError(
            f"at {change.commit_ts} {', '.join(names) or 'every table'}: {change.moved}: "
            f"{change.query}. Everything before it is delivered first. Create another changefeed "
            f"with --start-ts {change.commit_ts} and another --sink-uri, and copy its tables by "
            "`tidemark cli changefeed dumpstart`; a --filter may leave some out"
        )


def _begins_anew(table: SourceTable, commit_ts: int) -> bool:
    reread = reread_of(table.record)
    return reread.ts == commit_ts and reread.emptied


def _wanted(table: Table, catalog: Catalog) -> bool:
    return catalog.wants(table.schema_name, table.table_name)
