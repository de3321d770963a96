"""cdcpb.ChangeData: both versions of the event feed, and the state of one connection.

EventFeedV2 names the features it wants. A `Connection` registers and deregisters regions, and runs
their scans: live changes begin exactly where a scan's snapshot ends.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog
from kvproto import cdcpb_pb2 as cdcpb
from kvproto import errorpb_pb2 as errorpb
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.errors import StatusError
from server.store import metrics
from server.store.feed.hub import FeedHub
from server.store.feed.outbox import Failure, Initialized, Outbox, Rows, Subscription, chunks
from server.store.paced_scan import ByteRate, cursor
from server.store.region_table import RegionGate
from storage.defect import request_error
from storage.kv import Snapshot
from storage.model.errors import ClosedError, CorruptError, InvalidError
from storage.mvcc.change_feed import changes_since
from storage.mvcc.engine import Change, Engine
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.region import Region
from storage.queue import ByteBudget

_FEATURES = {"stream-multiplexing"}
_MAX_SCANS = 4
_MAX_SUBSCRIPTIONS = 1 << 17
_BUSY_MS = 5000

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FeedBackend:
    """The parts of the store that every feed connection uses."""

    cluster_id: int
    engine: Engine
    group: GroupCommit
    gate: RegionGate
    hub: FeedHub
    scanners: Executor
    scan_rate: ByteRate
    memory: ByteBudget
    buffer_bytes: int
    history_begins: Callable[[], int]
    """The newest safepoint of any GC so far: what changed before it may have been collected."""


class ChangeDataService:
    """The coroutines of `cdcpb.ChangeData`."""

    def __init__(self, tasks: asyncio.TaskGroup, backend: FeedBackend) -> None:
        """`tasks` outlives every call: connections that a client leaves are cancelled there."""
        self._tasks = tasks
        self._backend = backend
        self._open: dict[Outbox, None] = {}

    def close(self) -> None:
        """End all connections after their queued events, so that the listener need not wait."""
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
        # A client that asks for a feature relies on it; silently going on without would be wrong
        # for it.
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
        self._open[outbox] = None
        receiving = self._tasks.create_task(connection.receive(requests), name="change-feed")
        try:
            async for message in outbox.messages():
                yield message
        finally:
            self._open.pop(outbox, None)
            receiving.cancel()
            connection.close()


class SnapshotLostByGCError(InvalidError):
    """GC has passed the checkpoint of a feed; TiCDC's name for it."""

    code = "ErrSnapshotLostByGC"

    def __init__(self, checkpoint_ts: int, safe_point: int) -> None:
        super().__init__(
            f"changes since checkpoint {checkpoint_ts} may have been collected, GC has passed "
            f"{safe_point}; create the changefeed anew from a later start"
        )


