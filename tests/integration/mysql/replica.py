"""A changefeed's far end in memory: what a log puller adds, mounted and applied,
as a target would hold it.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from server.capture.source.mysql import MySqlSource
from server.changefeed.filter import TableFilter
from server.changefeed.source import SourceUri
from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord
from server.puller.mysql.listener import LogListener
from server.puller.mysql.session.options import MySqlOptions
from server.puller.open_transactions import OpenTransactions
from server.puller.source import TableChange
from sink.holds import Holds
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.errors import TidemarkError
from storage.model.span import Span

WAIT_S = 200.0
Row = dict[str, Any]


@asynccontextmanager
async def embedded_meta(directory: Path) -> AsyncIterator[EtcdMeta]:
    """Metadata of this process."""
    async with EmbeddedEtcd.open(directory) as etcd:
        yield EtcdMeta(etcd)


@dataclass
class Target:
    """Implements `Rows` and `Catalog`: keeps all batches, and the versions of all tables."""

    source: MySqlSource
    rules: tuple[str, ...]
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))
    open_transactions: OpenTransactions = field(default_factory=OpenTransactions)
    batches: list[tuple[Span, pa.RecordBatch]] = field(default_factory=list)
    resolved: dict[Span, int] = field(default_factory=dict)
    barrier_ts: int = 0
    holds: Holds = field(default_factory=Holds)
    changes: list[TableChange] = field(default_factory=list)
    versions: dict[Span, list[tuple[int, SourceTable]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    moved: threading.Condition = field(default_factory=threading.Condition)

    def wants(self, schema_name: str, table_name: str) -> bool:
        return TableFilter(self.rules).takes(schema_name, table_name)

    def wants_any_of(self, schema_name: str) -> bool:
        return TableFilter(self.rules).may_take_of(schema_name)

    def known(self, commit_ts: int) -> None:
        """Every change is news here."""
        del commit_ts

    def table(self, record: TableRecord, commit_ts: int | None = None) -> SourceTable | None:
        del commit_ts
        if not self.wants(record.schema_name, record.table_name):
            return None
        try:
            return self.source.table(record)
        except TableIneligibleError:
            return None  # as with --ignore-ineligible-table

    async def refuse(self, ts: int, error: TidemarkError) -> NoReturn:
        del ts
        raise error

    async def change(self, change: TableChange) -> None:
        for _, batch in self.batches:
            late = [ts for ts in batch.column("commit_ts").to_pylist() if ts > change.commit_ts]
            assert not late or change in self.changes, (
                f"rows at {late[:3]} were added before {change}"
            )
        known_ts = max(self.barrier_ts, *self.resolved.values(), 0)
        assert known_ts < change.commit_ts, "resolved beyond a DDL that was not told"
        if change.commit_ts in [known.commit_ts for known in self.changes]:
            return
        self.changes.append(change)
        for table in change.tables:
            self.versions[table.span].append((change.commit_ts, table))

    def resolve(self, span: Any, ts: int | None = None) -> None:
        if (
            ts is None
        ):  # of the catalogue: how far the log is, of a changefeed that has, or had, no tables
            assert span >= self.barrier_ts
            self.barrier_ts = span
            return
        with self.moved:
            assert ts >= self.resolved.get(span, 0)
            self.resolved[span] = ts
            self.moved.notify_all()

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        with self.moved:
            lowest = min(batch.column("commit_ts").to_pylist(), default=1 << 63)
            assert lowest > self.resolved.get(span, 0), "a row at or below what was resolved"
            self.batches.append((span, batch))
            self.moved.notify_all()

    def changes_of(self, span: Span) -> list[Row]:
        """All changes of a table, mounted, in order, each (commit_ts, op, columns)."""
        rows: list[Row] = []
        for each, batch in self.batches:
            if each == span and batch.num_rows:
                for ts, mounter in self._by_version(span, batch):
                    rows += [{**row, "_from": ts} for row in mounter.to_pylist()]
        return sorted(
            rows, key=lambda row: (row["_commit_ts"], row["_start_ts"], row["_op"] == "insert")
        )

    def _by_version(self, span: Span, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        found = []
        versions = self.versions[span]
        for place, (from_ts, table) in enumerate(versions):
            to_ts = versions[place + 1][0] if place + 1 < len(versions) else 1 << 63
            mask = [from_ts < ts <= to_ts for ts in batch.column("commit_ts").to_pylist()]
            part = batch.filter(pa.array(mask))
            if part.num_rows:
                found.append((from_ts, table.mounter.mount(part)))
        return found


@dataclass
class Feed:
    """A running log puller and its target."""

    source: MySqlSource
    target: Target
    start_ts: int
    task: "asyncio.Task[None]"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it is true, or the puller fails."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                if self.task.done():
                    await self.task
                await asyncio.sleep(0.01)

    async def seen(self, name: str, count: int) -> list[Row]:
        """The changes of a table by its last name, when there are so many."""
        span: list[Span] = []

        def there() -> bool:
            span[:] = [
                each
                for each, versions in self.target.versions.items()
                if versions[-1][1].name == name
            ]
            return bool(span) and self.rows_of(span[0]) >= count

        await self.until(there)
        return self.target.changes_of(span[0])

    def rows_of(self, span: Span) -> int:
        return sum(batch.num_rows for each, batch in list(self.target.batches) if each == span)


@asynccontextmanager
async def following(
    uri: str,
    meta: EtcdMeta,
    *rules: str,
    name: str = "feed",
    start_ts: int = 0,
    tables: list[SourceTable] | None = None,
    listener: LogListener | None = None,
) -> AsyncIterator[Feed]:
    """A changefeed from now on, or from `start_ts` with the `tables` in force there."""
    source = MySqlSource(name, MySqlOptions.of(SourceUri.parse(uri)), meta)
    source.listener = listener
    target = Target(source, rules)
    start_ts = start_ts or await source.now()
    if tables is None:
        tables = []
        for record in await source.snapshot(start_ts):
            table = target.table(record)
            tables += [table] if table is not None else []
    for table in tables:
        target.versions[table.span].append((start_ts, table))
    (puller,) = source.pullers(tables, start_ts, target, target)
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(puller.run())
            yield Feed(source, target, start_ts, task)
            task.cancel()
    finally:
        target.executor.shutdown()
