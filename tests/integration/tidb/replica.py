"""What a reader makes of a source: it keeps all that the source tells,
and replays it up to any timestamp.

It stands where a changefeed stands, but without sorter and sink, and also takes tables without a
key, which changefeeds refuse: rows are known by their record keys.
"""

import asyncio
import bisect
import random
from collections import defaultdict
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pyarrow as pa

from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord
from server.puller.open_transactions import OpenTransactions
from server.puller.source import Merging, Peer, Puller, Source, TableChange
from server.puller.tidb.table import removed_from, reread_of
from sink.tidb_mounter import TidbMounter
from storage.model.errors import TidemarkError
from storage.model.event import DELETE
from storage.model.span import Span
from storage.tidb.cell import parse_default
from storage.tidb.record import decode_record, table_span
from storage.tidb.schema import TableInfo
from tests.unit.storage.tidb import vectors

Row = dict[str, str | None]


@dataclass
class Table:
    """One table while it is replayed."""

    source: SourceTable
    info: TableInfo
    rows: dict[bytes, Row] = field(default_factory=dict)


class Taken:
    """Implements `Rows`: all that a source adds, by span."""

    def __init__(self) -> None:
        self.executor: Executor = ThreadPoolExecutor(4)
        self.open_transactions = OpenTransactions()
        self.resolved: dict[Span, int] = {}
        self._batches: dict[Span, list[pa.RecordBatch]] = defaultdict(list)
        self._sorted: dict[Span, list[dict[str, Any]]] = {}

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """See `Rows.add`; nothing may come that was promised to be there."""
        lowest = min(batch["commit_ts"].to_pylist())
        assert lowest > self.resolved[span], (span, lowest, self.resolved[span])
        self._batches[span].append(batch)

    def resolve(self, span: Span, ts: int) -> None:
        """See `Rows.resolve`."""
        assert ts >= self.resolved[span]
        self.resolved[span] = ts

    def rows(self, span: Span) -> list[dict[str, Any]]:
        """All changes in their order, when all have been added."""
        if span not in self._sorted:
            rows = [row for batch in self._batches.get(span, ()) for row in batch.to_pylist()]
            self._sorted[span] = sorted(
                rows, key=lambda row: (row["commit_ts"], row["start_ts"], row["op"], row["key"])
            )
        return self._sorted[span]


