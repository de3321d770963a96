"""The coordinator's own records: not for clients to write through its port,
nor a way to stop the timestamps unseen.
"""

import asyncio
import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from etcdpb import rpc_pb2, rpc_pb2_grpc
from kvproto import meta_storagepb_pb2, meta_storagepb_pb2_grpc

from server.rpc.pd import PdClient
from tests.integration.coordinator.clusters import Cluster, in_thread
from tests.integration.coordinator.processes import Coordinator, Etcd, etcd_members
from tests.integration.coordinator.topology import a_region, a_store
from tests.ports import free_port

REFUSED = "etcdserver: permission denied: [TM:ErrMetaOwnKeys]"


@pytest.fixture(params=["native", "grpcio"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each engine in turn, for the processes that the test starts."""
    monkeypatch.setenv("TIDEMARK_RPC_RPC_ENGINE", str(request.param))
    return str(request.param)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with etcd_members(tmp_path, 1) as (member,):
        yield member


@asynccontextmanager
async def leading(
    tmp_path: Path, metadata: str, *flags: str
) -> AsyncIterator[tuple[Coordinator, str, PdClient]]:
    """A coordinator that leads a bootstrapped cluster, and its HTTP address."""
    http = f"127.0.0.1:{free_port()}"
    coordinator = Coordinator(
        f"127.0.0.1:{free_port()}",
        metadata,
        tmp_path / "coordinator.log",
        ["--http-addr", http, *flags],
    )
    coordinator.launch()
    try:
        await in_thread(Cluster([], [coordinator]).leader)
        async with PdClient.open(coordinator.address) as pd:
            await pd.bootstrap(a_store(), a_region())
            yield coordinator, http, pd
    finally:
        coordinator.kill()


def readiness(http: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{http}/readyz", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as err:
        with err:
            return err.code, err.read().decode()


async def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def refusals(address: str, cluster_id: int) -> list[tuple[str, str]]:
    """How a coordinator answers to each way of writing its keys."""
    timestamp, root = f"/pd/{cluster_id}/timestamp".encode(), f"/pd/{cluster_id}/".encode()
    delete = rpc_pb2.DeleteRangeRequest(key=timestamp)
    inner = rpc_pb2.TxnRequest(failure=[rpc_pb2.RequestOp(request_delete_range=delete)])
    async with grpc.aio.insecure_channel(address) as channel:
        kv: Any = rpc_pb2_grpc.KVStub(channel)
        lease = await rpc_pb2_grpc.LeaseStub(channel).LeaseGrant(rpc_pb2.LeaseGrantRequest(TTL=60))
        calls = [
            kv.Put(rpc_pb2.PutRequest(key=timestamp, value=b"\0" * 8)),
            kv.Put(rpc_pb2.PutRequest(key=root + b"leader", value=b"", lease=lease.ID)),
            kv.DeleteRange(delete),
            kv.DeleteRange(rpc_pb2.DeleteRangeRequest(key=root, range_end=root[:-1] + b"0")),
            kv.DeleteRange(rpc_pb2.DeleteRangeRequest(key=b"\0", range_end=b"\0")),
            kv.Txn(rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_txn=inner)])),
        ]
        found: list[tuple[str, str]] = []
        for call in calls:
            try:
                await call
                found.append(("OK", ""))
            except grpc.aio.AioRpcError as err:
                found.append((err.code().name, err.details() or ""))
        storage: Any = meta_storagepb_pb2_grpc.MetaStorageStub(channel)
        answer = await storage.Delete(meta_storagepb_pb2.DeleteRequest(key=timestamp))
        found.append(("PERMISSION_DENIED", answer.header.error.message))
    return found


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("embedded", [True, False], ids=["embedded", "etcd"])
async def test_clients_cannot_write_the_coordinators_keys_and_can_write_theirs(
    tmp_path: Path, etcd: Etcd, embedded: bool
) -> None:
    metadata = f"leveldb:{tmp_path / 'meta'}" if embedded else f"etcd://{etcd.address}"
    async with leading(tmp_path, metadata) as (coordinator, http, pd):
        before = await pd.tso()
        for status, text in await refusals(coordinator.address, pd.cluster_id):
            assert (status, text.startswith(REFUSED)) == ("PERMISSION_DENIED", True), text
        assert await pd.tso() > before
        assert readiness(http) == (200, "ready\n")
        assert (await pd.update_service_gc_safe_point("ticdc", 600, 5)).safe_point >= 0
        async with grpc.aio.insecure_channel(coordinator.address) as channel:
            kv: Any = rpc_pb2_grpc.KVStub(channel)
            for key in (
                b"/tidb/server/minstartts/a",
                b"/tidb-binlog/v1/pumps/a",
                b"/tidemark/default/gc/x",
            ):
                await kv.Put(rpc_pb2.PutRequest(key=key, value=b"1"))
                assert (await kv.DeleteRange(rpc_pb2.DeleteRangeRequest(key=key))).deleted == 1


async def test_nobody_ends_the_leaders_lease_through_its_port(tmp_path: Path, etcd: Etcd) -> None:
    async with leading(tmp_path, f"etcd://{etcd.address}") as (coordinator, _http, pd):
        shown = json.loads(etcd.ctl("get", f"/pd/{pd.cluster_id}/leader", "--write-out", "json"))
        lease = shown["kvs"][0]["lease"]
        async with grpc.aio.insecure_channel(coordinator.address) as channel:
            leases: Any = rpc_pb2_grpc.LeaseStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="ErrMetaOwnKeys"):
                await leases.LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=lease))
            mine = await leases.LeaseGrant(rpc_pb2.LeaseGrantRequest(TTL=60))
            await leases.LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=mine.ID))
            with pytest.raises(grpc.aio.AioRpcError, match="requested lease not found"):
                await leases.LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=mine.ID))


BEHIND_ITS_BACK = {
    "timestamps": ("del", "/pd/{}/timestamp"),
    "timestamps set back": ("put", "/pd/{}/timestamp", "12345678"),
    "garbage for timestamps": ("put", "/pd/{}/timestamp", "x"),
    "the copy": ("del", "/tidemark/pd/{}/timestamp"),
    "ids": ("del", "/pd/{}/alloc_id"),
    "the stores": ("del", "--prefix", "/pd/{}/raft/s/"),
    "the leader": ("del", "/pd/{}/leader"),
}


@pytest.mark.parametrize("edit", BEHIND_ITS_BACK.values(), ids=list(BEHIND_ITS_BACK))
async def test_a_leader_whose_state_changes_in_etcd_steps_down_says_why_and_goes_on(
    tmp_path: Path, etcd: Etcd, edit: tuple[str, ...]
) -> None:
    """Timestamps run ahead of the clock here, so that only the records can say how far they got."""
    async with leading(tmp_path, f"etcd://{etcd.address}") as (coordinator, http, pd):
        root = f"/pd/{pd.cluster_id}"
        for _ in range(3):
            last_id = await pd.alloc_id()
        before = await pd.tso()
        terms = coordinator.log.count('"leading"')

        etcd.ctl(*(word.format(pd.cluster_id) for word in edit))
        await wait_for(lambda: coordinator.log.count('"leading"') > terms)

        assert await pd.tso() > before
        assert await pd.alloc_id() > last_id
        await wait_for(lambda: readiness(http) == (200, "ready\n"))
        if "leader" not in edit[-1]:
            assert (
                "was deleted by somebody else" in coordinator.log
                or "was written by somebody" in coordinator.log
            )
        assert etcd.ctl("get", "--keys-only", f"{root}/timestamp").strip()
        assert etcd.ctl("get", "--keys-only", f"/tidemark{root}/timestamp").strip()
        assert coordinator.running


async def test_timestamps_ahead_of_the_clock_stay_ahead_when_their_record_is_deleted(
    tmp_path: Path, etcd: Etcd
) -> None:
    async with leading(tmp_path, f"etcd://{etcd.address}") as (coordinator, _http, pd):
        key = f"/pd/{pd.cluster_id}/timestamp"
    future_ns = time.time_ns() + 3600 * 1_000_000_000
    put_bytes(etcd, key, future_ns.to_bytes(8))
    coordinator.launch()
    try:
        await in_thread(Cluster([], [coordinator]).leader)
        async with PdClient.open(coordinator.address) as pd:
            ahead = await pd.tso()
            assert ahead >> 18 >= future_ns // 1_000_000
            terms = coordinator.log.count('"leading"')
            etcd.ctl("del", key)
            await wait_for(lambda: coordinator.log.count('"leading"') > terms)
            assert await pd.tso() > ahead
            coordinator.kill()
            etcd.ctl("del", key)
            coordinator.launch()
            await in_thread(Cluster([], [coordinator]).leader)
            assert await pd.tso() > ahead
    finally:
        coordinator.kill()


async def test_a_coordinator_without_a_record_of_its_timestamps_stops_and_says_why(
    tmp_path: Path, etcd: Etcd
) -> None:
    async with leading(tmp_path, f"etcd://{etcd.address}") as (coordinator, _http, pd):
        root = f"/pd/{pd.cluster_id}"
    etcd.ctl("del", f"{root}/timestamp")
    etcd.ctl("del", f"/tidemark{root}/timestamp")
    coordinator.launch()
    assert await in_thread(coordinator.wait) == 1
    assert f"[TM:ErrCoordinatorStateLost] {root}/timestamp and its copy" in coordinator.log


async def test_a_leader_whose_whole_metadata_is_deleted_stops_and_says_why(
    tmp_path: Path, etcd: Etcd
) -> None:
    async with leading(tmp_path, f"etcd://{etcd.address}") as (coordinator, http, _pd):
        etcd.ctl("del", "--prefix", "/")
        assert await in_thread(coordinator.wait) == 1
        assert (
            "[TM:ErrCoordinatorStateLost] /pd/cluster_id is not that of cluster" in coordinator.log
        )
        with pytest.raises(urllib.error.URLError):
            readiness(http)


async def test_readyz_tells_that_nobody_leads(tmp_path: Path, etcd: Etcd) -> None:
    async with leading(tmp_path, f"etcd://{etcd.address}") as (_coordinator, http, _pd):
        assert readiness(http)[0] == 200
        etcd.send(signal.SIGSTOP)
        await wait_for(
            lambda: (
                readiness(http)
                == (503, "no coordinator leads now; see the log of the one that did\n")
            )
        )
        etcd.send(signal.SIGCONT)
        await wait_for(lambda: readiness(http)[0] == 200)


def put_bytes(etcd: Etcd, key: str, value: bytes) -> None:
    """`etcdctl put` of any bytes."""
    command = ["etcdctl", "--endpoints", etcd.address, "put", key]
    subprocess.run(command, input=value, capture_output=True, timeout=60, check=True)
