"""How a dump follows the log: `DumpListener` gets what the log brings, and keeps the windows and
the tables in the order of the log; `DumpCopying` copies rows that no event brings.

The log's thread calls the listener. The engine calls it, too, from the event loop and from its
readers' threads. One lock guards everything; nothing blocks while it is held. `DumpCopying` is
called on the event loop only.

Rows that no event brings are those of partitions that come and go, of tables renamed into the
changefeed, and of tables whose key gets other columns or another order, so that a cursor no longer
tells what was read. Invariants of copying:
1. What a table is set back to is durable before its change is in force at the target: no crash
   leaves rows out.
2. A table whose dump is done is not begun anew by itself where rows come or go by partitions:
   emptying it at the target is somebody's decision. Where a DDL changes values that no event tells,
   it is, unless the source's URI says `stop`: the job is made, or goes on, for that table
   (docs/design/0029).
"""

import asyncio
import glob
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import structlog

from server.changefeed.table import SourceTable
from server.dump import metrics
from server.dump.job import DumpRecords, DumpStateError, Job, ProgressSaver
from server.dump.mysql.check import DumpChunkDiffersError, Repairs
from server.dump.mysql.pace import Lags
from server.dump.mysql.window import Chunk, Closed, Windows
from server.dump.progress import TableDump, TableProgress, TableState
from server.puller.mysql.listener import Reread
from server.puller.mysql.tables import same_keys
from server.puller.source import TableChange
from sink.holds import Holds
from storage.model.errors import UnavailableError
from storage.model.span import Span

_log = structlog.get_logger(__name__)


class RereadFailedError(UnavailableError):
    """A table that must be read again cannot be; cuts wait until it can."""

    code = "ErrDumpRereadFailed"


