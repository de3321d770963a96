"""A leader that was deposed without hearing of it answers nothing and writes nothing,
and follows like any other.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kvproto import pdpb_pb2
from kvproto.pdpb_pb2_grpc import PDStub

from server.rpc.pd import PdClient
from tests.integration.coordinator.clusters import Cluster, in_thread, members_of, running_cluster
from tests.integration.coordinator.load import SEED, load_on
from tests.integration.coordinator.processes import Coordinator, Etcd
from tests.ports import free_ports

NOT_LEADER = (grpc.StatusCode.UNAVAILABLE, "not leader")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("fencing")) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Three coordinators over one etcd, all healthy."""
    shared.heal()
    return shared


async def test_a_leader_stopped_past_its_lease_answers_nothing_of_what_waited_for_it(
    cluster: Cluster,
) -> None:
    leader = await in_thread(cluster.leader)
    async with (
        PdClient.open(",".join(cluster.addresses)) as pd,
        load_on(cluster.addresses, SEED) as load,
        grpc.aio.insecure_channel(leader.address) as channel,
    ):
        stub: Any = PDStub(channel)
        header = pdpb_pb2.RequestHeader(cluster_id=pd.cluster_id)
        stream = stub.Tso()
        await stream.write(pdpb_pb2.TsoRequest(header=header, count=1))
        await stream.read()
        leader.send(signal.SIGSTOP)
        await stream.write(pdpb_pb2.TsoRequest(header=header, count=1))
        update = pdpb_pb2.UpdateServiceGCSafePointRequest(
            header=header, service_id=b"ticdc-default-late", TTL=600, safe_point=(1 << 62)
        )
        waiting = [
            stub.GetGCSafePoint(pdpb_pb2.GetGCSafePointRequest(header=header)),
            stub.AllocID(pdpb_pb2.AllocIDRequest(header=header)),
            stub.UpdateServiceGCSafePoint(update),
            stub.Tso(iter([pdpb_pb2.TsoRequest(header=header, count=1)])).read(),
            stream.read(),
        ]
        await load.goes_on()
        leader.send(signal.SIGCONT)
        assert [await status(call) for call in waiting] == [NOT_LEADER] * len(waiting)
        await load.goes_on()
    assert leader.running
    assert "ticdc-default-late" not in await in_thread(
        cluster.etcd[0].ctl, "get", "--prefix", "/pd", "--keys-only"
    )


async def test_a_leader_whose_key_is_deleted_ends_its_streams_and_may_lead_again(
    cluster: Cluster,
) -> None:
    leader = await in_thread(cluster.leader)
    cluster_id = members_of(leader.address).cluster_id
    async with grpc.aio.insecure_channel(leader.address) as channel:
        stub: Any = PDStub(channel)
        header = pdpb_pb2.RequestHeader(cluster_id=cluster_id)
        stamps, heartbeats = stub.Tso(), stub.RegionHeartbeat()
        await stamps.write(pdpb_pb2.TsoRequest(header=header, count=1))
        await stamps.read()
        await heartbeats.wait_for_connection()
        for other in cluster.followers:
            other.kill()
        await in_thread(cluster.etcd[0].ctl, "del", f"/pd/{cluster_id}/leader")
        assert [await status(call.read()) for call in (stamps, heartbeats)] == [NOT_LEADER] * 2
        assert await in_thread(cluster.leader) is leader
        assert leader.running


async def test_followers_refuse_with_the_leaders_address_and_pass_on_what_names_it(
    cluster: Cluster,
) -> None:
    leader, follower = await in_thread(lambda: (cluster.leader(), cluster.followers[0]))
    async with grpc.aio.insecure_channel(follower.address) as channel:
        stub: Any = PDStub(channel)
        header = pdpb_pb2.RequestHeader(cluster_id=members_of(leader.address).cluster_id)
        request = pdpb_pb2.AllocIDRequest(header=header)
        with pytest.raises(
            grpc.aio.AioRpcError, match=f"not leader; the leader is http://{leader.address}"
        ):
            await stub.AllocID(request)
        named = (("pd-forwarded-host", f"http://{leader.address}"),)
        assert (await stub.AllocID(request, metadata=named)).id > 0
        stream = stub.Tso(metadata=named)
        for count in (1, 7):
            await stream.write(pdpb_pb2.TsoRequest(header=header, count=count))
            assert (await stream.read()).count == count
        stream.cancel()
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"203\.0\.113\.1:1 is no coordinator of this cluster"
        ):
            await stub.AllocID(request, metadata=(("pd-forwarded-host", "203.0.113.1:1"),))
        with pytest.raises(grpc.aio.AioRpcError, match="not leader"):
            await stub.AllocID(request, metadata=(("pd-forwarded-host", follower.address),))


async def test_everybody_is_listed_and_names_the_same_leader(cluster: Cluster) -> None:
    async with asyncio.timeout(60):
        while True:
            views = [await in_thread(members_of, address) for address in cluster.addresses]
            leaders = {view.leader for view in views}
            if (
                all(view.members == sorted(cluster.addresses) for view in views)
                and len(leaders) == 1
            ):
                break
    assert leaders <= {"", *cluster.addresses}


async def test_a_coordinator_that_starts_before_etcd_waits_says_so_and_then_leads(
    tmp_path: Path,
) -> None:
    etcd_port, peer_port, port = free_ports(3)
    etcd = Etcd("etcd", (etcd_port, peer_port), {"etcd": peer_port}, tmp_path)
    coordinator = Coordinator(
        f"127.0.0.1:{port}", f"etcd://{etcd.address}", tmp_path / "coordinator.log"
    )
    try:
        coordinator.launch()
        await in_thread(wait_logged, coordinator, "waiting for the metadata")
        await in_thread(etcd.start)
        assert await in_thread(Cluster([etcd], [coordinator]).leader) is coordinator
        coordinator.send(signal.SIGTERM)
        assert await in_thread(coordinator.wait) == 0
    finally:
        coordinator.kill()
        etcd.kill()


def wait_logged(coordinator: Coordinator, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in coordinator.log:
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def status(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """How a call failed: its status, and the first words of its text."""
    try:
        return grpc.StatusCode.OK, str(await call)
    except grpc.aio.AioRpcError as err:
        return err.code(), (err.details() or "").partition(";")[0]
