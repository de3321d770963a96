"""Routing over real sockets: a store that answers what a test tells it,
and a coordinator that is a list of regions.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from kvproto import errorpb_pb2 as errorpb
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import metapb_pb2 as metapb
from kvproto import tikvpb_pb2 as tikvpb

from server.rpc.errors import StatusError
from server.rpc.key_error import LockedError, WriteConflictError
from server.rpc.region_cache import RegionRoute
from server.rpc.region_router import StoreRefusedError
from server.rpc.server import RpcServer
from server.rpc.tikv import KvClient
from storage.backoff import GaveUpError
from storage.codec import encode_bytes
from storage.model.errors import UnavailableError

pytestmark = pytest.mark.usefixtures("engine")

STORE = 1


def region(region_id: int, start: bytes, end: bytes, version: int = 1) -> metapb.Region:
    return metapb.Region(
        id=region_id,
        start_key=encode_bytes(start) if start else b"",
        end_key=encode_bytes(end) if end else b"",
        region_epoch=metapb.RegionEpoch(conf_ver=1, version=version),
        peers=[metapb.Peer(id=region_id * 10, store_id=STORE)],
    )


class Table:
    """The coordinator's regions; `asked` counts look-ups."""

    def __init__(self, regions: list[metapb.Region], address: str) -> None:
        self.regions, self.address, self.asked = regions, address, 0
        self.failures: list[UnavailableError] = []

    async def region(self, key: bytes) -> RegionRoute:
        self.asked += 1
        if self.failures:
            raise self.failures.pop()
        found = next(
            it
            for it in self.regions
            if it.start_key <= key and (not it.end_key or key < it.end_key)
        )
        return RegionRoute(found, found.peers[0], self.address)


class Store:
    """Answers from memory; `script` is asked first and may answer instead."""

    def __init__(self, pairs: dict[bytes, bytes]) -> None:
        self.pairs = pairs
        self.script: Callable[[Any], Any] = lambda _: None
        self.requests: list[Any] = []

    async def _answer(self, request: Any, otherwise: Callable[[], Any]) -> Any:
        self.requests.append(request)
        return self.script(request) or otherwise()

    async def KvGet(self, request: kvrpcpb.GetRequest, _: Any) -> Any:
        value = self.pairs.get(request.key)
        return await self._answer(
            request, lambda: kvrpcpb.GetResponse(value=value or b"", not_found=value is None)
        )

    async def KvScan(self, request: kvrpcpb.ScanRequest, _: Any) -> Any:
        inside = [
            kvrpcpb.KvPair(key=key, value=value)
            for key, value in sorted(self.pairs.items())
            if request.start_key <= key and (not request.end_key or key < request.end_key)
        ]
        return await self._answer(
            request, lambda: kvrpcpb.ScanResponse(pairs=inside[: request.limit])
        )

    async def KvBatchGet(self, request: kvrpcpb.BatchGetRequest, _: Any) -> Any:
        found = [
            kvrpcpb.KvPair(key=key, value=self.pairs[key])
            for key in request.keys
            if key in self.pairs
        ]
        return await self._answer(request, lambda: kvrpcpb.BatchGetResponse(pairs=found))

    async def KvPrewrite(self, request: kvrpcpb.PrewriteRequest, _: Any) -> Any:
        return await self._answer(request, kvrpcpb.PrewriteResponse)


@asynccontextmanager
async def cluster(
    *regions: metapb.Region, timeout_s: float = 5.0, pairs: dict[bytes, bytes] | None = None
) -> AsyncIterator[tuple[KvClient, Store, Table]]:
    store = Store(pairs or {})
    server = RpcServer()
    server.add_service(tikvpb.DESCRIPTOR.services_by_name["Tikv"], store)
    async with server.listen("127.0.0.1:0") as address:
        table = Table(list(regions), address)
        async with KvClient.open(table, timeout_s=timeout_s) as kv:
            yield kv, store, table


