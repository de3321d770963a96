"""The rows of partitions that a DDL removed, as deletes: nobody writes them, so they are read from the store.

They are deleted at the first timestamp after the DDL. The store still has them: the changefeed's service safe point
stands before the DDL until a reader has acknowledged what comes after it.
"""

from collections.abc import AsyncIterator

import pyarrow as pa

from server.puller.tidb.schemas import Schemas
from server.puller.tidb.table import Removed
from storage.model.event import DELETE, raw_batch
from storage.tidb.key import record_prefix

_ID_END = len(record_prefix(0))


async def removed_rows(
    schemas: Schemas, removed: Removed, table_id: int | None = None
) -> AsyncIterator[pa.RecordBatch]:
    """Batches of RAW_SCHEMA; with `table_id` the keys stand under that id instead of the partition's.

    Raises:
        HistoryLostError: GC was faster.
    """
    for partition_id in removed.partition_ids:
        async for page in schemas.rows(partition_id, removed.ts):
            count = len(page)
            prefix = record_prefix(partition_id if table_id is None else table_id)
            keys = [prefix + key[_ID_END:] for key, _ in page]
            commit_ts, start_ts = [removed.delete_ts] * count, [removed.ts] * count
            yield raw_batch(commit_ts, start_ts, [DELETE] * count, keys, [None] * count, [value for _, value in page])
