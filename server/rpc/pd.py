"""The client of coordinators, Tidemark's or PD's: cluster, TSO, regions, stores, safepoints.

Calls go to the leader. If the coordinator is absent, or does not lead, a call is repeated at the
then leader, with back-off, for up to `_CALL_SECONDS`. Keys are memcomparable-encoded, as in PD.

Timestamps come over one stream (`TsoStream`), which concurrent callers share: the caller that holds
its lock makes the round trip for all that wait, so no task of its own is needed. If a round fails,
or its caller is cancelled, the callers are put back at the front of the queue; timestamps that were
handed out and lost do no harm.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from kvproto import metapb_pb2, pdpb_pb2

from server.rpc.credentials import SecurityConfig
from server.rpc.members import Members, NoLeaderError, addresses_of
from server.rpc.region_cache import RegionRoute
from storage.backoff import Backoff
from storage.meta.calls import cancellations
from storage.model.errors import ConflictError, InvalidError, TidemarkError, UnavailableError
from storage.model.ts import LOGICAL_MAX, compose

if TYPE_CHECKING:
    from kvproto.pdpb_pb2_grpc import PDAsyncStub

R = TypeVar("R")
_OPEN_SECONDS = 10.0
# a real PD with its defaults takes more than 10 to lead anew
_CALL_SECONDS = 20.0
_ATTEMPT_SECONDS = 3.0
_SPLIT_RETRIES = 3
_BACKOFF_SECONDS = (0.05, 1.0)
_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_MOVED = ("not leader", "no leader")  # PD says so with other statuses, too
# else exhausted means that a message is too large
_BUSY = (
    "slow down and try again",
    "Concurrent RPC limit exceeded",
)
# gRPC of a connection that broke while it was written to; a status of nobody
_BROKEN = "Internal error from Core"
TsoCall = grpc.aio.StreamStreamCall[pdpb_pb2.TsoRequest, pdpb_pb2.TsoResponse]


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


class TsoUnavailableError(UnavailableError):
    """The stream to the timestamp oracle ended."""

    code = "ErrTsoUnavailable"


@dataclass(frozen=True, slots=True)
class MinSafePoint:
    """The service that holds GC back most, and its remaining TTL."""

    service_id: str
    ttl_s: int
    safe_point: int


class PdClient:
    """Connections to the coordinators of one cluster; made by `open`."""

    def __init__(self, address: str, members: Members) -> None:
        self.address = address
        self.cluster_id = members.cluster_id
        self._members = members
        self._header = pdpb_pb2.RequestHeader(cluster_id=self.cluster_id)
        self._tso = TsoStream(self._open_tso, self._header)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, address: str, security: SecurityConfig | None = None
    ) -> AsyncIterator["PdClient"]:
        """Connect to `host:port[,host:port…]`, learn the cluster id,
        and yield the client for the block.

        Raises:
            NoAddressError: `address` is empty.
            PdUnavailableError: nobody there knew a leader in time.
        """
        async with AsyncExitStack() as channels:
            members = Members(addresses_of(address), security, channels)
            await _repeat(address, members.leader, _OPEN_SECONDS)
            client = cls(address, members)
            try:
                yield client
            finally:
                client._tso.close()

    async def tso(self, count: int = 1) -> int:
        """Take `count` new timestamps; returns the last, the others are just below it.

        Later calls get greater ones.
        """
        return await self._repeat(lambda _: self._tso.take(count))

    async def region(self, key: bytes) -> RegionRoute:
        """The region that holds the encoded `key`, and its leader's address.

        Raises:
            RegionMissingError: no store has reported such a region.
        """
        answer = await self._call(
            "GetRegion", pdpb_pb2.GetRegionRequest(header=self._header, region_key=key)
        )
        return (await self._routes([(answer.region, answer.leader)], f"key {key.hex()}"))[0]

    async def region_by_id(self, region_id: int) -> RegionRoute:
        """The region of that id.

        Raises:
            RegionMissingError: it was merged away, or never reported.
        """
        request = pdpb_pb2.GetRegionByIDRequest(header=self._header, region_id=region_id)
        answer = await self._call("GetRegionByID", request)
        return (await self._routes([(answer.region, answer.leader)], f"id {region_id}"))[0]

    async def scan_regions(
        self, start_key: bytes, end_key: bytes = b"", limit: int = 128
    ) -> list[RegionRoute]:
        """Regions that touch `[start_key, end_key)` in key order, at most `limit`;
        empty when none is known.
        """
        request = pdpb_pb2.ScanRegionsRequest(
            header=self._header, start_key=start_key, end_key=end_key, limit=limit
        )
        answer = await self._call("ScanRegions", request)
        return await self._routes(
            list(zip(answer.region_metas, answer.leaders, strict=True)), "the range"
        )

    async def stores(self) -> list[metapb_pb2.Store]:
        """All stores that are not removed."""
        request = pdpb_pb2.GetAllStoresRequest(header=self._header, exclude_tombstone_stores=True)
        return list((await self._call("GetAllStores", request)).stores)

    async def store(self, store_id: int) -> metapb_pb2.Store:
        """One store.

        Raises:
            PdRefusedError: there is none of that id.
        """
        request = pdpb_pb2.GetStoreRequest(header=self._header, store_id=store_id)
        answer: pdpb_pb2.GetStoreResponse = await self._call("GetStore", request)
        return answer.store

    async def alloc_id(self) -> int:
        """A number that no other call ever gets: for stores, regions and peers."""
        return int((await self._call("AllocID", pdpb_pb2.AllocIDRequest(header=self._header))).id)

    async def is_bootstrapped(self) -> bool:
        """Whether a store has bootstrapped the cluster."""
        request = pdpb_pb2.IsBootstrappedRequest(header=self._header)
        return bool((await self._call("IsBootstrapped", request)).bootstrapped)

    async def bootstrap(self, store: metapb_pb2.Store, region: metapb_pb2.Region) -> None:
        """Start the cluster with its first store and the region that covers everything;
        durable when it returns.

        Raises:
            AlreadyBootstrappedError: another store was first.
        """
        request = pdpb_pb2.BootstrapRequest(header=self._header, store=store, region=region)
        await self._call("Bootstrap", request)

    async def put_store(self, store: metapb_pb2.Store) -> None:
        """Register a store, or its new address; durable when it returns."""
        await self._call("PutStore", pdpb_pb2.PutStoreRequest(header=self._header, store=store))

    async def store_heartbeat(self, stats: pdpb_pb2.StoreStats) -> None:
        """Send a store's heartbeat."""
        await self._call(
            "StoreHeartbeat", pdpb_pb2.StoreHeartbeatRequest(header=self._header, stats=stats)
        )

    async def region_heartbeat(self, regions: Iterable[metapb_pb2.Region]) -> None:
        """Report regions whose leader is their first peer;
        the coordinator knows them when this returns.

        Raises:
            PdRefusedError: it did not take one of them, because it is stale; it took the others.
        """
        requests = [
            pdpb_pb2.RegionHeartbeatRequest(
                header=self._header, region=region, leader=region.peers[0]
            )
            for region in regions
        ]

        async def report(leader: "PDAsyncStub") -> None:
            for refusal in [answer async for answer in leader.RegionHeartbeat(iter(requests))]:
                _check(refusal)

        await self._repeat(report)

    async def ask_batch_split(
        self, region: metapb_pb2.Region, count: int
    ) -> list[pdpb_pb2.SplitID]:
        """Ids for `count` new regions and their peers."""
        request = pdpb_pb2.AskBatchSplitRequest(
            header=self._header, region=region, split_count=count
        )
        return list((await self._call("AskBatchSplit", request)).ids)

    async def split_regions(self, keys: Iterable[bytes]) -> bool:
        """Have regions begin at (encoded) keys; returns whether all of them do now."""
        request = pdpb_pb2.SplitRegionsRequest(
            header=self._header, split_keys=keys, retry_limit=_SPLIT_RETRIES
        )
        answer = await self._call("SplitRegions", request)
        return bool(answer.finished_percentage == 100)

    async def report_batch_split(self, regions: Iterable[metapb_pb2.Region]) -> None:
        """Report that a region was split into `regions`."""
        request = pdpb_pb2.ReportBatchSplitRequest(header=self._header, regions=regions)
        await self._call("ReportBatchSplit", request)

    async def update_service_gc_safe_point(
        self, service_id: str, ttl_s: int, safe_point: int
    ) -> MinSafePoint:
        """Protect history newer than `safe_point` from GC for `ttl_s` seconds (<= 0: no longer);
        durable when it returns.

        Returns the service that holds GC back most; if its `safe_point` is greater than the asked
        one, nothing was stored and the history asked for may be gone.
        """
        request = pdpb_pb2.UpdateServiceGCSafePointRequest(
            header=self._header, service_id=service_id.encode(), TTL=ttl_s, safe_point=safe_point
        )
        answer = await self._call("UpdateServiceGCSafePoint", request)
        return MinSafePoint(
            answer.service_id.decode(errors="replace"), answer.TTL, answer.min_safe_point
        )

    async def update_gc_safe_point(self, safe_point: int) -> int:
        """Set the ts below which stores may collect; never moves back.

        Returns the safe point that holds, durably.
        """
        request = pdpb_pb2.UpdateGCSafePointRequest(header=self._header, safe_point=safe_point)
        return int((await self._call("UpdateGCSafePoint", request)).new_safe_point)

    async def gc_safe_point(self) -> int:
        """The safe point stores collect up to."""
        request = pdpb_pb2.GetGCSafePointRequest(header=self._header)
        return int((await self._call("GetGCSafePoint", request)).safe_point)

    async def members(self) -> pdpb_pb2.GetMembersResponse:
        """All coordinators, and which one leads."""
        answer: pdpb_pb2.GetMembersResponse = await self._call(
            "GetMembers", pdpb_pb2.GetMembersRequest(header=self._header)
        )
        return answer

    async def leader_address(self) -> str:
        """The address of the present leader, for those of its services that this client does not
        speak.
        """
        return await self._repeat(lambda _: self._members.address())

    async def _call(self, method: str, request: Any) -> Any:
        answer = await self._repeat(lambda leader: getattr(leader, method)(request))
        _check(answer)
        return answer

    async def _open_tso(self) -> TsoCall:
        return (await self._members.leader()).Tso(None)

    async def _repeat(self, attempt: Callable[["PDAsyncStub"], Awaitable[R]]) -> R:
        leader: PDAsyncStub | None = None

        async def once() -> R:
            nonlocal leader
            leader = await self._members.leader()
            return await attempt(leader)

        return await _repeat(
            self.address, once, _CALL_SECONDS, lambda: self._members.forget_leader(leader)
        )

    async def _routes(
        self, regions: list[tuple[metapb_pb2.Region, metapb_pb2.Peer]], sought: str
    ) -> list[RegionRoute]:
        if any(not region.id for region, _ in regions):
            raise RegionMissingError(f"no region is known for {sought}; is a store running?")
        addresses = {
            store_id: (await self.store(store_id)).address
            for store_id in {leader.store_id for _, leader in regions}
        }
        return [
            RegionRoute(region, leader, addresses[leader.store_id]) for region, leader in regions
        ]


