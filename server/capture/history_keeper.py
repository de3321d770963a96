"""Every two seconds drops the history of changefeeds that need not be kept any more, and lets go of
named readers that have been silent for too long.
"""

import asyncio
from collections.abc import Collection, Mapping
from typing import Final

import structlog

from server.capture.feed import Feed
from server.capture.history import RetentionBounds
from storage.model.errors import TidemarkError

_LOOK_EVERY_S: Final = 2.0
_log = structlog.get_logger(__name__)


async def keep_histories(feeds: Mapping[str, Feed]) -> None:
    """Do that for all `feeds`, until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        await look_at(list(feeds.values()))


async def look_at(feeds: Collection[Feed]) -> None:
    """Do that once for the changefeeds that run here, one after the other."""
    for feed in feeds:
        if feed.processor.sink is None:
            continue
        lost_below_ts = feed.kept_ts if feed.history.is_kept else 0
        gone = feed.readers.let_go(feed.info.reader_limit_s, lost_below_ts)
        for name in gone:
            _log.warning(
                "reader is held for no more", changefeed=feed.id, reader=name, kept_ts=feed.kept_ts
            )
        if gone:
            await _acknowledge_others(feed)
        if feed.history.is_kept:
            await _give_up_due(feed)


async def _acknowledge_others(feed: Feed) -> None:
    """Acknowledge the rows that only the readers let go of had held; the others may be idle."""
    sink = feed.processor.sink
    if sink is None:
        return
    ts = feed.readers.agreed_ts()

    def acknowledge() -> None:
        sink.ack(ts)
        feed.delivery.acknowledged(ts, sink.checkpoint_ts())

    try:
        await asyncio.to_thread(acknowledge)
    except TidemarkError as err:
        # The next acknowledgement of a reader does the same.
        _log.warning("nothing can be acknowledged now", changefeed=feed.id, error=str(err))


async def _give_up_due(feed: Feed) -> None:
    async with feed.history.changing:
        sink = feed.processor.sink
        if sink is None:
            return
        due = RetentionBounds(
            feed.info.retention,
            # Read under the lock: a reader that is being added has its position already.
            feed.readers.held_ts(),
            feed.catalog.versions,
            feed.catalog.holds,
        )
        try:
            await asyncio.to_thread(feed.history.look, sink, due)
        except TidemarkError as err:
            _log.warning("history cannot be given up now", changefeed=feed.id, error=str(err))