class Replica:
    """Implements `Catalog`, and runs the pullers of a source."""

    def __init__(self, source: Source, start_ts: int, before: "Replica | None" = None) -> None:
        """With `before`: of a source that was followed up to `start_ts`,
        and is taken up again with what was known.
        """
        known = before.at(start_ts) if before else {}
        self.first = [table.source for table in known.values()]
        """The tables at the start."""
        self._before = {name: dict(table.rows) for name, table in known.items()}
        self._replayed: tuple[int, dict[str, Table]] | None = None
        self.taken = Taken()
        self.changes: list[TableChange] = []
        self._records = {table.record.table_info["id"]: table.record for table in self.first}
        self._source = source
        self._start_ts = start_ts
        self.upto_ts = start_ts
        self._schemas_ts = start_ts
        self._pullers: dict[Puller, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def slowest_peer(self) -> Peer | None:
        """Of the logs that are merged, the one that the others wait for."""
        return next(
            (puller.slowest_peer for puller in self._pullers if isinstance(puller, Merging)), None
        )

    async def run(self, upto_ts: int) -> None:
        """Pull until everything up to `upto_ts` is here;
        a test may set another `upto_ts` meanwhile.
        """
        self.upto_ts = upto_ts
        if not self.first:
            records = await self._source.snapshot(self._start_ts)
            self.first = [table for table in map(self.table, records) if table is not None]
            self._records = {table.record.table_info["id"]: table.record for table in self.first}
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._pull(self.first, self._start_ts)
            schemas = self._source.schema_puller(self._start_ts, self)
            if schemas is not None:
                self._pullers[schemas] = tasks.create_task(schemas.run())
            while min((puller.resolved_ts for puller in self._pullers), default=0) < self.upto_ts:  # noqa: ASYNC110 - pullers tell no events
                await asyncio.sleep(0.05)
            for task in self._pullers.values():
                task.cancel()

    def _pull(self, tables: list[SourceTable], start_ts: int) -> None:
        assert self._tasks is not None
        self.taken.resolved |= {table.span: start_ts for table in tables}
        for puller in self._source.pullers(tables, start_ts, self.taken, self):
            self._pullers[puller] = self._tasks.create_task(puller.run())

    def wants(self, schema_name: str, table_name: str) -> bool:
        """See `Catalog.wants`."""
        del schema_name, table_name
        return True

    def wants_any_of(self, schema_name: str) -> bool:
        """See `Catalog.wants_any_of`."""
        del schema_name
        return True

    def known(self, commit_ts: int) -> None:
        """Every change is news here."""
        del commit_ts

    def table(self, record: TableRecord, commit_ts: int | None = None) -> SourceTable | None:
        """See `Catalog.table`."""
        del commit_ts
        try:
            return self._source.table(record, self._records.get(record.table_info["id"]))
        except TableIneligibleError:
            info = TableInfo.parse(record.table_info_json)
            return SourceTable(record, table_span(info.id), TidbMounter(info, record.schema_name))

    async def change(self, change: TableChange) -> None:
        """See `Catalog.change`."""
        assert not self.changes or self.changes[-1].commit_ts < change.commit_ts
        assert change.commit_ts > self._schemas_ts
        self.changes.append(change)
        self._records |= {table.record.table_info["id"]: table.record for table in change.tables}
        new = [table for table in change.tables if table.span not in self.taken.resolved]
        if self._source.per_table:
            self._pull(new, change.commit_ts)
        else:
            assert all(ts < change.commit_ts for ts in self.taken.resolved.values())
            self.taken.resolved |= {table.span: change.commit_ts for table in new}

    def tables_of(self, commit_ts: int) -> tuple[SourceTable, ...]:
        """The tables that one change brought."""
        return next(change.tables for change in self.changes if change.commit_ts == commit_ts)

    async def refuse(self, ts: int, error: TidemarkError) -> NoReturn:
        """See `Catalog.refuse`."""
        del ts
        raise error

    def resolve(self, ts: int) -> None:
        """See `Catalog.resolve`."""
        self._schemas_ts = ts

    def at(self, ts: int) -> dict[str, Table]:
        """The tables by name, and their rows as text, as of `ts`; good until the next call,
        cheap when ts ascends.
        """
        if self._replayed is None or self._replayed[0] > ts:
            tables = {table.name: _begun(table) for table in self.first}
            for name, rows in self._before.items():
                tables[name].rows |= rows
            self._replayed = self._start_ts, tables
        done_ts, tables = self._replayed
        for change in [it for it in self.changes if done_ts < it.commit_ts <= ts]:
            self._replay(tables, done_ts, change.commit_ts)
            done_ts = change.commit_ts
            tables = _changed(tables, change)
        self._replay(tables, done_ts, ts)
        self._replayed = ts, tables
        return tables

    def _replay(self, tables: dict[str, Table], after_ts: int, upto_ts: int) -> None:
        for table in tables.values():
            rows = self.taken.rows(table.source.span)
            first, end = (
                bisect.bisect_right(rows, ts, key=_commit_ts) for ts in (after_ts, upto_ts)
            )
            for row in rows[first:end]:
                if row["op"] == DELETE:
                    table.rows.pop(row["key"], None)
                else:
                    table.rows[row["key"]] = _text(table.info, row["key"], row["value"])


def _commit_ts(row: dict[str, Any]) -> int:
    return int(row["commit_ts"])


def _begun(table: SourceTable) -> Table:
    return Table(table, TableInfo.parse(table.record.table_info_json))


def _changed(before: dict[str, Table], change: TableChange) -> dict[str, Table]:
    """Tables after a schema change, as a reader alters them: rows stay, columns come,
    go and are renamed.
    """
    by_id = {int(table.source.record.table_info["id"]): table for table in before.values()}
    after = {name: table for name, table in before.items() if name not in change.dropped}
    for source in change.tables:
        table = _begun(source)
        old = by_id.get(table.info.id) or before.get(table.source.name)
        if old is not None and source.name not in change.truncated:
            table.rows = {key: _altered(old.info, table.info, row) for key, row in old.rows.items()}
        after[source.name] = table
    return after


def _altered(old: TableInfo, new: TableInfo, row: Row) -> Row:
    names = {column.id: column.name for column in old.stored_columns}
    return {
        column.name: row[names[column.id]]
        if column.id in names
        else vectors.text(column, parse_default(column))
        for column in new.stored_columns
    }


def _text(info: TableInfo, key: bytes, value: bytes) -> Row:
    values = decode_record(info, key, value)
    return {
        column.name: vectors.text(column, values[column.name]) for column in info.stored_columns
    }


def compare(replica: Replica, step: dict[str, Any]) -> int:
    """Check every table after a step; returns how many rows there are."""
    tables = replica.at(step["ts_after"])
    assert sorted(tables) == sorted(step["rows_after"]), step["name"]
    rows = 0
    for name, result in step["rows_after"].items():
        table = tables[name]
        found = [
            [row[column.name] for column in table.info.stored_columns]
            for row in table.rows.values()
        ]
        if "aggregate" in result:
            sizes = [len(row[1] or "") for row in found]
            total = [
                [str(len(found)), str(sum(int(row[0] or 0) for row in found)), str(sum(sizes))]
            ]
            assert total == result["aggregate"] or not found, step["name"]
        else:
            names = [column.name for column in table.info.stored_columns]
            at = [result["columns"].index(it) for it in names]
            wanted = [[row[number] for number in at] for row in result["rows"] or []]
            assert sorted(found, key=repr) == sorted(wanted, key=repr), (step["name"], name)
        rows += len(found)
    return rows


def _with_unwritten_rows(whole: Replica, ddls: list[int]) -> list[int]:
    """The DDLs that changed rows which nobody wrote."""
    tables = [(ts, table) for ts in ddls for table in whole.tables_of(ts)]
    return [
        ts
        for ts, it in tables
        if removed_from(it.record).partition_ids or reread_of(it.record).ts == ts
    ]


async def check_resumptions(
    source: Source, whole: Replica, chance: random.Random, count: int
) -> None:
    """Follow a source again from some of the timestamps at which a checkpoint may stand;
    DDLs among them.
    """
    steps = vectors.lines("steps")
    ddls = [change.commit_ts for change in whole.changes]
    places = [ts + more for ts in ddls for more in (-1, 0, 1)] + [
        step["ts_after"] for step in steps[:-1]
    ]
    for ts in {*chance.sample(places, count), *_with_unwritten_rows(whole, ddls)}:
        again = Replica(source, ts, whole)
        async with asyncio.timeout(200):
            await again.run(steps[-1]["ts_after"])
        for step in [step for step in steps if step["ts_after"] > ts]:
            compare(again, step)
