"""The worker's cluster over a store that answers what a test tells it, through real sockets."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kvproto import errorpb_pb2 as errorpb
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import metapb_pb2 as metapb
from kvproto import tikvpb_pb2 as tikvpb

from gcsafepoint.worker.cluster import LowestService, SafePointDecreasesError
from gcsafepoint.worker.do_gc import CollectUnsupportedError
from gcsafepoint.worker.records import Record
from server.gc_worker.cluster import TikvCluster, lowest_service
from server.rpc.pd import MinSafePoint, PdRefusedError
from server.rpc.region_cache import RegionRoute
from server.rpc.region_router import StoreRefusedError
from server.rpc.server import RpcServer
from server.rpc.tikv import KvClient
from storage.codec import encode_bytes
from storage.model.errors import CorruptError
from storage.model.span import KeyRange
from storage.model.ts import MAX_TS, compose

BORDERS = [b"", *(encode_bytes(b"%03d" % number) for number in range(1, 300)), b""]
REGIONS = [
    metapb.Region(
        id=index + 1,
        start_key=start,
        end_key=end,
        peers=[metapb.Peer(id=1, store_id=1 + index % 2)],
    )
    for index, (start, end) in enumerate(itertools.pairwise(BORDERS))
]


class Coordinator:
    """Three hundred regions led by two stores, both at one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.held: list[tuple[str, int, int]] = []
        self.refusal = ""
        self.unreported: set[int] = set()

    def _route(self, region: metapb.Region) -> RegionRoute:
        return RegionRoute(region, region.peers[0], self.address)

    async def region(self, key: bytes) -> RegionRoute:
        return self._route(
            next(
                it for it in REGIONS if it.start_key <= key and (not it.end_key or key < it.end_key)
            )
        )

    async def scan_regions(
        self, start_key: bytes, end_key: bytes = b"", limit: int = 128
    ) -> list[RegionRoute]:
        known = [it for it in REGIONS if it.id not in self.unreported]
        return [self._route(it) for it in known if not it.end_key or it.end_key > start_key][:limit]

    async def stores(self) -> list[metapb.Store]:
        return [metapb.Store(id=number, address=self.address) for number in (1, 2)]

    cluster_id = 7

    async def tso(self) -> int:
        return compose(1_000_000)

    async def update_service_gc_safe_point(
        self, service_id: str, ttl_s: int, safe_point: int
    ) -> MinSafePoint:
        if self.refusal:
            raise PdRefusedError(self.refusal)
        self.held.append((service_id, ttl_s, safe_point))
        return MinSafePoint("ticdc-default-feed", 60, 7)


class Store:
    """Locks on two keys of the first region; `moved` answers ResolveLock with a region error."""

    def __init__(self) -> None:
        self.moved = False
        self.asked: list[Any] = []

    async def KvScanLock(self, request: kvrpcpb.ScanLockRequest, _: Any) -> Any:
        self.asked.append(request)
        locks = [
            kvrpcpb.LockInfo(key=b"000", lock_version=5, primary_lock=b"000"),
            kvrpcpb.LockInfo(key=b"0001", lock_version=6, lock_type=kvrpcpb.PessimisticLock),
        ]
        return kvrpcpb.ScanLockResponse(locks=locks if request.start_key == b"" else [])

    async def KvResolveLock(self, request: kvrpcpb.ResolveLockRequest, _: Any) -> Any:
        self.asked.append(request)
        error = errorpb.Error(epoch_not_match=errorpb.EpochNotMatch()) if self.moved else None
        return kvrpcpb.ResolveLockResponse(region_error=error)

    async def KvCheckTxnStatus(self, request: kvrpcpb.CheckTxnStatusRequest, _: Any) -> Any:
        self.asked.append(request)
        return kvrpcpb.CheckTxnStatusResponse(commit_version=9)

    async def UnsafeDestroyRange(self, request: kvrpcpb.UnsafeDestroyRangeRequest, _: Any) -> Any:
        self.asked.append(request)
        return kvrpcpb.UnsafeDestroyRangeResponse(
            error="disk full" if request.start_key == b"x" else ""
        )


