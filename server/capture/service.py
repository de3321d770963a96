"""The captures' gRPC API: `tidemarkpb.v1` ChangefeedService and CaptureService.

Every capture takes every call. Only the owner of the changefeeds can carry a call of
ChangefeedService out, so another capture forwards it there, once. `Blockers` answers GetBlockers:
what holds the changefeeds of this capture back, the one that is furthest behind first.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from tidemarkpb.v1 import capture_pb2 as capturepb
from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from server.capture.errors import NotOwnerError
from server.capture.feed import Feed
from server.capture.membership import Membership
from server.capture.message import checked_message, message, new_changefeed
from server.capture.owner import Owner
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.errors import passed_on

A = TypeVar("A")
_FORWARDED = "tidemark-forwarded"
_FORWARD_S = 30.0
LIMIT, LIMIT_MAX = 3, 100
_LOOKED_AT = 16
"""Changefeeds whose locks are read in one call: those that are furthest behind."""
Context = grpc.aio.ServicerContext[Any, Any]


class ChangefeedService:
    """`tidemarkpb.v1.ChangefeedService`."""

    def __init__(self, owner: Owner, membership: Membership, security: SecurityConfig) -> None:
        self._owner = owner
        self._membership = membership
        self._security = security

    async def CreateChangefeed(self, request: pb.CreateChangefeedRequest, context: Context) -> Any:
        """Make a changefeed."""

        async def create() -> pb.CreateChangefeedResponse:
            change = self._owner.create(new_changefeed(request))
            return pb.CreateChangefeedResponse(
                changefeed=message(await self._owner.carry_out(change))
            )

        return await self._by_owner("CreateChangefeed", request, context, create)

    async def CheckChangefeed(self, request: pb.CreateChangefeedRequest, context: Context) -> Any:
        """Say what CreateChangefeed would do."""

        async def check() -> pb.CheckChangefeedResponse:
            return checked_message(await self._owner.check(new_changefeed(request)))

        return await self._by_owner("CheckChangefeed", request, context, check)

    async def ListChangefeeds(self, request: pb.ListChangefeedsRequest, context: Context) -> Any:
        """All changefeeds."""

        async def listed() -> pb.ListChangefeedsResponse:
            return pb.ListChangefeedsResponse(changefeeds=map(message, self._owner.feeds.values()))

        return await self._by_owner("ListChangefeeds", request, context, listed)

    async def QueryChangefeed(self, request: pb.QueryChangefeedRequest, context: Context) -> Any:
        """One changefeed."""

        async def queried() -> pb.QueryChangefeedResponse:
            return pb.QueryChangefeedResponse(changefeed=message(self._owner.feed(request.id)))

        return await self._by_owner("QueryChangefeed", request, context, queried)

    async def PauseChangefeed(self, request: pb.PauseChangefeedRequest, context: Context) -> Any:
        """Stop pulling."""

        async def pause() -> pb.PauseChangefeedResponse:
            feed = await self._owner.carry_out(self._owner.pause(request.id))
            return pb.PauseChangefeedResponse(changefeed=message(feed))

        return await self._by_owner("PauseChangefeed", request, context, pause)

    async def ResumeChangefeed(self, request: pb.ResumeChangefeedRequest, context: Context) -> Any:
        """Pull again."""

        async def resume() -> pb.ResumeChangefeedResponse:
            ts, with_now = request.overwrite_checkpoint_ts, request.overwrite_with_now
            feed = await self._owner.carry_out(
                self._owner.resume(request.id, ts, with_now=with_now)
            )
            return pb.ResumeChangefeedResponse(changefeed=message(feed))

        return await self._by_owner("ResumeChangefeed", request, context, resume)

    async def UpdateChangefeed(self, request: pb.UpdateChangefeedRequest, context: Context) -> Any:
        """Write its sink URI, what unclear DDL leads to, or its audit anew."""

        async def update() -> pb.UpdateChangefeedResponse:
            audit_s = request.audit_s if request.HasField("audit_s") else None
            updating = self._owner.update(
                request.id, request.sink_uri, request.on_unclear_ddl, audit_s
            )
            feed = await self._owner.carry_out(updating)
            return pb.UpdateChangefeedResponse(changefeed=message(feed))

        return await self._by_owner("UpdateChangefeed", request, context, update)

    async def RemoveChangefeed(self, request: pb.RemoveChangefeedRequest, context: Context) -> Any:
        """Forget it."""

        async def remove() -> pb.RemoveChangefeedResponse:
            feed = await self._owner.carry_out(self._owner.remove(request.id))
            return pb.RemoveChangefeedResponse(changefeed=message(feed))

        return await self._by_owner("RemoveChangefeed", request, context, remove)

    async def _by_owner(
        self, method: str, request: Any, context: Context, call: Callable[[], Awaitable[A]]
    ) -> Any:
        if self._owner.is_active:
            return await call()
        # A call is forwarded once. While an election is under way two captures may each take the
        # other one for the owner, and would pass the call to and fro until its deadline.
        if any(key == _FORWARDED for key, _ in context.invocation_metadata() or ()):
            raise NotOwnerError("the owner of the changefeeds has changed just now; ask again")
        async with connect(await self._membership.owner_address(), self._security) as channel:
            forward = getattr(ChangefeedServiceStub(channel), method)
            try:
                return await forward(request, timeout=_FORWARD_S, metadata=((_FORWARDED, "1"),))
            except grpc.aio.AioRpcError as err:
                raise passed_on(err) from err


class Blockers:
    """What holds the changefeeds of `owner` back; each processor reports on its tables."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def list(self, limit: int = 0) -> list[capturepb.ChangefeedBlockers]:
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


async def _changefeed(feed: Feed, most: int, *, with_locks: bool) -> capturepb.ChangefeedBlockers:
    processor = feed.processor
    message = capturepb.ChangefeedBlockers(
        changefeed=feed.id, checkpoint_ts=processor.checkpoint_ts, resolved_ts=processor.resolved_ts
    )
    message.tables.extend(await processor.blockers(most, with_locks=with_locks))
    return message


class CaptureService:
    """`tidemarkpb.v1.CaptureService`."""

    def __init__(self, membership: Membership, blockers: Blockers) -> None:
        self._membership = membership
        self._blockers = blockers

    async def GetBlockers(
        self, request: capturepb.GetBlockersRequest, context: Context
    ) -> capturepb.GetBlockersResponse:
        """What holds the changefeeds back that this capture runs; none if it does not own them."""
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
            )
            for member in await self._membership.members()
        ]
        return capturepb.ListCapturesResponse(captures=captures)
