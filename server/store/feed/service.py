"""cdcpb.ChangeData: both versions of the event feed; the second names the features it wants."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from kvproto import cdcpb_pb2 as cdcpb

from server.rpc.errors import StatusError
from server.store.feed.connection import Connection, FeedBackend
from server.store.feed.outbox import Outbox

_FEATURES = {"stream-multiplexing"}


class ChangeDataService:
    """The coroutines of `cdcpb.ChangeData`."""

    def __init__(self, tasks: asyncio.TaskGroup, backend: FeedBackend) -> None:
        """`tasks` outlives every call: connections that a client leaves are cancelled there."""
        self._tasks = tasks
        self._backend = backend
        self._open: set[Outbox] = set()

    def close(self) -> None:
        """End all connections after what is queued for them, so that the listener need not wait."""
        for outbox in self._open:
            outbox.close()

    async def EventFeed(self, requests: Any, _: Any) -> AsyncIterator[cdcpb.ChangeDataEvent]:
        """Subscriptions in, events out; resolved timestamps name regions, not requests."""
        async for message in self._feed(requests, multiplexed=False):
            yield message

    async def EventFeedV2(
        self, requests: Any, context: Any
    ) -> AsyncIterator[cdcpb.ChangeDataEvent]:
        """Like EventFeed; refuses features it does not have."""
        metadata = dict(context.invocation_metadata() or ())
        features = {
            name.strip() for name in str(metadata.get("features", "")).split(",") if name.strip()
        }
        if features - _FEATURES:
            unknown = ", ".join(sorted(features - _FEATURES))
            raise StatusError(
                grpc.StatusCode.UNIMPLEMENTED, f"feed features this store lacks: {unknown}"
            )
        async for message in self._feed(requests, multiplexed="stream-multiplexing" in features):
            yield message

    async def _feed(
        self, requests: Any, *, multiplexed: bool
    ) -> AsyncIterator[cdcpb.ChangeDataEvent]:
        outbox = Outbox(self._backend.buffer_bytes, self._backend.memory, multiplexed=multiplexed)
        connection = Connection(self._backend, outbox)
        self._open.add(outbox)
        receiving = self._tasks.create_task(connection.receive(requests), name="change-feed")
        try:
            async for message in outbox.messages():
                yield message
        finally:
            self._open.discard(outbox)
            receiving.cancel()
            connection.close()
