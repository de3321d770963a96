"""Requests to the store that leads a key's region, repeated until it really was that store,
or a deadline passes.

What is repeated: region errors (the cache is corrected first), broken connections and a silent
coordinator. That is safe because every request of the transaction protocol may be applied twice.
Keys here are raw; only the cache and the coordinator see encoded ones.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message
from kvproto import errorpb_pb2 as errorpb
from kvproto import metapb_pb2 as metapb
from kvproto.tikvpb_pb2_grpc import TikvStub

from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.region_cache import RegionCache, RegionRoute
from storage.backoff import Backoffer
from storage.codec import encode_bytes
from storage.model.errors import InvalidError, UnavailableError
from storage.tasks import gather

if TYPE_CHECKING:
    from kvproto.tikvpb_pb2_grpc import TikvAsyncStub

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
T = TypeVar("T")
_Q_contra = TypeVar("_Q_contra", contravariant=True)
_R_co = TypeVar("_R_co", covariant=True)


class UnaryCall(Protocol[_Q_contra, _R_co]):
    """One method of a connected stub."""

    def __call__(self, request: _Q_contra, *, timeout: float | None = None) -> Awaitable[_R_co]:
        """Send one request."""
        ...


Method: TypeAlias = Callable[["TikvAsyncStub"], UnaryCall[Q, R]]

_ATTEMPT_S = 10.0
_TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


class RegionError(UnavailableError):
    """The request did not reach the region's leader; the cache was corrected,
    locate the key again.
    """

    code = "ErrRegion"

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreRefusedError(InvalidError):
    """A store refused the call itself (not a key): the request or the store's version is wrong."""

    code = "ErrStoreRefused"


class Placement(Protocol):
    """Knows where regions are: `PdClient`."""

    async def region(self, key: bytes) -> RegionRoute:
        """The region of the encoded `key`."""
        ...