class Connection:
    """The subscriptions of one stream; `outbox` holds what to send."""

    def __init__(self, backend: FeedBackend, outbox: Outbox) -> None:
        self._backend = backend
        self._outbox = outbox
        # a slow reader holds up only its own scans
        self._scan_slots = asyncio.Semaphore(_MAX_SCANS)
        self._subscriptions: dict[tuple[int, int], Subscription] = {}

    async def receive(self, requests: AsyncIterator[cdcpb.ChangeDataRequest]) -> None:
        """Serve requests until the client ends; never fails."""
        try:
            async with asyncio.TaskGroup() as scans:
                async for request in requests:
                    self._handle(scans, request)
                    await self._outbox.wait_room()
        except* ClosedError:
            _log.info("change feed ended, the store is stopping")
        except* (grpc.aio.BaseError, grpc.aio.UsageError):
            _log.debug("change feed client is gone")
        except* Exception as group:  # noqa: BLE001 - nobody expected it: it is logged and ends this alone
            # logged; the stream ends, and its client asks again
            request_error(group, "change feed")
        self._outbox.close()

    def close(self) -> None:
        """Drop all subscriptions and queued events."""
        for subscription in self._subscriptions.values():
            self._backend.hub.detach(subscription)
        self._subscriptions.clear()
        self._outbox.drop()

    def _handle(self, scans: asyncio.TaskGroup, request: cdcpb.ChangeDataRequest) -> None:
        match request.WhichOneof("request"):
            case "deregister":
                self._deregister(request)
            case "notify_txn_status":
                """A hint about large transactions; locks tell us the same."""
            case _:
                self._register(scans, request)

    def _register(self, scans: asyncio.TaskGroup, request: cdcpb.ChangeDataRequest) -> None:
        region = self._checked(request)
        if isinstance(region, cdcpb.Error):
            self._outbox.control(Failure(request.region_id, request.request_id, region))
            return
        lower, upper = region.clamp(request.start_key, request.end_key)
        subscription = Subscription(
            region=region,
            request_id=request.request_id,
            checkpoint_ts=request.checkpoint_ts,
            lower=lower,
            upper=upper,
            old_values=request.extra_op == kvrpcpb.ReadOldValue,
            filter_loop=request.filter_loop,
        )
        self._subscriptions[request.request_id, request.region_id] = subscription
        scans.create_task(self._scan(subscription), name=f"feed-scan-{region.region_id}")

    def _checked(self, request: cdcpb.ChangeDataRequest) -> Region | cdcpb.Error:
        backend = self._backend
        cluster_id = request.header.cluster_id
        if cluster_id and cluster_id != backend.cluster_id:
            mismatch = cdcpb.ClusterIDMismatch(current=backend.cluster_id, request=cluster_id)
            return cdcpb.Error(cluster_id_mismatch=mismatch)
        # A request id and a region name one subscription; a second one would get each row twice.
        earlier = self._subscriptions.get((request.request_id, request.region_id))
        if earlier is not None and not earlier.ended:
            return cdcpb.Error(
                duplicate_request=cdcpb.DuplicateRequest(region_id=request.region_id)
            )
        if len(self._subscriptions) >= _MAX_SUBSCRIPTIONS and not self._forget_ended():
            return _busy(
                f"a feed connection has at most {_MAX_SUBSCRIPTIONS} subscriptions; open another "
                "one"
            )
        region = backend.gate.find(request.region_id, request.region_epoch)
        return _feed_error(region) if isinstance(region, errorpb.Error) else region

    def _deregister(self, request: cdcpb.ChangeDataRequest) -> None:
        """region_id 0 means all regions of the request id."""
        for key in [
            key
            for key in self._subscriptions
            if key[0] == request.request_id and request.region_id in (0, key[1])
        ]:
            self._backend.hub.detach(self._subscriptions.pop(key))

    def _forget_ended(self) -> bool:
        """Make room for new subscriptions; returns whether there was something to forget."""
        ended = [key for key, subscription in self._subscriptions.items() if subscription.ended]
        for key in ended:
            del self._subscriptions[key]
        return bool(ended)

    async def _scan(self, subscription: Subscription) -> None:
        """Attach, send the rows on disk, then INITIALIZED: live changes begin exactly where the
        snapshot ends.
        """
        async with self._scan_slots:
            # Attached between two groups, with the snapshot: each change is either in the scan or
            # sent live, none in both.
            snapshot = await self._backend.group.quiet(lambda: self._attach(subscription))
            changes = changes_since(
                snapshot,
                subscription.lower,
                subscription.upper,
                subscription.checkpoint_ts,
                old_values=subscription.old_values,
            )
            # busy makes the client wait, as for lost history; other regions go on
            try:
                async with cursor(
                    snapshot, _pieces(filter(subscription.covers, changes)), self._backend.scanners
                ) as pieces:
                    while not subscription.ended and (piece := await pieces.next()) is not None:
                        await self._send(subscription, *piece)
            except CorruptError as err:
                if not subscription.ended:
                    self._backend.hub.refuse(subscription, self._outbox, _busy(str(err)))
        if not subscription.ended:
            self._outbox.control(Initialized(subscription))
            subscription.initialized = True

    async def _send(self, subscription: Subscription, rows: list[Change], size: int) -> None:
        await self._backend.scan_rate.throttle(size)
        await self._outbox.put(Rows(subscription, rows, size))
        metrics.FEED_ROWS.inc(len(rows))

    def _attach(self, subscription: Subscription) -> Snapshot:
        backend = self._backend
        snapshot = backend.engine.kv.snapshot()
        # deregistered, or the client gone, while this waited
        if subscription.ended:
            return snapshot
        backend.hub.attach(subscription, self._outbox)
        # It may have changed while this waited for its slot.
        if backend.gate.regions.get(subscription.region.region_id) != subscription.region:
            backend.hub.refuse_stale(subscription, self._outbox)
        # GC may have removed versions since; saying nothing would lose rows.
        elif subscription.checkpoint_ts < backend.history_begins():
            backend.hub.refuse(
                subscription,
                self._outbox,
                _lost(subscription.checkpoint_ts, backend.history_begins()),
            )
        backend.engine.old_values = backend.hub.wants_old_values
        return snapshot


def _pieces(changes: Iterable[Change]) -> Generator[tuple[list[Change], int], None, None]:
    yield from chunks(changes)


def _feed_error(error: errorpb.Error) -> cdcpb.Error:
    if error.HasField("epoch_not_match"):
        return cdcpb.Error(epoch_not_match=error.epoch_not_match)
    if error.HasField("not_leader"):
        return cdcpb.Error(not_leader=error.not_leader)
    return cdcpb.Error(region_not_found=error.region_not_found)


def _busy(reason: str) -> cdcpb.Error:
    return cdcpb.Error(server_is_busy=errorpb.ServerIsBusy(reason=reason, backoff_ms=_BUSY_MS))


def _lost(checkpoint_ts: int, safe_point: int) -> cdcpb.Error:
    """The protocol has no error of its own for lost history: busy makes a client wait,
    and never lets it miss a row.
    """
    return _busy(str(SnapshotLostByGCError(checkpoint_ts, safe_point)))