class DumpListener:
    """One changefeed's listener; `tables` are those in force where its log begins to be read."""

    def __init__(
        self, changefeed: str, tables: Sequence[SourceTable], holds: Holds | None = None
    ) -> None:
        """`holds` keeps cuts back while tables are read again, until they are complete."""
        self._changefeed = changefeed
        self._holds = holds or Holds()
        self._rereading: dict[int, str] = {}
        """Tables that are read again by themselves, with the names they had then."""
        self._lock = threading.Lock()
        self._windows = Windows()
        self._lags = Lags()
        self._watermark_at = time.monotonic()
        # Tables without a key have no chunks: they are none of a dump's.
        self._tables = {table.span.table_id: table for table in tables if table.has_key}
        self._dumps: dict[int, TableDump] = {}
        self._repairs: dict[int, Repairs] = {}
        self._may_be_gone = False
        """Whether there may be dumps of tables that are absent from the log's tables."""
        self.on_news: Callable[[], None] = lambda: None
        """Called by the log's thread when a window has closed or a table is another one."""

    # By the log

    def changed(self, span: Span, keys: pa.BinaryArray) -> None:
        """See `LogListener.changed`."""
        with self._lock:
            self._windows.changed(span.table_id, keys)

    def watermark(
        self, values: Mapping[str, object], commit_ts: int
    ) -> Sequence[tuple[Span, pa.RecordBatch]]:
        """See `LogListener.watermark`."""
        if values["changefeed_id"] != self._changefeed:
            return []
        unique_identifier = str(values["unique_identifier"])
        with self._lock:
            self._watermark_at = time.monotonic()
            self._lags.arrived(unique_identifier, self._watermark_at)
            if self._may_be_gone and self._windows.ends(unique_identifier):
                self._drop_unknown()
            closed = self._windows.watermark(
                unique_identifier, int(str(values["event_type"])), commit_ts
            )
            batches = []
            for each in closed:
                dump = self._dumps.get(each.chunk.table_id)
                if dump is None or each.rows is None:
                    self._refuse_chunk(each)
                elif dump.count_chunk(each.chunk.read, commit_ts):
                    batches.append((self._tables[each.chunk.table_id].span, each.rows))
                    metrics.VERIFIED.inc(each.chunk.read.checked)
                    metrics.REPLACED.inc(len(each.chunk.keys) - each.rows.num_rows)
            self._end_reread(commit_ts)
        # Called without the lock: the engine takes it when it wakes up.
        self.on_news()
        return [(span, rows) for span, rows in batches if rows.num_rows]

    def _drop_unknown(self) -> None:
        """End the dumps of dropped tables.

        The progress of an earlier process may name tables that the log has dropped since, and ones
        that it creates only when it is read again: which of the two is known where it has passed a
        watermark of this process.
        """
        for table_id, dump in self._dumps.items():
            if table_id not in self._tables and not dump.durable.state.is_over:
                dump.set_state(TableState.DROPPED)
        self._may_be_gone = False

    def xa_moved(self, xid: str, *, waits: bool) -> None:
        """See `LogListener.xa_moved`."""
        with self._lock:
            self._windows.xa_moved(xid, waits=waits)

    def changed_schema(self, change: TableChange) -> None:
        """See `LogListener.changed_schema`."""
        with self._lock:
            brought = {table.span.table_id: table for table in change.tables if table.has_key}
            keyless = {table.span.table_id for table in change.tables} - brought.keys()
            before_change = dict(self._tables)
            for table_id, table in brought.items():
                self._windows.table_changed(table_id)
                before = self._tables.get(table_id)
                # A cursor is a key: with another key it says nothing about what was read.
                if before is None or not same_keys(before, table):
                    self._restart(table_id)
            for table_id, before in list(self._tables.items()):
                if table_id in brought:
                    continue
                if before.name in change.dropped or table_id in keyless:
                    self._windows.table_changed(table_id)
                    del self._tables[table_id]
                    if table_id in self._dumps:
                        self._dumps[table_id].set_state(TableState.DROPPED)
            self._tables |= brought
            for table_id, table in self._tables.items():
                if table.name in change.truncated:
                    self._windows.table_changed(table_id)
                    self._restart(table_id)
            self._change_rereads(change, before_change)
        self.on_news()

    def begin_anew(self, names: Collection[str], job: Job) -> bool:
        """Drop the progress of these tables; False, and nothing is changed: one of them is not
        being dumped.
        """
        with self._lock:
            here = {
                table_id: table for table_id, table in self._tables.items() if table.name in names
            }
            dumps = {table_id: self._dumps.get(table_id) for table_id in here}
            for table_id, dump in dumps.items():
                if not (_is_dumped(dump.durable.state) if dump else job.takes(here[table_id].name)):
                    return False
            for table_id, dump in dumps.items():
                if dump is not None:
                    dump.restart(table_id)
            return True

    def begin_reread(self, ts: int, tables: Mapping[int, str], reasons: Mapping[str, str]) -> None:
        """Read tables again behind the DDL at `ts`, whatever was read of them;
        cuts wait until they are complete.

        They are given by id, with their names behind the DDL, and reasons by name. One whose dump
        has not begun is begun by the engine.
        """
        with self._lock:
            for table_id, name in tables.items():
                self._rereading[table_id] = name
                self._holds.begin(ts, table_id, reasons.get(name, ""))
                self._set_back(table_id)
            metrics.READING_AGAIN.labels(self._changefeed).set(len(self._rereading))
        self.on_news()

    def _set_back(self, table_id: int) -> None:
        dump = self._dumps.get(table_id)
        self._repairs.pop(table_id, None)
        self._windows.table_changed(table_id)
        if dump is not None:
            dump.restart(table_id)

    def _change_rereads(self, change: TableChange, before: Mapping[int, SourceTable]) -> None:
        """Set back the tables that are read again and that a DDL touches, as what was read of them
        has another schema; forget those that it drops.
        """
        touched = {*change.dropped, *change.truncated, *(table.name for table in change.tables)}
        for table_id in list(self._rereading):
            now, earlier = self._tables.get(table_id), before.get(table_id)
            if now is None and earlier is not None:
                del self._rereading[table_id]
                self._holds.leave(table_id)
            elif now is not None and (
                now.name in touched or (earlier is not None and earlier.name in touched)
            ):
                self._holds.begin(change.commit_ts, table_id)
                self._set_back(table_id)
        self._end_reread(change.commit_ts)

    def _end_reread(self, ts: int) -> None:
        """Let cuts go on at `ts` if all tables that are read again are complete."""
        if not self._holds.open_since:
            return
        dumps = [self._dumps.get(table_id) for table_id in self._rereading]
        if all(dump is not None and dump.complete_ts is not None for dump in dumps):
            self._holds.end(ts)
            self._rereading.clear()
            metrics.READING_AGAIN.labels(self._changefeed).set(0)
            _log.info(
                "tables are read again and complete", changefeed=self._changefeed, commit_ts=ts
            )

    # By the engine

    @property
    def rereading(self) -> frozenset[int]:
        """The tables that are read again, for which cuts wait: they are read before all others, and
        whole, whatever condition the job has for them.
        """
        with self._lock:
            return frozenset(self._rereading)

    @property
    def rounds(self) -> int:
        """The number of rounds in progress."""
        with self._lock:
            return len(self._windows)

    @property
    def idle_s(self) -> float:
        """For how long no watermark was committed, and none came through the log."""
        with self._lock:
            return time.monotonic() - self._watermark_at

    @property
    def xa_unfinished(self) -> frozenset[str]:
        """See `Windows.xa_unfinished`."""
        with self._lock:
            return self._windows.xa_unfinished

    def reread_failed(self, table_id: int, error: str) -> None:
        """Show the error of a table that cannot be read, if cuts wait for it."""
        with self._lock:
            self._show_reread_error(table_id, error)

    def _show_reread_error(self, table_id: int, error: str) -> None:
        name = self._rereading.get(table_id)
        if name is not None:
            since_ts = self._holds.open_since
            self._holds.error = RereadFailedError(
                f"{name} cannot be read again, and cuts wait for it since the DDL at {since_ts}: "
                f"{error}. If its columns were altered under sql_log_bin=0, change any of its rows: "
                "with that the log tells the columns, and it is read again by itself. Otherwise mend "
                f"that, then `tidemark cli changefeed dumpresume -c {self._changefeed}`"
            )

    def expect(self, unique_identifier: str) -> None:
        """Expect a watermark that is about to be written."""
        with self._lock:
            self._lags.expect(unique_identifier)

    def written(self, unique_identifier: str) -> None:
        """Note that a watermark was committed just now."""
        with self._lock:
            self._watermark_at = time.monotonic()
            self._lags.written(unique_identifier, self._watermark_at)

    def forget(self, unique_identifier: str) -> None:
        """Expect a watermark no longer: it may never arrive."""
        with self._lock:
            self._lags.forget(unique_identifier)

    def lags(self) -> dict[str, float]:
        """Return the delays of watermarks through the log, in seconds, each once."""
        with self._lock:
            return self._lags.taken()

    def tables(self) -> dict[int, SourceTable]:
        """The tables in force as far as the log was read."""
        with self._lock:
            return dict(self._tables)

    def locked(self) -> threading.Lock:
        """The lock, to be held while a `TableDump` is read or changed."""
        return self._lock

    def all_dumps(self) -> Collection[TableDump]:
        """The dumps of the job's tables; to be called while `locked` is held."""
        return self._dumps.values()

    def dump(self, table_id: int) -> TableDump | None:
        """One table's dump; to be called while `locked` is held."""
        return self._dumps.get(table_id)

    def begin_job(self, dumps: Mapping[int, TableDump]) -> None:
        """Replace the tables by those of another job; no round may be under way."""
        with self._lock:
            assert not len(self._windows), "rounds of another job"
            self._dumps = dict(dumps)
            self._may_be_gone = True
            self._repairs.clear()

    def add(self, table_id: int, dump: TableDump) -> None:
        """Add a table to the job."""
        with self._lock:
            self._dumps[table_id] = dump

    def name(self, table_id: int) -> str:
        """The name that the job has for a table: its name when its dump began."""
        with self._lock:
            dump = self._dumps.get(table_id)
            return dump.durable.name if dump is not None else ""

    def table_version(self, table_id: int) -> tuple[SourceTable, int] | None:
        """A table and its version (`Windows.version`), to read a chunk of it; None: it is gone."""
        with self._lock:
            table = self._tables.get(table_id)
            self._may_be_gone |= table is None
            return (table, self._windows.version(table_id)) if table is not None else None

    def table_version_at(
        self, table_id: int, place: int, epoch: int
    ) -> tuple[SourceTable, int] | None:
        """The same for a chunk of a range; also None if the range was set back since `epoch`, as
        its cursor may be of another key.
        """
        with self._lock:
            dump, table = self._dumps.get(table_id), self._tables.get(table_id)
            if dump is None or table is None or not dump.is_current(place, epoch):
                return None
            return table, self._windows.version(table_id)

    def begin(self, low: str, high: str, tables: Sequence[int]) -> None:
        """See `Windows.begin`."""
        with self._lock:
            self._windows.begin(low, high, tables)

    def fill(self, high: str, chunks: Sequence[Chunk], xa_prepared: frozenset[str]) -> None:
        """See `Windows.fill`; the next chunks begin behind these."""
        with self._lock:
            # Under one lock: the log's thread must not close the window before its chunks are
            # counted as read.
            self._windows.fill(high, chunks, xa_prepared)
            for chunk in chunks:
                self._dumps[chunk.table_id].note_read(chunk.read)

    def give_up(self, high: str, chunks: Sequence[Chunk] = ()) -> None:
        """Give a round up: its chunks are read again."""
        with self._lock:
            self._windows.give_up(high)
            for chunk in chunks:
                self._set_chunk_back(chunk)

    def retry(self) -> None:
        """Try failed tables again: their chunks may differ once more before they fail."""
        self._holds.error = None
        with self._lock:
            self._repairs.clear()

    def _set_chunk_back(self, chunk: Chunk) -> bool:
        metrics.CHUNKS_AGAIN.inc()
        return chunk.table_id in self._dumps and self._dumps[chunk.table_id].set_back(chunk.read)

    def _refuse_chunk(self, closed: Closed) -> None:
        """Set back a chunk that does not count. A table fails if the same rows differ from the
        server's a second time.
        """
        table_id, mismatch, keys = closed.chunk.table_id, closed.chunk.mismatch, closed.differing
        if not self._set_chunk_back(closed.chunk) or mismatch is None or keys is None:
            return
        metrics.DIFFERING.inc()
        dump = self._dumps[table_id]
        error = DumpChunkDiffersError.of(dump.durable.name, mismatch, keys)
        helps = self._repairs.setdefault(table_id, Repairs()).again(keys)
        if helps:
            dump.count_repair()
        else:
            dump.set_state(TableState.FAILED, str(error))
            self._show_reread_error(table_id, str(error))
        _log.error(
            "chunk differs", changefeed=self._changefeed, begin_reread=helps, error=error.message
        )

    def _restart(self, table_id: int) -> None:
        dump = self._dumps.get(table_id)
        self._repairs.pop(table_id, None)
        if dump is not None and not dump.durable.state.is_over:
            dump.restart(table_id)


