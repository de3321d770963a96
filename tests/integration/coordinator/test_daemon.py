"""The coordinator as a process: what kill -9 cannot take, and how it fails to start."""

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kvproto import pdpb_pb2, pdpb_pb2_grpc

from server.rpc.pd import AlreadyBootstrappedError, NotBootstrappedError, PdClient, PdRefusedError
from tests.integration.coordinator.topology import a_region, a_store

NEVER_S = (1 << 63) - 1
Refused = Callable[..., subprocess.CompletedProcess[str]]


async def test_kill_9_takes_nothing_back(start: Any, tmp_path: Path) -> None:
    metadata = f"leveldb:{tmp_path}"
    last, last_id, cluster_id = 0, 0, 0
    for round_ in range(4):
        coordinator = start(metadata)
        async with PdClient.open(coordinator.address) as pd:
            assert cluster_id in (0, pd.cluster_id)
            cluster_id = pd.cluster_id
            taken = await asyncio.gather(*(pd.tso(100) for _ in range(200)))
            assert min(taken) - 100 >= last
            assert len(set(taken)) == 200
            last = max(taken)
            new_id = await pd.alloc_id()
            assert new_id > last_id
            last_id = new_id
            if not round_:
                await pd.bootstrap(a_store(), a_region())
                await pd.update_service_gc_safe_point("ticdc-a", 3600, 50)
                await pd.update_service_gc_safe_point("gc_worker", NEVER_S, 80)
                assert await pd.update_gc_safe_point(100) == 50
            assert await pd.gc_safe_point() == 50
            minimum = await pd.update_service_gc_safe_point("late", 60, 20)
            assert (minimum.service_id, minimum.safe_point) == ("ticdc-a", 50)
            assert (await pd.region(b"any")).address == "127.0.0.1:20160"
        coordinator.kill()


async def test_over_a_real_etcd_the_next_leader_continues_above_the_last(
    start: Any, etcd: str
) -> None:
    metadata = f"etcd://{etcd}"
    first = start(metadata)
    async with PdClient.open(first.address) as pd:
        last = await pd.tso()
        cluster_id = pd.cluster_id
    first.kill()
    second = await asyncio.to_thread(start, metadata)
    async with PdClient.open(second.address) as pd:
        assert pd.cluster_id == cluster_id
        assert await pd.tso() > last


