"""Crashes lose nothing that was answered; what cannot work says so in one line."""

import asyncio
import socket
from pathlib import Path

import grpc.aio
import pytest

from storage.model.errors import TidemarkError
from tests.integration.store.daemons import failed, running_cluster, start
from tests.integration.store.stubs import Stubs, row_key, stubs_of


async def _write_until_killed(stubs: Stubs, worker: int, answered: dict[bytes, bytes]) -> None:
    number = 0
    while True:
        number += 1
        key = row_key(101, worker * 100_000 + number)
        try:
            await stubs.put(key, b"%d" % number)
        except (grpc.aio.AioRpcError, TidemarkError):
            return
        answered[key] = b"%d" % number


async def test_a_killed_store_comes_back_as_itself_with_all_it_answered(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        answered: dict[bytes, bytes] = {}
        async with stubs_of(cluster) as stubs:
            (before,) = await stubs.pd.stores()
            orphan = await stubs.prewrite(row_key(102, 1), b"v")
            async with asyncio.TaskGroup() as tasks:
                for worker in range(4):
                    tasks.create_task(_write_until_killed(stubs, worker, answered))
                await asyncio.sleep(1.0)
                cluster.store.kill()
        assert len(answered) > 20
        cluster.restart_store()
        async with stubs_of(cluster) as stubs:
            (after,) = await stubs.pd.stores()
            assert (after.id, len(await stubs.pd.scan_regions(b""))) == (before.id, 4)
            for key, value in answered.items():
                assert (await stubs.get(key)).value == value
            assert (await stubs.get(row_key(102, 1))).error.locked.lock_version == orphan


def test_a_stopped_store_drains_and_ends_with_status_0(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        assert cluster.store.stop() == 0


def test_a_data_directory_of_another_cluster_is_refused(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        cluster.store.stop()
        other = start("coordinator", "--addr", "127.0.0.1:0", "--metadata", f"leveldb:{tmp_path / 'other'}")
        try:
            status, line = failed(
                "store", "--addr", "127.0.0.1:0", "--coordinator", other.addr, "--data-dir", str(tmp_path / "store")
            )
        finally:
            other.kill()
    assert status == 1
    assert line.startswith("[TM:ErrClusterMismatch]")
    assert "--data-dir" in line


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "another"


def test_what_cannot_be_used_is_named(tmp_path: Path, data_dir: Path) -> None:
    with running_cluster(tmp_path) as cluster, socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--coordinator", cluster.coordinator.addr]
        here = ["--addr", "127.0.0.1:0"]
        busy = failed("store", *flags, "--addr", f"127.0.0.1:{taken.getsockname()[1]}", "--data-dir", str(data_dir))
        locked = failed("store", *flags, *here, "--data-dir", str(tmp_path / "store"))
        (tmp_path / "file").touch()
        unusable = failed("store", *flags, *here, "--data-dir", str(tmp_path / "file"))
        hexless = failed("store", *flags, *here, "--data-dir", str(data_dir), "--split-keys", "xyz")
    for (status, line), code in (
        (busy, "ErrPortInUse"),
        (locked, "ErrDataDirLocked"),
        (unusable, "ErrDataDirUnusable"),
        (hexless, "ErrConfigInvalid"),
    ):
        assert (status, line.split("]")[0]) == (1, f"[TM:{code}"), line
        assert "\n" not in line


def test_a_corrupt_database_is_refused(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        cluster.store.stop()
        for manifest in (tmp_path / "store" / "mvcc").glob("MANIFEST-*"):
            manifest.write_bytes(b"garbage")
        status, line = failed("store", *cluster.store.arguments)
    assert status == 1
    assert line.startswith("[TM:ErrDatabaseCorrupt]")


def test_an_absent_coordinator_is_named(tmp_path: Path) -> None:
    status, line = failed(
        "store", "--addr", "127.0.0.1:0", "--coordinator", "127.0.0.1:1", "--data-dir", str(tmp_path / "store")
    )
    assert status == 1
    assert line.startswith("[TM:ErrCoordinatorUnavailable]")
