"""Holds, which insert a chunk among a table's changes: they keep the table's resolved_ts below the
chunk's ts until the chunk is added.

    hold → a fresh timestamp S → hold_below(S) → the chunk is read at S → add_held

A hold never takes a resolved_ts back, so S must be above the ts up to which the table is resolved.
Invariants:
1. Between `hold_below(S)` and the end of the hold, the table is resolved up to S - 1 at most.
2. When the hold ends, the table is resolved up to what its puller has promised meanwhile, without
   waiting for the next promise.
3. Of a log that brings all tables, each table can be held by itself (`HoldableLogRows`). A schema
   change waits until no round is under way: it resolves tables that end up to its own commit_ts,
   which may be above a chunk's. The next round finds the tables as they are after the change.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import pyarrow as pa

from server.changefeed.table import SourceTable, TableRecord
from server.puller.source import Catalog, Puller, Rows, TableChange
from sink.holds import Holds
from storage.model.errors import ConflictError, TidemarkError
from storage.model.span import Span


class HoldLateError(ConflictError):
    """The table is resolved up to the timestamp already: take a later one."""

    code = "ErrDumpHoldLate"


class HoldableRows:
    """Implements `server.puller.source.Rows` for one table; every call may block,
    and may come from any thread.
    """

    def __init__(self, span: Span, start_ts: int, rows: Rows) -> None:
        self.executor = rows.executor
        self.open_transactions = rows.open_transactions
        self.resolved_ts = start_ts
        """The ts up to which the table is resolved in the sorter."""
        self._span = span
        self._rows = rows
        self._lock = threading.Lock()
        self._promised = start_ts
        self._limit: int | None = None

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """See `Rows.add`; is never held."""
        self._rows.add(span, batch)

    def resolve(self, span: Span, ts: int) -> None:
        """See `Rows.resolve`; a ts above a hold takes effect when the hold ends."""
        assert span == self._span, "the rows of one table"
        with self._lock:
            self._promised = max(self._promised, ts)
            self._pass_on()

    @property
    def promised_ts(self) -> int:
        """Return the ts up to which the table's changes are complete, held back or not."""
        return self._promised

    def hold(self) -> None:
        """Keep the table's resolved_ts where it is."""
        with self._lock:
            self._limit = self.resolved_ts

    def hold_below(self, ts: int) -> None:
        """Resolve the table up to `ts` - 1 at most, from now on.

        Raises:
            HoldLateError: it is resolved up to `ts` or further already.
        """
        # Below the resolved_ts nothing may be added any more, so a later hold would be too late.
        with self._lock:
            if ts <= self.resolved_ts:
                raise HoldLateError(
                    f"table {self._span.table_id} is resolved up to {self.resolved_ts} already"
                )
            self._limit = ts - 1
            self._pass_on()

    def add_held(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Add the chunk of the hold and end the hold; if a batch cannot be added, the
        hold stays.
        """
        # Added before the hold ends: once the table is resolved up to S, the sorter refuses rows
        # at S.
        for batch in batches:
            self._rows.add(self._span, batch)
        self.let_go()

    def let_go(self) -> None:
        """End the hold, if there is one."""
        with self._lock:
            self._limit = None
            self._pass_on()

    def _pass_on(self) -> None:
        ts = self._promised if self._limit is None else min(self._promised, self._limit)
        if ts > self.resolved_ts:
            self._rows.resolve(self._span, ts)
            self.resolved_ts = ts


@dataclass(eq=False, slots=True)
class HoldableTable:
    """A pulled table whose `rows` can be held."""

    table: SourceTable
    rows: HoldableRows
    generation: int
    """Unique within the process: a table that is pulled again has another one."""
    rounds: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One hold at a time."""


class PulledTables:
    """The tables of a changefeed that are pulled at this moment; on the event loop only."""

    def __init__(self) -> None:
        self.ends = 0
        """Counts the tables removed from it; chunks of a removed table that the checkpoint has not
        passed may be lost.
        """
        self._pulled: dict[Span, HoldableTable] = {}
        self._begun = 0

    def all(self) -> dict[int, HoldableTable]:
        """The pulled tables by id; of a table that goes from one span to another, the new one."""
        return {span.table_id: table for span, table in self._pulled.items()}

    def find(self, table_id: int, span: Span | None) -> HoldableTable | None:
        """The pulled table of `span` (None: of the whole table), if there is one."""
        return self.all().get(table_id) if span is None else self._pulled.get(span)

    @contextmanager
    def pulled(self, table: SourceTable, rows: HoldableRows) -> Iterator[None]:
        """List the table during the block."""
        self.begin(table, rows)
        try:
            yield
        finally:
            self.end(table.span)

    def begin(self, table: SourceTable, rows: HoldableRows) -> None:
        """Note a table that is pulled from now on."""
        self._begun += 1
        self._pulled[table.span] = HoldableTable(table, rows, self._begun)

    def end(self, span: Span) -> None:
        """Forget a table that is not pulled any more."""
        del self._pulled[span]
        self.ends += 1


class HoldablePuller:
    """Implements `server.puller.source.Puller` for one table whose `rows` can be held."""

    def __init__(
        self, table: SourceTable, rows: HoldableRows, puller: Puller, tables: PulledTables
    ) -> None:
        self._table = table
        self._rows = rows
        self._puller = puller
        self._tables = tables
        self.table_pullers: tuple[Puller, ...] = tuple(getattr(puller, "table_pullers", (puller,)))

    @property
    def resolved_ts(self) -> int:
        """See `Puller.resolved_ts`: a puller that ends there has passed on what was held."""
        return min(self._puller.resolved_ts, self._rows.resolved_ts)

    async def run(self) -> None:
        """See `Puller.run`."""
        with self._tables.pulled(self._table, self._rows):
            await self._puller.run()


class HoldableLogRows:
    """Implements `server.puller.source.Rows`; a table is resolved no further than its hold."""

    def __init__(self, tables: Sequence[SourceTable], start_ts: int, rows: Rows) -> None:
        self.executor = rows.executor
        self.open_transactions = rows.open_transactions
        self.held = PulledTables()
        self._rows = rows
        self._by_span: dict[Span, HoldableRows] = {}
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
        now = {pulled.table.span: pulled for pulled in self.held.all().values()}
        brought = {table.span: table for table in change.tables}
        gone = {*change.dropped, *(table.name for table in change.tables)}
        for span, pulled in now.items():
            if span in brought:
                pulled.table = brought[span]
            elif pulled.table.name in gone:
                self.held.end(span)
                del self._by_span[span]
        for span in brought.keys() - now.keys():
            self._begin(brought[span], change.commit_ts)

    def _begin(self, table: SourceTable, start_ts: int) -> None:
        rows = self._by_span[table.span] = HoldableRows(table.span, start_ts, self._rows)
        self.held.begin(table, rows)


class HoldableLogCatalog:
    """Implements `server.puller.source.Catalog` by another one; its changes go to `rows`, too."""

    def __init__(self, catalog: Catalog, rows: HoldableLogRows) -> None:
        self._catalog = catalog
        self._rows = rows

    @property
    def holds(self) -> Holds:
        """See `Catalog.holds`."""
        return self._catalog.holds

    def wants(self, schema_name: str, table_name: str) -> bool:
        """See `Catalog.wants`."""
        return self._catalog.wants(schema_name, table_name)

    def wants_any_of(self, schema_name: str) -> bool:
        """See `Catalog.wants_any_of`."""
        return self._catalog.wants_any_of(schema_name)

    def table(self, record: TableRecord, commit_ts: int | None = None) -> SourceTable | None:
        """See `Catalog.table`."""
        return self._catalog.table(record, commit_ts)

    def known(self, commit_ts: int) -> Mapping[str, SourceTable] | None:
        """See `Catalog.known`."""
        return self._catalog.known(commit_ts)

    async def change(self, change: TableChange) -> None:
        """See `Catalog.change`."""
        # All rounds end first, and none begins until the change is in force: see invariant 3.
        async with AsyncExitStack() as stack:
            for pulled in self._rows.held.all().values():
                await stack.enter_async_context(pulled.rounds)
            await self._catalog.change(change)
            self._rows.change(change)

    async def refuse(self, ts: int, error: TidemarkError) -> NoReturn:
        """See `Catalog.refuse`."""
        await self._catalog.refuse(ts, error)

    def resolve(self, ts: int) -> None:
        """See `Catalog.resolve`."""
        self._catalog.resolve(ts)
