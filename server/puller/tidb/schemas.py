"""The schemas of a TiDB cluster, as its store has them: all of them as of a timestamp, one DDL job,
the rows of a table or partition.

`ClusterTables` answers for a source what has to do with tables, however their changes come.
Whatever is read at a timestamp is followed by a look at the GC safepoint: had GC passed the
timestamp, some of it could be missing without a sign.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final

from server.changefeed.table import SourceTable, TableRecord
from server.puller.source import SourceContext
from server.puller.tidb.table import following, keeping_identities, record_of, tidb_table
from server.puller.tikv.subscription import HistoryLostError
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient, Pairs
from server.rpc.transaction import Snapshot
from storage.model.errors import InvalidError
from storage.tidb.ddl import SCHEMAS_BEGIN, SCHEMAS_END, Job, history_key, job_key, job_span
from storage.tidb.record import table_span
from storage.tidb.schema_history import SchemaHistory

PAGE_KEYS: Final = 256
_TIMEOUT_S: Final = 30.0
_PAUSES_S: Final = (0.1, 0.4, 1.5, 3.0)


class SchemaGapError(InvalidError):
    """A schema change is not to be found, so rows after it cannot be read."""

    code = "ErrSchemaGap"


class Schemas:
    """Reads through the cluster's clients; holds nothing."""

    def __init__(self, pd: PdClient, kv: KvClient) -> None:
        self._pd = pd
        self._kv = kv
        self._resolver = LockResolver(pd, kv)

    async def at(self, ts: int) -> SchemaHistory:
        """All schemas in force above `ts`.

        Raises:
            HistoryLostError: GC has passed `ts`.
            CorruptError: the meta keys are not TiDB's.
        """
        pairs = [
            pair async for page in self._pages(SCHEMAS_BEGIN, SCHEMAS_END, ts) for pair in page
        ]
        return SchemaHistory.of_meta(ts, pairs)

    async def public_jobs(self, ts: int) -> list[int]:
        """The ids of jobs under way at `ts` that are in force for users; raises as `at`."""
        span = job_span()
        pages = [page async for page in self._pages(span.start_key, span.end_key, ts)]
        jobs = [Job.of_row(value) for page in pages for _, value in page]
        return [job.id for job in jobs if job.is_public]

    async def job(self, job_id: int, commit_ts: int) -> Job:
        """The DDL job as the transaction at `commit_ts` left it; or, where that is gone,
        as it ended.

        Raises:
            SchemaGapError: the store does not know it.
        """
        row = await self._snapshot(commit_ts).get(job_key(job_id))
        if row is not None:
            return Job.of_row(row)
        # A job moves to the history some time after its transaction.
        for pause_s in (*_PAUSES_S, 0.0):
            text = await self._snapshot(await self._pd.tso()).get(history_key(job_id))
            if text is not None:
                return Job.parse(text)
            await asyncio.sleep(pause_s)
        raise SchemaGapError(
            f"the store does not know DDL job {job_id}, which came in force at {commit_ts}: rows "
            "above it cannot be read; begin anew from a dump taken after it"
        )

    async def rows(self, table_id: int, ts: int) -> AsyncIterator[Pairs]:
        """The records of one table or partition at `ts`, page by page.

        Raises:
            HistoryLostError: GC has passed `ts`.
        """
        span = table_span(table_id)
        async for page in self._pages(span.start_key, span.end_key, ts):
            yield page

    async def present(self, keys: Sequence[bytes], ts: int) -> Collection[bytes]:
        """Those of `keys` that have a value at `ts`; raises as `rows`."""
        rows = await self._snapshot(ts).batch_get(keys)
        await self._check_kept(ts)
        return rows.keys()

    async def _page(self, begin: bytes, end: bytes, ts: int, limit: int) -> Pairs:
        """The first `limit` pairs of `[begin, end)` at `ts`.

        Raises:
            HistoryLostError: GC has passed `ts`.
            GaveUpError: a live transaction kept a key locked for too long, or no store answered.
        """
        page = await self._snapshot(ts).scan(begin, end, limit)
        # After the read: a safepoint that was read before it says nothing of what was collected
        # meanwhile.
        await self._check_kept(ts)
        return page

    async def _pages(self, begin: bytes, end: bytes, ts: int) -> AsyncIterator[Pairs]:
        while True:
            page = await self._page(begin, end, ts, PAGE_KEYS)
            if page:
                yield page
            if len(page) < PAGE_KEYS:
                return
            begin = page[-1][0] + b"\0"

    async def _check_kept(self, ts: int) -> None:
        """What was read at `ts` was all there: GC had not passed it afterwards."""
        safe_point = await self._pd.gc_safe_point()
        if ts < safe_point:
            raise HistoryLostError(
                f"the store's GC has passed {ts}, it stands at {safe_point}: schemas or rows of "
                "then are gone; begin anew from a dump, and keep the changefeed's service safe "
                "point alive"
            )

    def _snapshot(self, ts: int) -> Snapshot:
        return Snapshot(self._kv, self._resolver, ts, timeout_s=_TIMEOUT_S)


class ClusterTables:
    """What of `server.puller.source.Source` the cluster's sources answer alike;
    records are TiDB's TableInfo.
    """

    keeps_history = True
    warnings: Sequence[str] = ()

    def __init__(self, context: SourceContext) -> None:
        self._context = context
        self._schemas = Schemas(context.pd, context.kv)

    async def now(self) -> int:
        """See `Source.now`."""
        return await self._context.pd.tso()

    async def snapshot(self, ts: int, before: Sequence[TableRecord] = ()) -> Sequence[TableRecord]:
        """See `Source.snapshot`: what the meta keys say at `ts`;
        TiDB gives a reorganized column another id.
        """
        earlier_by_id = {record.table_info.get("id"): record for record in before}
        records: list[TableRecord] = []
        for record in map(record_of, await self._schemas.at(ts)):
            earlier = earlier_by_id.get(record.table_info.get("id"))
            records.append(keeping_identities(record, earlier) if earlier else record)
        return records

    async def present(self, before: Sequence[TableRecord]) -> tuple[int, Sequence[TableRecord]]:
        """See `Source.present`."""
        ts = await self.now()
        return ts, await self.snapshot(ts, before)

    def table(self, record: TableRecord, before: TableRecord | None = None) -> SourceTable:
        """See `Source.table`."""
        return tidb_table(record if before is None else following(record, before))