def once(make: Callable[[], Any]) -> Callable[[Any], Any]:
    """A script that answers the first request only."""
    answers = [make]
    return lambda _: answers.pop()() if answers else None


def refused(**error: Any) -> Callable[[Any], Any]:
    return once(lambda: kvrpcpb.GetResponse(region_error=errorpb.Error(**error)))


WHOLE = region(1, b"", b"")


async def test_a_request_carries_its_region_epoch_and_peer_and_the_cache_spares_the_coordinator() -> (
    None
):
    async with cluster(WHOLE, pairs={b"k": b"v"}) as (kv, store, table):
        assert await kv.get(b"k", 7) == b"v"
        assert await kv.get(b"none", 7) is None
        assert table.asked == 1
        context = store.requests[0].context
        assert (context.region_id, context.region_epoch, context.peer) == (
            1,
            WHOLE.region_epoch,
            WHOLE.peers[0],
        )


@pytest.mark.parametrize(
    ("error", "lookups"),
    [
        ({"not_leader": errorpb.NotLeader(region_id=1)}, 2),
        ({"region_not_found": errorpb.RegionNotFound(region_id=1)}, 2),
        ({"epoch_not_match": errorpb.EpochNotMatch()}, 2),
        ({"store_not_match": errorpb.StoreNotMatch()}, 2),
        ({"key_not_in_region": errorpb.KeyNotInRegion()}, 2),
        ({"server_is_busy": errorpb.ServerIsBusy(reason="full", backoff_ms=1)}, 1),
        ({"stale_command": errorpb.StaleCommand()}, 1),
        ({"message": "something new"}, 2),
    ],
)
async def test_every_region_error_is_retried_after_correcting_the_cache(
    error: dict[str, Any], lookups: int
) -> None:
    async with cluster(WHOLE, pairs={b"k": b"v"}) as (kv, store, table):
        store.script = refused(**error)
        assert await kv.get(b"k", 7) == b"v"
        assert len(store.requests) == 2
        assert table.asked == lookups


async def test_an_epoch_error_teaches_the_split_without_asking_the_coordinator() -> None:
    left, right = region(2, b"", b"m", version=2), region(1, b"m", b"", version=2)
    async with cluster(WHOLE, pairs={b"a": b"1", b"z": b"2"}) as (kv, store, table):
        store.script = refused(epoch_not_match=errorpb.EpochNotMatch(current_regions=[left, right]))
        assert await kv.get(b"z", 7) == b"2"
        assert await kv.get(b"a", 7) == b"1"
        assert [request.context.region_id for request in store.requests] == [1, 1, 2]
        assert table.asked == 1


async def test_a_silent_coordinator_is_outwaited() -> None:
    async with cluster(WHOLE, pairs={b"k": b"v"}) as (kv, _, table):
        table.failures = [UnavailableError("restarting")]
        assert await kv.get(b"k", 7) == b"v"


async def test_a_store_that_is_away_ends_in_one_error_at_the_deadline() -> None:
    async with cluster(WHOLE, timeout_s=0.3) as (kv, _, table):
        table.address = "127.0.0.1:1"
        with pytest.raises(
            GaveUpError, match=r"gave up after .* the store at 127.0.0.1:1 answered UNAVAILABLE"
        ):
            await kv.get(b"k", 7)


async def test_a_store_that_cannot_serve_the_call_is_not_asked_again() -> None:
    def not_so() -> None:
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, "no such thing here")

    async with cluster(WHOLE) as (kv, store, _):
        store.script = once(not_so)
        with pytest.raises(StoreRefusedError, match="no such thing here"):
            await kv.get(b"k", 7)
        assert len(store.requests) == 1


REGIONS = (region(1, b"", b"g"), region(2, b"g", b"n"), region(3, b"n", b""))
ALPHABET = {bytes([letter]): bytes([letter]).upper() for letter in b"abcdefghijklmnopqrstuvwxyz"}