def _is_dumped(state: TableState) -> bool:
    return state not in {TableState.DONE, TableState.DROPPED}


def fresh(name: str, table_id: int, job: str) -> TableDump:
    """A table of which nothing has been read."""
    return TableDump(TableProgress(name, table_id, job))


class DumpCopying:
    """Implements `puller.mysql.listener.TableCopier` for one changefeed; on the event loop."""

    def __init__(
        self,
        changefeed: str,
        listener: DumpListener,
        saver: ProgressSaver,
        records: DumpRecords,
        *,
        rereads: bool = True,
    ) -> None:
        """Without `rereads` no job is made: what would be read again stops the changefeed."""
        self._changefeed = changefeed
        self._records = records
        self._rereads = rereads
        self._listener = listener
        self._saver = saver
        self._job: Job | None = None
        self._looked = asyncio.Event()
        self._earlier: set[str] = set()
        """Tables that an earlier life was reading again,
        and whose DDL the log has yet to tell once more.
        """

    def set_job(self, job: Job | None) -> None:
        """Note the job that is in the metadata; until the first call, questions about it wait."""
        self._job = job
        self._looked.set()

    async def copies(self, names: Collection[str]) -> bool:
        """See `TableCopier.copies`."""
        await self._looked.wait()
        if self._reads_again_any(names):
            return False
        return self._job is not None and all(map(self._job.takes, names))

    async def begin(self, start_ts: int) -> None:
        """See `TableCopier.begin`."""
        job = await self._records.job()
        if job is None:
            return
        self._earlier = {name for name, ts in job.since_ts.items() if ts > start_ts}
        names = {name for name, ts in job.since_ts.items() if ts == start_ts}
        tables = {
            table_id: each.name
            for table_id, each in self._listener.tables().items()
            if each.name in names
        }
        if tables:
            self._listener.begin_reread(start_ts, tables, job.reasons)
            _log.warning(
                "tables are still to be read again",
                changefeed=self._changefeed,
                tables=sorted(names),
            )

    async def reads_again(self, again: Reread) -> bool:
        """See `TableCopier.reads_again`."""
        if not self._rereads:
            return False
        await self._looked.wait()
        while True:
            before = await self._records.job()
            # An operator may change the job at the same time: read it again and extend that one.
            try:
                await self._records.put_job(before, _extended(before, again))
            except DumpStateError:
                continue
            break
        # The job is durable, then the cuts wait, then the progress is set back durably: the DDL is
        # not in force before this returns, so a crash anywhere repeats it all.
        self._earlier -= again.reasons.keys()
        self._listener.begin_reread(again.commit_ts, again.tables, again.reasons)
        await self._saver.settle()
        metrics.READ_AGAIN.inc(len(again.tables))
        _log.warning(
            "tables are read again, cuts wait for them",
            changefeed=self._changefeed,
            commit_ts=again.commit_ts,
            reasons=dict(again.reasons),
        )
        return True

    def _reads_again_any(self, names: Collection[str]) -> bool:
        """Whether cuts wait, now or later, until one of these tables is read again: no reader sees
        it before it is complete then.
        """
        again = {
            table.name
            for table_id, table in self._listener.tables().items()
            if table_id in self._listener.rereading
        }
        return not (self._earlier | again).isdisjoint(names)

    async def copies_anew(self, names: Collection[str]) -> bool:
        """See `TableCopier.copies_anew`."""
        await self._looked.wait()
        if self._reads_again_any(names):
            return False
        if self._job is None or not self._listener.begin_anew(names, self._job):
            return False
        await self._saver.settle()
        _log.warning("tables are dumped anew", changefeed=self._changefeed, tables=sorted(names))
        return True


def _extended(job: Job | None, again: Reread) -> Job:
    """The job with these tables in it, and why."""
    reasons, since_ts = dict(again.reasons), dict.fromkeys(again.reasons, again.commit_ts)
    if job is None:
        return Job(
            uuid.uuid4().hex,
            tables=tuple(map(glob.escape, reasons)),
            reasons=reasons,
            since_ts=since_ts,
        )
    missing = [glob.escape(name) for name in reasons if not job.takes(name)]
    return replace(
        job,
        tables=(*job.tables, *missing),
        reasons={**job.reasons, **reasons},
        since_ts={**job.since_ts, **since_ts},
    )
