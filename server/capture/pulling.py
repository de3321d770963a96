"""The pullers of a running changefeed, and how their changes get into the sorter.

A log has one puller for all tables; other sources have one for each table, which starts and ends by
itself (`Pulling`). All changes go to the sorter through `SorterRows`, which drops those of tables
that have ended. A table's own puller goes through a `Gate`, which is closed before another puller
takes over the table.
"""

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from server.capture.catalog import FeedCatalog
from server.capture.traffic import TableTraffic
from server.changefeed.table import SourceTable
from server.puller.open_transactions import OpenTransactions
from server.puller.source import Merging, Peer, Puller, Source
from server.puller.tikv.puller import TablePuller
from sink.range_times import RangeTime, RangeTimes
from sorter import Sorter
from sorter.errors import TableNotFoundError
from storage.model.errors import ClosedError
from storage.model.span import Span
from storage.model.ts import physical_ms

_STEP_TABLES = 500
"""How many tables to start in one step; starting so many blocks the event loop for some hundredths
of a second.
"""


class SorterRows:
    """Implements `server.puller.source.Rows`; drops what still comes for a table that has ended."""

    def __init__(
        self,
        sorter: Sorter,
        executor: Executor,
        open_transactions: OpenTransactions | None = None,
        times: RangeTimes | None = None,
    ) -> None:
        """Without `open_transactions` a source keeps all open transactions in memory; `times` are
        for traces.
        """
        self.sorter = sorter
        self.executor = executor
        self.open_transactions = open_transactions or OpenTransactions()
        self.ended: dict[Span, int] = {}
        """The tables that end, each with the ts of its end."""
        self.traffic = TableTraffic()
        self._times = times

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """See `Rows.add`."""
        try:
            came_ns = time.time_ns()
            self.sorter.add(span, batch)
            commit_ts = batch.column("commit_ts").to_numpy()
            self.traffic.add(span, commit_ts, batch.nbytes)
            if self._times is not None and len(commit_ts):
                first_ts, last_ts = int(commit_ts.min()), int(commit_ts.max())
                committed_ns = min(physical_ms(first_ts) * 1_000_000, came_ns)
                pulled = RangeTime(first_ts, last_ts, committed_ns, came_ns, len(commit_ts))
                self._times.note_pulled(span, pulled, time.time_ns())
        except TableNotFoundError:
            if span not in self.ended:
                raise

    def resolve(self, span: Span, ts: int) -> None:
        """See `Rows.resolve`."""
        try:
            self.sorter.resolve(span, ts)
            if self._times is not None:
                self._times.note_resolved(span, ts, time.time_ns())
        except TableNotFoundError:
            if span not in self.ended:
                raise


class Gate:
    """Implements `server.puller.source.Rows` for one puller; once closed, calls change nothing."""

    def __init__(self, rows: SorterRows) -> None:
        self.executor = rows.executor
        self.open_transactions = rows.open_transactions
        self._rows = rows
        self._under_way = threading.Lock()
        self._closed = False

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """See `Rows.add`."""
        with self._passing():
            self._rows.add(span, batch)

    def resolve(self, span: Span, ts: int) -> None:
        """See `Rows.resolve`."""
        with self._passing():
            self._rows.resolve(span, ts)

    def close(self) -> None:
        """Let no more calls through; one may be under way."""
        # A cancelled puller may have a call under way in a thread, which cannot be cancelled. Its
        # late `resolve` would promise rows of a table that is pulled again and has none yet.
        self._closed = True

    def drain(self) -> None:
        """Wait for the call under way. A call that waits for room in the sorter ends only when its
        table is removed.
        """
        with self._under_way:
            return

    @contextmanager
    def _passing(self) -> Iterator[None]:
        with self._under_way:
            if self._closed:
                raise ClosedError("this table is pulled by another puller by now")
            try:
                yield
            except TableNotFoundError:
                # Closed while it waited for room in the sorter, which ends when the table is
                # removed.
                if not self._closed:
                    raise


@dataclass(frozen=True, slots=True)
class PullContext:
    """One changefeed's source and tables, and the sorter that takes their changes."""

    changefeed: str
    source: Source
    catalog: FeedCatalog
    rows: SorterRows


