"""The dump of tables of the cluster itself: chunks are snapshots at a timestamp of their own,
so no windows are needed.

A chunk is read at a fresh timestamp S, while its table's resolved_ts is held below S (`holds.py`).
Its rows are added as updates at commit_ts S, so they come after the change feed's rows up to S and
before those above S. Invariants:
1. A chunk counts only if its rows were in the sorter before its table was resolved up to S;
   otherwise it is read again.
2. What is written of a table's progress is at or below the durable checkpoint (`TableDump.settle`);
   when it is pulled anew, its rows may be lost with the puller, so nothing ahead of the checkpoint
   counts any more.
3. GC has not passed S when the chunk was read: it is asked for afterwards, or the chunk is read
   again.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import structlog

from server.dump import metrics
from server.dump.cluster.chunks import Chunks, Page, Pulled, RoundRead
from server.dump.cluster.plan import cursor_of, least_s
from server.dump.cluster.survey import Surveyed, Surveyor
from server.dump.job import RUNNING, DumpRecords, Job, ProgressSaver
from server.dump.progress import ChunkRead, TableDump, TableProgress, TableState
from storage.model.errors import TidemarkError
from storage.model.ts import physical_ms
from storage.tasks import gather

_IDLE_S: Final = 1.0
_LOOK_S: Final = 0.3
_GONE_S: Final = 10.0
_LAG_MS: Final = 10_000
"""A table whose changes lag more than this is not read, as reading would delay them further."""
EVERY_TABLE: Final = 0
"""The table id of what versions before this one said of all tables:
that workers do not dump them.
"""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Pick:
    """Ranges of one table that are next."""

    table_id: int
    name: str
    dump: TableDump
    surveyed: Surveyed
    places: Sequence[int]


class ClusterDump:
    """Dumps the tables of one run of one changefeed; lives on the event loop."""

    def __init__(
        self, changefeed: str, records: DumpRecords, surveyor: Surveyor, chunks: Chunks
    ) -> None:
        self._changefeed = changefeed
        self._records = records
        self._surveyor = surveyor
        self._chunks = chunks
        self._job: Job | None = None
        self._dumps: dict[int, TableDump] = {}
        self._surveyed: dict[int, Surveyed] = {}
        self._missing_since: dict[int, float] = {}
        self._last_ts = 0
        self._free_at = 0.0
        self._saver = ProgressSaver(changefeed, records, self)

    def locked(self) -> AbstractContextManager[None]:
        """See `server.dump.job.Dumps`."""
        return nullcontext()

    def all_dumps(self) -> Collection[TableDump]:
        """See `server.dump.job.Dumps`; without the progress that was lost with a puller."""
        self._forget_lost(self._chunks.tables())
        return self._dumps.values()

    async def run(self) -> None:
        """Look after the job until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._saver.run(), name=f"dump progress {self._changefeed}")
            tasks.create_task(self._rounds(), name=f"dump {self._changefeed}")

    async def _rounds(self) -> None:
        while True:
            try:
                busy = await self._run_next()
            except TidemarkError as err:
                _log.warning(
                    "dump waits", changefeed=self._changefeed, code=err.code, error=err.message
                )
                busy = False
            if not busy:
                await asyncio.sleep(_IDLE_S)

    async def _run_next(self) -> bool:
        """Run a round if there is anything to read; returns whether to look for the next one at
        once.
        """
        job = await self._follow_job(await self._records.job())
        if job is None or job.state != RUNNING:
            return False
        pause_s = self._free_at - time.monotonic()
        if pause_s > 0:
            await asyncio.sleep(min(pause_s, _LOOK_S))
            return True
        await self._survey(job)
        picks = self._pick(job)
        if not picks:
            return False
        began = time.monotonic()
        read = await gather(self._round(job, pick) for pick in picks)
        rows, size = (sum(each) for each in zip(*read, strict=True))
        self._free_at = began + least_s(job, rows, size)
        return rows > 0 or not any(pick.dump.durable.error for pick in picks)

    async def _follow_job(self, job: Job | None) -> Job | None:
        before, self._job = self._job, job
        if job is None or before is None or job.id != before.id:
            durable = (
                {each.table_id: each for each in await self._records.tables(job)} if job else {}
            )
            # An earlier version left it in the metadata: see EVERY_TABLE.
            if durable.pop(EVERY_TABLE, None) is not None:
                await self._records.delete_table(EVERY_TABLE)
            self._saver.begin(durable)
            self._dumps = {table_id: TableDump(each) for table_id, each in durable.items()}
            self._surveyed.clear()
            self._missing_since.clear()
            self._free_at = 0.0
        return job

    def _forget_lost(self, here: Mapping[int, Pulled]) -> None:
        for table_id, surveyed in list(self._surveyed.items()):
            pulled = here.get(table_id)
            if pulled is None or pulled.generation != surveyed.generation:
                del self._surveyed[table_id]
                self._dumps[table_id] = TableDump(self._dumps[table_id].durable)

    async def _survey(self, job: Job) -> None:
        """Plan tables that are new or pulled anew, and note those that are gone."""
        here = self._chunks.tables()
        self._forget_lost(here)
        new = {
            table_id: pulled
            for table_id, pulled in here.items()
            if table_id not in self._surveyed
            and self._is_taken(job, table_id, pulled)
            and not self._is_over(table_id)
        }
        for table_id, pulled in new.items():
            fresh = TableProgress(pulled.table.name, table_id, job.id)
            self._dumps.setdefault(table_id, TableDump(fresh))
        self._drop_missing(here)
        first = sorted(new, key=lambda table_id: -job.priority_of(new[table_id].table.name))
        await gather(
            self._survey_one(table_id, new[table_id]) for table_id in first[: job.parallel]
        )

    async def _survey_one(self, table_id: int, pulled: Pulled) -> None:
        dump = self._dumps[table_id]
        if dump.durable.state is TableState.DROPPED:
            dump.restart(table_id)
        try:
            self._surveyed[table_id] = await self._surveyor.survey(pulled, dump)
        except TidemarkError as err:
            self._note(dump, str(err))

    def _is_taken(self, job: Job, table_id: int, pulled: Pulled) -> bool:
        """Whether the job takes the table; a table once taken stays in the job when it
        is renamed.
        """
        return table_id in self._dumps or job.takes(pulled.table.name)

    def _is_over(self, table_id: int) -> bool:
        dump = self._dumps.get(table_id)
        return dump is not None and dump.durable.state in {TableState.DONE, TableState.FAILED}

    def _drop_missing(self, here: Mapping[int, Pulled]) -> None:
        # A table is missing for moments while it is pulled anew, here or on another worker. Only
        # one that stays away was dropped.
        now = time.monotonic()
        for table_id, dump in self._dumps.items():
            if table_id in here or dump.durable.state.is_over:
                self._missing_since.pop(table_id, None)
            elif now - self._missing_since.setdefault(table_id, now) > _GONE_S:
                dump.set_state(TableState.DROPPED)

    def _pick(self, job: Job) -> list[_Pick]:
        """Choose the ranges to read next: of up to `parallel` tables, several of each if there are
        fewer tables.
        """
        here = self._chunks.tables()
        self._forget_lost(here)
        ready = [
            self._dumps[table_id]
            for table_id in self._surveyed
            if self._keeps_up(table_id, here[table_id])
        ]
        dumps = job.most_urgent(ready)[: job.parallel]
        chosen = [(dump, self._surveyed[dump.durable.table_id]) for dump in dumps]
        most = max(job.parallel // max(len(dumps), 1), 1)
        return [
            _Pick(dump.durable.table_id, dump.durable.name, dump, surveyed, _places(dump, most))
            for dump, surveyed in chosen
        ]

    def _keeps_up(self, table_id: int, pulled: Pulled) -> bool:
        behind_ms = physical_ms(self._last_ts) - physical_ms(pulled.resolved_ts)
        dump = self._dumps[table_id]
        if behind_ms > _LAG_MS and dump.durable.state is TableState.DUMPING:
            self._note(
                dump, f"waits: the table's changes are {behind_ms // 1000} s behind, and go first"
            )
            return False
        return True

    async def _round(self, job: Job, pick: _Pick) -> tuple[int, int]:
        """Read one chunk of each range, at one timestamp; returns how many rows and bytes."""
        dump, surveyed = pick.dump, pick.surveyed
        limit = surveyed.pace.limit(job, len(pick.places))
        at = [(place, *dump.unread(place)) for place in pick.places]
        pages = [
            Page(surveyed.begin(place, part), surveyed.ranges[place].end_key, limit)
            for place, part, _ in at
        ]
        try:
            read = await self._chunks.read(pick.table_id, pages)
        except TidemarkError as err:
            surveyed.pace.failed()
            metrics.CHUNKS_AGAIN.inc(len(pages))
            self._note(dump, str(err))
            return 0, 0
        self._note(dump, "")
        # The table may have been pulled anew during the read: its former chunks above the
        # checkpoint are lost then, and this one was added to the puller that has ended.
        self._forget_lost(self._chunks.tables())
        if (
            self._surveyed.get(pick.table_id) is not surveyed
            or read.generation != surveyed.generation
        ):
            metrics.CHUNKS_AGAIN.inc(len(pages))
        else:
            for (place, _, epoch), page, page_read in zip(at, pages, read.pages, strict=True):
                last = cursor_of(page_read.last) if page_read.rows else None
                chunk = ChunkRead(
                    place, epoch, last, page_read.ends, page_read.rows, page_read.size_bytes
                )
                dump.note_read(chunk)
                dump.count_chunk(chunk, read.ts)
                surveyed.note_rows(place, page, page_read)
            dump.set_expected(dump.rows_counted + surveyed.left(dump))
        return self._counted(read)

    def _counted(self, read: RoundRead) -> tuple[int, int]:
        self._last_ts = max(self._last_ts, read.ts)
        rows, size = (
            sum(each.rows for each in read.pages),
            sum(each.size_bytes for each in read.pages),
        )
        metrics.ROWS.inc(rows)
        metrics.BYTES.inc(size)
        return rows, size

    def _note(self, dump: TableDump, error: str) -> None:
        """Show in the table's status why it waits."""
        if error != dump.durable.error:
            if error:
                _log.warning(
                    "table is dumped later",
                    changefeed=self._changefeed,
                    table=dump.durable.name,
                    error=error,
                )
            dump.set_state(dump.durable.state, error)


def _places(dump: TableDump, most: int) -> list[int]:
    places: list[int] = []
    while len(places) < most and (place := dump.next_range(frozenset(places))) is not None:
        places.append(place)
    return places
