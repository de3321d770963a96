"""Starts real daemons as processes and waits for their ready lines."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.split_keys import FIRST_REGIONS

_ENGINE = {name: text for name, text in os.environ.items() if name.startswith("TIDEMARK_RPC_")}
_ENVIRONMENT = {"PYTHONPATH": ".:proto/gen", "PATH": "/usr/bin:/bin", **_ENGINE}


@dataclass
class Daemon:
    """A running daemon; `addr` is where its gRPC service listens, `http` where its metrics are."""

    process: subprocess.Popen[str]
    addr: str
    http: str
    arguments: list[str]

    def kill(self) -> None:
        """Crash it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def stop(self) -> int:
        """Drain it; returns its exit status."""
        self.process.terminate()
        return self.process.wait(60)


def start(name: str, *arguments: str) -> Daemon:
    """Start a daemon; fails with what it said when it does not get ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli.main", name, *arguments, "--http-addr", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[3],
        env=_ENVIRONMENT,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    assert line, f"{name} ended with status {process.wait(60)}"
    endpoints = json.loads(line)["endpoints"]
    return Daemon(process, endpoints[name], endpoints["http"], list(arguments))


def failed(name: str, *arguments: str) -> tuple[int, str]:
    """Start a daemon that cannot run; its status and the lines it gave the user."""
    done = subprocess.run(
        [sys.executable, "-m", "server.cli.main", name, *arguments, "--http-addr", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
        env=_ENVIRONMENT,
        check=False,
    )
    return done.returncode, "\n".join(
        line for line in done.stderr.splitlines() if line.startswith("[TM:")
    )


@dataclass
class Cluster:
    """A coordinator and a store."""

    coordinator: Daemon
    store: Daemon

    def restart_store(self) -> None:
        """Start the store again with the same data, after it was stopped or killed."""
        self.store = start("store", *self.store.arguments)


@contextmanager
def running_cluster(directory: Path, *store_flags: str) -> Iterator[Cluster]:
    """A coordinator and a store of their own on free ports."""
    coordinator = start(
        "coordinator", "--addr", "127.0.0.1:0", "--metadata", f"leveldb:{directory / 'meta'}"
    )
    cluster = None
    try:
        flags = [
            "--addr",
            "127.0.0.1:0",
            "--coordinator",
            coordinator.addr,
            "--data-dir",
            str(directory / "store"),
        ]
        cluster = Cluster(coordinator, start("store", *flags, *FIRST_REGIONS, *store_flags))
        yield cluster
    finally:
        for daemon in [cluster.store, coordinator] if cluster else [coordinator]:
            if daemon.process.poll() is None:
                daemon.kill()
