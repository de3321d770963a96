"""The owner's work: the changefeeds' life, from creation to removal, and their processors.

All changes are made on the event loop, one at a time, and are in the metadata before they are answered: a new owner
finds every changefeed as the last answer said. An error stops a changefeed, never the others.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from server.capture import metrics
from server.capture.catalog.columns import ColumnRules
from server.capture.catalog.filter import TableFilter
from server.capture.catalog.history import SchemaChange, by_id
from server.capture.catalog.tables import chosen_tables
from server.capture.changefeed import ChangefeedInfo, RunningError, State
from server.capture.creation import NewChangefeed, check_range
from server.capture.errors import (
    ChangefeedExistsError,
    ChangefeedNotExistsError,
    ChangefeedStateError,
    NotOwnerError,
    SnapshotLostError,
)
from server.capture.feed import Feed, Workshop
from server.capture.keeper import Keeper
from server.capture.runner import keep_running, note
from server.capture.safepoint import Safepoints
from server.puller.source import Source
from server.puller.tikv.puller import TablePuller
from server.rpc.pd import PdClient
from storage.model.errors import TidemarkError

_log = structlog.get_logger(__name__)


class Owner:
    """The changefeeds; empty-handed (NotOwnerError) while `run` does not run."""

    def __init__(self, workshop: Workshop, pd: PdClient) -> None:
        self.feeds: dict[str, Feed] = {}
        self._workshop = workshop
        self._records = workshop.records
        self._safepoints = Safepoints(pd)
        self._changing = asyncio.Lock()
        self._keeper = Keeper(self.feeds, self._records, self._safepoints, self._changing, self._on_lost)
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
        return [puller for feed in self.feeds.values() for puller in feed.processor.table_pullers]

    async def run(self, started: Callable[[], None]) -> None:
        """Own the changefeeds until cancelled; `started` is called when they can be asked for."""
        try:
            for info, checkpoint_ts in await self._records.load():
                self.feeds[info.id] = await self._loaded(info, checkpoint_ts)
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

    async def create(self, new: NewChangefeed) -> Feed:
        """Make a changefeed. Durable.

        Raises:
            InvalidError: a parameter cannot be used; its subclass says which.
            TableIneligibleError: a table cannot be replicated.
            StartTsBeforeGcError: GC may have collected what it would need.
            ChangefeedExistsError: the id is taken.
        """
        new.records()
        source = self._workshop.make_source(new.id, new.source_uri)
        async with self._changing:
            self._check_active()
            if new.id in self.feeds:
                raise ChangefeedExistsError(f"changefeed {new.id} exists already; choose another id or remove it")
            await self._records.clear(new.id)  # not later: a log source keeps its anchor for `now`
            now_ts = await source.now()
            start_ts = new.start_ts or now_ts
            check_range(start_ts, new.target_ts, now_ts)
            await self._safepoints.protect_creation(source, new.id, start_ts)
            try:
                feed = self.feeds[new.id] = await self._made(new, source, start_ts)
            except TidemarkError:
                await self._safepoints.end_creation(source, new.id)
                raise
            await self._hand_over(feed)
            self._start(feed)
        _log.info("changefeed created", changefeed=new.id, start_ts=start_ts, tables=len(feed.tables))
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
            check_range(start_ts, feed.info.target_ts, await feed.source.now())
            await self._safepoints.protect_creation(feed.source, changefeed, start_ts)
            await feed.stop()
            if start_ts == feed.checkpoint_ts:
                feed.restart_at(start_ts, feed.catalog.history)
                await self._move(feed, State.NORMAL)
            else:
                await self._overwrite(feed, start_ts)
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
            await self._safepoints.release(feed.source, changefeed)
        _log.info("changefeed removed", changefeed=changefeed)
        return feed

    async def _loaded(self, info: ChangefeedInfo, checkpoint_ts: int) -> Feed:
        if info.tables:
            info = await self._records.move_tables(info)
        changes = await self._records.schemas.load(info.id)
        try:
            return Feed.of(self._workshop, info, checkpoint_ts, changes)
        except TidemarkError as err:
            feed = Feed.unreadable(self._workshop, info, checkpoint_ts, err)
            note(feed, State.FAILED, err)
            return feed

    async def _made(self, new: NewChangefeed, source: Source, start_ts: int) -> Feed:
        chosen = await new.chosen(source, start_ts)
        info = new.info(start_ts, chosen)
        feed = Feed.of(self._workshop, info, start_ts, [SchemaChange(start_ts, tables=by_id(chosen.tables))])
        await self._records.create(info, chosen.tables)
        return feed

    async def _overwrite(self, feed: Feed, start_ts: int) -> None:
        """Go on at another ts, with the tables that the source has then."""
        info = feed.info.moved_to(State.NORMAL)
        if info.from_snapshot:
            taken = TableFilter(info.rules)
            columns, ignore = ColumnRules(info.columns), info.ignore_ineligible
            chosen = await chosen_tables(feed.source, taken, start_ts, columns=columns, ignore_ineligible=ignore)
            tables = chosen.tables
        else:
            tables = tuple(table.record for table in feed.tables)
        start = SchemaChange(start_ts, tables=by_id(tables))
        await self._records.restart(info, start)
        feed.restart_at(start_ts, [start])
        feed.info, feed.info_saved = info, True
        _log.info("changefeed goes on elsewhere", changefeed=feed.id, checkpoint_ts=start_ts, tables=len(tables))

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
            await self._safepoints.hold(feed.source, feed.id, feed.checkpoint_ts)
            await self._safepoints.end_creation(feed.source, feed.id)
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
