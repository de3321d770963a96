"""What holds this capture's changefeeds back: the slowest tables, their slowest regions, and the locks that hold those.

Locks are read from the store when they are asked for, only where a region stands, and only for so long: a store that
does not answer is an answer, too.
"""

import asyncio
import heapq
import time
from collections.abc import Sequence

from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1 import capture_pb2 as pb

from server.capture.feed import Feed
from server.capture.owner import Owner
from server.capture.table import SourceTable
from server.puller.tikv.puller import RegionProgress, TablePuller
from server.puller.tikv.stuck_locks import raw_bounds
from server.rpc.tikv import KvClient
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import physical_ms

LIMIT, LIMIT_MAX = 3, 100
_STANDS_MS = 2_000
_LOCKS_S = 1.0
_LOOKED_AT = 16
"""Changefeeds whose locks are read in one call: those that are furthest behind."""


class Blockers:
    """The changefeeds of `owner`; their locks by `kv`."""

    def __init__(self, owner: Owner, kv: KvClient) -> None:
        self._owner = owner
        self._kv = kv

    async def list(self, limit: int = 0) -> list[pb.ChangefeedBlockers]:
        """Every changefeed that runs here, the one furthest behind first; `limit` 0: 3."""
        most = min(limit or LIMIT, LIMIT_MAX)
        feeds = [feed for feed in self._owner.feeds.values() if feed.info.state.is_running]
        feeds.sort(key=lambda feed: feed.processor.checkpoint_ts)
        found = [_changefeed(feed, most) for feed in feeds]
        async with asyncio.TaskGroup() as tasks:
            for _, stands in found[:_LOOKED_AT]:
                for region, progress in stands:
                    tasks.create_task(self._add_locks(region, progress, most))
        return [message for message, _ in found]

    async def _add_locks(self, region: pb.RegionBlockers, progress: RegionProgress, most: int) -> None:
        """The locks a region's resolved_ts cannot pass: it stands right before the oldest."""
        assert progress.part is not None
        start_key, end_key = raw_bounds(progress.part)
        try:
            async with asyncio.timeout(_LOCKS_S):
                page = await self._kv.scan_lock(start_key, end_key, progress.resolved_ts + 1, LIMIT_MAX)
        except TimeoutError:
            region.problem = f"its store does not tell its locks within {_LOCKS_S:g} s"
        except TidemarkError as err:
            region.problem = str(err)
        else:
            region.locks.extend(map(_lock, heapq.nsmallest(most, page.locks, key=lambda lock: lock.lock_version)))


_Standing = list[tuple[pb.RegionBlockers, RegionProgress]]


def _changefeed(feed: Feed, most: int) -> tuple[pb.ChangefeedBlockers, _Standing]:
    """A changefeed, and the region of its slowest table whose locks are to be read."""
    processor = feed.processor
    message = pb.ChangefeedBlockers(
        changefeed=feed.id, checkpoint_ts=processor.checkpoint_ts, resolved_ts=processor.resolved_ts
    )
    pullers = {puller.span: puller for puller in processor.pullers}
    stands: _Standing = []
    for table, resolved_ts in _slowest(feed, pullers, most):
        shown = message.tables.add(name=table.name, table_id=table.span.table_id, resolved_ts=resolved_ts)
        shown.checkpoint_ts = processor.sink.checkpoint_ts(table.span) if processor.sink else processor.start_ts
        regions = pullers[table.span].slowest(most) if table.span in pullers else []
        for progress in regions:
            region = shown.regions.add(
                region_id=progress.region_id, resolved_ts=progress.resolved_ts, store=progress.store
            )
            if not stands and progress.part is not None and _stands(progress.resolved_ts):
                stands.append((region, progress))
    return message, stands


def _slowest(feed: Feed, pullers: dict[Span, TablePuller], most: int) -> Sequence[tuple[SourceTable, int]]:
    """The tables whose resolved_ts is lowest, and how far they are."""
    found = [
        (table, pullers[table.span].resolved_ts if table.span in pullers else feed.processor.start_ts)
        for table in feed.tables
    ]
    return heapq.nsmallest(most, found, key=lambda item: item[1])


def _stands(resolved_ts: int) -> bool:
    return time.time() * 1000 - physical_ms(resolved_ts) > _STANDS_MS


def _lock(info: kvrpcpb.LockInfo) -> pb.LockBlocker:
    return pb.LockBlocker(
        start_ts=info.lock_version,
        primary=info.primary_lock,
        key=info.key,
        ttl_ms=info.lock_ttl,
        kind=kvrpcpb.Op.Name(info.lock_type).lower(),
    )
