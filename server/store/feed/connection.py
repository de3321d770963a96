"""One feed connection: registers and deregisters regions, and runs their scans."""

import asyncio
from collections.abc import AsyncIterator, Generator
from concurrent.futures import Executor
from itertools import islice

import grpc.aio
import structlog
from kvproto import cdcpb_pb2 as cdcpb
from kvproto import errorpb_pb2 as errorpb
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store import metrics
from server.store.cursor import cursor
from server.store.feed.hub import FeedHub
from server.store.feed.outbox import Failure, Initialized, Outbox, Rows
from server.store.feed.subscription import Subscription, chunks
from server.store.region_check import RegionGate
from storage.kv import Snapshot
from storage.model.errors import ClosedError
from storage.mvcc.change import Change
from storage.mvcc.engine import Engine
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.history import changes_since
from storage.mvcc.region import Region

_SCAN_ROWS = 1024
_MAX_SCANS = 4
_log = structlog.get_logger(__name__)


class FeedBackend:
    """What every connection of this store works with."""

    def __init__(
        self, *, cluster_id: int, engine: Engine, group: GroupCommit, gate: RegionGate, hub: FeedHub, scanners: Executor
    ) -> None:
        self.cluster_id = cluster_id
        self.engine = engine
        self.group = group
        self.gate = gate
        self.hub = hub
        self.scanners = scanners


class Connection:
    """The subscriptions of one stream; `outbox` is what it sends."""

    def __init__(self, backend: FeedBackend, outbox: Outbox) -> None:
        self._backend = backend
        self._outbox = outbox
        self._scan_slots = asyncio.Semaphore(_MAX_SCANS)  # a slow reader holds up only its own scans
        self._subscriptions: dict[tuple[int, int], Subscription] = {}

    async def receive(self, requests: AsyncIterator[cdcpb.ChangeDataRequest]) -> None:
        """Serve requests until the client ends; never fails."""
        try:
            async with asyncio.TaskGroup() as scans:
                async for request in requests:
                    self._handle(scans, request)
        except* ClosedError:
            _log.info("change feed ended, the store is stopping")
        except* (grpc.aio.BaseError, grpc.aio.UsageError):
            _log.debug("change feed client is gone")
        self._outbox.close()

    def close(self) -> None:
        """Drop all subscriptions."""
        for wanted in self._subscriptions.values():
            self._backend.hub.detach(wanted)
        self._subscriptions.clear()

    def _handle(self, scans: asyncio.TaskGroup, request: cdcpb.ChangeDataRequest) -> None:
        match request.WhichOneof("request"):
            case "deregister":
                self._deregister(request)
            case "notify_txn_status":
                """A hint about large transactions; locks tell us the same."""
            case _:
                self._register(scans, request)

    def _register(self, scans: asyncio.TaskGroup, request: cdcpb.ChangeDataRequest) -> None:
        found = self._checked(request)
        if isinstance(found, cdcpb.Error):
            self._outbox.control(Failure(request.region_id, request.request_id, found))
            return
        lower, upper = found.clamp(request.start_key, request.end_key)
        wanted = Subscription(
            region=found,
            request_id=request.request_id,
            checkpoint_ts=request.checkpoint_ts,
            lower=lower,
            upper=upper,
            old_values=request.extra_op == kvrpcpb.ReadOldValue,
        )
        self._subscriptions[request.request_id, request.region_id] = wanted
        scans.create_task(self._scan(wanted), name=f"feed-scan-{found.region_id}")

    def _checked(self, request: cdcpb.ChangeDataRequest) -> Region | cdcpb.Error:
        backend = self._backend
        asked = request.header.cluster_id
        if asked and asked != backend.cluster_id:
            mismatch = cdcpb.ClusterIDMismatch(current=backend.cluster_id, request=asked)
            return cdcpb.Error(cluster_id_mismatch=mismatch)
        known = self._subscriptions.get((request.request_id, request.region_id))
        if known is not None and not known.ended:
            return cdcpb.Error(duplicate_request=cdcpb.DuplicateRequest(region_id=request.region_id))
        found = backend.gate.find(request.region_id, request.region_epoch)
        return _feed_error(found) if isinstance(found, errorpb.Error) else found

    def _deregister(self, request: cdcpb.ChangeDataRequest) -> None:
        """region_id 0 means all regions of the request id."""
        for key in [
            key for key in self._subscriptions if key[0] == request.request_id and request.region_id in (0, key[1])
        ]:
            self._backend.hub.detach(self._subscriptions.pop(key))

    async def _scan(self, wanted: Subscription) -> None:
        """Attach, send what is on disk, then INITIALIZED: live changes begin exactly where the snapshot ends."""
        async with self._scan_slots:
            snapshot = await self._backend.group.quiet(lambda: self._attach(wanted))
            steps = _scan_steps(snapshot, wanted)
            async with cursor(snapshot, steps, self._backend.scanners) as pieces:
                while not wanted.ended and (step := await pieces.next()) is not None:
                    for piece, size in step:
                        await self._outbox.put(Rows(wanted, piece, size))
                        metrics.FEED_ROWS.inc(len(piece))
        if not wanted.ended:
            self._outbox.control(Initialized(wanted))
            wanted.initialized = True

    def _attach(self, wanted: Subscription) -> Snapshot:
        gate, hub = self._backend.gate, self._backend.hub
        snapshot = self._backend.engine.kv.snapshot()
        if wanted.ended:  # deregistered, or the client gone, while this waited
            return snapshot
        hub.attach(wanted, self._outbox)
        if gate.regions.get(wanted.region.region_id) != wanted.region:  # split since it was checked
            hub.refuse_stale(wanted, self._outbox)
        self._backend.engine.old_values = hub.wants_old_values
        return snapshot


def _scan_steps(snapshot: Snapshot, wanted: Subscription) -> Generator[list[tuple[list[Change], int]], None, None]:
    changes = changes_since(snapshot, wanted.lower, wanted.upper, wanted.checkpoint_ts, old_values=wanted.old_values)
    while part := list(islice(changes, _SCAN_ROWS)):
        yield list(chunks(part))


def _feed_error(error: errorpb.Error) -> cdcpb.Error:
    if error.HasField("epoch_not_match"):
        return cdcpb.Error(epoch_not_match=error.epoch_not_match)
    return cdcpb.Error(region_not_found=error.region_not_found)
