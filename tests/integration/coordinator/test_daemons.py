"""Daemons that know several coordinators: the leader dies, and they go on with the next one."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.rpc.pd import PdClient
from tests.integration.coordinator.clusters import in_thread, running_cluster
from tests.integration.coordinator.processes import ENVIRONMENT, Daemon

TIDEMARK = (sys.executable, "-m", "server.cli.main")
STORE = ("store", "--heartbeat-interval", "0.5")
OTHERS = (("capture", "--flight-addr", "127.0.0.1:0"), ("pump",), ("gc-worker",))


async def test_every_daemon_follows_the_leader(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        known = ",".join(cluster.addresses)
        with running([STORE, *OTHERS], known, tmp_path) as daemons:
            leader = await in_thread(cluster.leader)
            leader.kill()
            async with PdClient.open(known) as pd:
                before = (await pd.stores())[0].last_heartbeat
                while (await pd.stores())[0].last_heartbeat == before:
                    await pd.tso()
                assert (await pd.region(b"")).region.id > 0
            assert all(daemon.running for daemon in daemons)
            assert "gc_worker" in await in_thread(cli, known, "service-gc-safepoint")


@contextmanager
def running(
    commands: list[tuple[str, ...]], coordinators: str, directory: Path
) -> Iterator[list[Daemon]]:
    """One daemon for each command, ready."""
    daemons = [
        Daemon(command_of(command, coordinators, directory), directory / f"{command[0]}.log")
        for command in commands
    ]
    try:
        for daemon in daemons:
            daemon.launch()
        for daemon in daemons:
            wait_ready(daemon)
        yield daemons
    finally:
        for daemon in daemons:
            daemon.kill()


def command_of(command: tuple[str, ...], coordinators: str, directory: Path) -> list[str]:
    name, *flags = command
    places = ["--addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--coordinator", coordinators]
    data = [] if name == "gc-worker" else ["--data-dir", str(directory / name)]
    return [*TIDEMARK, name, *places, *data, *flags]


def wait_ready(daemon: Daemon) -> None:
    deadline = time.monotonic() + 120
    while '{"ready": true' not in daemon.log:
        assert time.monotonic() < deadline, daemon.log[-2000:]
        assert daemon.running, daemon.log[-2000:]
        time.sleep(0.05)


def cli(coordinators: str, *words: str) -> str:
    done = subprocess.run(
        [*TIDEMARK, "cli", "--pd", coordinators, *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
