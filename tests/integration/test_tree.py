"""`tidemark up` as an operator meets it: one ready line, reflection everywhere,
a tree that lives and dies as one.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.ports import free_port

SERVICES = {
    "coordinator": {"pdpb.PD", "etcdserverpb.KV", "etcdserverpb.Watch", "etcdserverpb.Lease"},
    "store": {"tikvpb.Tikv", "cdcpb.ChangeData"},
    "capture": {"tidemarkpb.v1.ChangefeedService", "tidemarkpb.v1.CaptureService"},
    "pump": {"binlog.Pump"},
    "gc_worker": {"tidemarkpb.v1.GCService"},
}
LISTENERS = ("coordinator", "store", "capture", "flight", "pump", "gc-worker", "http")

pytestmark = pytest.mark.timeout(400)


@asynccontextmanager
async def tree(data: Path, *ports: str) -> AsyncIterator[tuple[Process, dict]]:
    flags = ports or [part for name in LISTENERS for part in (f"--{name}-addr", "127.0.0.1:0")]
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "server.cli.main",
            "up",
            "--no-spark",
            "--data-dir",
            str(data),
            *flags,
        ),
        stdout=PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(200):
            yield process, json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # asyncio leaves the pipe of a killed child open


def metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        return answer.read().decode()


def services(address: str) -> set[str]:
    with grpc.insecure_channel(address) as channel:
        return set(ProtoReflectionDescriptorDatabase(channel).get_services())


async def test_every_daemon_lists_its_services_and_sigterm_ends_the_tree_with_zero(tmp_path):
    async with tree(tmp_path) as (process, ready):
        assert ready["ready"] is True
        assert ready["cluster_id"] > 0
        for name, expected in SERVICES.items():
            found = await asyncio.to_thread(services, ready["endpoints"][name])
            assert expected | {"grpc.health.v1.Health"} <= found, name
        assert 'tidemark_up_alive{daemon="capture"} 1.0' in await asyncio.to_thread(
            metrics, ready["endpoints"]["http"]
        )
        for name in SERVICES:
            own = await asyncio.to_thread(metrics, ready["endpoints"][f"{name}_http"])
            assert "process_start_time_seconds" in own, name
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_the_descriptors_that_reflection_gives_are_complete(tmp_path):
    async with tree(tmp_path) as (_, ready):
        with grpc.insecure_channel(ready["endpoints"]["coordinator"]) as channel:
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            method = pool.FindServiceByName("pdpb.PD").FindMethodByName("GetGCSafePoint")
        assert method.output_type.fields_by_name["safe_point"].number == 2


async def test_doctor_finds_nothing_wrong_with_a_new_cluster_and_says_what_does_not_answer(
    tmp_path,
):
    async def doctor(*flags: str) -> tuple[int, str]:
        command = (sys.executable, "-m", "server.cli.main", "cli", *flags, "doctor")
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    async with tree(tmp_path) as (_, ready):
        capture, coordinator = ready["endpoints"]["capture"], ready["endpoints"]["coordinator"]
        status, said = await doctor("--server", capture, "--pd", coordinator)
        assert (status, said) == (0, "nothing is wrong; there are no changefeeds\n")
        nobody = f"127.0.0.1:{free_port()}"
        status, said = await doctor("--server", nobody, "--pd", coordinator)
        assert status == 1
        assert "PROBLEM captures: [TM:ErrCaptureUnavailable]" in said


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not installed")
async def test_grpcurl_asks_for_the_safe_point_without_proto_files(tmp_path):
    async with tree(tmp_path) as (_, ready):
        command = (
            "grpcurl",
            "-plaintext",
            ready["endpoints"]["coordinator"],
            "pdpb.PD/GetGCSafePoint",
        )
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert str(ready["cluster_id"]) in json.loads(done.stdout)["header"].values()


async def test_kill_9_of_the_root_leaves_no_daemon_and_the_same_cluster_comes_back(tmp_path):
    ports = [part for name in LISTENERS for part in (f"--{name}-addr", f"127.0.0.1:{free_port()}")]
    async with tree(tmp_path, *ports) as (process, ready):
        process.kill()
        await process.wait()
        async with asyncio.timeout(60):
            while any(str(tmp_path) in _command(pid) for pid in daemons()):  # noqa: ASYNC110 - not our children
                await asyncio.sleep(0.01)
    async with tree(tmp_path, *ports) as (_, back):
        assert back["cluster_id"] == ready["cluster_id"]
        assert back["endpoints"] == ready["endpoints"]


async def test_a_daemon_that_is_killed_is_started_again_where_it_was(tmp_path):
    async with tree(tmp_path) as (_, ready):
        store = ready["endpoints"]["store"]
        pids = [pid for pid in daemons() if _serves(pid, str(tmp_path / "store"))]
        assert len(pids) == 1
        os.kill(pids[0], signal.SIGKILL)
        async with asyncio.timeout(120):
            while True:
                try:
                    found = await asyncio.to_thread(services, store)
                except grpc.RpcError:
                    continue
                if "tikvpb.Tikv" in found:
                    break


def daemons() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _serves(pid: int, directory: str) -> bool:
    return directory in _command(pid).split("\0")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