async def _repeat(
    address: str,
    attempt: Callable[[], Awaitable[R]],
    within_s: float,
    failed: Callable[[], None] = lambda: None,
) -> R:
    """Await `attempt()` until it answers; transient failures are repeated with jittered back-off,
    after `failed()`.
    """
    backoff = Backoff(*_BACKOFF_SECONDS)
    loop = asyncio.get_running_loop()
    deadline, before = loop.time() + within_s, cancellations()
    while True:
        try:
            async with asyncio.timeout(_ATTEMPT_SECONDS):
                return await attempt()
        except (TimeoutError, TsoUnavailableError, NoLeaderError) as err:
            reason = str(err) or "no answer in time"
        except grpc.aio.AioRpcError as err:
            reason = err.details() or err.code().name
            # Repeated only after an error that shows that nothing was done, or that a repetition is
            # harmless.
            if err.code() not in _RETRIED and not any(
                words in reason for words in (*_MOVED, *_BUSY, _BROKEN)
            ):
                raise PdRefusedError(
                    f"the coordinator at {address} answered {err.code().name}: {reason}"
                ) from err
        # Before the pause: another caller may already find the new leader meanwhile.
        failed()
        if cancellations() > before:
            # gRPC answers with the call's failure if both come at once
            raise asyncio.CancelledError
        pause_s = backoff.next_s()
        if loop.time() + pause_s >= deadline:
            raise PdUnavailableError(
                f"no coordinator answers at {address}: {reason}; is it running?"
            )
        await asyncio.sleep(pause_s)