async def test_a_scan_goes_from_region_to_region_and_stops_at_limit_and_end() -> None:
    async with cluster(*REGIONS, pairs=ALPHABET) as (kv, store, _):
        assert dict(await kv.scan(b"", b"", 7, 100)) == ALPHABET
        assert [key for key, _ in await kv.scan(b"e", b"q", 7, 100)] == [
            bytes([it]) for it in b"efghijklmnop"
        ]
        assert [key for key, _ in await kv.scan(b"e", b"", 7, 4)] == [b"e", b"f", b"g", b"h"]
        store.requests.clear()
        assert [key for key, _ in await kv.scan(b"a", b"g", 7, 100)] == [
            bytes([it]) for it in b"abcdef"
        ]
        assert len(store.requests) == 1


async def test_a_batch_is_one_request_a_region_and_only_the_moved_part_is_repeated() -> None:
    split = (region(2, b"g", b"j", version=2), region(4, b"j", b"n", version=2))

    def moved(request: Any) -> Any:
        if request.context.region_id == 2 and request.context.region_epoch.version == 1:
            error = errorpb.Error(epoch_not_match=errorpb.EpochNotMatch(current_regions=split))
            return kvrpcpb.BatchGetResponse(region_error=error)
        return None

    async with cluster(*REGIONS, pairs=ALPHABET) as (kv, store, _):
        store.script = moved
        assert await kv.batch_get([b"a", b"h", b"k", b"z", b"0"], 7) == {
            key: ALPHABET[key] for key in (b"a", b"h", b"k", b"z")
        }
        asked = sorted(
            (request.context.region_id, tuple(request.keys)) for request in store.requests
        )
        assert asked == [
            (1, (b"0", b"a")),
            (2, (b"h",)),
            (2, (b"h", b"k")),
            (3, (b"z",)),
            (4, (b"k",)),
        ]


async def test_locks_of_all_regions_come_in_one_error_and_a_conflict_comes_first() -> None:
    def locked(request: Any) -> Any:
        keys = [mutation.key for mutation in request.mutations]
        return kvrpcpb.PrewriteResponse(
            errors=[
                kvrpcpb.KeyError(locked=kvrpcpb.LockInfo(key=key, lock_version=5)) for key in keys
            ]
        )

    mutations = [kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=b"v") for key in (b"a", b"h")]
    async with cluster(*REGIONS) as (kv, store, _):
        store.script = locked
        with pytest.raises(LockedError) as caught:
            await kv.prewrite(mutations, primary=b"a", start_version=9, lock_ttl_ms=1)
        assert sorted(lock.key for lock in caught.value.locks) == [b"a", b"h"]

        def conflicting(request: Any) -> Any:
            if request.context.region_id == 1:
                return locked(request)
            conflict = kvrpcpb.WriteConflict(start_ts=9, conflict_commit_ts=12, key=b"h")
            return kvrpcpb.PrewriteResponse(errors=[kvrpcpb.KeyError(conflict=conflict)])

        store.script = conflicting
        with pytest.raises(WriteConflictError) as conflict:
            await kv.prewrite(mutations, primary=b"a", start_version=9, lock_ttl_ms=1)
        assert conflict.value.conflict_commit_ts == 12


async def test_cancelling_a_caller_ends_its_retries() -> None:
    async with cluster(WHOLE, timeout_s=30) as (kv, _, table):
        table.address = "127.0.0.1:1"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await kv.get(b"k", 7)


async def test_a_read_of_many_keys_tells_all_locks_though_the_answer_tells_the_first_once_more() -> (
    None
):
    locked = [kvrpcpb.KeyError(locked=kvrpcpb.LockInfo(key=key)) for key in (b"a", b"b")]
    answer = kvrpcpb.BatchGetResponse(
        error=locked[0], pairs=[kvrpcpb.KvPair(error=error) for error in locked]
    )
    async with cluster(WHOLE) as (kv, store, _):
        store.script = once(lambda: answer)
        with pytest.raises(LockedError) as caught:
            await kv.batch_get([b"a", b"b"], 7)
    assert [lock.key for lock in caught.value.locks] == [b"a", b"b"]
