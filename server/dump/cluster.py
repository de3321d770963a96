"""The dump of tables of the cluster itself: chunks are snapshots at a timestamp of their own, so no windows are needed.

A chunk is read at a fresh timestamp S, while its table's resolved_ts is held below S (`server.dump.held`), and comes
as inserts at commit_ts S. The feed brings what is at or below S in front of it, and what is above S behind it.
Invariants:
1. What is counted of a chunk was in the sorter before its table was resolved up to S; all else is read again.
2. What is written of a table's progress is at or below the durable checkpoint (`TableDump.settle`); when its puller
   ends, its rows may be lost with it, so nothing ahead of the checkpoint counts any more.
3. GC cannot have passed S when the chunk was read: the store says so, or it is read again.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa
import structlog

from server.dump import metrics
from server.dump.chunk import ChunkSize
from server.dump.held import HeldRows, HeldTables
from server.dump.job import RUNNING, DumpRecords, Job
from server.dump.keeper import ProgressKeeper
from server.dump.progress import Cell, Range, Read, TableDump, TableProgress, TableState
from server.dump.unsupported import EVERY_TABLE
from server.dump.window import inserts
from server.puller.table import SourceTable
from storage.model.errors import TidemarkError
from storage.model.span import Span

_IDLE_S: Final = 1.0
_PAUSE_S: Final = 0.5
_GONE_S: Final = 10.0
_FIRST_ROWS: Final = 64

_log = structlog.get_logger(__name__)


class Store(Protocol):
    """The cluster's store."""

    async def now(self) -> int:
        """A timestamp above all that anybody has."""
        ...

    async def page(self, begin: bytes, end: bytes, ts: int, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """The first `limit` pairs of `[begin, end)` at `ts`.

        Raises:
            TidemarkError: not now.
        """
        ...

    def parts(self, table: SourceTable) -> Sequence[Span]:
        """Where the rows of a table lie."""
        ...


@dataclass(frozen=True, slots=True)
class _Pick:
    """Ranges of one table that are next."""

    table: SourceTable
    rows: HeldRows
    dump: TableDump
    places: Sequence[int]


class ClusterDump:
    """Of one run of one changefeed; all but the rows' own calls is done on the event loop."""

    def __init__(self, changefeed: str, records: DumpRecords, store: Store, tables: HeldTables) -> None:
        self._changefeed = changefeed
        self._records = records
        self._store = store
        self._tables = tables
        self._job: Job | None = None
        self._dumps: dict[int, TableDump] = {}
        self._sizes: dict[int, ChunkSize] = {}
        self._attached: dict[int, HeldRows] = {}
        self._missing_since: dict[int, float] = {}
        self._keeper = ProgressKeeper(changefeed, records, self)

    def looking(self) -> AbstractContextManager[None]:
        """See `server.dump.keeper.Dumps`."""
        return nullcontext()

    def all_dumps(self) -> Collection[TableDump]:
        """See `server.dump.keeper.Dumps`."""
        return self._dumps.values()

    async def run(self) -> None:
        """Look after the job until cancelled."""
        self._tables.on_end = self._ended
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keeper.run(), name=f"dump progress {self._changefeed}")
            tasks.create_task(self._rounds(), name=f"dump {self._changefeed}")

    def _ended(self, table_id: int) -> None:
        dump = self._dumps.get(table_id)
        if dump is not None:
            self._dumps[table_id] = TableDump(dump.durable)

    async def _rounds(self) -> None:
        while True:
            try:
                busy = await self._next()
            except TidemarkError as err:
                _log.warning("dump waits", changefeed=self._changefeed, code=err.code, error=err.message)
                busy = False
            if not busy:
                await asyncio.sleep(_IDLE_S)

    async def _next(self) -> bool:
        """A round, if there is anything to do; returns whether to go on at once."""
        job = await self._taken_up(await self._records.job())
        if job is None or job.state != RUNNING:
            return False
        self._attach(job)
        picks = self._pick(job)
        if not picks:
            return False
        began = time.monotonic()
        read = await asyncio.gather(*map(self._round, picks))
        rows, size = (sum(each) for each in zip(*read, strict=True))
        least_s = max(rows / job.rows_per_s if job.rows_per_s else 0, size / job.bytes_per_s if job.bytes_per_s else 0)
        await asyncio.sleep(max(0.0, least_s - (time.monotonic() - began)))
        return rows > 0 or not any(pick.dump.durable.error for pick in picks)

    async def _taken_up(self, job: Job | None) -> Job | None:
        before, self._job = self._job, job
        if job is None or before is None or job.id != before.id:
            durable = {each.table_id: each for each in await self._records.tables(job)} if job else {}
            if durable.pop(EVERY_TABLE, None) is not None:  # of a capture that dealt its tables to workers
                await self._records.delete_table(EVERY_TABLE)
            self._keeper.begin(durable)
            self._dumps = {table_id: TableDump(each) for table_id, each in durable.items()}
            self._missing_since.clear()
            self._attached.clear()
        return job

    def _attach(self, job: Job) -> None:
        """See to tables that are new, have other partitions, or are gone."""
        here = self._tables.all()
        for table_id, (table, rows) in here.items():
            if self._attached.get(table_id) is rows or not job.takes(table.name):
                continue
            self._attached[table_id] = rows
            dump = self._dumps.get(table_id)
            if dump is None:
                dump = self._dumps[table_id] = TableDump(TableProgress(table.name, table_id, job.id))
            ranges = tuple(Range(None, _cursor(part.end_key)) for part in self._store.parts(table))
            others = [each.until for each in dump.durable.ranges] != [each.until for each in ranges]
            if dump.durable.state is TableState.DROPPED or (others and not dump.durable.state.is_over):
                dump.restart(table_id)
            if dump.durable.state is TableState.WAITING:
                dump.planned(ranges, 0)
        now = time.monotonic()
        for table_id, dump in self._dumps.items():
            if table_id in here or dump.durable.state.is_over:
                self._missing_since.pop(table_id, None)
            elif now - self._missing_since.setdefault(table_id, now) > _GONE_S:
                dump.moved_to(TableState.DROPPED)

    def _pick(self, job: Job) -> list[_Pick]:
        """The ranges that are next: of up to `parallel` tables; several of each where there are fewer tables."""
        most, here = job.parallel, self._tables.all()
        foremost = job.foremost(dump for table_id, dump in self._dumps.items() if table_id in here)
        dumping = [(*here[dump.durable.table_id], dump) for dump in foremost][:most]
        return [_Pick(table, rows, dump, _places(dump, max(most // len(dumping), 1))) for table, rows, dump in dumping]

    async def _round(self, pick: _Pick) -> tuple[int, int]:
        """One chunk of each range, under one hold of the table; returns how many rows and bytes were read."""
        dump = pick.dump
        try:
            read = await self._held(pick)
        except TidemarkError as err:
            _log.warning("chunk is read later", changefeed=self._changefeed, table=pick.table.name, error=str(err))
            dump.moved_to(dump.durable.state, str(err))
            return 0, 0
        if dump.durable.error:
            dump.moved_to(dump.durable.state)
        counted = sum(each.rows for each in read), sum(each.bytes for each in read)
        metrics.ROWS.inc(counted[0])
        metrics.BYTES.inc(counted[1])
        return counted

    async def _held(self, pick: _Pick) -> list[Read]:
        """Whoever is cancelled leaves the hold: a call under way in a thread may still be adding."""
        loop, rows, dump = asyncio.get_running_loop(), pick.rows, pick.dump
        await loop.run_in_executor(rows.executor, rows.hold)
        try:
            ts = await self._store.now()
            await loop.run_in_executor(rows.executor, rows.hold_below, ts)
            parts = self._store.parts(pick.table)
            found = [await self._read(dump, place, parts[place], ts) for place in pick.places]
            await loop.run_in_executor(rows.executor, rows.add_held, [batch for _, batch in found if batch.num_rows])
        except TidemarkError:
            await loop.run_in_executor(rows.executor, rows.let_go)
            raise
        for chunk, _ in found:
            dump.read(chunk)
            dump.closed(chunk, ts)
        return [chunk for chunk, _ in found]

    async def _read(self, dump: TableDump, place: int, part: Span, ts: int) -> tuple[Read, pa.RecordBatch]:
        size = self._sizes.setdefault(part.table_id, ChunkSize(_FIRST_ROWS))
        at, epoch = dump.ahead(place)
        begin = at.after[0].data + b"\0" if at.after else part.start_key
        began, limit = time.monotonic(), size.rows
        pairs = await self._store.page(begin, part.end_key, ts, limit)
        keys, values = (pa.array([pair[side] for pair in pairs], pa.binary()) for side in (0, 1))
        size.took(len(pairs), keys.nbytes + values.nbytes, time.monotonic() - began)
        last = _cursor(pairs[-1][0]) if pairs else None
        chunk = Read(place, epoch, last, len(pairs) < limit, len(pairs), keys.nbytes + values.nbytes)
        return chunk, inserts(keys, values, ts)


def _cursor(key: bytes) -> tuple[Cell, ...]:
    return (Cell(0, key),)


def _places(dump: TableDump, most: int) -> list[int]:
    places: list[int] = []
    while len(places) < most and (place := dump.next_range(frozenset(places))) is not None:
        places.append(place)
    return places
