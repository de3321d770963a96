"""A TiDB cluster as its store has it at a timestamp: its schemas, one DDL job, and rows that a DDL
changed although nobody wrote them.

`Schemas` reads. Whatever it reads at a timestamp is followed by a look at the GC safepoint: had GC
passed the timestamp, some of it could be missing without a sign. `unwritten_rows` gives what a DDL
changed beside all transactions as changes at the first timestamp after it: rows of removed
partitions are deletes; of a table whose stored values the DDL changed, all rows come as updates.
The store still has them: the changefeed's service safe point stands before the DDL until a reader
has acknowledged what comes after it.

`ClusterTables` answers for a source what has to do with tables, however their changes come.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa
import structlog

from server.changefeed.table import SourceTable, TableRecord
from server.puller import metrics
from server.puller.source import SourceContext
from server.puller.tidb.table import (
    Removed,
    following,
    keeping_identities,
    part_spans,
    physical_spans,
    record_of,
    removed_from,
    reread_of,
    tidb_table,
)
from server.puller.tikv.feed import HistoryLostError
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient, Pairs
from server.rpc.transaction import Snapshot
from storage.model.errors import InvalidError
from storage.model.event import DELETE, raw_batch, snapshot_rows
from storage.tidb.ddl import SCHEMAS_BEGIN, SCHEMAS_END, Job, history_key, job_key, job_span
from storage.tidb.record import record_prefix, table_span
from storage.tidb.schema_history import SchemaHistory

PAGE_KEYS: Final = 256
_TIMEOUT_S: Final = 30.0
_PAUSES_S: Final = (0.1, 0.4, 1.5, 3.0)
_ID_END = len(record_prefix(0))
_LOOKED_AT_ONCE = 16  # partitions, of a page's keys

_log = structlog.get_logger(__name__)


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
        """Return those of `keys` that have a value at `ts`; raises as `rows`."""
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
        """Check that a read at `ts` was complete: GC had not passed it afterwards."""
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
    """The part of `server.puller.source.Source` that the cluster's sources share; records are
    TiDB's TableInfo.
    """

    keeps_history = True
    warnings: Sequence[str] = ()

    def __init__(self, context: SourceContext) -> None:
        self._context = context
        self._schemas = Schemas(context.pd, context.kv)

    async def now(self) -> int:
        """See `Source.now`."""
        return await self._context.pd.tso()

    async def check_start(self, ts: int) -> None:
        """See `Source.check_start`: a safepoint holds it."""

    async def snapshot(self, ts: int, before: Sequence[TableRecord] = ()) -> Sequence[TableRecord]:
        """See `Source.snapshot`: what the meta keys say at `ts`;
        TiDB gives a reorganized column another id.
        """
        earlier_by_id = {record.table_info.get("id"): record for record in before}
        records: list[TableRecord] = []
        for record in map(record_of, await self._schemas.at(ts)):
            earlier = earlier_by_id.get(record.table_info.get("id"))
            if earlier is None:
                records.append(record)
                continue
            # A column that was built anew meanwhile, under another name, looks like two.
            kept = keeping_identities(record, earlier)
            records.append(replace(kept, matched_by_names=True))
        return records

    async def present(self, before: Sequence[TableRecord]) -> tuple[int, Sequence[TableRecord]]:
        """See `Source.present`."""
        ts = await self.now()
        return ts, await self.snapshot(ts, before)

    def table(self, record: TableRecord, before: TableRecord | None = None) -> SourceTable:
        """See `Source.table`."""
        return tidb_table(record if before is None else following(record, before))


async def unwritten_rows(
    schemas: Schemas, table: SourceTable, start_ts: int, *, own_keys: bool = False
) -> AsyncIterator[pa.RecordBatch]:
    """Batches of RAW_SCHEMA, all above `start_ts`;
    with `own_keys` keys stand under the table's id, not a partition's.

    Raises:
        HistoryLostError: GC was faster.
    """
    table_id = int(table.record.table_info["id"]) if own_keys else None
    removed, reread = removed_from(table.record), reread_of(table.record).ts
    if (removed.partition_ids and start_ts <= removed.ts) or (reread and start_ts <= reread):
        _log.info(
            "rows that a DDL changed are read from the store",
            table=table.name,
            ddl_ts=max(removed.ts, reread),
        )
    # A run that begins behind the DDL has had these rows before.
    if start_ts <= removed.ts:
        rewritten_in = part_spans(table.record) if own_keys else ()
        async for batch in _removed(
            schemas, removed, table_id, [span.table_id for span in rewritten_in]
        ):
            metrics.UNWRITTEN_ROWS.inc(batch.num_rows)
            yield batch
    if reread and start_ts <= reread:
        for span in physical_spans(table.record):
            async for batch in _reread(schemas, span.table_id, reread + 1, table_id):
                metrics.UNWRITTEN_ROWS.inc(batch.num_rows)
                yield batch


async def _removed(
    schemas: Schemas, removed: Removed, table_id: int | None, rewritten_in: Sequence[int]
) -> AsyncIterator[pa.RecordBatch]:
    """Deletes of all rows; but of those keys that are in one of these other partitions by then."""
    for partition_id in removed.partition_ids:
        # At the DDL's own timestamp, the last one at which they are rows of the table.
        async for rows in schemas.rows(partition_id, removed.ts):
            page = await _without_rewritten(schemas, rows, rewritten_in, removed.ts)
            count = len(page)
            yield raw_batch(
                [removed.delete_ts] * count,
                [removed.ts] * count,
                [DELETE] * count,
                _keys(page, partition_id if table_id is None else table_id),
                [None] * count,
                [value for _, value in page],
            )


async def _without_rewritten(
    schemas: Schemas, page: Pairs, partition_ids: Sequence[int], ts: int
) -> Pairs:
    """A job that removes partitions is told when it is done: before,
    users may have written their keys to others.
    """
    handles, rewritten = [key[_ID_END:] for key, _ in page], set[bytes]()
    # Only binlogs need it (`own_keys`): their keys hold no partition, so the delete would be one of
    # the row that was written elsewhere.
    for first in range(0, len(partition_ids), _LOOKED_AT_ONCE):
        prefixes = map(record_prefix, partition_ids[first : first + _LOOKED_AT_ONCE])
        row_keys = [prefix + handle for prefix in prefixes for handle in handles]
        rewritten.update(key[_ID_END:] for key in await schemas.present(row_keys, ts))
    return [pair for pair, handle in zip(page, handles, strict=True) if handle not in rewritten]


async def _reread(
    schemas: Schemas, partition_id: int, ts: int, table_id: int | None
) -> AsyncIterator[pa.RecordBatch]:
    """All rows at `ts`; they stand behind a transaction that happens to commit at `ts`,
    which they show.
    """
    async for page in schemas.rows(partition_id, ts):
        keys = _keys(page, partition_id if table_id is None else table_id)
        values = pa.array([value for _, value in page], pa.binary())
        yield snapshot_rows(pa.array(keys, pa.binary()), values, ts)


def _keys(page: Pairs, table_id: int) -> list[bytes]:
    prefix = record_prefix(table_id)
    return [prefix + key[_ID_END:] for key, _ in page]