@dataclass(frozen=True, slots=True)
class _Pulled:
    """One table of a source that is per table."""

    puller: Puller
    task: asyncio.Task[None]
    gate: Gate


class Pulling:
    """Starts and ends the pullers, as children of `tasks`; the error of one ends them all."""

    def __init__(self, intake: PullContext, tasks: asyncio.TaskGroup) -> None:
        self._intake = intake
        self._tasks = tasks
        self._pulled: dict[Span, _Pulled] = {}
        self._others: list[Puller] = []

    @property
    def table_pullers(self) -> list[TablePuller]:
        """The pullers that pull regions."""
        pullers: Iterable[Puller] = (
            *(pulled.puller for pulled in list(self._pulled.values())),
            *self._others,
        )
        parts: Iterable[Puller] = (
            part for puller in pullers for part in getattr(puller, "table_pullers", (puller,))
        )
        return [puller for puller in parts if isinstance(puller, TablePuller)]

    @property
    def resolved_ts(self) -> int:
        """Return the lowest ts that all of them have reached; 0 without any."""
        pullers = [*(pulled.puller for pulled in list(self._pulled.values())), *self._others]
        return min((puller.resolved_ts for puller in pullers), default=0)

    @property
    def slowest_peers(self) -> list[Peer]:
        """Return, for each log that is merged from several streams, the stream that the others wait
        for.
        """
        merging = (puller for puller in self._others if isinstance(puller, Merging))
        return [peer for puller in merging if (peer := puller.slowest_peer)]

    @property
    def log_ts(self) -> int:
        """Return the ts up to which the whole log has been read; 0 if the source is no log."""
        return (
            0
            if self._intake.source.per_table
            else min((puller.resolved_ts for puller in self._others), default=0)
        )

    async def begin(self, tables: Sequence[SourceTable], start_ts: int) -> bool:
        """Pull the tables in force at `start_ts`, and the schema changes above it. Returns whether
        schema changes have a puller of their own. No table may come or go meanwhile.
        """
        source, catalog = self._intake.source, self._intake.catalog
        if source.per_table:
            for number, table in enumerate(tables, 1):
                self.add(table, start_ts)
                if number % _STEP_TABLES == 0:
                    await asyncio.sleep(0)
            schemas = source.schema_puller(start_ts, catalog)
            self._others = [schemas] if schemas is not None else []
        else:
            self._others = list(source.pullers(tables, start_ts, self._intake.rows, catalog))
        for puller in self._others:
            self._tasks.create_task(puller.run(), name=f"puller {self._intake.changefeed}")
        return source.per_table and bool(self._others)

    def add(self, table: SourceTable, start_ts: int) -> None:
        """Pull one more table above `start_ts`; the puller of a log takes it up by itself."""
        source, catalog = self._intake.source, self._intake.catalog
        if not source.per_table:
            return
        gate = Gate(self._intake.rows)
        [puller] = source.pullers([table], start_ts, gate, catalog)
        name = f"puller {self._intake.changefeed} {table.span.table_id}"
        self._pulled[table.span] = _Pulled(
            puller, self._tasks.create_task(puller.run(), name=name), gate
        )

    async def end_passed(self, ends: Mapping[Span, int]) -> None:
        """Stop pulling the tables that have reached their end."""
        passed = [
            span
            for span, end_ts in ends.items()
            if span in self._pulled and self._at(span) >= end_ts
        ]
        for span in passed:
            await self.end(span)

    async def end(self, span: Span) -> Gate | None:
        """Stop pulling a table. A call may still be under way in the returned gate, which lets no
        other through; None: the table has no puller of its own.
        """
        pulled = self._pulled.pop(span, None)
        if pulled is None:
            return None
        # The gate closes before the task is cancelled: between the two a thread of the puller could
        # still resolve the table.
        pulled.gate.close()
        pulled.task.cancel()
        await asyncio.wait([pulled.task])
        return pulled.gate

    def _at(self, span: Span) -> int:
        return self._pulled[span].puller.resolved_ts