def _check(answer: Any) -> None:
    error = answer.header.error
    if error.type == pdpb_pb2.OK:
        return
    errors: dict[Any, type[TidemarkError]] = {
        pdpb_pb2.NOT_BOOTSTRAPPED: NotBootstrappedError,
        pdpb_pb2.ALREADY_BOOTSTRAPPED: AlreadyBootstrappedError,
    }
    raise errors.get(error.type, PdRefusedError)(error.message)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    count: int
    last: asyncio.Future[int]


class TsoStream:
    """Timestamps from the leader, to which `connect` opens a stream;
    `take` may be called by any number of tasks.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[TsoCall]], header: pdpb_pb2.RequestHeader
    ) -> None:
        self._connect = connect
        self._header = header
        self._call: Any = None
        self._lock = asyncio.Lock()
        self._waiting: deque[_Waiter] = deque()

    async def take(self, count: int) -> int:
        """Reserve `count` timestamps; returns the last one, the others are just below it.

        Raises:
            TsoUnavailableError: the stream ended without an answer; try again.
            grpc.aio.AioRpcError: the coordinator refused, or is not there.
        """
        waiter = _Waiter(count, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            while not waiter.last.done():
                async with self._lock:
                    if not waiter.last.done():
                        await self._round()
            return waiter.last.result()
        finally:
            # its caller left; a round that has it on board looks before it answers
            if waiter.last.cancel():
                with suppress(ValueError):
                    self._waiting.remove(waiter)

    def close(self) -> None:
        """End the stream."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def _round(self) -> None:
        batch = self._next_batch()
        total = sum(waiter.count for waiter in batch)
        try:
            if self._call is None:
                self._call = await self._connect()
            # the stream ended meanwhile: reading tells why
            with suppress(asyncio.InvalidStateError):
                await self._call.write(pdpb_pb2.TsoRequest(header=self._header, count=total))
            # The answer names the last of `total` timestamps; each caller gets its part, in the
            # order of asking, so later callers have greater ones.
            last = _last_ts(await self._call.read()) - total
        except BaseException:
            self.close()
            # In front, in their order: they have waited longest. Timestamps that the lost round
            # handed out are never used, which does no harm.
            self._waiting.extendleft(waiter for waiter in reversed(batch) if not waiter.last.done())
            raise
        for waiter in batch:
            last += waiter.count
            if not waiter.last.done():
                waiter.last.set_result(last)

    def _next_batch(self) -> list[_Waiter]:
        batch = [self._waiting.popleft()]
        total = batch[0].count
        while self._waiting and total + self._waiting[0].count <= LOGICAL_MAX // 2:
            batch.append(self._waiting.popleft())
            total += batch[-1].count
        return batch


def _last_ts(response: Any) -> int:
    if not isinstance(response, pdpb_pb2.TsoResponse):
        raise TsoUnavailableError("the coordinator ended the TSO stream; try again")
    return compose(response.timestamp.physical, response.timestamp.logical)