async def test_requests_are_checked_for_cluster_and_bootstrap(start: Any, tmp_path: Path) -> None:
    coordinator = start(f"leveldb:{tmp_path}")
    async with (
        PdClient.open(coordinator.address) as pd,
        grpc.aio.insecure_channel(coordinator.address) as channel,
    ):
        with pytest.raises(NotBootstrappedError):
            await pd.gc_safe_point()
        with pytest.raises(NotBootstrappedError):
            await pd.region(b"")
        stub = pdpb_pb2_grpc.PDStub(channel)
        wrong = pdpb_pb2.RequestHeader(cluster_id=5)
        for method, request in [
            (stub.GetGCSafePoint, pdpb_pb2.GetGCSafePointRequest(header=wrong)),
            (stub.UpdateServiceGCSafePoint, pdpb_pb2.UpdateServiceGCSafePointRequest(header=wrong)),
            (stub.GetAllStores, pdpb_pb2.GetAllStoresRequest(header=wrong)),
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await method(request)
            assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert refused.value.details() == f"mismatch cluster id, need {pd.cluster_id} but got 5"
        stream = stub.Tso()
        await stream.write(pdpb_pb2.TsoRequest(header=wrong, count=1))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_regions_follow_reports_and_splits(start: Any, tmp_path: Path) -> None:
    coordinator = start(f"leveldb:{tmp_path}")
    async with PdClient.open(coordinator.address) as pd:
        await pd.bootstrap(a_store(), a_region())
        with pytest.raises(AlreadyBootstrappedError):
            await pd.bootstrap(a_store(), a_region())
        (split,) = await pd.ask_batch_split(a_region(), 1)
        assert len(split.new_peer_ids) == 1
        left, right = a_region(split.new_region_id, b"", b"m", 2), a_region(2, b"m", b"", 2)
        await pd.report_batch_split([left, right])
        with pytest.raises(PdRefusedError, match="region is stale: region id: 2 "):
            await pd.region_heartbeat([a_region(), left, right])
        assert [route.region.id for route in await pd.scan_regions(b"")] == [left.id, 2]
        assert (await pd.region(b"z")).region.start_key == b"m"
        assert (await pd.region_by_id(left.id)).leader.id == left.peers[0].id
        query = (await pd._members.leader()).QueryRegion()
        await query.write(
            pdpb_pb2.QueryRegionRequest(
                header=pd._header, keys=[b"a", b"z"], prev_keys=[b"z", b"a"], ids=[404]
            )
        )
        answer = await query.read()
        assert (list(answer.key_id_map), list(answer.prev_key_id_map)) == (
            [left.id, 2],
            [left.id, 0],
        )
        assert set(answer.regions_by_id) == {left.id, 2}
        query.cancel()
    coordinator.process.send_signal(signal.SIGTERM)
    assert coordinator.process.wait(60) == 0
    again = start(f"leveldb:{tmp_path}")
    async with PdClient.open(again.address) as pd:
        assert [route.region.id for route in await pd.scan_regions(b"")] == [left.id, 2]


async def test_metrics_tell_safepoints_and_timestamps(start: Any, tmp_path: Path) -> None:
    coordinator = start(f"leveldb:{tmp_path}")
    async with PdClient.open(coordinator.address) as pd:
        await pd.bootstrap(a_store(), a_region())
        await pd.tso(5)
        await pd.update_service_gc_safe_point("ticdc-a", 3600, 50)
        await pd.update_service_gc_safe_point("gc_worker", NEVER_S, 80)

    def scrape() -> str:
        with urllib.request.urlopen(f"http://{coordinator.http}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    text = await asyncio.to_thread(scrape)
    assert "tidemark_coordinator_tso_total 5.0" in text
    assert 'tidemark_gcsafepoint_service_safe_point_ts{service="ticdc-a"} 50.0' in text
    assert "tidemark_gcsafepoint_min_service_safe_point_ts 50.0" in text
    assert "tidemark_gcsafepoint_txn_safe_point_ts 50.0" in text


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not installed")
async def test_grpcurl_needs_no_proto_files(start: Any, tmp_path: Path) -> None:
    coordinator = start(f"leveldb:{tmp_path}")

    def grpcurl(*arguments: str) -> str:
        done = subprocess.run(
            ["grpcurl", "-plaintext", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    async with PdClient.open(coordinator.address) as pd:
        await pd.bootstrap(a_store(), a_region())
        services = (await asyncio.to_thread(grpcurl, coordinator.address, "list")).split()
        assert {"pdpb.PD", "etcdserverpb.KV", "meta_storagepb.MetaStorage"} <= set(services)
        header = {"header": {"cluster_id": str(pd.cluster_id)}}
        answer = await asyncio.to_thread(
            grpcurl, "-d", json.dumps(header), coordinator.address, "pdpb.PD/GetGCSafePoint"
        )
        assert json.loads(answer.replace("clusterId", "cluster_id")) == header


def test_a_busy_port_is_one_clear_error(refused: Refused, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        addr = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = refused("--addr", addr, "--metadata", f"leveldb:{tmp_path}")
    assert_one_error(ended, "ErrPortInUse", addr)


def test_a_directory_that_cannot_be_made_is_one_clear_error(
    refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    ended = refused("--addr", "127.0.0.1:0", "--metadata", f"leveldb:{tmp_path / 'file' / 'data'}")
    assert_one_error(ended, "ErrDataDirUnusable", str(tmp_path))


def test_a_corrupt_database_is_one_clear_error(
    start: Any, refused: Refused, tmp_path: Path
) -> None:
    start(f"leveldb:{tmp_path}").kill()
    for manifest in tmp_path.glob("MANIFEST-*"):
        manifest.write_bytes(b"\x00garbage" * 20)
    ended = refused("--addr", "127.0.0.1:0", "--metadata", f"leveldb:{tmp_path}")
    assert_one_error(ended, "ErrDatabaseCorrupt", str(tmp_path))


def test_a_directory_in_use_is_one_clear_error(
    start: Any, refused: Refused, tmp_path: Path
) -> None:
    start(f"leveldb:{tmp_path}")
    ended = refused("--addr", "127.0.0.1:0", "--metadata", f"leveldb:{tmp_path}")
    assert_one_error(ended, "ErrDataDirLocked", str(tmp_path))


def test_another_cluster_id_than_the_stored_one_is_one_clear_error(
    start: Any, refused: Refused, tmp_path: Path
) -> None:
    start(f"leveldb:{tmp_path}").kill()
    ended = refused(
        "--addr", "127.0.0.1:0", "--metadata", f"leveldb:{tmp_path}", "--cluster-id", "42"
    )
    assert_one_error(ended, "ErrClusterIdMismatch", "not 42")


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--metadata", "mysql://somewhere"), "ErrMetadataUrl"),
        (("--addr", "0.0.0.0:0"), "ErrConfigInvalid"),
    ],
)
def test_settings_that_cannot_work_are_one_clear_error(
    refused: Refused, flags: tuple[str, ...], code: str
) -> None:
    assert_one_error(refused(*flags), code, flags[1])


def assert_one_error(ended: subprocess.CompletedProcess[str], code: str, text: str) -> None:
    shown = [line for line in ended.stderr.splitlines() if line and not line.startswith("{")]
    assert ended.returncode == 1, ended.stderr
    assert len(shown) == 1, ended.stderr
    assert shown[0].startswith(f"[TM:{code}] ")
    assert text in shown[0]
