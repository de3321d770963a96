"""The engine of a dump: round after round of low watermark, chunks, high watermark,
beside the log of its changefeed.

A round reads up to `parallel` chunks, of several tables and of several ranges of one table, under
one pair of watermarks. At most `ROUNDS_MAX` rounds wait for the log to pass them, so the log sets
the pace and memory is bounded. If watermarks do not come, a round without chunks follows, and ends
rounds that lost theirs. Invariants:
1. What is written of a table's progress is at or below the durable checkpoint (`TableDump.settle`).
2. A table that cannot be read stops, with what the server said; the others go on. None is left out
   silently.
It starts and ends with the puller of the log (`server.dump.puller`), and slows down when the log
lags (`server.dump.mysql.pace`). While a round reads, Python's threads switch more often
(`GilInterval`): with the default of 5 ms a thread that reads chunks would delay the log's thread by
as much at each batch.
"""

import asyncio
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import structlog

from server.changefeed.table import SourceTable
from server.dump import metrics
from server.dump.job import RUNNING, DumpRecords, Job, ProgressSaver
from server.dump.mysql.check import Check
from server.dump.mysql.chunk import ChunkQuery, ChunkSize
from server.dump.mysql.listener import DumpCopying, DumpListener, fresh
from server.dump.mysql.pace import LastRound, Pace, Pick, Refusals, Refused, XaWait, next_picks
from server.dump.mysql.reader import ReadChunk, Server, ServerThreads
from server.dump.mysql.watermarks import WatermarkWriter
from server.dump.mysql.window import HIGH, LOW
from server.dump.progress import TableDump, TableState
from server.puller.mysql.session.errors import MySqlUnavailableError
from server.puller.mysql.session.options import MySqlOptions
from storage.backoff import Backoff
from storage.model.errors import CorruptError, InvalidError, TidemarkError
from storage.tasks import wait_at_most

ROUNDS_MAX: Final = 2
_LOOK_S: Final = 0.2
_IDLE_S: Final = 0.3
_PAUSE_S: Final = (0.2, 5.0)
_PLANS_MAX: Final = 64
"""Tables looked at between two rounds."""
_log = structlog.get_logger(__name__)
SHORT_S: Final = 0.0005


