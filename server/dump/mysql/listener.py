"""The dump's ear at the log: implements `LogListener`; keeps windows and tables in the order of the log.

The log's thread calls it, and the engine asks and tells it things from the event loop and its readers' threads: one
lock for all.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import pyarrow as pa
import structlog

from server.dump import metrics
from server.dump.job import Job
from server.dump.mysql.check import DumpChunkDiffersError, Repairs
from server.dump.mysql.lag import Lags
from server.dump.mysql.window import Chunk, Closed, Windows
from server.dump.progress import TableProgress, TableState
from server.dump.table_dump import TableDump
from server.puller.mysql.tables import same_keys
from server.puller.source import TableChange
from server.puller.table import SourceTable
from storage.model.span import Span

_log = structlog.get_logger(__name__)


class DumpListener:
    """Of one changefeed; `tables` are those in force where its log begins to be read."""

    def __init__(self, changefeed: str, tables: Sequence[SourceTable]) -> None:
        self._changefeed = changefeed
        self._lock = threading.Lock()
        self._windows = Windows()
        self._lags = Lags()
        self._tables = {table.span.table_id: table for table in tables}
        self._dumps: dict[int, TableDump] = {}
        self._repairs: dict[int, Repairs] = {}
        self.on_news: Callable[[], None] = lambda: None
        """Called by the log's thread when a window has closed or a table is another one."""

    # By the log

    def changed(self, span: Span, keys: pa.BinaryArray) -> None:
        """See `LogListener.changed`."""
        with self._lock:
            self._windows.changed(span.table_id, keys)

    def watermark(self, values: Mapping[str, object], commit_ts: int) -> Sequence[tuple[Span, pa.RecordBatch]]:
        """See `LogListener.watermark`."""
        if values["changefeed_id"] != self._changefeed:
            return []
        unique_identifier = str(values["unique_identifier"])
        with self._lock:
            self._lags.arrived(unique_identifier, time.monotonic())
            closed = self._windows.watermark(unique_identifier, int(str(values["event_type"])), commit_ts)
            found = []
            for each in closed:
                dump = self._dumps.get(each.chunk.table_id)
                if dump is None or each.rows is None:
                    self._reread(each)
                elif dump.closed(each.chunk.read, commit_ts):
                    found.append((self._tables[each.chunk.table_id].span, each.rows))
                    metrics.VERIFIED.inc(each.chunk.read.checked)
                    metrics.REPLACED.inc(len(each.chunk.keys) - each.rows.num_rows)
        self.on_news()
        return [(span, rows) for span, rows in found if rows.num_rows]

    def xa_moved(self, xid: str, *, waits: bool) -> None:
        """See `LogListener.xa_moved`."""
        with self._lock:
            self._windows.xa_moved(xid, waits=waits)

    def changed_schema(self, change: TableChange) -> None:
        """See `LogListener.changed_schema`."""
        with self._lock:
            brought = {table.span.table_id: table for table in change.tables}
            for table_id, table in brought.items():
                self._windows.table_changed(table_id)
                before = self._tables.get(table_id)
                if before is None or not same_keys(before, table):
                    self._restart(table_id)
            for table_id, before in list(self._tables.items()):
                if table_id in brought:
                    continue
                if before.name in change.dropped:
                    self._windows.table_changed(table_id)
                    del self._tables[table_id]
                    if table_id in self._dumps:
                        self._dumps[table_id].moved_to(TableState.DROPPED)
            self._tables |= brought
            for table_id, table in self._tables.items():
                if table.name in change.truncated:
                    self._windows.table_changed(table_id)
                    self._restart(table_id)
        self.on_news()

    def begin_anew(self, names: Collection[str], job: Job) -> bool:
        """What was read of these tables does not count; False, and nothing has changed: one is not being dumped."""
        with self._lock:
            here = {table_id: table for table_id, table in self._tables.items() if table.name in names}
            dumps = {table_id: self._dumps.get(table_id) for table_id in here}
            for table_id, dump in dumps.items():
                if not (_is_dumped(dump.durable.state) if dump else job.takes(here[table_id].name)):
                    return False
            for table_id, dump in dumps.items():
                if dump is not None:
                    dump.restart(table_id)
            return True

    # By the engine

    @property
    def rounds(self) -> int:
        """How many are under way."""
        with self._lock:
            return len(self._windows)

    def expect(self, unique_identifier: str) -> None:
        """A watermark is about to be written."""
        with self._lock:
            self._lags.expect(unique_identifier)

    def written(self, unique_identifier: str) -> None:
        """It was committed just now."""
        with self._lock:
            self._lags.written(unique_identifier, time.monotonic())

    def forget(self, unique_identifier: str) -> None:
        """It may never arrive."""
        with self._lock:
            self._lags.forget(unique_identifier)

    def lags(self) -> dict[str, float]:
        """How long watermarks have taken through the log, in seconds, each told once."""
        with self._lock:
            return self._lags.taken()

    def tables(self) -> dict[int, SourceTable]:
        """Those in force as far as the log was read."""
        with self._lock:
            return dict(self._tables)

    def looking(self) -> threading.Lock:
        """Held while a `TableDump` is looked into or told something."""
        return self._lock

    def all_dumps(self) -> Collection[TableDump]:
        """Those of the job's tables; call it `looking`."""
        return self._dumps.values()

    def dump(self, table_id: int) -> TableDump | None:
        """One of them; call it `looking`."""
        return self._dumps.get(table_id)

    def take_up(self, dumps: Mapping[int, TableDump]) -> None:
        """Another job: its tables, none of which has a round under way."""
        with self._lock:
            assert not len(self._windows), "rounds of another job"
            self._dumps = dict(dumps)
            self._repairs.clear()

    def add(self, table_id: int, dump: TableDump) -> None:
        """One more table."""
        with self._lock:
            self._dumps[table_id] = dump

    def name(self, table_id: int) -> str:
        """By which the job knows a table: that which it had when its dump began."""
        with self._lock:
            dump = self._dumps.get(table_id)
            return dump.durable.name if dump is not None else ""

    def known(self, table_id: int) -> tuple[SourceTable, int] | None:
        """A table with the number of its changes, to read a chunk of it; None: it is gone."""
        with self._lock:
            table = self._tables.get(table_id)
            return (table, self._windows.version(table_id)) if table is not None else None

    def known_at(self, table_id: int, place: int, epoch: int) -> tuple[SourceTable, int] | None:
        """The same for a chunk of a range; None if that was set back since, too: its cursor may be of another key."""
        with self._lock:
            dump, table = self._dumps.get(table_id), self._tables.get(table_id)
            if dump is None or table is None or not dump.is_now(place, epoch):
                return None
            return table, self._windows.version(table_id)

    def begin(self, low: str, high: str, tables: Sequence[int]) -> None:
        """See `Windows.begin`."""
        with self._lock:
            self._windows.begin(low, high, tables)

    def fill(self, high: str, chunks: Sequence[Chunk], xa_prepared: frozenset[str]) -> None:
        """See `Windows.fill`; the next chunks begin behind these."""
        with self._lock:
            self._windows.fill(high, chunks, xa_prepared)
            for chunk in chunks:
                self._dumps[chunk.table_id].read(chunk.read)

    def give_up(self, high: str, chunks: Sequence[Chunk] = ()) -> None:
        """Nothing comes of the round: its chunks are read again."""
        with self._lock:
            self._windows.give_up(high)
            for chunk in chunks:
                self._again(chunk)

    def retry(self) -> None:
        """Tables that have failed are tried again: their chunks may differ once more."""
        with self._lock:
            self._repairs.clear()

    def _again(self, chunk: Chunk) -> bool:
        metrics.AGAIN.inc()
        return chunk.table_id in self._dumps and self._dumps[chunk.table_id].again(chunk.read)

    def _reread(self, closed: Closed) -> None:
        """A chunk does not count; one that is not as the server has it is read again once."""
        table_id, doubt, keys = closed.chunk.table_id, closed.chunk.doubt, closed.differing
        if not self._again(closed.chunk) or doubt is None or keys is None:
            return
        metrics.DIFFERING.inc()
        dump = self._dumps[table_id]
        error = DumpChunkDiffersError.of(dump.durable.name, doubt, keys)
        helps = self._repairs.setdefault(table_id, Repairs()).again(keys)
        if helps:
            dump.repaired()
        else:
            dump.moved_to(TableState.FAILED, str(error))
        _log.error("chunk differs", changefeed=self._changefeed, read_again=helps, error=error.message)

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
