"""The tables of a log that brings all of them, each of which can be held by itself while a chunk of it is read.

Invariant: while a schema change comes in force no round is under way. The change resolves tables that end up to its
own commit_ts, which may be above a chunk's; so it waits for the chunk, and the next round finds the tables after it.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NoReturn

import pyarrow as pa

from server.changefeed.table import SourceTable, TableRecord
from server.dump.cluster.held import HeldRows, HeldTables
from server.puller.source import Catalog, Rows, TableChange
from sink.holds import Holds
from storage.model.errors import TidemarkError
from storage.model.span import Span


class HeldLogRows:
    """Implements `server.puller.source.Rows`; a table is resolved no further than its hold."""

    def __init__(self, tables: Sequence[SourceTable], start_ts: int, rows: Rows) -> None:
        self.executor = rows.executor
        self.open_transactions = rows.open_transactions
        self.held = HeldTables()
        self._rows = rows
        self._by_span: dict[Span, HeldRows] = {}
        for table in tables:
            self._begin(table, start_ts)

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """See `Rows.add`; is never held."""
        self._rows.add(span, batch)

    def resolve(self, span: Span, ts: int) -> None:
        """See `Rows.resolve`."""
        (self._by_span.get(span) or self._rows).resolve(span, ts)

    def change(self, change: TableChange) -> None:
        """A schema change has come in force."""
        now = {held.table.span: held for held in self.held.all().values()}
        brought = {table.span: table for table in change.tables}
        gone = {*change.dropped, *(table.name for table in change.tables)}
        for span, held in now.items():
            if span in brought:
                held.table = brought[span]
            elif held.table.name in gone:
                self.held.end(span)
                del self._by_span[span]
        for span in brought.keys() - now.keys():
            self._begin(brought[span], change.commit_ts)

    def _begin(self, table: SourceTable, start_ts: int) -> None:
        rows = self._by_span[table.span] = HeldRows(table.span, start_ts, self._rows)
        self.held.begin(table, rows)


class HeldLogCatalog:
    """Implements `server.puller.source.Catalog` by another one, of whose changes `rows` is told."""

    def __init__(self, catalog: Catalog, rows: HeldLogRows) -> None:
        self._catalog = catalog
        self._rows = rows

    @property
    def holds(self) -> Holds:
        """See `Catalog.holds`."""
        return self._catalog.holds

    def wants(self, schema_name: str, table_name: str) -> bool:
        """See `Catalog.wants`."""
        return self._catalog.wants(schema_name, table_name)

    def table(self, record: TableRecord, commit_ts: int | None = None) -> SourceTable | None:
        """See `Catalog.table`."""
        return self._catalog.table(record, commit_ts)

    async def change(self, change: TableChange) -> None:
        """See `Catalog.change`."""
        async with AsyncExitStack() as stack:
            for held in self._rows.held.all().values():
                await stack.enter_async_context(held.rounds)
            await self._catalog.change(change)
            self._rows.change(change)

    async def refuse(self, ts: int, error: TidemarkError) -> NoReturn:
        """See `Catalog.refuse`."""
        await self._catalog.refuse(ts, error)

    def resolve(self, ts: int) -> None:
        """See `Catalog.resolve`."""
        self._catalog.resolve(ts)
