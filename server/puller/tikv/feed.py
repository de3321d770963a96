"""Event feeds: one bidirectional stream for each store, shared by all pullers of the process, and
the subscriptions on it, each of one region of one span.

A subscription says what is asked for, where its events arrive, and how it ends. Its request id is
never used again, so an event that was under way when its subscription ended cannot be mistaken for
one of the next. Events wait in an `Inbox`, a queue bounded in bytes: a full one stops the store's
stream. The pullers of a changefeed share a budget, so that what has arrived for any number of
tables is bounded, too.

A subscription ends with a `Fault`; what follows is either to locate its range again, or to stop the
puller. The coordinator is asked for the place anew after any fault, so a leader hint is not needed.
A feed lives as long as its stream. When the stream breaks, every subscription on it ends with a
fault, in order behind the events that came before; the pullers subscribe again, which opens the
next feed.

Source: kvproto cdcpb.proto (Error), TiCDC's region request worker.
"""

import asyncio
import itertools
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import grpc
import grpc.aio
import structlog
from kvproto import cdcpb_pb2 as cdcpb
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import metapb_pb2 as metapb
from kvproto.cdcpb_pb2_grpc import ChangeDataStub

from server.puller import metrics
from server.puller.stream_timeout import SILENT_S, StreamSilentError, StreamTimeout
from server.puller.tikv.matcher import Matcher
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from storage.model.errors import InvalidError, TidemarkError
from storage.model.span import KeyRange
from storage.queue import ByteBudget

_MULTIPLEXING = (("features", "stream-multiplexing"),)
# the TiCDC whose protocol we speak; a store that wants a later one says so (`compatibility`)
_VERSION = "8.5.0"
_RESOLVED_BYTES = 16
_BUSY_MS = 100
_GATHER_BYTES = 256 << 10
"""Received messages are handed over once they have this many bytes."""
_request_ids = itertools.count(1)
_log = structlog.get_logger(__name__)
T = TypeVar("T")
Delivery: TypeAlias = tuple["Subscription", "cdcpb.Event | int | Fault"]
"""An event, a resolved_ts, or the end of a subscription."""


class ClusterIdMismatchError(InvalidError):
    """The store belongs to another cluster."""

    code = "ErrClusterIDMismatch"


class FeedRefusedError(InvalidError):
    """The store will never serve this subscription as it is."""

    code = "ErrEventFeedRefused"


class HistoryLostError(InvalidError):
    """The store's GC has passed a timestamp that is still needed:
    going on would miss rows (TiCDC's code for it).
    """

    code = "ErrSnapshotLostByGC"


@dataclass(frozen=True, slots=True)
class Fault:
    """The end of one subscription; `fatal` set: of the puller."""

    reason: str
    wait_ms: int = 0
    fatal: TidemarkError | None = None


_BROKEN = Fault("stream_broken", wait_ms=100)
_SILENT = Fault("stream_silent", wait_ms=100)


def fault_of(error: cdcpb.Error) -> Fault:
    """The fault that a store's error stands for."""
    if error.HasField("cluster_id_mismatch"):
        ids = error.cluster_id_mismatch
        message = (
            f"the store is of cluster {ids.current}, we asked for {ids.request}; check "
            "--coordinator"
        )
        return Fault("cluster_id_mismatch", fatal=ClusterIdMismatchError(message))
    if error.HasField("compatibility"):
        message = (
            f"the store asks for version {error.compatibility.required_version} of its clients; "
            "upgrade tidemark"
        )
        return Fault("compatibility", fatal=FeedRefusedError(message))
    if error.HasField("duplicate_request"):
        message = (
            f"the store says region {error.duplicate_request.region_id} is subscribed twice under "
            "one request id"
        )
        return Fault("duplicate_request", fatal=FeedRefusedError(message))
    # The protocol has no error for it, so our store says it as `server_is_busy`: other clients wait
    # for what never comes, we know better.
    code, _, why = error.server_is_busy.reason.partition(" ")
    if code == f"[TM:{HistoryLostError.code}]":
        return Fault("snapshot_lost", fatal=HistoryLostError(why))
    if error.HasField("server_is_busy"):
        return Fault("server_is_busy", wait_ms=error.server_is_busy.backoff_ms or _BUSY_MS)
    if error.HasField("congested"):
        return Fault("congested", wait_ms=_BUSY_MS)
    # The coordinator knows the region's new place, or will in a moment: no wait.
    for name in ("not_leader", "epoch_not_match", "region_not_found"):
        if error.HasField(name):
            return Fault(name)
    # An error of a later protocol: trying again is always safe.
    return Fault("unknown", wait_ms=_BUSY_MS)


