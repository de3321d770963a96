"""A changefeed on its owner: its record, its checkpoint, its tables, and its processor."""

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final

from server.capture import long_lived
from server.capture.audit import Audit
from server.capture.catalog import FeedCatalog, TableReader, TablesRead
from server.capture.errors import ParameterError
from server.capture.history import KeptHistory, not_kept
from server.capture.job_report import JobReport, failed_for_s
from server.capture.processor import Assignment, MakeProcessor, Processor
from server.capture.readers import ReaderRecord, Readers
from server.capture.records import Records
from server.capture.source.registry import MakeSource, UnreadableSource
from server.changefeed.history import History, SchemaChange
from server.changefeed.info import ChangefeedInfo, State, lake_format
from server.changefeed.table import SourceTable
from server.changefeed.terms import terms_of
from server.puller.source import Source
from storage.model.errors import TidemarkError

_FILTER_AGAIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class FeedFactory:
    """Dependencies for building feeds."""

    records: Records
    make_source: MakeSource
    make_processor: MakeProcessor


@dataclass(slots=True)
class ReadActivity:
    """When the rows of a running changefeed were last requested: shows whether anything reads it.

    Set by Flight's threads; times are the monotonic clock's.
    """

    since_s: float
    """The time from which on requests are known: this capture has run the changefeed since then."""
    asked_s: float | None = None
    """The time of the last request for rows; None: no request since `since_s`."""

    def idle_s(self, now_s: float) -> float:
        """Return for how many seconds, at least, no rows have been requested."""
        return max(0.0, now_s - (self.since_s if self.asked_s is None else self.asked_s))


