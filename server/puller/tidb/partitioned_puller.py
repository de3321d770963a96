"""The puller of a table whose span is not that of its rows: one puller for each partition,
all into the one span.

A table without partitions, of which a DDL has changed the stored values, has one part. The table is
resolved as far as its slowest part. Keys carry the partition's id, so rows of two partitions are
never taken for one another. Rows that changed with the DDL which brought the table, although nobody
wrote them, are added first.

On their way to the sorter, changes of any table pass `without_empty_deletes`. A transaction of TiDB
that inserts a row and deletes it again may leave a delete that found no row. A store is asked for
old values, so a delete without one found nothing. Where the record key holds the row's key, such a
delete is passed on, as it does no harm. Elsewhere nobody could tell which row it means, and it is
left out.
"""

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from server.changefeed.table import SourceTable, TableRecord
from server.puller import metrics
from server.puller.source import Rows
from server.puller.tidb.cluster import Schemas, unwritten_rows
from server.puller.tidb.table import key_is_in_rows, physical_spans
from server.puller.tikv.puller import Sorter, TablePuller, Upstream
from storage.model.event import DELETE
from storage.model.span import Span


class PartitionedPuller:
    """Pulls all parts of `table` from `start_ts` (exclusive) until cancelled."""

    def __init__(
        self, table: SourceTable, start_ts: int, upstream: Upstream, rows: Rows, schemas: Schemas
    ) -> None:
        self._table = table
        self._start_ts = start_ts
        self._rows = rows
        self._schemas = schemas
        parts = physical_spans(table.record)
        self._joined = JoinedRows(table.span, parts, start_ts, rows)
        sorter = without_empty_deletes(table.record, self._joined)
        self.table_pullers = tuple(TablePuller(span, start_ts, upstream, sorter) for span in parts)

    @property
    def resolved_ts(self) -> int:
        """See `Puller.resolved_ts`."""
        return min(puller.resolved_ts for puller in self.table_pullers)

    async def run(self) -> None:
        """See `Puller.run`."""
        loop = asyncio.get_running_loop()
        # They are at the first timestamp after the DDL, so the pullers may resolve it only when
        # these rows were added.
        async for batch in unwritten_rows(self._schemas, self._table, self._start_ts):
            await loop.run_in_executor(self._rows.executor, self._rows.add, self._table.span, batch)
        async with asyncio.TaskGroup() as tasks:
            for puller in self.table_pullers:
                tasks.create_task(puller.run(), name=f"puller of partition {puller.span.table_id}")


class JoinedRows:
    """Rows of several spans on their way into one; safe to call from several threads."""

    def __init__(self, span: Span, parts: Sequence[Span], start_ts: int, rows: Rows) -> None:
        self._span = span
        self._rows = rows
        self._lock = threading.Lock()
        self._resolved = dict.fromkeys(parts, start_ts)
        self._lowest = start_ts

    def add(self, _part: Span, batch: pa.RecordBatch) -> None:
        """Pass changes of one part on."""
        self._rows.add(self._span, batch)

    def resolve(self, part: Span, ts: int) -> None:
        """Note that all changes of one part up to `ts` were added."""
        # Under the lock, with the call: parts are resolved by several threads, and the table's
        # resolved_ts must not go back.
        with self._lock:
            self._resolved[part] = ts
            lowest = min(self._resolved.values())
            if lowest > self._lowest:
                self._rows.resolve(self._span, lowest)
                self._lowest = lowest


def without_empty_deletes(record: TableRecord, sorter: Sorter) -> Sorter:
    """The sorter for a table's changes: `sorter` itself, or one that passes on all but deletes
    that tell no key.
    """
    return _WithoutEmptyDeletes(sorter) if key_is_in_rows(record) else sorter


class _WithoutEmptyDeletes:
    def __init__(self, sorter: Sorter) -> None:
        self._sorter = sorter

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        # Before the sorter, which keeps one of two equal changes: a region that is scanned again
        # may send the delete with its row, and the empty one could be the one that stays.
        empty = np.asarray(batch["op"]) == DELETE
        empty &= np.asarray(batch["old_value"].is_null())
        count = int(np.count_nonzero(empty))
        if count:
            metrics.EMPTY_DELETES.inc(count)
            batch = batch.filter(pa.array(~empty))
        self._sorter.add(span, batch)

    def resolve(self, span: Span, ts: int) -> None:
        self._sorter.resolve(span, ts)
