"""Rows that a DDL changed although nobody wrote them,
as changes at the first timestamp after it: read from the store.

Rows of removed partitions are deletes. Of a table whose stored values the DDL changed, all rows
come as updates. The store still has them: the changefeed's service safe point stands before the DDL
until a reader has acknowledged what comes after it.
"""

from collections.abc import AsyncIterator, Sequence

import pyarrow as pa
import structlog

from server.changefeed.table import SourceTable
from server.puller import metrics
from server.puller.tidb.schemas import Schemas
from server.puller.tidb.table import Removed, part_spans, physical_spans, removed_from, reread_of
from server.rpc.tikv import Pairs
from storage.model.event import DELETE, raw_batch, snapshot_rows
from storage.tidb.record import record_prefix

_ID_END = len(record_prefix(0))
_LOOKED_AT_ONCE = 16  # partitions, of a page's keys

_log = structlog.get_logger(__name__)


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
