"""What holds this capture's changefeeds back, the one furthest behind first;
each processor tells of its tables.
"""

import asyncio

from tidemarkpb.v1 import capture_pb2 as pb

from server.capture.feed import Feed
from server.capture.owner import Owner

LIMIT, LIMIT_MAX = 3, 100
_LOOKED_AT = 16
"""Changefeeds whose locks are read in one call: those that are furthest behind."""


class Blockers:
    """The changefeeds of `owner`."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def list(self, limit: int = 0) -> list[pb.ChangefeedBlockers]:
        """Every changefeed that runs here; of each the `limit` slowest tables (0: 3)."""
        most = min(limit or LIMIT, LIMIT_MAX)
        feeds = [feed for feed in self._owner.feeds.values() if feed.info.state.is_running]
        feeds.sort(key=lambda feed: feed.processor.checkpoint_ts)
        async with asyncio.TaskGroup() as tasks:
            lookups = [
                tasks.create_task(_changefeed(feed, most, with_locks=place < _LOOKED_AT))
                for place, feed in enumerate(feeds)
            ]
        return [task.result() for task in lookups]


async def _changefeed(feed: Feed, most: int, *, with_locks: bool) -> pb.ChangefeedBlockers:
    processor = feed.processor
    message = pb.ChangefeedBlockers(
        changefeed=feed.id, checkpoint_ts=processor.checkpoint_ts, resolved_ts=processor.resolved_ts
    )
    message.tables.extend(await processor.blockers(most, with_locks=with_locks))
    return message
