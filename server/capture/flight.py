"""The owner's changefeeds as the Flight server sees them; called from its threads.

A changefeed that does not run here right now (paused, restarting, not the owner) is UNAVAILABLE: readers wait and ask
again. After a restart the rows are pulled anew, so ranges above what is resolved so far are waited for.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from server.capture.changefeed import State
from server.capture.errors import ChangefeedFailedError, ChangefeedNotRunningError
from server.capture.feed import Feed
from server.capture.owner import Owner
from server.capture.processor import Sink
from server.capture.waiting import READ_WAIT_S, Waiting
from server.puller.table import SourceTable
from sink.errors import TableNotFoundError
from sink.flight.feeds import FeedDescription, Slice, TableDescription, TableNotExistsError
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import physical_ms

T = TypeVar("T")
_CALL_WAIT_S = 20.0
_START_WAIT_S = 5.0
_IDLE_CUT_MS = 3_000
"""While nothing changes, readers are moved on, and with them the checkpoint, only this often."""
_START_STEP_S = 0.02


class OwnerFeeds:
    """Implements `sink.flight.feeds.Feeds`; `close` lets go of whoever waits."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._waiting = Waiting()

    def close(self) -> None:
        """End all waiting."""
        self._waiting.close()

    def describe(self, changefeed: str) -> FeedDescription:
        """See `Feeds.describe`; a changefeed that does not run stands at its checkpoint."""
        feed = self._owner.feed(changefeed)
        processor = feed.processor
        sink = processor.sink
        tables = tuple(
            TableDescription(
                table=table.name,
                table_id=table.span.table_id,
                key=table.mounter.key_columns,
                schema=table.mounter.schema,
                resolved_ts=sink.resolved_ts(table.span) if sink else processor.start_ts,
                checkpoint_ts=sink.checkpoint_ts(table.span) if sink else processor.start_ts,
            )
            for table in feed.tables
        )
        return FeedDescription(
            changefeed=feed.id,
            state=feed.info.state.value,
            sink_uri=feed.info.sink_uri,
            start_ts=feed.info.start_ts,
            checkpoint_ts=processor.checkpoint_ts,
            resolved_ts=processor.resolved_ts,
            tables=tables,
        )

    def latest(
        self,
        changefeed: str,
        table: str | None,
        start_ts: int,
        max_rows: int | None,
        max_bytes: int | None,
        wait_s: float,
    ) -> int:
        """See `Feeds.latest`."""
        feed, sink = self._running(changefeed)
        span = _table(feed, table).span if table else None
        deadline = time.monotonic() + wait_s

        def cut() -> int:
            end_ts = start_ts
            while self._waiting.resolved(sink, span, end_ts + 1, deadline - time.monotonic()):
                end_ts = sink.cut(start_ts, max_rows, max_bytes, span)
                if _worth_a_cut(feed, sink, span, start_ts, end_ts):
                    return end_ts
            return start_ts

        return _while_running(feed, cut)

    def plan(self, changefeed: str, tables: Sequence[str] | None, start_ts: int, end_ts: int) -> list[Slice]:
        """See `Feeds.plan`."""
        feed, sink = self._running(changefeed)
        wanted = feed.tables if tables is None else tuple(_table(feed, name) for name in tables)

        def plan() -> list[Slice]:
            for table in wanted:
                self._waiting.resolved(sink, table.span, end_ts, _CALL_WAIT_S)
            parts = sink.plan_tables([table.span for table in wanted], start_ts, end_ts)
            planned = zip(wanted, parts, strict=True)
            locate = feed.processor.locations
            return [
                Slice(table.name, part.rows, part.bytes, locate(table.span)) for table, part in planned if part.rows
            ]

        return _while_running(feed, plan)

    def read(
        self, changefeed: str, table: str, start_ts: int, end_ts: int
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """See `Feeds.read`."""
        feed, sink = self._running(changefeed)
        source = _table(feed, table)

        def read() -> Iterator[pa.RecordBatch]:
            self._waiting.resolved(sink, source.span, end_ts, READ_WAIT_S)
            return sink.read(source.span, start_ts, end_ts)

        return source.mounter.schema, _while_running(feed, read)

    def ack(self, changefeed: str, table: str | None, ts: int) -> int:
        """See `Feeds.ack`."""
        feed, sink = self._running(changefeed)
        span = _table(feed, table).span if table else None

        def ack() -> int:
            self._waiting.resolved(sink, span, ts, _CALL_WAIT_S)
            sink.ack(ts, span)
            return sink.checkpoint_ts()

        return _while_running(feed, ack)

    def _running(self, changefeed: str) -> tuple[Feed, Sink]:
        """The changefeed and its sink; one that is starting is waited for."""
        feed = self._owner.feed(changefeed)
        deadline = time.monotonic() + _START_WAIT_S
        while (sink := feed.processor.sink) is None:
            if not feed.info.state.is_running or time.monotonic() > deadline or self._waiting.pause(_START_STEP_S):
                raise _not_running(feed)
        return feed, sink


def _worth_a_cut(feed: Feed, sink: Sink, span: Span | None, start_ts: int, end_ts: int) -> bool:
    """Whether there are rows to take, or the reader's position has grown old; each cut costs the reader a commit."""
    if physical_ms(end_ts) - physical_ms(start_ts) >= _IDLE_CUT_MS:
        return True
    spans = [span] if span else [table.span for table in feed.tables]
    return any(part.rows for part in sink.plan_tables(spans, start_ts, end_ts))


def _table(feed: Feed, name: str) -> SourceTable:
    for table in feed.tables:
        if table.name == name:
            return table
    known = ", ".join(table.name for table in feed.tables)
    raise TableNotExistsError(f"changefeed {feed.id} has no table {name!r}; it has {known}")


def _not_running(feed: Feed) -> TidemarkError:
    state, error = feed.info.state, feed.info.error
    cause = f" after {error.code}: {error.message}" if error else ""
    if state is State.FAILED:
        return ChangefeedFailedError(f"changefeed {feed.id} has failed{cause}")
    return ChangefeedNotRunningError(f"changefeed {feed.id} does not run now, its state is {state}{cause}")


def _while_running(feed: Feed, call: Callable[[], T]) -> T:
    """A changefeed may stop during a call: its sink has no tables then."""
    try:
        return call()
    except TableNotFoundError as err:
        raise _not_running(feed) from err
