"""What client-go of 2023 and 2026 asks a coordinator with a store, request by request,
as they were seen to ask it.

The Rust client itself runs in tests/integration/store/test_client.py; the Go clients cannot run
here.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from etcdpb import rpc_pb2, rpc_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvproto import (
    kvrpcpb_pb2,
    meta_storagepb_pb2,
    meta_storagepb_pb2_grpc,
    pdpb_pb2,
    tikvpb_pb2_grpc,
)

from storage.codec import encode_bytes
from storage.model.ts import compose
from tests.integration.coordinator.in_process import Pd, refusal
from tests.integration.store.daemons import Cluster, running_cluster

EVERYTHING = encode_bytes(b"")  # client-go encodes the empty start key, too
NULL_KEYSPACE = 0xFFFFFFFF


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Coordinator and store, kept for the module."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@asynccontextmanager
async def asked(cluster: Cluster) -> AsyncIterator[Pd]:
    async with grpc.aio.insecure_channel(cluster.coordinator.addr) as channel:
        members = await Pd(channel, 0).stub.GetMembers(pdpb_pb2.GetMembersRequest())
        yield Pd(channel, members.header.cluster_id)


async def test_a_client_of_2026_finds_all_it_connects_to(cluster: Cluster) -> None:
    async with asked(cluster) as pd:
        health: Any = health_pb2_grpc.HealthStub(pd.channel)
        assert (
            await health.Check(health_pb2.HealthCheckRequest())
        ).status == health_pb2.HealthCheckResponse.SERVING
        url = f"http://{cluster.coordinator.addr}"
        etcd: Any = rpc_pb2_grpc.ClusterStub(pd.channel)
        assert [
            list(one.clientURLs)
            for one in (await etcd.MemberList(rpc_pb2.MemberListRequest())).members
        ] == [[url]]
        modes = await pd.stub.GetClusterInfo(pdpb_pb2.GetClusterInfoRequest())
        assert list(modes.serviceModes) == [pdpb_pb2.PD_SVC_MODE]
        registry = f"/ms/{pd.cluster_id}/router/registry/".encode()
        door: Any = meta_storagepb_pb2_grpc.MetaStorageStub(pd.channel)
        found = await door.Get(
            meta_storagepb_pb2.GetRequest(key=registry, range_end=registry[:-1] + b"0")
        )
        assert (found.header.cluster_id, found.count) == (pd.cluster_id, 0)
        query = pdpb_pb2.QueryRegionRequest(header=pd.header, keys=[EVERYTHING])
        (located,) = await pd.stream("QueryRegion", [query])
        leader = located.regions_by_id[located.key_id_map[0]].leader
        told = await pd.ask("GetStore", store_id=leader.store_id)
        assert told.store.address == cluster.store.addr
        scope = pdpb_pb2.KeyspaceScope(keyspace_id=NULL_KEYSPACE)
        assert await refusal(pd.ask("GetGCState", keyspace_scope=scope)) == ("OK", "")


async def test_a_client_of_2023_finds_all_it_connects_to(cluster: Cluster) -> None:
    async with asked(cluster) as pd:
        etcd: Any = rpc_pb2_grpc.KVStub(pd.channel)
        saved = await etcd.Range(rpc_pb2.RangeRequest(key=b"/tidb/store/gcworker/saved_safe_point"))
        assert saved.count <= 1
        region = await pd.ask("GetRegion", region_key=EVERYTHING)
        assert region.leader in region.region.peers
        assert [one.address for one in (await pd.ask("GetAllStores")).stores] == [
            cluster.store.addr
        ]
        requests = [pdpb_pb2.TsoRequest(header=pd.header, count=count) for count in (1, 100, 7)]
        answers = await pd.stream("Tso", requests)
        assert [answer.count for answer in answers] == [1, 100, 7]


async def now(pd: Pd) -> int:
    newest = (await pd.ask("GetMinTS")).timestamp
    return compose(newest.physical, newest.logical)


async def get(store: Any, located: Any, key: bytes, version: int) -> kvrpcpb_pb2.GetResponse:
    context = kvrpcpb_pb2.Context(
        region_id=located.region.id, region_epoch=located.region.region_epoch, peer=located.leader
    )
    answer: kvrpcpb_pb2.GetResponse = await store.KvGet(
        kvrpcpb_pb2.GetRequest(context=context, key=key, version=version)
    )
    return answer


async def test_a_split_through_pd_reaches_the_store_and_stale_caches(cluster: Cluster) -> None:
    keys = [encode_bytes(b"g-split%d" % number) for number in range(3)]
    async with asked(cluster) as pd, grpc.aio.insecure_channel(cluster.store.addr) as channel:
        cached = await pd.ask("GetRegion", region_key=keys[0])
        answer = await pd.ask("SplitRegions", split_keys=keys, retry_limit=2)
        assert (answer.finished_percentage, len(answer.regions_id)) == (100, 3)
        for key, region_id in zip(keys, answer.regions_id, strict=True):
            found = await pd.ask("GetRegion", region_key=key)
            assert (found.region.start_key, found.region.id) == (key, region_id)
            assert await refusal(pd.ask("ScatterRegion", region_id=region_id, group="g")) == (
                "OK",
                "",
            )
            waited = await refusal(pd.ask("GetOperator", region_id=region_id))
            assert waited == ("REGION_NOT_FOUND", "Not Found")
        again = await pd.ask("SplitAndScatterRegions", split_keys=keys, retry_limit=1)
        assert list(again.regions_id) == list(answer.regions_id)
        store: Any = tikvpb_pb2_grpc.TikvStub(channel)
        stale = await get(store, cached, b"g-split1", await now(pd))
        assert {one.id for one in stale.region_error.epoch_not_match.current_regions} & set(
            answer.regions_id
        )
        fresh = await get(
            store, await pd.ask("GetRegion", region_key=keys[1]), b"g-split1", await now(pd)
        )
        assert fresh.not_found


async def test_client_gos_gc_goes_through(cluster: Cluster) -> None:
    scope = pdpb_pb2.KeyspaceScope(keyspace_id=NULL_KEYSPACE)
    async with asked(cluster) as pd, grpc.aio.insecure_channel(cluster.store.addr) as channel:
        target = await now(pd)
        advanced = await pd.ask("AdvanceTxnSafePoint", keyspace_scope=scope, target=target)
        assert (advanced.new_txn_safe_point, advanced.blocker_description) == (target, "")
        scanned = await pd.ask("ScanRegions", start_key=EVERYTHING, limit=128)
        assert len(scanned.regions) == len(scanned.region_metas) == len(scanned.leaders) > 0
        store: Any = tikvpb_pb2_grpc.TikvStub(channel)
        for one in scanned.regions:
            context = kvrpcpb_pb2.Context(
                region_id=one.region.id, region_epoch=one.region.region_epoch, peer=one.leader
            )
            locks = await store.KvScanLock(
                kvrpcpb_pb2.ScanLockRequest(context=context, max_version=target, limit=1024)
            )
            assert not locks.HasField("region_error")
        assert (await pd.ask("UpdateGCSafePoint", safe_point=target)).new_safe_point == target
        assert (await pd.ask("GetGCSafePoint")).safe_point == target