class Held:
    """A metadata store with these records."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    async def read(self, prefix: str) -> dict[str, Record]:
        return {key: Record(text, 1) for key, text in self.texts.items() if key.startswith(prefix)}

    async def write(self, changes: Any, expect: Any) -> int:
        raise NotImplementedError


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[TikvCluster, Store, Coordinator]]:
    store, server = Store(), RpcServer()
    server.add_service(tikvpb.DESCRIPTOR.services_by_name["Tikv"], store)
    async with server.listen("127.0.0.1:0") as address:
        pd: Any = Coordinator(address)
        async with KvClient.open(pd) as kv:
            yield TikvCluster(pd, kv, Held()), store, pd


async def test_every_region_is_under_its_store_however_many_pages_there_are() -> None:
    async with opened() as (cluster, _, _pd):
        by_store = await cluster.ranges_by_store()
    assert sorted(by_store) == [1, 2]
    ranges = sorted(
        (it for ranges in by_store.values() for it in ranges), key=lambda it: it.start_key
    )
    assert [it.end_key for it in ranges[:-1]] == [it.start_key for it in ranges[1:]]
    assert (len(ranges), ranges[0].start_key, ranges[-1].end_key) == (300, b"", b"")


@pytest.mark.parametrize(
    "unreported", [{1}, {7, 8}, {128}, {129}, {300}, {1, 40, 300}, {*range(1, 301)}]
)
async def test_keys_of_which_the_coordinator_knows_no_region_are_not_left_out(
    unreported: set[int],
) -> None:
    """Between two reports of a split or a merge; locks there would be passed over,
    and their outcome collected.
    """
    async with opened() as (cluster, _, pd):
        pd.unreported = unreported
        by_store = await cluster.ranges_by_store()
    ranges = sorted(
        (it for ranges in by_store.values() for it in ranges), key=lambda it: it.start_key
    )
    assert [it.end_key for it in ranges[:-1]] == [it.start_key for it in ranges[1:]]
    assert (ranges[0].start_key, ranges[-1].end_key) == (b"", b"")


async def test_the_safepoint_is_held_for_ever_under_the_workers_name() -> None:
    async with opened() as (cluster, _, pd):
        assert await cluster.hold_safe_point(9) == LowestService("ticdc-default-feed", 7)
        assert pd.held == [("gc_worker", 2**63 - 1, 9)]


async def test_locks_are_scanned_decided_and_resolved_as_gc_does() -> None:
    async with opened() as (cluster, store, _):
        page = await cluster.scan_locks(KeyRange(b"", b"001"), 100)
        assert [(lock.key, lock.start_ts, lock.pessimistic) for lock in page.locks] == [
            (b"000", 5, False),
            (b"0001", 6, True),
        ]
        assert page.next_key is None
        assert await cluster.decide(page.locks[0]) == 9
        assert await cluster.resolve(page, {5: 9})
    scan, status, resolve = store.asked
    assert (scan.max_version, scan.limit, scan.end_key) == (99, 1024, b"001")
    assert (status.current_ts, status.caller_start_ts, status.rollback_if_not_exist) == (
        MAX_TS,
        0,
        True,
    )
    assert [(info.txn, info.status) for info in resolve.txn_infos] == [(5, 9)]


async def test_a_region_that_moved_is_told_instead_of_raised() -> None:
    async with opened() as (cluster, store, _):
        page = await cluster.scan_locks(KeyRange(b"", b""), 100)
        assert page.next_key == b"001"
        store.moved = True
        assert not await cluster.resolve(page, {5: 9})


async def test_stores_without_kvgc_refuse_mode_central_with_what_to_do() -> None:
    async with opened() as (cluster, _, _pd):
        with pytest.raises(
            CollectUnsupportedError, match="central needs stores that take KvGC; use distributed"
        ):
            await cluster.collect(KeyRange(b"", b""), 0)


async def test_a_range_that_a_store_does_not_destroy_says_which_and_why() -> None:
    async with opened() as (cluster, _, pd):
        await cluster.destroy_range(pd.address, KeyRange(b"a", b"b"))
        with pytest.raises(
            StoreRefusedError, match=f"{pd.address} did not destroy a range: disk full"
        ):
            await cluster.destroy_range(pd.address, KeyRange(b"x", b"y"))


async def test_the_lowest_living_service_or_barrier_is_found_without_asking_anybody() -> None:
    services, barriers = "/pd/7/gc/safe_point/service/", "/pd/7/gc/global_gc_barriers/"
    held = Held()
    assert await lowest_service(held, 7, 1000) is None
    held.texts = {
        services
        + "gc_worker": '{"service_id":"gc_worker","expired_at":9223372036854775807,"safe_point":1}',
        services + "gone": '{"service_id":"gone","expired_at":999,"safe_point":2}',
        services + "feed": '{"service_id":"feed","expired_at":1000,"safe_point":4}',
        barriers + "native_br": '{"barrier_id":"native_br","barrier_ts":5}',
    }
    assert await lowest_service(held, 7, 1000) == LowestService("feed", 4)
    assert await lowest_service(held, 7, 1001) == LowestService("native_br", 5)


async def test_a_record_of_the_coordinator_that_cannot_be_read_is_named() -> None:
    for text in ("garbage", "[]", "{}", '{"service_id":"feed","safe_point":"x"}'):
        held = Held()
        held.texts = {"/pd/7/gc/safe_point/service/feed": text}
        with pytest.raises(CorruptError, match="safe_point/service/feed cannot be read"):
            await lowest_service(held, 7, 1000)


async def test_a_safepoint_behind_the_coordinators_is_told_apart_from_other_refusals() -> None:
    async with opened() as (cluster, _, pd):
        for text, error in (
            (
                "[PD:gc:ErrDecreasingTxnSafePoint]trying to update to a smaller value",
                SafePointDecreasesError,
            ),
            ("TTL of gc_worker must be infinity", PdRefusedError),
        ):
            pd.refusal = text
            with pytest.raises(error):
                await cluster.hold_safe_point(9)
