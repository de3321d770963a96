"""Saves what changes all the time: checkpoints in the metadata, service safepoints at the
coordinator.

Order, for each changefeed: the reader acknowledges, the checkpoint is durable in the metadata, then
the safepoint follows. So a crash anywhere between keeps more history than needed, never less. All
changefeeds are saved in one go, under the lock under which they are created and removed: nothing is
written for what is gone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from gcsafepoint.explain.names import CREATING_PREFIX, feed_of, generation_of
from gcsafepoint.state.records import SafePointRecordError
from server.capture import metrics
from server.capture.audit import Audit
from server.capture.errors import SnapshotLostError
from server.capture.feed import Feed
from server.capture.job_report import failed_by_job
from server.capture.records import Records
from server.capture.runner import note
from server.capture.safepoint import ChangefeedSafePoints
from server.changefeed.history import History
from server.changefeed.info import State
from server.log import RateLimitedWarning
from server.rpc.pd import PdRefusedError
from storage.model.errors import UnavailableError

_SAVE_EVERY_S = 0.2
_SAFEPOINT_EVERY_S = 2.0
_SAFEPOINT_REFRESH_S = 60.0
_FINAL_SAVE_S = 5.0
_COLLECT_EVERY_S = 60.0
_SWEEP_EVERY_S = 60.0
_AUDITS_EVERY_S = 2.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointHandlers:
    """What `CheckpointSaver` calls when a changefeed needs more than its checkpoint saved."""

    on_lost: Callable[[Feed, SnapshotLostError], None]
    """Called when GC may have collected history that the changefeed still needs."""
    on_end: Callable[[Feed], Awaitable[None]]
    """Called as long as a changefeed is to be finished or removed (`Feed.is_ending`)."""
    on_filter: Callable[[Feed], Awaitable[None]]
    """Called as long as a new filter is due (`Feed.is_filter_due`)."""
    on_unknown_outcomes: Callable[[], Awaitable[None]]
    """Called first: reloads changefeeds whose last change got no answer, so that no older record is
    written over it.
    """


class CheckpointSaver:
    """Saves the checkpoints and safepoints of `feeds`, and finishes, removes and refilters them
    when that is due.
    """

    def __init__(
        self,
        feeds: Mapping[str, Feed],
        records: Records,
        safepoints: ChangefeedSafePoints,
        changing: asyncio.Lock,
        handlers: CheckpointHandlers,
    ) -> None:
        self._feeds = feeds
        self._records = records
        self._safepoints = safepoints
        self._changing = changing
        self._handlers = handlers
        self._collected_s = time.monotonic()
        self._sweep_s = 0.0
        self._audits_s = 0.0
        self._unsaved = RateLimitedWarning(_log, "checkpoints cannot be saved now")

    async def run(self) -> None:
        """Save five times a second until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(_SAVE_EVERY_S)
                await self._save_all()
        finally:
            # Once more at the end: the next owner begins where readers have acknowledged, and not
            # up to 200 ms before. Where the metadata is silent it begins a little before.
            with suppress(TimeoutError):
                async with asyncio.timeout(_FINAL_SAVE_S):
                    await self._save_all()

    async def _save_all(self) -> None:
        try:
            async with self._changing:
                await self._handlers.on_unknown_outcomes()
                # Checkpoints before safepoints: a crash in between keeps more history than needed.
                await self._save()
                await self._save_jobs()
                for feed in [feed for feed in self._feeds.values() if feed.is_ending]:
                    await self._handlers.on_end(feed)
                for feed in filter(self._is_due, self._feeds.values()):
                    await self._hold(feed)
                await self._collect()
                await self._sweep()
                await self._load_audits()
                for feed in [feed for feed in self._feeds.values() if feed.is_filter_due]:
                    await self._handlers.on_filter(feed)
        except (UnavailableError, PdRefusedError) as err:
            # It is tried five times a second, and may go on for hours, as when etcd is full.
            self._unsaved.warn(error=str(err))

    async def _save(self) -> None:
        feeds = self._feeds.values()
        for feed in feeds:
            _note_damage(feed)
            if feed.recovered():
                feed.info, feed.info_saved = feed.info.moved_to(State.NORMAL), False
        moved = [(feed, feed.processor.checkpoint_ts) for feed in feeds]
        moved = [
            (feed, checkpoint_ts)
            for feed, checkpoint_ts in moved
            if checkpoint_ts > feed.checkpoint_ts
        ]
        changed = [
            (feed, feed.info) for feed in feeds if not feed.info_saved and feed.is_info_readable
        ]
        read = [(feed, positions) for feed in feeds if (positions := feed.readers.unsaved())]
        if not moved and not changed and not read:
            return
        await self._records.save(
            {feed.id: checkpoint_ts for feed, checkpoint_ts in moved},
            {feed.id: info for feed, info in changed},
            {feed.id: positions for feed, positions in read},
        )
        for feed, positions in read:
            feed.readers.saved(positions)
        for feed, checkpoint_ts in moved:
            feed.checkpoint_ts = checkpoint_ts
        for feed, info in changed:
            # The feed may have failed while the write was under way: that is still to be saved.
            feed.info_saved = feed.info is info

    async def _save_jobs(self) -> None:
        """Save the errors with which lake jobs have given up: a new owner of the changefeeds needs
        them, too.
        """
        for feed in self._feeds.values():
            job = feed.job if failed_by_job(feed.info, feed.job) else None
            if job is not feed.job_saved:
                await self._records.save_job(feed.id, job)
                feed.job_saved = job

    async def _collect(self) -> None:
        """Forget the schema changes below the checkpoint of a minute ago."""
        # Not of now: a reader that has just acknowledged may still ask for a ts a little below.
        if time.monotonic() - self._collected_s < _COLLECT_EVERY_S:
            return
        self._collected_s = time.monotonic()
        for feed in self._feeds.values():
            if feed.catalog.left_out:
                # Readers may need more than the history says, which has those tables still.
                continue
            # A copy, since the source may add a change meanwhile: a million tables take seconds.
            history = History(feed.catalog.history)
            garbage = await asyncio.to_thread(history.garbage, feed.settled_ts)
            # The metadata first: what memory has forgotten would never be deleted there.
            await self._records.schemas.collect(feed.id, garbage)
            feed.catalog.history.forget(garbage)
            feed.catalog.forget(feed.settled_ts)
            # A reader may begin in history that is kept: it needs the schemas of then.
            feed.settled_ts = min(feed.checkpoint_ts, feed.kept_ts)

    async def _sweep(self) -> None:
        """Delete what interrupted creations and resumes left at the coordinator."""
        if time.monotonic() < self._sweep_s:
            return
        self._sweep_s = time.monotonic() + _SWEEP_EVERY_S
        # The lock is held, so no creation is under way whose safepoint this could take.
        service_ids = await self._records.service_ids(self._safepoints.cluster_id)
        # The ids come from the metadata, too: there may be a record whose creation got no answer.
        unprotected = dict.fromkeys(await self._records.ids(), False)
        protected = {
            feed.id: not _needs_safepoint(feed) or bool(feed.safepoint_time)
            for feed in self._feeds.values()
        }
        await self._safepoints.sweep(service_ids, unprotected | protected)

    async def _load_audits(self) -> None:
        """Read the results of audits; lake jobs and `verify` write them, the capture only shows
        them.
        """
        if time.monotonic() < self._audits_s or not any(
            feed.info.audit_s for feed in self._feeds.values()
        ):
            return
        self._audits_s = time.monotonic() + _AUDITS_EVERY_S
        audits = await self._records.load_audits()
        for feed in self._feeds.values():
            feed.audit = audits.get(feed.id, Audit())

    def _is_due(self, feed: Feed) -> bool:
        """Whether the changefeed's safepoint should be set now.

        A stopped changefeed's safepoint is not renewed: it expires after 24 h, unless the
        changefeed is resumed.
        """
        if not _needs_safepoint(feed):
            return False
        age = time.monotonic() - feed.safepoint_time
        return age > (
            _SAFEPOINT_EVERY_S if feed.checkpoint_ts > feed.safepoint_ts else _SAFEPOINT_REFRESH_S
        )

    async def _hold(self, feed: Feed) -> None:
        checkpoint_ts = feed.checkpoint_ts
        try:
            if feed.record_error is not None:
                await self._hold_unread(feed)
            else:
                await self._safepoints.hold(
                    feed.source, feed.info, checkpoint_ts, failed_s=feed.failed_s
                )
        except SnapshotLostError as err:
            self._handlers.on_lost(feed, err)
        else:
            metrics.SAFEPOINTS.inc()
            feed.safepoint_ts, feed.safepoint_time = checkpoint_ts, time.monotonic()

    async def _hold_unread(self, feed: Feed) -> None:
        """Renew the safepoint of a changefeed whose records cannot be read, since another version
        may be able to read them.
        """
        cluster_id = self._safepoints.cluster_id
        all_services = await self._records.service_ids(cluster_id)
        services = [each for each in all_services if feed_of(each) == feed.id]
        own = [each for each in services if not each.startswith(CREATING_PREFIX)]
        try:
            points = await self._records.service_safe_points(cluster_id, services)
        except SafePointRecordError as err:
            # The coordinator cannot read it either, and lets GC go nowhere.
            _log.warning("safepoint not renewed", changefeed=feed.id, error=str(err))
            return
        if points:
            # The record would tell the generation; without it the newest one is taken.
            service = max(own, key=generation_of, default=feed.info.gc_service)
            await self._safepoints.renew(service, min(points.values()))


def _needs_safepoint(feed: Feed) -> bool:
    holds = feed.info.state.is_running or feed.record_error is not None
    return feed.source.keeps_history and holds and feed.info.blocks_gc


def _note_damage(feed: Feed) -> None:
    """Set the state WARNING while a table is pulled again, or cannot be read again, or while a
    schema change is about to fail the changefeed.
    """
    refusal = feed.catalog.refusal
    damage = (
        (feed.processor.damage or feed.catalog.holds.error) if refusal is None else refusal.error
    )
    if damage is not None and feed.info.state is State.NORMAL:
        note(feed, State.WARNING, damage, hint="" if refusal is None else refusal.hint)
