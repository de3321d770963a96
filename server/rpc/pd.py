"""The client of a coordinator, ours or a real PD: cluster, TSO, regions, stores, safepoints.

Calls that meet an absent or restarting coordinator are repeated with back-off until `_CALL_SECONDS` are over; keys are
memcomparable-encoded, as in PD.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from kvproto import metapb_pb2, pdpb_pb2, pdpb_pb2_grpc

from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.tso import TsoStream, TsoUnavailableError
from storage.model.errors import ConflictError, InvalidError, TidemarkError, UnavailableError

R = TypeVar("R")
_CALL_SECONDS = 10.0
_ATTEMPT_SECONDS = 5.0
_BACKOFF_SECONDS = (0.05, 1.0)
_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class PdUnavailableError(UnavailableError):
    """No coordinator answered in time."""

    code = "ErrCoordinatorUnavailable"


class PdRefusedError(InvalidError):
    """The coordinator refused the request as it is."""

    code = "ErrCoordinatorRefused"


class NotBootstrappedError(UnavailableError):
    """No store has started the cluster yet."""

    code = "ErrNotBootstrapped"


class AlreadyBootstrappedError(ConflictError):
    """Another store has started the cluster."""

    code = "ErrAlreadyBootstrapped"


class RegionMissingError(UnavailableError):
    """No region is known for the key; a store has yet to report it."""

    code = "ErrRegionMissing"


@dataclass(frozen=True, slots=True)
class RegionRoute:
    """Where a region is served; bounds in `region` are memcomparable-encoded, `end_key == b""` means no end."""

    region: metapb_pb2.Region
    leader: metapb_pb2.Peer
    address: str


@dataclass(frozen=True, slots=True)
class MinSafePoint:
    """The service that holds GC back most, and how long it will."""

    service_id: str
    ttl_s: int
    safe_point: int


class PdClient:
    """One connection to a coordinator; made by `open`."""

    def __init__(self, channel: grpc.aio.Channel, address: str, cluster_id: int) -> None:
        self.address = address
        self.cluster_id = cluster_id
        self._stub = pdpb_pb2_grpc.PDStub(channel)
        self._header = pdpb_pb2.RequestHeader(cluster_id=cluster_id)
        self._tso = TsoStream(lambda: self._stub.Tso(None), self._header)

    @classmethod
    @asynccontextmanager
    async def open(cls, address: str, security: SecurityConfig | None = None) -> AsyncIterator["PdClient"]:
        """Connect, learn the cluster id, and yield the client for the block.

        Raises:
            PdUnavailableError: nobody answered at `address` in time.
        """
        async with connect(address, security) as channel:
            members = pdpb_pb2_grpc.PDStub(channel).GetMembers
            answer = await _repeat(address, lambda: members(pdpb_pb2.GetMembersRequest()))
            client = cls(channel, address, answer.header.cluster_id)
            try:
                yield client
            finally:
                client._tso.close()

    async def tso(self, count: int = 1) -> int:
        """Take `count` new timestamps; returns the last, the others are just below it. Later calls get greater ones."""
        return await _repeat(self.address, lambda: self._tso.take(count))

    async def region(self, key: bytes) -> RegionRoute:
        """The region that holds the encoded `key`, and its leader's address.

        Raises:
            RegionMissingError: no store has reported such a region.
        """
        answer = await self._call(self._stub.GetRegion, pdpb_pb2.GetRegionRequest(header=self._header, region_key=key))
        return (await self._routes([(answer.region, answer.leader)], f"key {key.hex()}"))[0]

    async def region_by_id(self, region_id: int) -> RegionRoute:
        """The region of that id.

        Raises:
            RegionMissingError: it was merged away, or never reported.
        """
        request = pdpb_pb2.GetRegionByIDRequest(header=self._header, region_id=region_id)
        answer = await self._call(self._stub.GetRegionByID, request)
        return (await self._routes([(answer.region, answer.leader)], f"id {region_id}"))[0]

    async def scan_regions(self, start_key: bytes, end_key: bytes = b"", limit: int = 128) -> list[RegionRoute]:
        """Regions that touch `[start_key, end_key)` in key order, at most `limit`; empty when none is known."""
        request = pdpb_pb2.ScanRegionsRequest(header=self._header, start_key=start_key, end_key=end_key, limit=limit)
        answer = await self._call(self._stub.ScanRegions, request)
        return await self._routes(list(zip(answer.region_metas, answer.leaders, strict=True)), "the range")

    async def stores(self) -> list[metapb_pb2.Store]:
        """All stores that are not removed."""
        request = pdpb_pb2.GetAllStoresRequest(header=self._header, exclude_tombstone_stores=True)
        return list((await self._call(self._stub.GetAllStores, request)).stores)

    async def store(self, store_id: int) -> metapb_pb2.Store:
        """One store.

        Raises:
            PdRefusedError: there is none of that id.
        """
        request = pdpb_pb2.GetStoreRequest(header=self._header, store_id=store_id)
        answer: pdpb_pb2.GetStoreResponse = await self._call(self._stub.GetStore, request)
        return answer.store

    async def alloc_id(self) -> int:
        """A number that no other call ever gets: for stores, regions and peers."""
        return int((await self._call(self._stub.AllocID, pdpb_pb2.AllocIDRequest(header=self._header))).id)

    async def is_bootstrapped(self) -> bool:
        """Whether a store has started the cluster."""
        request = pdpb_pb2.IsBootstrappedRequest(header=self._header)
        return bool((await self._call(self._stub.IsBootstrapped, request)).bootstrapped)

    async def bootstrap(self, store: metapb_pb2.Store, region: metapb_pb2.Region) -> None:
        """Start the cluster with its first store and the region that covers everything; durable when it returns.

        Raises:
            AlreadyBootstrappedError: another store was first.
        """
        request = pdpb_pb2.BootstrapRequest(header=self._header, store=store, region=region)
        await self._call(self._stub.Bootstrap, request)

    async def put_store(self, store: metapb_pb2.Store) -> None:
        """Register a store, or its new address; durable when it returns."""
        await self._call(self._stub.PutStore, pdpb_pb2.PutStoreRequest(header=self._header, store=store))

    async def store_heartbeat(self, stats: pdpb_pb2.StoreStats) -> None:
        """Tell that a store lives."""
        await self._call(self._stub.StoreHeartbeat, pdpb_pb2.StoreHeartbeatRequest(header=self._header, stats=stats))

    async def region_heartbeat(self, regions: Iterable[metapb_pb2.Region]) -> None:
        """Report regions whose leader is their first peer; the coordinator knows them when this returns."""
        requests = [
            pdpb_pb2.RegionHeartbeatRequest(header=self._header, region=region, leader=region.peers[0])
            for region in regions
        ]

        async def report() -> None:
            call = self._stub.RegionHeartbeat(iter(requests))
            async for answer in call:
                _check(answer)

        await _repeat(self.address, report)

    async def ask_batch_split(self, region: metapb_pb2.Region, count: int) -> list[pdpb_pb2.SplitID]:
        """Ids for `count` new regions and their peers."""
        request = pdpb_pb2.AskBatchSplitRequest(header=self._header, region=region, split_count=count)
        return list((await self._call(self._stub.AskBatchSplit, request)).ids)

    async def report_batch_split(self, regions: Iterable[metapb_pb2.Region]) -> None:
        """Tell that a region was split into `regions`."""
        request = pdpb_pb2.ReportBatchSplitRequest(header=self._header, regions=regions)
        await self._call(self._stub.ReportBatchSplit, request)

    async def update_service_gc_safe_point(self, service_id: str, ttl_s: int, safe_point: int) -> MinSafePoint:
        """Keep what is newer than `safe_point` from GC for `ttl_s` seconds (<= 0: no longer); durable when it returns.

        Returns the service that holds GC back most; if its `safe_point` is greater than the asked one, nothing was
        stored and the history asked for may be gone.
        """
        request = pdpb_pb2.UpdateServiceGCSafePointRequest(
            header=self._header, service_id=service_id.encode(), TTL=ttl_s, safe_point=safe_point
        )
        answer = await self._call(self._stub.UpdateServiceGCSafePoint, request)
        return MinSafePoint(answer.service_id.decode(errors="replace"), answer.TTL, answer.min_safe_point)

    async def update_gc_safe_point(self, safe_point: int) -> int:
        """Let stores collect what is older; never goes back. Returns the safe point that holds, durably."""
        request = pdpb_pb2.UpdateGCSafePointRequest(header=self._header, safe_point=safe_point)
        return int((await self._call(self._stub.UpdateGCSafePoint, request)).new_safe_point)

    async def gc_safe_point(self) -> int:
        """The safe point stores collect up to."""
        request = pdpb_pb2.GetGCSafePointRequest(header=self._header)
        return int((await self._call(self._stub.GetGCSafePoint, request)).safe_point)

    async def _call(self, method: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        answer = await _repeat(self.address, lambda: method(request))
        _check(answer)
        return answer

    async def _routes(self, regions: list[tuple[metapb_pb2.Region, metapb_pb2.Peer]], sought: str) -> list[RegionRoute]:
        if any(not region.id for region, _ in regions):
            raise RegionMissingError(f"no region is known for {sought}; is a store running?")
        addresses = {
            store_id: (await self.store(store_id)).address for store_id in {leader.store_id for _, leader in regions}
        }
        return [RegionRoute(region, leader, addresses[leader.store_id]) for region, leader in regions]


async def _repeat(address: str, attempt: Callable[[], Awaitable[R]]) -> R:
    """Await `attempt()` until it answers; transient failures are repeated with jittered back-off."""
    pause, most = _BACKOFF_SECONDS
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _CALL_SECONDS
    while True:
        try:
            async with asyncio.timeout(_ATTEMPT_SECONDS):
                return await attempt()
        except (TimeoutError, TsoUnavailableError) as err:
            reason = str(err) or "no answer in time"
        except grpc.aio.AioRpcError as err:
            if err.code() not in _RETRIED:
                raise PdRefusedError(
                    f"the coordinator at {address} answered {err.code().name}: {err.details()}"
                ) from err
            reason = err.details() or err.code().name
        if loop.time() + pause >= deadline:
            raise PdUnavailableError(f"no coordinator answers at {address}: {reason}; is it running?")
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter needs no secrecy
        pause = min(pause * 2, most)


def _check(answer: Any) -> None:
    error = answer.header.error
    if error.type == pdpb_pb2.OK:
        return
    known: dict[Any, type[TidemarkError]] = {
        pdpb_pb2.NOT_BOOTSTRAPPED: NotBootstrappedError,
        pdpb_pb2.ALREADY_BOOTSTRAPPED: AlreadyBootstrappedError,
    }
    raise known.get(error.type, PdRefusedError)(error.message)
