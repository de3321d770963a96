"""Keeps what changes all the time: checkpoints in the metadata, service safepoints at the coordinator.

Order, for each changefeed: the reader acknowledges, the checkpoint is durable in the metadata, then the safepoint
follows. So a crash anywhere between keeps more history than needed, never less. All changefeeds are saved in one go,
under the lock under which they are created and removed: nothing is written for what is gone.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

import structlog

from server.capture import metrics
from server.capture.changefeed import State
from server.capture.errors import SnapshotLostError
from server.capture.feed import Feed
from server.capture.records import Records
from server.capture.runner import note
from server.capture.safepoint import Safepoints
from server.rpc.pd import PdRefusedError
from storage.model.errors import UnavailableError

_SAVE_EVERY_S = 0.2
_SAFEPOINT_EVERY_S = 2.0
_SAFEPOINT_REFRESH_S = 60.0
_FINAL_SAVE_S = 5.0
_COLLECT_EVERY_S = 60.0

_log = structlog.get_logger(__name__)


class Keeper:
    """Looks after `feeds`; `on_lost(feed, error)` is told when history is gone that a changefeed still needs."""

    def __init__(
        self,
        feeds: Mapping[str, Feed],
        records: Records,
        safepoints: Safepoints,
        changing: asyncio.Lock,
        on_lost: Callable[[Feed, SnapshotLostError], None],
    ) -> None:
        self._feeds = feeds
        self._records = records
        self._safepoints = safepoints
        self._changing = changing
        self._on_lost = on_lost
        self._collected_s = time.monotonic()

    async def run(self) -> None:
        """Save five times a second until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(_SAVE_EVERY_S)
                await self._keep()
        finally:
            async with asyncio.timeout(_FINAL_SAVE_S):
                await self._keep()

    async def _keep(self) -> None:
        try:
            async with self._changing:
                await self._save()
                for feed in filter(self._is_due, self._feeds.values()):
                    await self._hold(feed)
                await self._collect()
        except (UnavailableError, PdRefusedError) as err:
            _log.warning("checkpoints cannot be saved now", error=str(err))

    async def _save(self) -> None:
        feeds = self._feeds.values()
        for feed in feeds:
            _note_damage(feed)
            if feed.recovered():
                feed.info, feed.info_saved = feed.info.moved_to(State.NORMAL), False
        moved = [(feed, feed.processor.checkpoint_ts) for feed in feeds]
        moved = [(feed, checkpoint_ts) for feed, checkpoint_ts in moved if checkpoint_ts > feed.checkpoint_ts]
        changed = [(feed, feed.info) for feed in feeds if not feed.info_saved]
        if not moved and not changed:
            return
        await self._records.save(
            {feed.id: checkpoint_ts for feed, checkpoint_ts in moved}, {feed.id: info for feed, info in changed}
        )
        for feed, checkpoint_ts in moved:
            feed.checkpoint_ts = checkpoint_ts
        for feed, info in changed:
            feed.info_saved = feed.info is info  # it may have failed meanwhile

    async def _collect(self) -> None:
        """Forget schema changes behind the checkpoint of a minute ago: a reader may still ask about a little before."""
        if time.monotonic() - self._collected_s < _COLLECT_EVERY_S:
            return
        self._collected_s = time.monotonic()
        for feed in self._feeds.values():
            garbage = feed.catalog.history.garbage(feed.settled_ts)
            await self._records.schemas.collect(feed.id, garbage)
            feed.catalog.history.forget(garbage)
            feed.catalog.forget(feed.settled_ts)
            feed.settled_ts = feed.checkpoint_ts

    def _is_due(self, feed: Feed) -> bool:
        """Whoever does not run is not renewed: its safepoint ends a day after it stopped, unless it is resumed."""
        if not (feed.source.keeps_history and feed.info.state.is_running and feed.info.blocks_gc):
            return False
        age = time.monotonic() - feed.safepoint_time
        return age > (_SAFEPOINT_EVERY_S if feed.checkpoint_ts > feed.safepoint_ts else _SAFEPOINT_REFRESH_S)

    async def _hold(self, feed: Feed) -> None:
        checkpoint_ts = feed.checkpoint_ts
        try:
            await self._safepoints.hold(feed.source, feed.id, checkpoint_ts)
        except SnapshotLostError as err:
            self._on_lost(feed, err)
        else:
            metrics.SAFEPOINTS.inc()
            feed.safepoint_ts, feed.safepoint_time = checkpoint_ts, time.monotonic()


def _note_damage(feed: Feed) -> None:
    """A table is being pulled again: the changefeed goes on, with a warning."""
    damage = feed.processor.damage
    if damage is not None and feed.info.state is State.NORMAL:
        note(feed, State.WARNING, damage)