class RegionRouter:
    """A region cache and one channel a store."""

    def __init__(
        self, pd: Placement, security: SecurityConfig | None = None, *, timeout_s: float = 20.0
    ) -> None:
        self._pd = pd
        self._security = security
        self._timeout_s = timeout_s
        self._cache = RegionCache()
        self._stubs: dict[str, tuple[grpc.aio.Channel, TikvAsyncStub]] = {}

    async def close(self) -> None:
        """Close every channel."""
        for channel, _ in self._stubs.values():
            await channel.close(None)
        self._stubs.clear()

    async def locate(self, key: bytes) -> RegionRoute:
        """The region that holds the raw `key`.

        Raises:
            UnavailableError: the coordinator is silent or knows no such region.
        """
        encoded = encode_bytes(key)
        route = self._cache.find(encoded)
        if route is None:
            route = await self._pd.region(encoded)
            self._cache.insert(route)
        return route

    async def call(self, key: bytes, method: Method[Q, R], request: Q) -> R:
        """Send `request` to the region of `key`.

        Raises:
            GaveUpError: no attempt got through before the deadline.
            StoreRefusedError: the store cannot serve this call at all.
        """
        _, answer = await self.call_region(key, method, lambda _: request)
        return answer

    async def call_region(
        self,
        key: bytes,
        method: Method[Q, R],
        make: Callable[[RegionRoute], Q],
        *,
        attempt_s: float = _ATTEMPT_S,
    ) -> tuple[RegionRoute, R]:
        """Send `make(region of key)` to that region; returns the region that answered, too.

        Raises as `call`.
        """

        async def attempt() -> tuple[RegionRoute, R]:
            route = await self.locate(key)
            return route, await self.ask(route, method, make(route), timeout_s=attempt_s)

        return await self._repeat(attempt, Backoffer(self._timeout_s))

    async def fan_out(
        self, keys: Iterable[bytes], method: Method[Q, R], make: Callable[[list[bytes]], Q]
    ) -> list[tuple[list[bytes], R]]:
        """Send `make(keys of one region)` to each region of `keys`, in parallel;
        answers with the keys they are for.

        Raises:
            GaveUpError: some region's request did not get through before the deadline; others may
                have.
        """
        return await self._fan_out(sorted(set(keys)), method, make, Backoffer(self._timeout_s))

    async def ask(
        self, route: RegionRoute, method: Method[Q, R], request: Q, *, timeout_s: float = _ATTEMPT_S
    ) -> R:
        """One attempt at exactly this region.

        Raises:
            RegionError: the region is not as `route` says, or its store did not answer.
            StoreRefusedError: the store cannot serve this call at all.
        """
        region = route.region
        outgoing: Any = request
        outgoing.context.region_id = region.id
        outgoing.context.region_epoch.CopyFrom(region.region_epoch)
        outgoing.context.peer.CopyFrom(route.leader)
        try:
            answer: Any = await self.ask_store(route.address, method, request, timeout_s=timeout_s)
        except RegionError:
            self._cache.drop(region)
            raise
        if answer.HasField("region_error"):
            raise self._corrected(route, answer.region_error)
        return answer  # type: ignore[no-any-return]  # HasField wants Any; the method's type says what it is

    async def ask_store(
        self, address: str, method: Method[Q, R], request: Q, *, timeout_s: float = _ATTEMPT_S
    ) -> R:
        """One attempt at a store, whatever regions it holds.

        Raises:
            RegionError: the store did not answer.
            StoreRefusedError: it cannot serve this call at all.
        """
        try:
            return await method(self._stub(address))(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as err:
            answer_text = f"the store at {address} answered {err.code().name}: {err.details()}"
            if err.code() in _TRANSIENT:
                raise RegionError(answer_text) from err
            raise StoreRefusedError(answer_text) from err

    def _stub(self, address: str) -> "TikvAsyncStub":
        if address not in self._stubs:
            channel = connect(address, self._security)
            self._stubs[address] = (channel, TikvStub(channel))
        return self._stubs[address][1]

    async def _repeat(self, attempt: Callable[[], Coroutine[Any, Any, T]], backoff: Backoffer) -> T:
        while True:
            try:
                return await attempt()
            except RegionError as err:
                await backoff.wait(err, err.retry_after_s)
            except UnavailableError as err:
                await backoff.wait(err)

    async def _fan_out(
        self,
        keys: Sequence[bytes],
        method: Method[Q, R],
        make: Callable[[list[bytes]], Q],
        backoff: Backoffer,
    ) -> list[tuple[list[bytes], R]]:
        async def send(route: RegionRoute, part: list[bytes]) -> list[tuple[list[bytes], R]]:
            try:
                return [(part, await self.ask(route, method, make(part)))]
            except RegionError as err:
                await backoff.wait(err, err.retry_after_s)
                return await self._fan_out(part, method, make, backoff)

        groups = await self._repeat(lambda: self._grouped(keys), backoff)
        answers = await gather(send(route, part) for route, part in groups)
        return [pair for pairs in answers for pair in pairs]

    async def _grouped(self, keys: Sequence[bytes]) -> list[tuple[RegionRoute, list[bytes]]]:
        groups: dict[int, tuple[RegionRoute, list[bytes]]] = {}
        for key in keys:
            route = await self.locate(key)
            groups.setdefault(route.region.id, (route, []))[1].append(key)
        return list(groups.values())

    def _corrected(self, route: RegionRoute, error: errorpb.Error) -> RegionError:
        """Correct the cache by a region error."""
        if error.HasField("server_is_busy"):
            return RegionError(
                f"the store is busy: {error.server_is_busy.reason}",
                error.server_is_busy.backoff_ms / 1e3,
            )
        # A stale command says nothing of the region: the same one may be asked again.
        if not error.HasField("stale_command"):
            self._cache.drop(route.region)
        # The store names the regions that took the place of the old one, which saves a question to
        # the coordinator; ours are those whose peer is on that store.
        for region in error.epoch_not_match.current_regions:
            peer = next(
                (peer for peer in region.peers if peer.store_id == route.leader.store_id), None
            )
            if peer is not None:
                self._cache.insert(RegionRoute(_copy(region), peer, route.address))
        return RegionError(error.message or str(error).strip() or "the store named no reason")


def _copy(region: metapb.Region) -> metapb.Region:
    kept = metapb.Region()
    kept.CopyFrom(region)
    return kept
