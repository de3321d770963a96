"""A changefeed pauses, is removed, and ends with its capture within seconds,
whatever its log waits for.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from tests.integration.capture.processes import Cluster, running_cluster
from tests.mariadb import MariaDb, running_mariadb
from tests.small_disk import small_disk

QUOTA_BYTES = 4 << 20
SECONDS = 20.0
"""A slow machine's; who waits for the server takes half a minute, for the disk for ever."""
LIMIT_S = 120.0


@contextlib.contextmanager
def replicated(directory: Path, data: Path) -> Iterator[tuple[MariaDb, Cluster]]:
    """A server, and a capture with a changefeed of its table that has read the log up to now."""
    flags = ("--memory-quota-bytes", str(QUOTA_BYTES), "--data-dir", str(data))
    with running_mariadb() as server, running_cluster(directory, *flags) as cluster:
        server.execute(
            "CREATE DATABASE shop", "CREATE TABLE shop.t (id INT PRIMARY KEY, v VARBINARY(4096))"
        )
        create = [
            "changefeed",
            "create",
            "-c",
            "shop",
            "--sink-uri",
            "parquet:///lake",
            "--filter",
            "shop.*",
        ]
        made = cluster.cli(*create, "--source-uri", f"{server.uri}?idle-row-ms=500")
        assert made["state"] == "normal", made
        wait_for(lambda: query(cluster).resolved_ts > int(made["start_ts"]))
        yield server, cluster


def query(cluster: Cluster) -> Any:
    return cluster.api("QueryChangefeed", pb.QueryChangefeedRequest(id="shop")).changefeed


def write(server: MariaDb, transactions: int) -> None:
    for first in range(0, transactions * 1000, 1000):
        rows = f"SELECT seq, RANDOM_BYTES(1024) FROM seq_{first}_to_{first + 999}"
        server.execute(f"REPLACE INTO t {rows}", database="shop")


def wait_for(get: Callable[[], Any]) -> Any:
    """Ask until it gives something."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := get()):
        assert time.monotonic() < deadline, f"not after {LIMIT_S} s"
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def within_seconds() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SECONDS


def waits_for_room(cluster: Cluster) -> bool:
    return bool(query(cluster).holding.waiting)


def is_staged(cluster: Cluster) -> bool:
    """As much as may be is staged for a reader that never comes, and the rest is on disk."""
    holding = query(cluster).holding
    return holding.sorter_disk_bytes > QUOTA_BYTES and holding.staged_bytes > QUOTA_BYTES // 4


def check_ends(cluster: Cluster, waits: Callable[[Cluster], bool]) -> None:
    """Pause, resume, remove; each time when it `waits` again."""
    pause(cluster)
    cluster.api("ResumeChangefeed", pb.ResumeChangefeedRequest(id="shop"))
    wait_for(lambda: waits(cluster))
    with within_seconds():
        cluster.api("RemoveChangefeed", pb.RemoveChangefeedRequest(id="shop"))


def pause(cluster: Cluster) -> None:
    with within_seconds():
        paused = cluster.api("PauseChangefeed", pb.PauseChangefeedRequest(id="shop")).changefeed
    assert paused.state == pb.CHANGEFEED_STATE_STOPPED


@pytest.mark.timeout(600)
def test_while_the_disk_is_full(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "48m") as disk,
        replicated(tmp_path, disk / "capture") as (server, cluster),
    ):
        (disk / "filler").write_bytes(bytes(40 << 20))
        write(server, 20)
        wait_for(lambda: waits_for_room(cluster))
        check_ends(cluster, waits_for_room)


@pytest.mark.timeout(600)
def test_a_capture_ends_while_the_disk_is_full(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "48m") as disk,
        replicated(tmp_path, disk / "capture") as (server, cluster),
    ):
        (disk / "filler").write_bytes(bytes(40 << 20))
        write(server, 20)
        wait_for(lambda: waits_for_room(cluster))
        with within_seconds():
            assert cluster.capture.terminate() == 0


@pytest.mark.timeout(600)
def test_while_the_quota_is_exhausted_and_nobody_reads(tmp_path: Path) -> None:
    with replicated(tmp_path, tmp_path / "capture") as (server, cluster):
        write(server, 20)
        wait_for(lambda: is_staged(cluster))
        check_ends(cluster, is_staged)


@pytest.mark.timeout(600)
def test_while_the_server_hangs(tmp_path: Path) -> None:
    with replicated(tmp_path, tmp_path / "capture") as (server, cluster):
        assert server.running is not None
        server.running.send_signal(signal.SIGSTOP)
        try:
            time.sleep(2)  # by now a row of the heartbeat is under way
            pause(cluster)
        finally:
            server.running.send_signal(signal.SIGCONT)


@pytest.mark.timeout(600)
def test_a_capture_ends_while_the_server_hangs(tmp_path: Path) -> None:
    with replicated(tmp_path, tmp_path / "capture") as (server, cluster):
        assert server.running is not None
        server.running.send_signal(signal.SIGSTOP)
        try:
            time.sleep(2)  # by now a row of the heartbeat is under way
            with within_seconds():
                assert cluster.capture.terminate() == 0
        finally:
            server.running.send_signal(signal.SIGCONT)
