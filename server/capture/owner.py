"""The owner's work: the changefeeds' life, from creation to removal, and their processors.

All changes are made on the event loop, one at a time, and are in the metadata before they are answered: a new owner
finds every changefeed as the last answer said. An error stops a changefeed, never the others.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from server.capture import metrics
from server.capture.changefeed import ChangefeedInfo, RunningError, State, check_id, check_sink_uri
from server.capture.errors import (
    ChangefeedExistsError,
    ChangefeedNotExistsError,
    ChangefeedStateError,
    NotOwnerError,
    ParameterError,
    SnapshotLostError,
    StartTsInFutureError,
    TargetTsError,
)
from server.capture.feed import Feed
from server.capture.keeper import Keeper
from server.capture.processor import MakeProcessor
from server.capture.records import Records
from server.capture.runner import keep_running, note, utc_now
from server.capture.safepoint import Safepoints
from server.capture.table import source_tables
from server.puller.table import TableRecord
from server.puller.tikv.puller import TablePuller
from server.rpc.pd import PdClient
from storage.model.errors import TidemarkError

_log = structlog.get_logger(__name__)


class Owner:
    """The changefeeds; empty-handed (NotOwnerError) while `run` does not run."""

    def __init__(self, records: Records, pd: PdClient, make_processor: MakeProcessor) -> None:
        self.feeds: dict[str, Feed] = {}
        self._records = records
        self._pd = pd
        self._make_processor = make_processor
        self._safepoints = Safepoints(pd)
        self._changing = asyncio.Lock()
        self._keeper = Keeper(self.feeds, records, self._safepoints, self._changing, self._on_lost)
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def is_active(self) -> bool:
        """Whether this capture owns the changefeeds."""
        return self._tasks is not None

    def feed(self, changefeed: str) -> Feed:
        """The changefeed of that id; callable from any thread.

        Raises:
            NotOwnerError, ChangefeedNotExistsError: it is elsewhere, or nowhere.
        """
        feed = self.feeds.get(changefeed)
        if feed is None:
            self._check_active()
            raise ChangefeedNotExistsError(f"there is no changefeed {changefeed!r}; see `tidemark cli changefeed list`")
        return feed

    def pullers(self) -> list[TablePuller]:
        """Of all changefeeds, at this moment."""
        return [puller for feed in self.feeds.values() for puller in feed.processor.pullers]

    async def run(self, started: Callable[[], None]) -> None:
        """Own the changefeeds until cancelled; `started` is called when they can be asked for."""
        try:
            for info, checkpoint_ts in await self._records.load():
                self.feeds[info.id] = Feed.of(info, checkpoint_ts, self._make_processor)
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for feed in self.feeds.values():
                    self._start(feed)
                metrics.OWNER.set(1)
                started()
                await self._keeper.run()
        finally:
            metrics.OWNER.set(0)
            self._tasks = None
            self.feeds.clear()

    async def carry_out(self, change: Coroutine[Any, Any, Feed]) -> Feed:
        """Bring a change to its end, even if whoever asked for it goes away meanwhile; raises what it raises."""
        if self._tasks is None:
            change.close()
            raise _not_owner()
        outcome = await asyncio.shield(self._tasks.create_task(_outcome(change), name="change"))
        if isinstance(outcome, TidemarkError):
            raise outcome
        return outcome

    async def create(
        self, changefeed: str, sink_uri: str, start_ts: int, target_ts: int, tables: Sequence[tuple[str, str]]
    ) -> Feed:
        """Make a changefeed that starts after `start_ts` (0: now); tables are (schema name, TableInfo JSON). Durable.

        Raises:
            InvalidError: a parameter cannot be used; its subclass says which.
            StartTsBeforeGcError: GC may have collected what it would need.
            ChangefeedExistsError: the id is taken.
        """
        check_id(changefeed)
        check_sink_uri(sink_uri)
        records = tuple(TableRecord(schema_name, _document(text)) for schema_name, text in tables)
        source_tables(records)
        async with self._changing:
            self._check_active()
            if changefeed in self.feeds:
                raise ChangefeedExistsError(f"changefeed {changefeed} exists already; choose another id or remove it")
            now_ts = await self._pd.tso()
            start_ts = start_ts or now_ts
            _check_range(start_ts, target_ts, now_ts)
            info = ChangefeedInfo(
                id=changefeed,
                sink_uri=sink_uri,
                start_ts=start_ts,
                target_ts=target_ts,
                create_time=utc_now(),
                tables=records,
            )
            await self._safepoints.protect_creation(changefeed, start_ts)
            await self._records.create(info)
            feed = self.feeds[changefeed] = Feed.of(info, start_ts, self._make_processor)
            await self._hand_over(feed)
            self._start(feed)
        _log.info("changefeed created", changefeed=changefeed, start_ts=start_ts, tables=len(records))
        return feed

    async def pause(self, changefeed: str) -> Feed:
        """Stop pulling; the checkpoint stays, and holds GC back for a day more. Pausing twice is harmless. Durable."""
        async with self._changing:
            feed = self._own(changefeed)
            await feed.stop()
            try:
                await self._move(feed, State.STOPPED)
            except TidemarkError:
                self._start(feed)
                raise
        return feed

    async def resume(self, changefeed: str, overwrite_checkpoint_ts: int = 0) -> Feed:
        """Pull again, from the checkpoint or from `overwrite_checkpoint_ts`. Durable.

        Raises:
            ChangefeedStateError: it runs.
            StartTsBeforeGcError: GC may have collected what it would need.
        """
        async with self._changing:
            feed = self._own(changefeed)
            if feed.info.state.is_running:
                raise ChangefeedStateError(f"changefeed {changefeed} is {feed.info.state}; pause it first")
            start_ts = overwrite_checkpoint_ts or feed.checkpoint_ts
            _check_range(start_ts, feed.info.target_ts, await self._pd.tso())
            await self._safepoints.protect_creation(changefeed, start_ts)
            await feed.stop()
            feed.restart_at(start_ts, self._make_processor)
            await self._records.save({changefeed: start_ts}, {})
            await self._move(feed, State.NORMAL)
            await self._hand_over(feed)
            self._start(feed)
        return feed

    async def remove(self, changefeed: str) -> Feed:
        """Forget the changefeed and let GC go on. Durable."""
        async with self._changing:
            feed = self._own(changefeed)
            await self._records.remove(changefeed)
            del self.feeds[changefeed]
            await feed.stop()
            await asyncio.to_thread(feed.processor.wipe)
            await self._safepoints.release(changefeed)
        _log.info("changefeed removed", changefeed=changefeed)
        return feed

    def _own(self, changefeed: str) -> Feed:
        self._check_active()
        return self.feed(changefeed)

    def _check_active(self) -> None:
        if self._tasks is None:
            raise _not_owner()

    async def _move(self, feed: Feed, state: State, error: RunningError | None = None) -> None:
        info = feed.info.moved_to(state, error)
        await self._records.save({}, {feed.id: info})
        feed.info, feed.info_saved = info, True
        _log.info("changefeed state", changefeed=feed.id, state=state.value)

    def _start(self, feed: Feed) -> None:
        if feed.info.state.is_running and self._tasks is not None:
            feed.task = self._tasks.create_task(keep_running(feed, self._safepoints), name=f"changefeed {feed.id}")

    async def _hand_over(self, feed: Feed) -> None:
        """The changefeed's own safepoint takes over from that of its creation; if not now, the keeper will set it."""
        try:
            await self._safepoints.hold(feed.id, feed.checkpoint_ts)
            await self._safepoints.end_creation(feed.id)
        except TidemarkError as err:
            _log.warning("safepoint not handed over yet", changefeed=feed.id, error=str(err))

    def _on_lost(self, feed: Feed, error: SnapshotLostError) -> None:
        """The keeper found the history gone."""
        if feed.task is not None:
            feed.task.cancel()
        note(feed, State.FAILED, error)


def _not_owner() -> NotOwnerError:
    return NotOwnerError("this capture does not own the changefeeds; see `tidemark cli capture list`")


async def _outcome(change: Coroutine[Any, Any, Feed]) -> Feed | TidemarkError:
    try:
        return await change
    except TidemarkError as err:
        return err


def _check_range(start_ts: int, target_ts: int, now_ts: int) -> None:
    if start_ts > now_ts:
        raise StartTsInFutureError(f"the start {start_ts} is after the present {now_ts}; see `tidemark cli tso query`")
    if target_ts and target_ts <= start_ts:
        raise TargetTsError(f"target_ts {target_ts} is not after the start {start_ts}")


def _document(text: str) -> dict[str, Any]:
    try:
        doc = json.loads(text)
    except ValueError as err:
        raise ParameterError(f"a table_info is not JSON: {err}") from err
    if not isinstance(doc, dict):
        raise ParameterError("a table_info must be a JSON object: TiDB's model.TableInfo")
    return doc