class Delivery:
    """Which rows readers have taken of a changefeed since this capture runs it; used by Flight's
    threads.
    """

    def __init__(self, start_ts: int) -> None:
        self.rows = 0
        """Rows of cuts that are acknowledged."""
        self.last_ts = start_ts
        """No row after it has been acknowledged: the end of the last cut that had rows."""
        self.read_ts = 0
        """The greatest ts that a reader has acknowledged since this capture runs the changefeed."""
        self._planned: dict[tuple[str, int], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def planned(self, tables: str, start_ts: int, end_ts: int, rows: int) -> None:
        """Note that a reader is about to take a range of all or some tables; a second plan from the
        same start replaces the first.
        """
        with self._lock:
            if rows:
                self._planned[tables, start_ts] = end_ts, rows
            else:
                self._planned.pop((tables, start_ts), None)

    def acknowledged(self, ts: int, checkpoint_ts: int) -> None:
        """Note that a reader is at `ts`, and that everything up to `checkpoint_ts` is at the
        target.
        """
        with self._lock:
            self.read_ts = max(self.read_ts, ts)
            taken = [key for key, (ts, _) in self._planned.items() if ts <= checkpoint_ts]
            for key in taken:
                end_ts, rows = self._planned.pop(key)
                self.rows += rows
                self.last_ts = max(self.last_ts, end_ts)


@dataclass(slots=True, eq=False)
class Feed:
    """One changefeed with all that runs it. Changed on the event loop only; other threads may read
    it.
    """

    info: ChangefeedInfo
    checkpoint_ts: int
    """The checkpoint that the metadata has."""
    source: Source
    catalog: FeedCatalog
    processor: Processor
    factory: FeedFactory
    task: asyncio.Task[None] | None = None
    info_saved: bool = True
    record_error: TidemarkError | None = None
    """Why its records cannot be read. Such a changefeed only keeps its safepoint, and can be
    removed.
    """
    is_info_readable: bool = True
    """Whether the record was readable; else `info` is a stand-in, which is never written."""
    job: JobReport | None = None
    """The last report of the lake job; Flight's threads set it, too."""
    job_saved: JobReport | None = None
    """The report that the metadata has, saved when the job gave up."""
    audit: Audit = field(default_factory=Audit)
    """The audit's result that the metadata has."""
    reading: ReadActivity = field(default_factory=lambda: ReadActivity(time.monotonic()))
    delivery: Delivery = field(init=False)
    readers: Readers = field(init=False)
    history: KeptHistory = field(init=False)
    settled_ts: int = 0
    """The checkpoint when schema changes behind it were last collected."""
    safepoint_ts: int = 0
    """The checkpoint that the service safepoint protects."""
    released: bool = False
    """Whether its safepoints were deleted after its end."""
    filter_error: str = ""
    """Why a new filter cannot come in force now."""
    filter_tried_s: float = 0.0
    """The monotonic clock's time when it was last tried."""
    safepoint_time: float = field(default=0.0)
    """Loop time at which it was set; 0: not by this owner."""

    def __post_init__(self) -> None:
        """Start the delivery at the checkpoint: what an earlier run delivered above it is not
        known.
        """
        self.delivery = Delivery(self.checkpoint_ts)
        self.history = KeptHistory(is_kept=bool(self.info.retention))
        self.read_by({})

    def read_by(self, named: Mapping[str, ReaderRecord]) -> None:
        """Set the named readers and their positions."""
        has_lake_job = bool(lake_format(self.info.sink_uri))
        self.readers = Readers(named, self.checkpoint_ts, has_lake_job=has_lake_job)

    @classmethod
    async def of(
        cls,
        factory: FeedFactory,
        info: ChangefeedInfo,
        checkpoint_ts: int,
        changes: Iterable[SchemaChange],
    ) -> "Feed":
        """A changefeed that does not run yet.

        Raises:
            SourceUriError, FilterRuleError: its record is not for this version.
            InvalidError, TableIneligibleError: one of its tables cannot be read.
        """
        source = factory.make_source(info.id, info.source_uri)
        # A hundred thousand tables take a minute to read.
        catalog = await asyncio.to_thread(
            _catalog, factory, info, source, History(changes), checkpoint_ts, info.rules
        )
        return cls._made(factory, info, checkpoint_ts, source, catalog)

    @classmethod
    def unreadable(
        cls, factory: FeedFactory, info: ChangefeedInfo, checkpoint_ts: int, error: TidemarkError
    ) -> "Feed":
        """A changefeed that cannot run for `error`, which `of` raised;
        its records stay as they are.
        """
        source = UnreadableSource(error)
        catalog = _catalog(factory, info, source, History(), checkpoint_ts, ())
        feed = cls._made(factory, info, checkpoint_ts, source, catalog)
        feed.record_error = error
        return feed

    @classmethod
    def _made(
        cls,
        factory: FeedFactory,
        info: ChangefeedInfo,
        checkpoint_ts: int,
        source: Source,
        catalog: FeedCatalog,
    ) -> "Feed":
        processor = factory.make_processor(_assignment(info, source, catalog, checkpoint_ts))
        return cls(info, checkpoint_ts, source, catalog, processor, factory)

    @property
    def id(self) -> str:
        """Its id."""
        return self.info.id

    @property
    def tables(self) -> tuple[SourceTable, ...]:
        """The tables in force after all schema changes that are known."""
        return self.catalog.tables

    async def restart_at(
        self,
        checkpoint_ts: int,
        changes: Iterable[SchemaChange],
        *,
        info: ChangefeedInfo | None = None,
        source: Source | None = None,
    ) -> None:
        """Let the next run begin at `checkpoint_ts`, with the tables of `changes`. `info`, which
        must be durable, and `source`, which reads the tables, replace the feed's.
        """
        of = info or self.info
        reader = TablesRead(self.catalog.read() if source is None else (), source or self.source)
        catalog = await asyncio.to_thread(
            _catalog,
            self.factory,
            of,
            reader,
            History(changes),
            checkpoint_ts,
            of.rules,
        )
        # Without an await in between: nobody may see the new record with the former tables.
        if info is not None:
            self.info, self.info_saved = info, True
        tables = len(self.catalog.read())
        self.source, self.catalog = source or self.source, catalog
        if checkpoint_ts < self.safepoint_ts:
            # The safepoint protects too little now: the creation's service must stay until this one
            # is set again.
            self.safepoint_ts, self.safepoint_time = 0, 0.0
        self.checkpoint_ts, self.settled_ts = checkpoint_ts, 0
        self.reading = ReadActivity(time.monotonic())
        self.delivery = Delivery(checkpoint_ts)
        self.history.begin(is_kept=bool(self.info.retention))
        self.processor = self.factory.make_processor(
            _assignment(self.info, self.source, self.catalog, checkpoint_ts)
        )
        long_lived.dropped_tables(tables)

    @property
    def kept_ts(self) -> int:
        """The ts above which rows can still be read; below the checkpoint only if
        history is kept.
        """
        sink, checkpoint_ts = self.processor.sink, self.processor.checkpoint_ts
        if sink is None or not self.history.is_kept:
            return checkpoint_ts
        return min(max(sink.kept_ts(), self.processor.start_ts), checkpoint_ts)

    def start_of_reader(self, start_ts: int) -> int:
        """Return the ts at which a new reader begins that requests everything above `start_ts`; 0:
        everything that is kept.

        Raises:
            RangeCleanedError: not all of it is kept.
            ParameterError: nobody can read so far yet.
        """
        kept_ts, resolved_ts = self.kept_ts, self.processor.resolved_ts
        if not start_ts:
            return kept_ts
        if start_ts < kept_ts:
            raise not_kept(self.id, start_ts, kept_ts)
        if start_ts > max(resolved_ts, kept_ts):
            raise ParameterError(
                f"a reader cannot begin at {start_ts}: changefeed {self.id} is complete up to "
                f"{resolved_ts}. Leave --start-ts out to begin with the first that is kept"
            )
        # No cut begins within a stretch where tables were read again.
        return max(self.catalog.holds.acknowledged(start_ts), kept_ts)

    @property
    def failed_s(self) -> float:
        """The number of seconds since its lake job gave up; 0 if it has not."""
        return failed_for_s(self.info, self.job, datetime.now(UTC))

    @property
    def is_ending(self) -> bool:
        """Whether the changefeed should be finished or removed now: everything up to target_ts is
        acknowledged durably.
        """
        if self.info.state.is_running:
            return 0 < self.info.target_ts <= self.checkpoint_ts
        return self.info.state is State.REMOVED or (
            self.info.state is State.FINISHED and not self.released
        )

    @property
    def is_filter_due(self) -> bool:
        """Whether a new filter comes into force now, or at another ts than planned: no cut can end
        at the planned ts, since tables are read again there.
        """
        update = self.info.filter_update
        if update is None or not self.info.state.is_running:
            return False
        if self.filter_error and time.monotonic() - self.filter_tried_s < _FILTER_AGAIN_S:
            return False
        if update.is_planned and self.catalog.holds.bound(update.ts) < update.ts:
            return True
        # Without tables the checkpoint goes on by itself, and a reader may be behind it.
        is_read = bool(self.catalog.at(self.checkpoint_ts)) or self.delivery.read_ts >= update.ts
        return self.checkpoint_ts >= update.ts and is_read

    def recovered(self) -> bool:
        """Whether it runs well again after an error."""
        running = self.info.state is State.WARNING and self.processor.sink is not None
        if self.catalog.refusal is not None or self.catalog.holds.error is not None:
            return False
        # Not as soon as it runs: a changefeed that fails each time before it makes progress would
        # change between warning and normal for ever.
        moved = (
            self.processor.resolved_ts > self.processor.start_ts
            or self.catalog.holds.open_since > 0
        )
        return running and not self.processor.repairing and moved

    async def stop(self) -> None:
        """End its task, and wait until it has ended."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def _catalog(
    factory: FeedFactory,
    info: ChangefeedInfo,
    source: TableReader,
    history: History,
    start_ts: int,
    rules: Sequence[str],
) -> FeedCatalog:
    save = partial(factory.records.schemas.append, info.id)
    with long_lived.building_tables(sum(len(change.tables) for change in history)):
        return FeedCatalog(terms_of(info, rules), source, history, start_ts, save)


def _assignment(
    info: ChangefeedInfo, source: Source, catalog: FeedCatalog, checkpoint_ts: int
) -> Assignment:
    return Assignment(
        info.id,
        source,
        catalog,
        checkpoint_ts,
        info.stop_ts,
        info.target_ts,
        keep_ts=checkpoint_ts if info.retention else 0,
        region_threshold=info.region_threshold,
    )
