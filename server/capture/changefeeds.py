"""Changefeeds that one key in the metadata lets this capture run: it pauses, resumes, updates and
removes them, and runs their processors.

All changes are made on the event loop, one at a time, and are in the metadata before they are
answered: whoever runs a changefeed next finds it as the last answer said. An error stops a
changefeed, never the others.

A change may be repeated, as its answer was lost, here or at the next owner. Its `request` is the
same each time (empty: it is not repeated); the metadata have it together with the change, and who
finds it there makes no change.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import structlog
from pyspark_tidemark.sink_uri import format_of

from gcsafepoint.explain.names import CREATING_PREFIX, feed_of, generation_of
from server.capture import long_lived
from server.capture.audit import Audit, check_audit
from server.capture.checkpoint_saver import CheckpointHandlers, CheckpointSaver
from server.capture.creation import check_range, select_tables
from server.capture.errors import (
    AuditUnsupportedError,
    ChangefeedNotExistsError,
    ChangefeedStateError,
    ChangefeedUnreadableError,
    ChangeInterruptedError,
    NotOwnerError,
    SnapshotLostError,
)
from server.capture.feed import Feed, FeedFactory
from server.capture.history_keeper import keep_histories
from server.capture.job_report import failed_by_job
from server.capture.records import ChangefeedRecord
from server.capture.runner import keep_running, note, utc_now
from server.capture.safepoint import ChangefeedSafePoints
from server.capture.update import (
    ChangefeedUpdate,
    FilterPlan,
    FilterUpdates,
    check_open,
    check_target,
    plan_filter,
)
from server.changefeed.history import SchemaChange, by_id
from server.changefeed.info import (
    ChangefeedInfo,
    State,
)
from server.changefeed.table import check_names
from server.changefeed.terms import terms_of
from server.puller.source import Source
from server.puller.tikv.puller import TablePuller
from server.rpc.pd import PdClient
from storage.defect import request_error
from storage.meta.errors import MetaUnavailableError
from storage.model.errors import TidemarkError, UnavailableError

_DRAIN_TIMEOUT_S: Final = 10.0
T = TypeVar("T")
_log = structlog.get_logger(__name__)


class Changefeeds:
    """Runs changefeeds: the one of the id `only`, or those of `_own_records`. While `run` does not
    run there are none, and calls raise NotOwnerError.
    """

    def __init__(self, factory: FeedFactory, pd: PdClient, only: str = "") -> None:
        self.feeds: dict[str, Feed] = {}
        self._only = only
        self._factory = factory
        self._pd = pd
        self._records = factory.records
        self._safepoints = ChangefeedSafePoints(pd, only)
        self._filters = FilterUpdates(self._records)
        self._changing = asyncio.Lock()
        self._unknown_outcomes: set[str] = set()
        """Changefeeds whose last change got no answer from the metadata: they do not run until
        `_reload` has read whether it was made.
        """
        self._saver = CheckpointSaver(
            self.feeds,
            self._records,
            self._safepoints,
            self._changing,
            CheckpointHandlers(
                self._fail_for_lost_history,
                self._finish_or_remove,
                self._advance_filter_update,
                self._read_unknown_outcomes,
            ),
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._is_leaving = False

    @property
    def is_active(self) -> bool:
        """Whether `run` runs, so that changefeeds can be asked for and changed."""
        return self._tasks is not None

    def feed(self, changefeed: str) -> Feed:
        """The changefeed of that id; callable from any thread.

        Raises:
            NotOwnerError, ChangefeedNotExistsError: it is elsewhere, or nowhere.
        """
        feed = self.feeds.get(changefeed)
        if feed is None:
            self._check_active()
            raise ChangefeedNotExistsError(
                f"there is no changefeed {changefeed!r}; see `tidemark cli changefeed list`"
            )
        return feed

    def pullers(self) -> list[TablePuller]:
        """The pullers of all changefeeds, at this moment."""
        return [puller for feed in self.feeds.values() for puller in feed.processor.table_pullers]

    async def run(self, started: Callable[[], None]) -> None:
        """Run the changefeeds until cancelled; `started` is called when they can be asked for.

        Raises:
            UnavailableError: the metadata cannot be read.
        """
        self._is_leaving = False
        try:
            jobs = await self._records.load_jobs(time.monotonic())
            for record in await self._own_records():
                feed = self.feeds[record.info.id] = await self.loaded(record)
                feed.job = feed.job_saved = jobs.get(feed.id)
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(keep_histories(self.feeds), name="kept histories")
                for feed in self.feeds.values():
                    self._start(feed)
                started()
                try:
                    await self._run_background()
                finally:
                    # Changes under way may end; no other may begin.
                    self._is_leaving = True
        finally:
            self._tasks = None
            self._unknown_outcomes.clear()
            ended = list(self.feeds.values())
            self.feeds.clear()
            # It may run on another capture next, and nobody would delete its sorted rows here.
            for feed in ended if self._only else ():
                await asyncio.to_thread(feed.processor.wipe)
            long_lived.dropped_tables(sum(len(feed.catalog.read()) for feed in ended))

    async def drain_changes(self) -> None:
        """Refuse new changes, and wait up to `_DRAIN_TIMEOUT_S` for those under way: so each client
        gets an answer, from this capture or from the next one.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_TIMEOUT_S), self._changing:
                self._is_leaving = True

    async def carry_out(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, even if the client goes away meanwhile.

        Raises:
            ChangeInterruptedError: the changefeeds ended here meanwhile.
            TidemarkError: what the change raises.
        """
        if self._tasks is None or self._is_leaving:
            change.close()
            raise _not_owner()
        # A client that hangs up cancels its call. A change that stopped halfway would leave a
        # stopped feed, or a safepoint of a creation, that no answer tells of.
        task = self._tasks.create_task(_outcome(change), name="change")
        await asyncio.wait([task])
        if task.cancelled():
            raise ChangeInterruptedError(
                "this capture ceased to run the changefeed while it changed it: whether it is "
                "changed, or made, `tidemark cli changefeed query` says in a moment"
            )
        outcome = task.result()
        if isinstance(outcome, TidemarkError):
            raise outcome
        return outcome

    async def is_carried_out(self, changefeed: str, request: str) -> bool:
        """Whether a change was made already, by an earlier call of the same request."""
        return await self._records.is_carried_out(changefeed, request)

    async def pause(self, changefeed: str, request: str = "") -> Feed:
        """Stop pulling; the checkpoint stays, and holds GC back for a day more.

        Pausing twice is harmless. Durable.

        Raises:
            ChangefeedStateError: it is finished, or its removal has begun.
        """
        async with self._changing:
            feed = await self._changeable(changefeed)
            if await self.is_carried_out(changefeed, request):
                return feed
            check_open(feed)
            await feed.stop()
            try:
                await self._set_state(feed, State.STOPPED, request)
            except TidemarkError:
                self._start(feed)
                raise
            feed.job = None
        return feed

    async def resume(
        self,
        changefeed: str,
        overwrite_checkpoint_ts: int = 0,
        *,
        with_now: bool = False,
        request: str = "",
    ) -> Feed:
        """Pull again, from the checkpoint, from `overwrite_checkpoint_ts`,
        or from what its source calls now. Durable.

        Raises:
            ChangefeedStateError: it runs, is finished, or its removal has begun.
            StartTsBeforeGcError: GC may have collected what it would need.
        """
        async with self._changing:
            feed = await self._changeable(changefeed)
            if await self.is_carried_out(changefeed, request):
                return feed
            check_open(feed)
            if failed_by_job(feed.info, feed.job) and not (overwrite_checkpoint_ts or with_now):
                # Rows are being pulled all the time: only the lake job has to start again.
                await self._forget_job(feed, request)
                return feed
            if feed.info.state.is_running:
                raise ChangefeedStateError(
                    f"changefeed {changefeed} is {feed.info.state}; pause it first"
                )
            asks = bool(overwrite_checkpoint_ts) or with_now or feed.source.keeps_history
            now_ts = await feed.source.now() if asks else feed.checkpoint_ts
            start_ts = now_ts if with_now else overwrite_checkpoint_ts or feed.checkpoint_ts
            if asks:
                check_range(start_ts, feed.info.target_ts, now_ts)
            # The history is protected before anything is changed: where GC has passed it, the
            # changefeed stays as it was.
            creating = await self._safepoints.protect_creation(feed.source, changefeed, start_ts)
            await feed.stop()
            await self._forget_job(feed)
            if start_ts == feed.checkpoint_ts:
                await feed.restart_at(start_ts, feed.catalog.history)
                await self._set_state(feed, State.NORMAL, request)
            else:
                await self._overwrite(feed, start_ts, request)
            await self._hand_over_safepoint(feed, creating)
            self._start(feed)
        return feed

    async def update(self, changefeed: str, update: ChangefeedUpdate) -> Feed:
        """Change a changefeed that exists. Durable.

        How to log in at the sink may change, the place may not. A running changefeed goes on from
        its checkpoint. A new table filter comes in force when everything up to now is at the
        target.

        Raises:
            ParameterError: nothing is to be changed, or to something that cannot be.
            SinkUriError: it is not valid, or names another place.
            TableIneligibleError: a table cannot be replicated, or the sink cannot hold its names.
            SourceUriError: the source has no such option, or not with this value.
            AuditUnsupportedError: the sink has no rows that could be compared.
            ChangefeedStateError: its tables cannot change any more, or it has to be paused first.
            TargetTsError: readers may be behind the new target_ts already.
        """
        update.check()
        update = await update.with_salt()
        async with self._changing:
            feed = await self._changeable(changefeed)
            if await self.is_carried_out(changefeed, update.request):
                return feed
            if update.changes_tables:
                check_open(feed)
            if update.target_ts is not None:
                await check_target(feed, update.target_ts)
            info = update.applied_to(feed.info)
            ignores_events = bool(update.terms_after(feed.info).event_filters)
            await self._check_audit(
                info.audit_s, info.sink_uri, info.source_uri, ignores_events=ignores_events
            )
            for table in feed.tables:
                check_names(table, format_of(info.sink_uri))
            # Made before anything is saved: a source refuses options that it does not know.
            source: Source | None = None
            saved_source: Source | None = None
            if info.source_uri != feed.info.source_uri:
                source = self._factory.make_source(feed.id, info.source_uri)
            restarts, region_threshold = update.changes_tables, feed.info.region_threshold
            try:
                if update.changes_tables:
                    # No reader may be beyond the ts that is chosen: it must not run meanwhile.
                    offered_ts = feed.processor.resolved_ts
                    await feed.stop()
                    info = await self._planned_filter(feed, info, update, offered_ts)
                else:
                    await self._save_info(feed, info, update.request)
                feed.info = info
                # A run that drops acknowledged history cannot begin to keep it; a new one can.
                begins_to_keep = bool(info.retention) and not feed.history.is_kept
                splits_otherwise = info.region_threshold != region_threshold
                if source is not None or begins_to_keep or splits_otherwise:
                    restarts = True
                    await feed.stop()
                    saved_source = source
            finally:
                if restarts and feed.id not in self._unknown_outcomes:
                    # If nothing was saved, the former source is kept.
                    history = feed.catalog.history
                    await feed.restart_at(feed.checkpoint_ts, history, source=saved_source)
                    self._start(feed)
            if not info.audit_s:
                feed.audit = Audit()
        _log.info("changefeed updated", changefeed=changefeed, sink_uri=feed.info.shown_sink_uri)
        return feed

    async def add_reader(
        self, changefeed: str, name: str, start_ts: int = 0, request: str = ""
    ) -> Feed:
        """Let a reader of this name have the changes from `start_ts` on (0: all that are kept), and
        hold them until it has them; one that is there stays as it is. Durable.

        Raises:
            ReaderInvalidError: the name, or there are too many.
            RangeCleanedError: `start_ts` is below what is kept.
            ParameterError: it is above what can be read yet.
            ChangefeedStateError: it is finished, or its removal has begun.
        """
        async with self._changing:
            feed = await self._changeable(changefeed)
            if await self.is_carried_out(changefeed, request):
                return feed
            check_open(feed)
            # What it begins with is not given up meanwhile.
            async with feed.history.changing:
                # It holds from here on; a crash before the record is there tells nobody that it
                # did.
                begin_ts = feed.start_of_reader(start_ts)
                feed.readers.add(name, begin_ts, feed.processor.checkpoint_ts)
            record = feed.readers.record(name)
            await self._records.save_reader(changefeed, name, record, request)
        _log.info(
            "reader added", changefeed=changefeed, reader=name, ts=feed.readers.position(name)
        )
        return feed

    async def remove_reader(self, changefeed: str, name: str, request: str = "") -> Feed:
        """Hold nothing for a reader any more. Durable.

        Raises:
            ReaderNotExistsError: there is none of that name.
        """
        async with self._changing:
            feed = await self._changeable(changefeed)
            if await self.is_carried_out(changefeed, request):
                return feed
            ts = feed.readers.position(name)
            with self._sending(feed):
                await self._records.save_reader(changefeed, name, None, request)
            feed.readers.remove(name)
        _log.info("reader removed", changefeed=changefeed, reader=name, checkpoint_ts=ts)
        return feed

    async def plan_filter(self, changefeed: str, update: ChangefeedUpdate) -> FilterPlan:
        """What a new table filter, or other terms, would change now; nothing is kept, and others
        may change the changefeed meanwhile: the source may take a while to answer.

        Raises as `server.capture.update.plan_filter`, and ChangefeedStateError.
        """
        self._check_active()
        feed = self.feed(changefeed)
        check_open(feed)
        return await plan_filter(feed, await update.with_salt())

    async def _planned_filter(
        self, feed: Feed, info: ChangefeedInfo, update: ChangefeedUpdate, offered_ts: int
    ) -> ChangefeedInfo:
        try:
            return await self._filters.planned(feed, info, update, offered_ts)
        except MetaUnavailableError as err:
            # Readers must not pass the ts that may be chosen by now.
            self._note_unknown_outcome(feed)
            raise ChangeInterruptedError.by_metadata(feed.id, err) from err

    async def _advance_filter_update(self, feed: Feed) -> None:
        """Take the next step of a filter update; called again until the filter is in force."""
        feed.filter_error, feed.filter_tried_s = "", time.monotonic()
        info, changes = feed.info, list(feed.catalog.history)
        try:
            info, changes = await self._filters.next_step(feed)
        except MetaUnavailableError:
            self._note_unknown_outcome(feed)
            raise
        except TidemarkError as err:
            feed.filter_error = err.message
            _log.warning(
                "new filter not in force yet", changefeed=feed.id, code=err.code, error=err.message
            )
        await feed.restart_at(feed.checkpoint_ts, changes, info=info)
        self._start(feed)

    async def remove(self, changefeed: str, request: str = "") -> Feed | None:
        """Forget the changefeed and let GC go on; None: an earlier call of the same request has.
        Durable.
        """
        # Its record is marked first and goes last: while it is there, whoever owns the changefeeds
        # knows that safepoints may be left.
        async with self._changing:
            is_removed = await self.is_carried_out(changefeed, request)
            try:
                feed = await self._changeable(changefeed, readable=False)
            except ChangefeedNotExistsError:
                if is_removed:
                    return None
                raise
            if is_removed and feed.info.state is not State.REMOVED:
                # Another one of that id.
                return None
            if feed.is_info_readable:
                await self._set_state(feed, State.REMOVED, request)
            try:
                await self._finish_or_remove(feed, request)
            except MetaUnavailableError as err:
                raise ChangeInterruptedError.by_metadata(changefeed, err) from err
        return feed

    async def _own_records(self) -> list[ChangefeedRecord]:
        """The changefeeds to run."""
        one = await self._records.load_one(self._only)
        return [] if one is None else [one]

    async def _run_background(self) -> None:
        """Run the background work until cancelled."""
        await self._saver.run()

    async def _finish_or_remove(self, feed: Feed, request: str = "") -> None:
        """Carry out a removal, or the end at target_ts; repeated until it succeeds."""
        if feed.info.state.is_running:
            await self._set_state(feed, State.FINISHED)
        # A processor that still ran would read history that GC may collect now.
        await feed.stop()
        services = await self._services(feed)
        await self._safepoints.release(feed.source, services)
        feed.released = True
        await asyncio.to_thread(feed.processor.wipe)
        # The record goes last: see `remove`. One that cannot be read ends by a removal only.
        if feed.info.state is State.REMOVED or not feed.is_info_readable:
            own = [each for each in services if not each.startswith(CREATING_PREFIX)]
            await self._records.remove(feed.id, max(map(generation_of, own)), request)
            del self.feeds[feed.id]
            _log.info("changefeed removed", changefeed=feed.id)
            long_lived.dropped_tables(len(feed.catalog.read()))

    async def _services(self, feed: Feed) -> list[str]:
        """The services at the coordinator that keep history for a changefeed."""
        services = [feed.info.gc_service]
        if feed.source.keeps_history:
            # Those of creations and resumes that nobody has ended; and where its record cannot be
            # read, which of them is its own.
            service_ids = await self._records.service_ids(self._safepoints.cluster_id)
            services += [each for each in service_ids if feed_of(each) == feed.id]
        return list(dict.fromkeys(services))

    async def loaded(self, record: ChangefeedRecord) -> Feed:
        """A changefeed that does not run yet, by its records."""
        info, checkpoint_ts = record.info, record.checkpoint_ts
        if record.error is not None:
            feed = Feed.unreadable(self._factory, info, checkpoint_ts, record.error)
            feed.is_info_readable = False
            note(feed, State.FAILED, record.error)
            return feed
        if info.tables:
            info = await self._records.move_tables(info)
        if info.secret_advice:
            _log.warning("secret in the metadata", changefeed=info.id, advice=info.secret_advice)
        try:
            changes = await self._records.schemas.load(info.id)
            feed = await Feed.of(self._factory, info, checkpoint_ts, changes)
            feed.read_by(await self._records.load_readers(info.id))
        except UnavailableError:
            raise
        except Exception as err:  # noqa: BLE001 - records that cannot be read stop their changefeed, no other
            error = request_error(err, f"records of changefeed {info.id}")
            feed = Feed.unreadable(self._factory, info, checkpoint_ts, error)
            note(feed, State.FAILED, error)
        return feed

    async def _check_audit(
        self, audit_s: int, sink_uri: str, source_uri: str, *, ignores_events: bool
    ) -> None:
        """See that lake and source can be compared; raises as `check_audit`."""
        check_audit(audit_s, sink_uri, ignores_events=ignores_events)
        if audit_s and source_uri.startswith("pump:") and not await self._pd.stores():
            raise AuditUnsupportedError(
                "--audit reads the rows of the source, and TiDB's pumps have only changes: the "
                "cluster has no store"
            )

    async def _overwrite(self, feed: Feed, start_ts: int, request: str) -> None:
        """Go on at another ts, with the tables that the source has then."""
        info = feed.info.continuing_at(start_ts, feed.checkpoint_ts, utc_now())
        if info.from_snapshot:
            before = [table.record for table in feed.tables]
            selection = await select_tables(
                feed.source, terms_of(info, info.rules, feed.info.terms), start_ts, before=before
            )
            tables = selection.tables
        else:
            tables = tuple(table.record for table in feed.tables)
        start = SchemaChange(start_ts, tables=by_id(tables))
        # Durable first: a crash here begins at the new ts, with the tables that it has.
        with self._sending(feed):
            await self._records.restart(info, start, feed.readers.named(), request)
        await feed.restart_at(start_ts, [start], info=info)
        feed.readers.restart_at(start_ts)
        _log.info(
            "changefeed goes on elsewhere",
            changefeed=feed.id,
            checkpoint_ts=start_ts,
            tables=len(tables),
        )
        for stretch in info.skipped[-1:]:
            if stretch.end_ts == start_ts:
                _log.warning(
                    "changes skipped",
                    changefeed=feed.id,
                    start_ts=stretch.start_ts,
                    end_ts=start_ts,
                )

    async def _forget_job(self, feed: Feed, request: str = "") -> None:
        """Whatever its lake job reported: it gets a new start. Durable."""
        if feed.job_saved is not None or request:
            with self._sending(feed):
                await self._records.save_job(feed.id, None, request)
        feed.job = feed.job_saved = None

    async def _changeable(self, changefeed: str, *, readable: bool = True) -> Feed:
        """The changefeed to change, as the metadata has it. Call it under the lock.

        Raises:
            NotOwnerError, ChangefeedNotExistsError: it does not run here.
            ChangefeedUnreadableError: `readable`, and this version cannot read its record.
        """
        self._check_active()
        if changefeed in self._unknown_outcomes:
            await self._reload(changefeed)
        feed = self.feed(changefeed)
        if readable and not feed.is_info_readable:
            # A write would replace a record that another version can read.
            raise ChangefeedUnreadableError(
                feed.info.error.message if feed.info.error else f"changefeed {changefeed}"
            )
        return feed

    def _note_unknown_outcome(self, feed: Feed) -> None:
        """Note that a change of a changefeed got no answer. What is in memory may be older than the
        metadata, so nothing is written by it before that was read again.
        """
        self._unknown_outcomes.add(feed.id)
        feed.info_saved = True

    async def _read_unknown_outcomes(self) -> None:
        """Reload the changefeeds whose last change got no answer."""
        for changefeed in sorted(self._unknown_outcomes):
            await self._reload(changefeed)

    async def _reload(self, changefeed: str) -> None:
        """Replace a changefeed by what the metadata says of it, as a new owner would load it. Call
        it under the lock.

        Raises:
            UnavailableError: the metadata does not answer.
        """
        record = await self._records.settled_one(changefeed)
        jobs = await self._records.load_jobs(time.monotonic())
        feed = None if record is None else await self.loaded(record)
        before = self.feeds.pop(changefeed, None)
        if before is not None:
            await before.stop()
        self._unknown_outcomes.discard(changefeed)
        _log.warning(
            "changefeed is as the metadata has it",
            changefeed=changefeed,
            state=None if feed is None else feed.info.state.value,
            checkpoint_ts=None if feed is None else feed.checkpoint_ts,
        )
        if feed is not None and self._runs_here(feed):
            feed.job = feed.job_saved = jobs.get(changefeed)
            self.feeds[changefeed] = feed
            self._start(feed)

    def _runs_here(self, feed: Feed) -> bool:
        """Whether a reloaded changefeed runs here."""
        del feed
        return True

    def _check_active(self) -> None:
        if self._tasks is None or self._is_leaving:
            raise _not_owner()

    async def _set_state(self, feed: Feed, state: State, request: str = "") -> None:
        info = feed.info.moved_to(state)
        await self._save_info(feed, info, request)
        feed.info, feed.info_saved = info, True
        _log.info("changefeed state", changefeed=feed.id, state=state.value)

    async def _save_info(self, feed: Feed, info: ChangefeedInfo, request: str) -> None:
        with self._sending(feed):
            await self._records.change(info, request)

    @contextmanager
    def _sending(self, feed: Feed) -> Iterator[None]:
        """Within it a change is written: if that gets no answer, the metadata tell what is in
        force.

        Raises:
            ChangeInterruptedError: it got none.
            NotOwnerError: nothing was written.
        """
        try:
            yield
        except UnavailableError as err:
            self._note_unknown_outcome(feed)
            if isinstance(err, NotOwnerError):
                raise
            raise ChangeInterruptedError.by_metadata(feed.id, err) from err

    def _start(self, feed: Feed) -> None:
        is_clear = feed.id not in self._unknown_outcomes
        if feed.info.state.is_running and is_clear and self._tasks is not None:
            feed.task = self._tasks.create_task(
                keep_running(feed, self._safepoints), name=f"changefeed {feed.id}"
            )

    async def _hand_over_safepoint(self, feed: Feed, creating: str) -> None:
        """Set the changefeed's own safepoint, then delete that of its creation. If this fails,
        `CheckpointSaver` does it later.
        """
        # Its own is set before the creation's ends: at no moment is the history unprotected.
        try:
            await self._safepoints.hold(feed.source, feed.info, feed.checkpoint_ts)
            await self._safepoints.end_creation(creating)
        except TidemarkError as err:
            _log.warning("safepoint not handed over yet", changefeed=feed.id, error=str(err))

    def _fail_for_lost_history(self, feed: Feed, error: SnapshotLostError) -> None:
        """Fail a changefeed whose history is gone, as the checkpoint saver has found."""
        if feed.task is not None:
            feed.task.cancel()
        note(feed, State.FAILED, error)


def _not_owner() -> NotOwnerError:
    return NotOwnerError(
        "this capture does not own the changefeeds; see `tidemark cli capture list`"
    )


async def _outcome(change: Coroutine[Any, Any, T]) -> T | TidemarkError:
    try:
        return await change
    except Exception as err:  # noqa: BLE001 - it is the request's: nothing that a client sends ends the owner
        return request_error(err, "changefeed API")