class Inbox(Generic[T]):
    """Items with their size, in order; many producers, one consumer, all on one event loop."""

    def __init__(
        self,
        limit_bytes: int,
        take_bytes: int,
        shared: ByteBudget | None = None,
        *,
        gather_s: float = 0.0,
    ) -> None:
        """Hold up to `limit_bytes`, and what the `shared` budget leaves; None:
        it has one of its own. Takes of little lie `gather_s` apart.
        """
        self._gather_s = gather_s
        self._taken_at = 0.0
        self._limit = limit_bytes
        self._take = take_bytes
        self._budget = shared or ByteBudget(limit_bytes)
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._closed = False

    async def put(self, item: T, size: int) -> None:
        """Append; waits while there is no room.

        An item of any size fits when nothing else is in this inbox.
        """
        # An empty inbox takes one item even where others have used up the budget: a backlog of one
        # table slows the others down, and stops none.
        while self._bytes and not self._fits(size) and not self._closed:
            await self._budget.wait_freed()
        self.put_now(item, size)

    def put_now(self, item: T, size: int = 0) -> None:
        """Append without waiting: for the few items that must never be lost."""
        if self._closed:
            return
        self._items.append((item, size))
        self._bytes += size
        self._budget.take(size)
        self._filled.set()

    async def take(self) -> list[T]:
        """Wait for items, and remove up to the take limit in bytes of them, at least one.

        What comes after a silence is there at once; what comes one by one is taken together.
        """
        await self._filled.wait()
        gathers_s = self._taken_at + self._gather_s - time.monotonic()
        if gathers_s > 0 and self._bytes < _GATHER_BYTES:
            await asyncio.sleep(gathers_s)
        self._taken_at = time.monotonic()
        taken: list[T] = []
        size = 0
        while self._items and (not taken or size + self._items[0][1] <= self._take):
            item, item_size = self._items.popleft()
            taken.append(item)
            size += item_size
        self._bytes -= size
        if not self._items:
            self._filled.clear()
        self._budget.free(size)
        return taken

    def close(self) -> None:
        """The consumer is gone: drop everything, now and later,
        so that no producer waits for it.
        """
        self._closed = True
        self._items.clear()
        self._filled.clear()
        # Freeing wakes the producers, who see that it is closed: the stream that they read serves
        # other tables, too.
        self._budget.free(self._bytes)
        self._bytes = 0

    def _fits(self, size: int) -> bool:
        return (
            self._bytes + size <= self._limit
            and self._budget.used_bytes + size <= self._budget.limit_bytes
        )


def next_request_id() -> int:
    """A request id that this process has not used."""
    return next(_request_ids)


@dataclass(slots=True, eq=False)
class Subscription:
    """`part` lies within the region; `ended` is set by the puller once it has seen the fault."""

    request_id: int
    region_id: int
    epoch: metapb.RegionEpoch
    address: str
    part: KeyRange
    matcher: Matcher
    inbox: Inbox[Delivery] = field(repr=False)
    ended: bool = False

    def register(self, cluster_id: int) -> cdcpb.ChangeDataRequest:
        """The request that starts it."""
        return cdcpb.ChangeDataRequest(
            header=cdcpb.Header(cluster_id=cluster_id, ticdc_version=_VERSION),
            region_id=self.region_id,
            region_epoch=self.epoch,
            checkpoint_ts=self.matcher.start_ts,
            start_key=self.part.start_key,
            end_key=self.part.end_key,
            request_id=self.request_id,
            extra_op=kvrpcpb.ReadOldValue,
            register=cdcpb.ChangeDataRequest.Register(),
        )

    def deregister(self, cluster_id: int) -> cdcpb.ChangeDataRequest:
        """The request that ends it."""
        return cdcpb.ChangeDataRequest(
            header=cdcpb.Header(cluster_id=cluster_id, ticdc_version=_VERSION),
            region_id=self.region_id,
            request_id=self.request_id,
            deregister=cdcpb.ChangeDataRequest.Deregister(),
        )


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
