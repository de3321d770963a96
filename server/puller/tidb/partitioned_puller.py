"""The puller of a table whose span is not that of its rows: one puller for each partition,
all into the one span.

A table without partitions, of which a DDL has changed the stored values, has one part. The table is
resolved as far as its slowest part. Keys carry the partition's id, so rows of two partitions are
never taken for one another. Rows that changed with the DDL which brought the table, although nobody
wrote them, are added first.
"""

import asyncio
import threading
from collections.abc import Sequence

import pyarrow as pa

from server.changefeed.table import SourceTable
from server.puller.source import Rows
from server.puller.tidb.empty_deletes import without_empty_deletes
from server.puller.tidb.schemas import Schemas
from server.puller.tidb.table import physical_spans
from server.puller.tidb.unwritten_rows import unwritten_rows
from server.puller.tikv.puller import TablePuller, Upstream
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
        """All changes of one part up to `ts` were added."""
        with self._lock:
            self._resolved[part] = ts
            lowest = min(self._resolved.values())
            if lowest > self._lowest:
                self._rows.resolve(self._span, lowest)
                self._lowest = lowest
