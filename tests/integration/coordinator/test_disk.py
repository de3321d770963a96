"""A full disk at etcd: what cannot be kept is not promised, what is known is told,
and room makes all well again.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvproto import pdpb_pb2
from kvproto.pdpb_pb2_grpc import PDStub

from tests.integration.coordinator.clusters import Cluster, in_thread, members_of, running_cluster
from tests.integration.coordinator.load import SEED, load_on
from tests.integration.coordinator.namespaces import Namespace, namespace
from tests.integration.coordinator.processes import Etcd


async def test_at_etcds_quota_writes_are_refused_with_what_to_do_and_reads_go_on(
    tmp_path: Path,
) -> None:
    with running_cluster(tmp_path, settings={"quota-backend-bytes": 4 << 20}) as cluster:
        leader = await in_thread(cluster.leader)
        async with load_on(cluster.addresses, SEED) as load:
            await in_thread(fill, cluster.etcd[0])
            assert "etcdctl alarm disarm" in await in_thread(wait_refused, leader.address)
            assert await in_thread(cluster.leader) is leader  # its lease needs no room
            now_s = time.monotonic()
            async with asyncio.timeout(60):
                while load.safe_points[-1].sent_s < now_s:  # noqa: ASYNC110 - reads go on
                    await asyncio.sleep(0.01)
            await in_thread(make_room, cluster.etcd[0])
            await load.goes_on()
        assert await in_thread(cluster.leader) is leader


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
async def test_an_etcd_that_dies_of_its_full_disk_loses_nothing(tmp_path: Path) -> None:
    # etcd sets 144 MiB aside at its start
    with small_disk(tmp_path / "disk", "180m") as disk, running_on(disk, tmp_path) as cluster:
        (etcd,) = cluster.etcd
        async with load_on(cluster.addresses, SEED) as load:
            await in_thread(fill_disk, disk, etcd, tmp_path / "disk")
            await in_thread(cluster.wait_until_nobody_leads)
            disk.run("rm", str(tmp_path / "disk" / "junk"))
            await in_thread(etcd.start)
            await load.goes_on()


def fill(etcd: Etcd) -> None:
    """Put until etcd raises its alarm."""
    for number in range(64):
        try:
            put(etcd, f"junk{number}")
        except subprocess.CalledProcessError as err:
            if b"database space exceeded" in err.stderr:
                return
    raise AssertionError("the quota was never reached")


def put(etcd: Etcd, key: str) -> None:
    command = ["etcdctl", "--endpoints", etcd.address, "--command-timeout", "10s", "put", key]
    subprocess.run(command, input=b"x" * 1_000_000, check=True, capture_output=True, timeout=60)


def wait_refused(address: str) -> str:
    """How the leader refuses a write once timestamps have run out, too."""
    header = pdpb_pb2.RequestHeader(cluster_id=members_of(address).cluster_id)
    request = pdpb_pb2.UpdateServiceGCSafePointRequest(
        header=header, service_id=b"x", TTL=1, safe_point=1 << 62
    )
    with grpc.insecure_channel(address) as channel:
        stub: Any = PDStub(channel)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                next(stub.Tso(iter([pdpb_pb2.TsoRequest(header=header, count=1)]), timeout=2))
            except grpc.RpcError:
                break
            time.sleep(0.1)
        with pytest.raises(grpc.RpcError) as refused:
            stub.UpdateServiceGCSafePoint(request, timeout=30)
    failed: Any = refused.value
    assert failed.code() == grpc.StatusCode.UNAVAILABLE
    return str(failed.details())


def make_room(etcd: Etcd) -> None:
    etcd.ctl("del", "--prefix", "junk")
    revision = (
        etcd.ctl("endpoint", "status", "--write-out", "fields").split('"Revision" : ')[1].split()[0]
    )
    etcd.ctl("compact", revision, "--physical")
    etcd.ctl("defrag")
    etcd.ctl("alarm", "disarm")


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Namespace]:
    """A file system of that size at `directory`, for processes inside only."""
    directory.mkdir()
    with namespace("mnt") as space:
        space.run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory))
        yield space


@contextmanager
def running_on(disk: Namespace, directory: Path) -> Iterator[Cluster]:
    with running_cluster(
        directory, inside=disk.inside, settings={"data-dir": directory / "disk" / "etcd"}
    ) as cluster:
        yield cluster


def fill_disk(disk: Namespace, etcd: Etcd, directory: Path) -> None:
    """Leave no room, and write until etcd needs some."""
    subprocess.run(
        [*disk.inside, "dd", "if=/dev/zero", f"of={directory}/junk", "bs=64k"],
        check=False,
        capture_output=True,
    )
    for number in range(64):
        if not etcd.running:
            return
        try:
            put(etcd, f"junk{number}")
        except subprocess.CalledProcessError:
            time.sleep(0.1)
    raise AssertionError("etcd never needed more room")
