"""A log of TiDB tables as a test writes it: rows, schema changes and progress, in order,
read again from any start.
"""

import asyncio
import itertools
import json

from server.changefeed.table import TableRecord
from server.puller.source import TableChange
from server.puller.tidb.table import tidb_table
from storage.model.errors import InvalidError, NotFoundError
from storage.model.event import INSERT, raw_batch
from storage.tidb.record import encode_record
from storage.tidb.schema import Column, TableInfo


def table_of(number, name, *columns):
    return TableInfo.build(number, name, [Column.bigint("id"), *map(Column.bigint, columns)])


def record_of(info, **members):
    return TableRecord("bank", json.loads(info.to_json()) | members)


class ScriptedLog:
    """Implements `server.puller.source.Source`."""

    keeps_history = False
    warnings: tuple[str, ...] = ()
    per_table = False

    def __init__(self, *tables):
        self.tables = list(tables)
        self.events = []
        self.now_ts, self.begins_at = 1000, 0
        self.written = asyncio.Event()

    def write(self, ts, *events):
        self.events += [(ts, event) for event in events]
        self.written.set()

    def rows(self, ts, info, *rows):
        pairs = [encode_record(info, row) for row in rows]
        keys, values = [key for key, _ in pairs], [value for _, value in pairs]
        count = len(rows)
        batch = raw_batch(
            [ts] * count, [ts - 1] * count, [INSERT] * count, keys, values, [None] * count
        )
        self.write(ts, ("rows", record_of(info), batch))

    def ddl(self, ts, query, *tables, dropped=(), truncated=(), **members):
        """`members` are further ones of the TableInfos."""
        self.write(ts, ("ddl", query, tables, dropped, truncated, members))

    def resolve(self, ts):
        self.write(ts, ("resolve",))

    async def now(self):
        return self.now_ts

    async def check_start(self, ts):
        if ts < self.begins_at:
            raise NotFoundError(f"the log begins at {self.begins_at}")

    async def snapshot(self, ts, before=()):
        return [record_of(info) for info in self.tables]

    async def present(self, before):
        return self.now_ts, await self.snapshot(self.now_ts, before)

    def table(self, record, before=None):
        return tidb_table(record)

    def pullers(self, tables, start_ts, rows, catalog):
        return [Replay(self, tables, start_ts, rows, catalog)]

    def schema_puller(self, start_ts, catalog, *, dumps=True):
        return None


class Replay:
    """Reads a log from the beginning, and takes what is above its start."""

    def __init__(self, log, tables, start_ts, rows, catalog):
        self.resolved_ts = start_ts
        self._log, self._rows, self._catalog = log, rows, catalog
        self._live = {table.name: table.span for table in tables}

    async def run(self):
        for place in itertools.count():
            while place == len(self._log.events):
                self._log.written.clear()
                await self._log.written.wait()
            ts, event = self._log.events[place]
            if ts > self.resolved_ts or event[0] == "resolve":
                await self._take(ts, *event)

    async def _take(self, ts, kind, *parts):
        in_thread = asyncio.get_running_loop().run_in_executor
        if kind == "rows":
            record, batch = parts
            if record.name in self._live:
                await in_thread(self._rows.executor, self._rows.add, self._live[record.name], batch)
        elif kind == "ddl":
            query, infos, dropped, truncated, members = parts
            try:
                tables = tuple(
                    table
                    for info in infos
                    if (table := self._catalog.table(record_of(info, **members)))
                )
                await self._catalog.change(TableChange(ts, query, tables, dropped, truncated))
            except InvalidError as err:
                for span in set(self._live.values()):
                    await in_thread(self._rows.executor, self._rows.resolve, span, ts - 1)
                self.resolved_ts = ts - 1
                await self._catalog.refuse(ts - 1, err)
            for name in dropped:
                self._live.pop(name, None)
            ended = set(self._live.values()) - {table.span for table in tables}
            for span in ended & {self._live.get(table.name) for table in tables}:
                await in_thread(self._rows.executor, self._rows.resolve, span, ts)
            self._live |= {table.name: table.span for table in tables}
        elif ts > self.resolved_ts:
            for span in set(self._live.values()):
                await in_thread(self._rows.executor, self._rows.resolve, span, ts)
            self.resolved_ts = ts
