"""Event feeds: one bidirectional stream per store, shared by all pullers of the process.

A feed lives as long as its stream. When the stream breaks, every subscription on it ends with a
fault, in order behind the events that came before; the pullers subscribe again, which opens the
next feed.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import structlog
from kvproto import cdcpb_pb2 as cdcpb
from kvproto.cdcpb_pb2_grpc import ChangeDataStub

from server.puller import metrics
from server.puller.stream_timeout import SILENT_S, StreamSilentError, StreamTimeout
from server.puller.tikv.subscription import Fault, FeedRefusedError, Subscription
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig

_MULTIPLEXING = (("features", "stream-multiplexing"),)
_BROKEN = Fault("stream_broken", wait_ms=100)
_SILENT = Fault("stream_silent", wait_ms=100)
_RESOLVED_BYTES = 16

_log = structlog.get_logger(__name__)


class EventFeed:
    """One store's stream and the subscriptions on it."""

    def __init__(self, address: str, cluster_id: int, timeout: StreamTimeout) -> None:
        self.address = address
        self._cluster_id = cluster_id
        self._timeout = timeout
        self._subscriptions: dict[int, Subscription] = {}
        # Holds at most two requests a subscription, so the number of regions bounds it.
        self._requests: asyncio.Queue[cdcpb.ChangeDataRequest] = asyncio.Queue()

    def subscribe(self, subscription: Subscription) -> None:
        """Ask the store for the subscription's events; they arrive in its inbox."""
        self._subscriptions[subscription.request_id] = subscription
        self._requests.put_nowait(subscription.register(self._cluster_id))

    def unsubscribe(self, subscription: Subscription) -> None:
        """Tell the store to stop; nothing more arrives."""
        if self._subscriptions.pop(subscription.request_id, None) is not None:
            self._requests.put_nowait(subscription.deregister(self._cluster_id))

    async def run(self, security: SecurityConfig | None) -> None:
        """Read until the stream breaks, then end all subscriptions."""
        fault = _BROKEN
        try:
            async with connect(self.address, security) as channel:
                call = ChangeDataStub(channel).EventFeedV2(self._outgoing(), metadata=_MULTIPLEXING)
                message = await self._timeout.first(call)
                while isinstance(message, cdcpb.ChangeDataEvent):
                    await self._deliver(message)
                    message = await self._timeout.next(call)
            _log.info("event feed closed by the store", store=self.address)
        except grpc.aio.AioRpcError as err:
            _log.warning(
                "event feed broke",
                store=self.address,
                status=err.code().name,
                details=err.details(),
            )
            fault = _fault_of_status(self.address, err)
        except StreamSilentError as err:
            # A store says nothing on a stream on which nobody has asked for anything.
            if self._subscriptions:
                metrics.SILENT_STREAMS.labels("store").inc()
                _log.warning("event feed is silent", store=self.address, error=err.message)
            fault = _SILENT
        finally:
            # Without waiting for room, and in the inbox: behind the events that came before, which
            # are still good, and never lost, or the range would not be pulled again.
            for subscription in self._subscriptions.values():
                subscription.inbox.put_now((subscription, fault))
            self._subscriptions.clear()

    async def _outgoing(self) -> AsyncIterator[cdcpb.ChangeDataRequest]:
        while True:
            yield await self._requests.get()

    async def _deliver(self, message: cdcpb.ChangeDataEvent) -> None:
        metrics.BYTES.inc(message.ByteSize())
        for event in message.events:
            # Of a subscription that has ended; its request id is not used again.
            subscription = self._subscriptions.get(event.request_id)
            if subscription is None:
                continue
            # An error is the last event of its subscription: the end of the stream is to add no
            # second one.
            if event.WhichOneof("event") == "error":
                del self._subscriptions[event.request_id]
            # Waiting for one table's inbox stops the stream for all of them; gRPC's flow control
            # then stops the store.
            await subscription.inbox.put((subscription, event), event.ByteSize())
        if message.HasField("resolved_ts"):
            subscription = self._subscriptions.get(message.resolved_ts.request_id)
            if subscription is not None:
                await subscription.inbox.put(
                    (subscription, message.resolved_ts.ts), _RESOLVED_BYTES
                )


class EventFeeds:
    """The feeds of all stores; made by `open`."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        cluster_id: int,
        security: SecurityConfig | None,
        silent_s: float,
    ) -> None:
        self._tasks = tasks
        self._cluster_id = cluster_id
        self._security = security
        self._feeds: dict[str, EventFeed] = {}
        self._timeout: defaultdict[str, StreamTimeout] = defaultdict(
            lambda: StreamTimeout(silent_s)
        )
        self._running: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, cluster_id: int, security: SecurityConfig | None = None, silent_s: float = SILENT_S
    ) -> AsyncIterator["EventFeeds"]:
        """Feeds for the block; a store is connected to when the first subscription needs it.

        `silent_s` bounds the silence of a stream.
        """
        async with asyncio.TaskGroup() as tasks:
            feeds = cls(tasks, cluster_id, security, silent_s)
            try:
                yield feeds
            finally:
                for task in feeds._running:
                    task.cancel()

    def subscribe(self, subscription: Subscription) -> None:
        """Start `subscription` on its store's feed."""
        feed = self._feeds.get(subscription.address)
        if feed is None:
            address = subscription.address
            feed = self._feeds[address] = EventFeed(
                address, self._cluster_id, self._timeout[address]
            )
            task = self._tasks.create_task(self._run(feed), name=f"event feed {feed.address}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        feed.subscribe(subscription)

    def unsubscribe(self, subscription: Subscription) -> None:
        """Stop `subscription`, if its feed still has it."""
        feed = self._feeds.get(subscription.address)
        if feed is not None:
            feed.unsubscribe(subscription)

    async def _run(self, feed: EventFeed) -> None:
        try:
            await feed.run(self._security)
        finally:
            # The next subscription opens a new feed, even before this one's faults are taken.
            if self._feeds.get(feed.address) is feed:
                del self._feeds[feed.address]


def _fault_of_status(address: str, err: grpc.aio.AioRpcError) -> Fault:
    if err.code() != grpc.StatusCode.UNIMPLEMENTED:
        return _BROKEN
    message = (
        f"the store at {address} does not serve cdcpb.ChangeData/EventFeedV2; TiKV has it from "
        "7.5 on"
    )
    return Fault("unimplemented", fatal=FeedRefusedError(message))