class GilInterval:
    """The process's interval; used on the event loop's thread only."""

    def __init__(self) -> None:
        self._users = 0
        self._before_s = 0.0

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Let threads take turns often for the block, and for others that overlap it."""
        # There is one interval for the whole process: the first user shortens it and the last one
        # sets it back, so that other threads have the usual one while no round reads.
        if not self._users:
            self._before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(self._before_s, SHORT_S))
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._before_s)


GIL_INTERVAL: Final = GilInterval()


class DumpEngine:
    """The dump of one changefeed; its rows are added by the log, through `listener`."""

    def __init__(
        self, changefeed: str, options: MySqlOptions, records: DumpRecords, listener: DumpListener
    ) -> None:
        self._changefeed = changefeed
        self._records = records
        self._listener = listener
        self._job: Job | None = None
        self._paces: dict[int, Pace] = {}
        self._refusals = Refusals()
        self._saver = ProgressSaver(changefeed, records, listener)
        self._watermarks = WatermarkWriter(changefeed, listener, self._commit, self._wait)
        self._looked_at = 0.0
        self._last_round = LastRound()
        self._xa_wait = XaWait()
        rereads = options.on_unclear_ddl == "reread"
        self.copying = DumpCopying(changefeed, listener, self._saver, records, rereads=rereads)
        self._news = asyncio.Event()
        self._threads = ServerThreads(changefeed, options)

    async def run(self) -> None:
        """Look after the job until cancelled."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._news.set)

        self._listener.on_news = wake
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._saver.run(), name=f"dump progress {self._changefeed}")
                tasks.create_task(self._rounds(), name=f"dump {self._changefeed}")
        finally:
            self._listener.on_news = lambda: None
            metrics.READING_AGAIN.remove(self._changefeed)
            metrics.EASE.remove(self._changefeed)
            self._threads.close()

    async def _rounds(self) -> None:
        backoff = Backoff(*_PAUSE_S)
        while True:
            try:
                busy = await self._run_next()
            except TidemarkError as err:
                _log.warning(
                    "dump waits", changefeed=self._changefeed, code=err.code, error=err.message
                )
                self._note(str(err))
                self._threads.hang_up()
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            if not busy:
                await self._wait(_IDLE_S)

    async def _run_next(self) -> bool:
        """Run a round if there is anything to read and the log keeps up; returns whether to look
        for the next one at once.
        """
        if self._job is not None and self._watermarks.seem_lost():
            # Only a later high watermark ends a round that lost its own, and has its chunks read
            # again. Nothing else would write one: everything waits for the rounds before.
            _log.warning(
                "watermarks late or lost",
                changefeed=self._changefeed,
                rounds=self._listener.rounds,
            )
            await self._round(self._job, ())
            return True
        job = await self._follow_job(await self._current_job())
        if job is None or job.state != RUNNING or self._listener.rounds >= ROUNDS_MAX:
            return False
        if await self._plan_waiting(job):
            # A table is unknown, or was refused, perhaps by a DDL that the log has not passed yet.
            # A round without chunks brings two watermarks: when the log has passed them, the table
            # is gone, or tried again.
            await self._round(job, ())
            return True
        if (left_s := self._last_round.until_s(job) - time.monotonic()) > 0:
            # In steps: meanwhile the job may get other rates, or be paused.
            await asyncio.sleep(min(left_s, _IDLE_S))
            return True
        rereading = self._listener.rereading
        with self._listener.locked():
            dumps = self._listener.all_dumps()
            first = job.most_urgent(each for each in dumps if each.durable.table_id in rereading)
            picks = next_picks(
                first or job.most_urgent(dumps), self._watermarks.guard.parallel(job.parallel)
            )
        if not picks:
            return False
        if not await self._watermarks.measure_lag():
            return False
        began = time.monotonic()
        with GIL_INTERVAL.shortened():
            rows, size = await self._round(job, picks)
        ended = time.monotonic()
        rest_s = max(self._watermarks.guard.rest_s(ended - began), self._xa_wait.rest_s(ended))
        self._last_round = LastRound(began, rows, size, ended + rest_s)
        return True

    async def _current_job(self) -> Job | None:
        """The job in the metadata, read every `_LOOK_S` only: a round may take less than a read."""
        now = time.monotonic()
        if self._job is None or now >= self._looked_at + _LOOK_S:
            self._looked_at, job = now, await self._records.job()
            return job
        return self._job

    async def _follow_job(self, job: Job | None) -> Job | None:
        """Follow a change of the job, and add tables that are new; returns the job, None if there
        is nothing to do for it yet.
        """
        before = self._job
        if job is None or before is None or job.id != before.id:
            if self._listener.rounds:
                # They are of the job before, and their chunks are not the new one's. The log
                # passes them soon.
                return None
            durable = (
                {each.table_id: each for each in await self._records.tables(job)} if job else {}
            )
            self._paces.clear()
            self._refusals.clear()
            self._saver.begin(durable)
            self._listener.begin_job(
                {table_id: TableDump(each) for table_id, each in durable.items()}
            )
        elif job.attempt != before.attempt:
            self._retry_failed()
        self._job = job
        self.copying.set_job(job)
        with self._listener.locked():
            dumps = {each.durable.table_id for each in self._listener.all_dumps()}
        rereading = self._listener.rereading
        for table_id, table in self._listener.tables().items():
            if (
                job is not None
                and table_id not in dumps
                and (table_id in rereading or job.takes(table.name))
            ):
                self._listener.add(table_id, fresh(table.name, table_id, job.id))
        return job

    def _retry_failed(self) -> None:
        self._listener.retry()
        self._refusals.clear()
        with self._listener.locked():
            self._paces.clear()
            for dump in self._listener.all_dumps():
                if dump.durable.state is TableState.FAILED:
                    dump.set_state(
                        TableState.DUMPING if dump.durable.chunks else TableState.WAITING
                    )

    async def _plan_waiting(self, job: Job) -> bool:
        """Plan tables that are not begun yet, soon, since the size of the dump is known only then;
        returns whether one was refused.
        """
        with self._listener.locked():
            tables = [each.durable for each in self._listener.all_dumps()]
        waiting = [each for each in tables if each.state is TableState.WAITING]
        waiting.sort(key=lambda each: -job.priority_of(each.name))
        planned = [await self._plan(job, each.table_id) for each in waiting[:_PLANS_MAX]]
        return not all(planned)

    async def _plan(self, job: Job, table_id: int) -> bool:
        """Plan the ranges of one table; returns False if the server refused that, or if the log has
        not brought the table yet.
        """
        described = self._listener.table_version(table_id)
        if described is None:
            return False
        table, version = described
        where = self._where(job, table_id)
        # Outside of the try: a login that is refused is no fault of this table.
        server = await self._threads.connected()
        try:
            query, ranges, rows = await self._threads.call(server.plan, table, where, job.parallel)
        except MySqlUnavailableError:
            raise
        except (InvalidError, CorruptError) as err:
            self._count_refusals([Refused(table_id, version, err)])
            return False
        self._refusals.over(table_id)
        self._begin_version(job, table, version, query)
        with self._listener.locked():
            dump = self._listener.dump(table_id)
            if dump is not None and dump.durable.state is TableState.WAITING:
                dump.begin(ranges, rows)
        return True

    def _where(self, job: Job, table_id: int) -> str:
        """The condition under which rows are read: a table that is read again has lost those that
        do not meet it.
        """
        return (
            ""
            if table_id in self._listener.rereading
            else job.where.get(self._listener.name(table_id), "")
        )

    def _begin_version(self, job: Job, table: SourceTable, version: int, query: ChunkQuery) -> Pace:
        """Read the table by this query from here on, as its version has changed."""
        if job.verify and (columns := Check(query).unchecked):
            _log.warning(
                "columns not compared",
                changefeed=self._changefeed,
                table=table.name,
                columns=columns,
            )
        pace = self._paces[table.span.table_id] = Pace(version, query, ChunkSize())
        return pace

    async def _round(self, job: Job, picks: Sequence[Pick]) -> tuple[int, int]:
        """Run one round: low watermark, reads, high watermark. Returns the rows and bytes read."""
        low, high = uuid.uuid4().hex, uuid.uuid4().hex
        server = await self._threads.connected()
        taken: list[ReadChunk] = []
        self._listener.begin(low, high, [pick.table_id for pick in picks])
        try:
            with metrics.ROUND_SECONDS.time():
                # The order makes the window: the low watermark is committed before the first
                # SELECT, and the high one is written after the last. What a chunk may have missed
                # lies between them in the log.
                await self._watermarks.write(low, LOW)
                # After the low watermark: see invariant 4 of `window`.
                xa_prepared = await self._threads.call(server.xa_prepared)
                outcomes = await asyncio.gather(*(self._read(job, server, pick) for pick in picks))
                taken = [each for each in outcomes if isinstance(each, ReadChunk)]
                self._count_refusals(each for each in outcomes if isinstance(each, Refused))
                # The chunks are in the window before its high watermark is written: the log's
                # thread may see that before `write` returns here.
                self._listener.fill(high, [each.chunk for each in taken], xa_prepared)
                for each in outcomes:
                    if isinstance(each, MySqlUnavailableError):
                        raise each
                await self._watermarks.write(high, HIGH)
        except TidemarkError:
            self._listener.forget(low)
            self._listener.give_up(high, [each.chunk for each in taken])
            raise
        self._xa_wait.note_waiting(self._listener.xa_unfinished, time.monotonic())
        self._note(self._xa_wait.note(time.monotonic()))
        rows, size = sum(len(each.chunk.keys) for each in taken), sum(each.bytes for each in taken)
        metrics.ROWS.inc(rows)
        metrics.BYTES.inc(size)
        return rows, size

    async def _read(
        self, job: Job, server: Server, pick: Pick
    ) -> ReadChunk | Refused | MySqlUnavailableError | None:
        """Read one chunk of a round; returns something else if there is none."""
        described = self._listener.table_version_at(pick.table_id, pick.place, pick.epoch)
        if described is None:
            return None
        table, version = described
        try:
            pace = self._paces.get(pick.table_id)
            if pace is None or pace.version != version:
                query = await self._threads.call(
                    server.query, table, self._where(job, pick.table_id)
                )
                pace = self._begin_version(job, table, version, query)
            pace.begin(pick.epoch)
            taken = await self._threads.call(self._read_by_one, job, server, pick, pace)
        except MySqlUnavailableError as err:
            return err
        except (InvalidError, CorruptError) as err:
            return Refused(pick.table_id, version, err)
        self._refusals.over(pick.table_id)
        pace.size.took(taken.chunk.read.rows, taken.bytes, taken.seconds)
        return taken

    def _read_by_one(self, job: Job, server: Server, pick: Pick, pace: Pace) -> ReadChunk:
        reader = server.reader()
        limit = job.rows_at_once(self._watermarks.guard.rows(pace.size.rows))
        try:
            return reader.read(pick, pace.version, pace.query, limit, verify=job.verify)
        finally:
            server.done(reader)

    def _count_refusals(self, refused: Iterable[Refused]) -> None:
        """Count refused reads, and fail tables that were refused often enough. A DDL that the log
        has not passed yet may be the reason, so they are tried again first.
        """
        for each in self._refusals.last(refused):
            self._fail(each.table_id, TableState.FAILED, str(each.error))

    def _fail(self, table_id: int, state: TableState, error: str) -> None:
        with self._listener.locked():
            dump = self._listener.dump(table_id)
            if dump is not None and not dump.durable.state.is_over:
                dump.set_state(state, error)
                _log.error(
                    "table not dumped",
                    changefeed=self._changefeed,
                    table=dump.durable.name,
                    error=error,
                )
        if state is TableState.FAILED:
            self._listener.reread_failed(table_id, error)

    def _note(self, error: str) -> None:
        """Note in the status of all unfinished tables why they wait."""
        with self._listener.locked():
            for dump in self._listener.all_dumps():
                if not dump.durable.state.is_over and dump.durable.error != error:
                    dump.set_state(dump.durable.state, error)

    async def _commit(self, unique_identifier: str, kind: int) -> None:
        """Write a watermark, and note when it was committed."""
        server = await self._threads.connected()

        def write() -> None:
            server.write(unique_identifier, kind)
            # In the same thread, at once: until the event loop gets to it the lag would look
            # shorter than it is.
            self._listener.written(unique_identifier)

        await self._threads.call(write)

    async def _wait(self, seconds: float) -> None:
        """Wait until the log has passed something, at most so long."""
        self._news.clear()
        await wait_at_most(self._news, seconds)
