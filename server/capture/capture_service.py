"""`tidemarkpb.v1.CaptureService`: the captures, what holds them back, and who leaves."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc.aio
from tidemarkpb.v1 import capture_pb2 as capturepb
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub

from server.capture.feed import Feed
from server.capture.maintainers import Maintainers
from server.capture.membership import Membership
from server.capture.owner import Owner
from server.capture.routing import Router
from server.changefeed.captures import CaptureRecord

BLOCKERS, BLOCKERS_MAX = 3, 100
"""Slowest tables of a changefeed in an answer: how many by default, and at most."""
_LOCKS_READ_OF: Final = 16
"""Changefeeds whose locks are read in one call: those that are furthest behind."""
Context = grpc.aio.ServicerContext[Any, Any]


class Blockers:
    """Lists what holds back the changefeeds that this capture runs; each processor reports on its
    tables.
    """

    def __init__(self, maintainers: Maintainers) -> None:
        self._maintainers = maintainers

    async def list(self, limit: int = 0) -> list[capturepb.ChangefeedBlockers]:
        """Every changefeed that runs here; of each the `limit` slowest tables (0: 3)."""
        most = min(limit or BLOCKERS, BLOCKERS_MAX)
        feeds = [feed for feed in self._maintainers.feeds.values() if feed.info.state.is_running]
        feeds.sort(key=lambda feed: feed.processor.checkpoint_ts)
        async with asyncio.TaskGroup() as tasks:
            lookups = [
                tasks.create_task(_changefeed(feed, most, with_locks=place < _LOCKS_READ_OF))
                for place, feed in enumerate(feeds)
            ]
        return [task.result() for task in lookups]


async def _changefeed(feed: Feed, most: int, *, with_locks: bool) -> capturepb.ChangefeedBlockers:
    processor = feed.processor
    message = capturepb.ChangefeedBlockers(
        changefeed=feed.id, checkpoint_ts=processor.checkpoint_ts, resolved_ts=processor.resolved_ts
    )
    message.tables.extend(await processor.blockers(most, with_locks=with_locks))
    return message


class CaptureService:
    """`tidemarkpb.v1.CaptureService`."""

    def __init__(
        self,
        owner: Owner,
        membership: Membership,
        blockers: Blockers,
        router: Router,
        leave_out: Callable[[str], None],
    ) -> None:
        """`leave_out` lets no changefeed that begins have a share on a capture."""
        self._owner = owner
        self._membership = membership
        self._blockers = blockers
        self._router = router
        self._leave_out = leave_out

    async def GetBlockers(
        self, request: capturepb.GetBlockersRequest, context: Context
    ) -> capturepb.GetBlockersResponse:
        """List what holds back the changefeeds that this capture runs; an empty list if it runs
        none.
        """
        del context
        return capturepb.GetBlockersResponse(changefeeds=await self._blockers.list(request.limit))

    async def ListCaptures(
        self, request: capturepb.ListCapturesRequest, context: Context
    ) -> capturepb.ListCapturesResponse:
        """All living captures."""
        del request, context
        captures = [
            capturepb.Capture(
                id=member.record.id,
                address=member.record.address,
                flight_address=member.record.flight_address,
                is_owner=member.is_owner,
                version=member.record.version,
                draining=member.is_draining,
                maintained=member.maintained,
                started=member.record.started,
            )
            for member in await self._membership.members()
        ]
        return capturepb.ListCapturesResponse(captures=captures, answered_by=self._membership.id)

    async def DrainCapture(self, request: capturepb.DrainCaptureRequest, context: Context) -> Any:
        """Let its tables go to the others."""

        async def drain() -> capturepb.DrainCaptureResponse:
            record = await self._membership.drain(request.id, cancel=request.cancel)
            if not request.cancel:
                # What was decided by the captures of a moment ago would come only after the count.
                self._leave_out(record.id)
                await self._owner.place_logs()
            own = await self._membership.owner() == record
            count = sum(_tables_at(feed, record, own=own) for feed in self._owner.feeds.values())
            count += await self._owner.tables_of(await self._membership.maintained_by(record.id))
            return capturepb.DrainCaptureResponse(tables=count)

        return await self._router.carry_out(
            CaptureServiceStub, "DrainCapture", request, context, drain
        )

    async def ResignOwner(self, request: capturepb.ResignOwnerRequest, context: Context) -> Any:
        """Let another capture be elected."""

        async def resign() -> capturepb.ResignOwnerResponse:
            self._membership.resign()
            return capturepb.ResignOwnerResponse()

        return await self._router.carry_out(
            CaptureServiceStub, "ResignOwner", request, context, resign
        )


def _tables_at(feed: Feed, record: CaptureRecord, *, own: bool) -> int:
    """Return how many tables of a changefeed a capture pulls; `own`: it is the owner, which also
    pulls those that are not divided among captures. A share counts as one table until it has ended,
    since stopping the capture before that would start the changefeed anew.
    """
    shares = int(feed.processor.has_share_at(record.id))
    if not feed.info.state.is_running:
        return shares
    places = [feed.processor.places(table.span) for table in feed.tables]
    ends = f"://{record.flight_address}"
    tables = sum(
        any(each.endswith(ends) for each in place) or (own and not place) for place in places
    )
    return max(tables, shares)
