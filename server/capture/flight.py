"""The changefeeds of this capture for the Flight server, which calls them from its threads.

A changefeed that does not run here now (paused, restarting, on another capture) is UNAVAILABLE:
readers wait and try again. After a restart the rows are pulled again, so a call waits for a range
that is not resolved yet (`FlightWaits`); waits end when the server closes.

Which table a name means depends on the ts: the changefeed's versions say it (`sink.versions`). No
cut, slice or read crosses a DDL.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import pyarrow as pa

from server.capture.errors import ChangefeedFailedError, ChangefeedNotRunningError
from server.capture.feed import Feed
from server.capture.history import not_kept
from server.capture.processor import Sink
from server.capture.readers import UNNAMED, KeptRange, ReaderInvalidError
from server.capture.runner import note_job
from server.changefeed.info import State
from sink.cut import Slice
from sink.errors import AckAboveResolvedError
from sink.flight.feeds import (
    ChangefeedMovedBackError,
    FeedDescription,
    Poll,
    Report,
    SliceEndpoint,
    TableDescription,
    TableNotExistsError,
)
from sink.mounter import schema_of
from sink.versions import Version, Versions
from sorter.errors import RangeCleanedError, TableNotFoundError
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import MAX_TS, physical_ms

READ_WAIT_S: Final = 60.0
_STEP_S = 0.5
T = TypeVar("T")
_CALL_WAIT_S = 20.0
_START_WAIT_S = 5.0
_IDLE_CUT_MS, _IDLE_CUT_MS_MAX = 3_000, 3_600_000
"""While nothing changes, a reader gets an empty cut, which moves the checkpoint, this often, unless
it asks for another interval; and the longest that it may ask for.
"""
_START_STEP_S = 0.02
_NAMES_TOLD = 20


class FlightWaits:
    """The waits of all calls of one listener, which `close` ends."""

    def __init__(self) -> None:
        self._closing = threading.Event()

    def close(self) -> None:
        """End all waiting."""
        self._closing.set()

    def pause(self, seconds: float) -> bool:
        """Wait; returns whether the listener closes."""
        return self._closing.wait(seconds)

    def resolved(self, sink: Sink, span: Span | None, ts: int, limit_s: float) -> bool:
        """Wait until the table (None: all) is resolved up to `ts`, for `limit_s` at most;
        returns whether it is.
        """
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0 and not self._closing.is_set():
            if sink.wait_resolved(ts - 1, min(left_s, _STEP_S), span) >= ts:
                return True
        return sink.resolved_ts(span) >= ts


class RunningFeeds(Protocol):
    """The changefeeds that run here."""

    def feed(self, changefeed: str) -> Feed:
        """The changefeed of that id; raises NotOwnerError, ChangefeedNotExistsError."""
        ...


class OwnerFeeds:
    """Implements `sink.flight.feeds.Feeds`; `close` ends calls that wait."""

    def __init__(self, running: RunningFeeds) -> None:
        self._feeds = running
        self._waiting = FlightWaits()

    def close(self) -> None:
        """End all waiting."""
        self._waiting.close()

    def remote_action(self, changefeed: str) -> Callable[[str, bytes], bytes] | None:
        """Return None: nothing is forwarded; see `Feeds.remote_action`."""
        del changefeed
        return None

    def describe(
        self,
        changefeed: str,
        ts: int | None = None,
        *,
        before: bool = False,
        known_ts: int | None = None,
        reader: str = UNNAMED,
    ) -> FeedDescription:
        """See `Feeds.describe`; one that does not run is at its checkpoint."""
        feed = self._feeds.feed(changefeed)
        processor, versions = feed.processor, feed.catalog.versions
        checkpoint_ts = processor.checkpoint_ts
        if reader:
            checkpoint_ts = feed.readers.begins_at(reader, checkpoint_ts)
        at_ts = max(checkpoint_ts, versions.start_ts) if ts is None else ts
        versions_at_ts = versions.at(at_ts)
        is_unchanged = known_ts is not None and versions.unchanged(known_ts, at_ts)
        return FeedDescription(
            changefeed=feed.id,
            state=feed.info.state.value,
            sink_uri=feed.info.shown_sink_uri,
            start_ts=feed.info.start_ts,
            target_ts=feed.info.target_ts,
            checkpoint_ts=checkpoint_ts,
            resolved_ts=processor.resolved_ts,
            tables=None
            if is_unchanged
            else tuple(_description(feed, version, before=before) for version in versions_at_ts),
            ddls=feed.catalog.holds.shown(versions.ddls(at_ts), versions),
            skipped=tuple((each.start_ts, each.end_ts) for each in feed.info.skipped),
            epoch=feed.info.epoch,
            kept_ts=feed.kept_ts if feed.history.is_kept else 0,
        )

    def latest(
        self,
        changefeed: str,
        table: str | None,
        start_ts: int,
        max_rows: int | None,
        max_bytes: int | None,
        poll: Poll,
    ) -> int:
        """See `Feeds.latest`."""
        oldest_ms = _IDLE_CUT_MS if poll.idle_ms is None else min(poll.idle_ms, _IDLE_CUT_MS_MAX)
        feed, sink = self._running(changefeed)
        _check_kept(feed, start_ts)
        if table is None:
            _check_begun(feed, start_ts)
        versions = feed.catalog.versions
        version = _named(feed, table).version(table, start_ts) if table else None
        span = version.span if version else None
        deadline = time.monotonic() + poll.wait_s

        def cut() -> int:
            end_ts = start_ts
            while self._waiting.resolved(sink, span, end_ts + 1, deadline - time.monotonic()):
                # Looked up anew each time: a schema change may have come while we waited.
                ddl_ts = versions.next_change(start_ts, table)
                end_ts = min(sink.cut(start_ts, max_rows, max_bytes, span), ddl_ts)
                spans = [span] if span else [] if table else None
                is_stop = end_ts in (ddl_ts, *_stops(feed))
                if is_stop or _worth_a_cut(sink, spans, start_ts, end_ts, oldest_ms):
                    return end_ts
            return start_ts

        end_ts = _while_running(feed, cut)
        self._check_held()
        return end_ts

    def plan(
        self,
        changefeed: str,
        tables: Sequence[str] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[SliceEndpoint]:
        """See `Feeds.plan`; a table that is not there in the range has no slices."""
        feed, sink = self._running(changefeed)
        _check_kept(feed, start_ts)
        versions, locate = feed.catalog.versions, feed.processor.locations
        if tables is None:
            versions.check_range(start_ts, end_ts)
            _check_begun(feed, start_ts)
            spans = None
        else:
            in_range = [_named(feed, name).of_range(name, start_ts, end_ts) for name in tables]
            spans = [version.span for version in in_range if version]

        def plan() -> list[SliceEndpoint]:
            for span in [None] if spans is None else spans:
                self._waiting.resolved(sink, span, end_ts, _CALL_WAIT_S)
            # Tables that are read again are planned by themselves: their rows do not begin where
            # the cut does, and `holds` says from where on they are in it.
            ddls = {ddl.ts for ts in (start_ts, end_ts) for ddl in versions.ddls(ts, 1)}
            again = feed.catalog.holds.tables(start_ts, end_ts, ddls)
            others = spans
            if spans:
                others = [span for span in spans if span.table_id not in again]
            parts = sink.plan_tables(others, start_ts, end_ts, slice_bytes)
            parts = [part for part in parts if part.span.table_id not in again]
            for span, since_ts in _read_again(versions, again, start_ts, end_ts).items():
                if spans is None or span in spans:
                    parts += sink.plan_tables([span], since_ts, end_ts, slice_bytes)
            rows = sum(part.rows for part in parts)
            feed.delivery.planned(",".join(tables or ()), start_ts, end_ts, rows)
            return [_slice(versions, part, locate(part.span)) for part in parts]

        slices = _while_running(feed, plan)
        self._check_held()
        return slices

    def read(
        self, changefeed: str, table: str, start_ts: int, end_ts: int, *, before: bool = False
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """See `Feeds.read`."""
        feed, sink = self._running(changefeed)
        _check_kept(feed, start_ts)
        version = _named(feed, table).of_range(table, start_ts, end_ts)
        if version is None:
            raise TableNotExistsError(
                f"there is no table {table!r} right above {start_ts}; see describe at that ts"
            )
        span = version.span

        def read() -> Iterator[pa.RecordBatch]:
            self._waiting.resolved(sink, span, end_ts, READ_WAIT_S)
            return sink.read(span, start_ts, end_ts, before=before)

        return schema_of(version.mounter, before=before), _while_running(feed, read)

    def ack(
        self,
        changefeed: str,
        table: str | None,
        ts: int,
        epoch: int | None = None,
        reader: str = UNNAMED,
    ) -> int:
        """See `Feeds.ack`."""
        feed, sink = self._running(changefeed)
        if epoch not in (None, feed.info.epoch):
            raise ChangefeedMovedBackError(
                f"the checkpoint of changefeed {changefeed} was moved back after this reader began;"
                f" it is {sink.checkpoint_ts()} now, and the reader's {ts} does not move it. A lake"
                " job is started again, and goes on where its lake ends. A query is given another"
                " checkpointLocation: it begins at the changefeed's checkpoint_ts, or at startTs"
            )
        # A reader may be beyond the end of this run, which is its target_ts or a refused DDL, if
        # the run began below the reader: the checkpoint stops at that end.
        ts = min(feed.catalog.holds.acknowledged(ts), *_stops(feed))
        versions = (
            [version for version in _named(feed, table).named(table) if version.from_ts < ts]
            if table
            else []
        )

        if table and (reader or feed.readers):
            raise ReaderInvalidError(
                f"changefeed {changefeed} has readers with names, which acknowledge all of its "
                "tables at once: say which reader this is (option reader)"
            )

        def ack() -> int:
            all_ts = ts
            if table is None:
                self._waiting.resolved(sink, None, ts, _CALL_WAIT_S)
                all_ts = self._of_all_readers(feed, sink, reader, ts)
                sink.ack(all_ts)
            for version in versions:
                self._ack_version(sink, version, min(ts, version.to_ts))
            checkpoint_ts = sink.checkpoint_ts()
            feed.delivery.acknowledged(all_ts, checkpoint_ts)
            return checkpoint_ts

        return _while_running(feed, ack)

    @staticmethod
    def _of_all_readers(feed: Feed, sink: Sink, reader: str, ts: int) -> int:
        """Return the ts up to which all readers have the changefeed's changes, when this reader has
        them up to `ts`.
        """
        # Checked before it counts: with too high a position the reader would no longer hold changes
        # that it has yet to read.
        if (reader or feed.readers) and ts > sink.resolved_ts():
            raise AckAboveResolvedError(
                f"reader {reader!r} cannot have {ts}: it is complete up to {sink.resolved_ts()} "
                "here; after a restart, try again when it has been pulled again"
            )
        kept = KeptRange(sink.checkpoint_ts(), feed.kept_ts)
        return feed.readers.acknowledged(reader, ts, kept)

    def report(self, changefeed: str, report: Report) -> None:
        """See `Feeds.report`; a changefeed that does not run has no job to speak for it."""
        feed = self._feeds.feed(changefeed)
        if feed.info.state.is_running:
            note_job(feed, report)

    def _check_held(self) -> None:
        """Check, before a cut or plan is answered, that this capture still had the right to run the
        changefeed.

        Raises:
            NotOwnerError: another capture may run it.
        """

    def _ack_version(self, sink: Sink, version: Version, ts: int) -> None:
        """Acknowledge the rows of one version of a table up to `ts`."""
        # Rows of the same span under an earlier name are acknowledged under that name; until then
        # this acknowledgement does not count.
        try:
            if sink.checkpoint_ts(version.span) >= version.from_ts:
                self._waiting.resolved(sink, version.span, ts, _CALL_WAIT_S)
                sink.ack(ts, version.span)
        except TableNotFoundError:
            if version.to_ts == MAX_TS:
                raise

    def _running(self, changefeed: str) -> tuple[Feed, Sink]:
        """The changefeed and its sink; waits for a changefeed that is starting."""
        feed = self._feeds.feed(changefeed)
        feed.reading.asked_s = time.monotonic()
        # A changefeed that is starting has its sink in moments. Refusing at once would make every
        # reader wait for its own retry after each restart.
        deadline = time.monotonic() + _START_WAIT_S
        while (sink := feed.processor.sink) is None:
            if (
                not feed.info.state.is_running
                or time.monotonic() > deadline
                or self._waiting.pause(_START_STEP_S)
            ):
                raise _not_running(feed)
        return feed, sink


def _check_kept(feed: Feed, start_ts: int) -> None:
    """Check that a range does not begin below the kept history, of a changefeed that keeps any: the
    sink knows that of each table only.

    Raises:
        RangeCleanedError: it does.
    """
    if feed.history.is_kept and start_ts < feed.kept_ts:
        raise not_kept(feed.id, start_ts, feed.kept_ts)


def _check_begun(feed: Feed, start_ts: int) -> None:
    """Check that a range of all tables has no table that ended before this run of the changefeed
    began: the run's sink does not have it, and its rows would be missing.

    Raises:
        RangeCleanedError: there is one.
    """
    begun_ts, versions = feed.processor.start_ts, feed.catalog.versions
    if start_ts >= begun_ts:
        return
    if any(each[-1].to_ts <= begun_ts for each in versions.spans(start_ts)):
        raise RangeCleanedError(
            f"changefeed {feed.id} was started again at {begun_ts}, and a table had ended before: "
            f"its rows above {start_ts} are acknowledged and gone; begin at {begun_ts}"
        )


def _stops(feed: Feed) -> tuple[int, int]:
    """Return the ts at which the changefeed ends, and the ts at which a refused DDL stops it
    (MAX_TS: never). A cut that ends at one of them is made however few rows it has.
    """
    refusal = feed.catalog.refusal
    return feed.info.stop_ts or MAX_TS, MAX_TS if refusal is None else refusal.ts


def _worth_a_cut(
    sink: Sink, spans: Sequence[Span] | None, start_ts: int, end_ts: int, oldest_ms: int
) -> bool:
    """Whether the cut is worth a commit of the reader: it has rows, or spans `oldest_ms`."""
    if physical_ms(end_ts) - physical_ms(start_ts) >= oldest_ms:
        return True
    return any(part.rows for part in sink.plan_tables(spans, start_ts, end_ts))


def _slice(versions: Versions, part: Slice, locations: tuple[str, ...]) -> SliceEndpoint:
    version = versions.of_span(part.span, part.start_ts)
    assert version is not None, "a table with rows in a range is in force there"
    return SliceEndpoint(version.name, part.start_ts, part.end_ts, part.rows, part.bytes, locations)


def _read_again(
    versions: Versions, again: Mapping[int, int | None], start_ts: int, end_ts: int
) -> dict[Span, int]:
    """The tables that are read again and are in force in a cut, each with the ts from which on its
    rows are part of the cut.
    """
    spans = {version.span: again.get(version.span.table_id) for version in versions.at(start_ts)}
    return {
        span: since_ts
        for span, since_ts in spans.items()
        if since_ts is not None and since_ts < end_ts
    }


def _description(feed: Feed, version: Version, *, before: bool) -> TableDescription:
    """A table above some ts; one whose end is acknowledged has left the sink."""
    sink, start_ts = feed.processor.sink, feed.processor.start_ts
    try:
        resolved_ts = sink.resolved_ts(version.span) if sink else start_ts
        checkpoint_ts = sink.checkpoint_ts(version.span) if sink else start_ts
    except TableNotFoundError:
        resolved_ts = checkpoint_ts = version.to_ts if version.to_ts < MAX_TS else start_ts
    shard = feed.catalog.record(version).shard
    return TableDescription(
        table=version.name,
        table_id=version.span.table_id,
        key=version.mounter.key_columns,
        schema=schema_of(version.mounter, before=before),
        schema_ts=version.from_ts,
        resolved_ts=min(resolved_ts, version.to_ts),
        checkpoint_ts=min(checkpoint_ts, version.to_ts),
        shard=None if shard is None else (shard.name, shard.column),
    )


def _named(feed: Feed, name: str) -> Versions:
    """The versions, among which there is a table of that name at some time."""
    versions = feed.catalog.versions
    if name in feed.catalog.left_out:
        raise ChangefeedNotRunningError(
            f"changefeed {feed.id} was given a filter that leaves {name} out: plan again"
        )
    if not versions.has(name):
        names = ", ".join(sorted(versions.names())[:_NAMES_TOLD])
        raise TableNotExistsError(f"changefeed {feed.id} has no table {name!r}; it has {names}")
    return versions


def _not_running(feed: Feed) -> TidemarkError:
    state, error = feed.info.state, feed.info.error
    cause = f" after {error.code}: {error.message}" if error else ""
    if state is State.FAILED:
        return ChangefeedFailedError(f"changefeed {feed.id} has failed{cause}")
    return ChangefeedNotRunningError(
        f"changefeed {feed.id} does not run now, its state is {state}{cause}"
    )


def _while_running(feed: Feed, call: Callable[[], T]) -> T:
    """Make the call; raises an UnavailableError where the sink has no such table, because the
    changefeed stops meanwhile or the table is only coming.
    """
    try:
        return call()
    except TableNotFoundError as err:
        raise _not_running(feed) from err
