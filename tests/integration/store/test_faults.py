"""Crashes lose nothing that was answered; what cannot work says so in one line."""

import asyncio
import socket
from pathlib import Path

import grpc.aio
import pytest

from storage.model.errors import TidemarkError
from tests.integration.store.daemons import failed, running_cluster, start
from tests.integration.store.feeds import feeding
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
                async with asyncio.timeout(60):
                    while len(answered) <= 200:  # noqa: ASYNC110 - writers tell no events
                        await asyncio.sleep(0.01)
                cluster.store.kill()
        cluster.restart_store()
        async with stubs_of(cluster) as stubs:
            (after,) = await stubs.pd.stores()
            assert (after.id, len(await stubs.pd.scan_regions(b""))) == (before.id, 4)
            for key, value in answered.items():
                assert (await stubs.get(key)).value == value
            assert (await stubs.get(row_key(102, 1))).error.locked.lock_version == orphan


async def test_a_reader_that_stops_reading_is_cut_and_can_come_back(tmp_path: Path) -> None:
    with running_cluster(tmp_path, "--feed-buffer-bytes", "500000", "--split-keys", "") as cluster:
        async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
            (route,) = await stubs.pd.scan_regions(b"")
            feed.subscribe(route)
            await feed.wait_resolved(1)
            for handle in range(60):
                await stubs.put(row_key(101, handle), bytes(200_000))
            while not feed.errors:
                await feed.step()
            assert feed.errors[0].error.congested.region_id == route.region.id
            checkpoint_ts = feed.regions[route.region.id].resolved_ts
            assert len(feed.committed) < 60
            feed.subscribe(route, checkpoint_ts)
            await feed.wait_resolved(await stubs.pd.tso())
            told = {row[2] for row in feed.committed}
            assert told == {row_key(101, handle) for handle in range(60)}


async def test_a_feed_goes_on_from_its_resolved_ts_after_the_store_was_killed(
    tmp_path: Path,
) -> None:
    with running_cluster(tmp_path) as cluster:
        answered: dict[bytes, bytes] = {}
        committed: set[tuple[int, bytes, bytes]] = set()
        async with stubs_of(cluster) as stubs, feeding(stubs) as feed, asyncio.TaskGroup() as tasks:
            for route in await stubs.pd.scan_regions(b""):
                feed.subscribe(route)
            tasks.create_task(_write_until_killed(stubs, 1, answered))
            while len(feed.committed) < 100:
                await feed.step()
            cluster.store.kill()
        checkpoint_ts = min(state.resolved_ts for state in feed.regions.values())
        committed |= {(row[0], row[2], row[4]) for row in feed.committed}
        cluster.restart_store()
        async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
            for route in await stubs.pd.scan_regions(b""):
                feed.subscribe(route, checkpoint_ts)
            await feed.wait_resolved(checkpoint_ts + 1)
        committed |= {(row[0], row[2], row[4]) for row in feed.committed}
    told = {key: value for _, key, value in committed}
    assert answered.items() <= told.items()
    assert len(committed) == len(told), "a change was told twice with different timestamps"


def test_a_stopped_store_drains_and_ends_with_status_0(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        assert cluster.store.stop() == 0


def test_a_data_directory_of_another_cluster_is_refused(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        cluster.store.stop()
        other = start(
            "coordinator", "--addr", "127.0.0.1:0", "--metadata", f"leveldb:{tmp_path / 'other'}"
        )
        try:
            status, line = failed(
                "store",
                "--addr",
                "127.0.0.1:0",
                "--coordinator",
                other.addr,
                "--data-dir",
                str(tmp_path / "store"),
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
        busy = failed(
            "store",
            *flags,
            "--addr",
            f"127.0.0.1:{taken.getsockname()[1]}",
            "--data-dir",
            str(data_dir),
        )
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
        "store",
        "--addr",
        "127.0.0.1:0",
        "--coordinator",
        "127.0.0.1:1",
        "--data-dir",
        str(tmp_path / "store"),
    )
    assert status == 1
    assert line.startswith("[TM:ErrCoordinatorUnavailable]")
