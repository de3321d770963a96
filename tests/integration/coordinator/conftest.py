"""Real processes: coordinators and a private etcd, each on free ports."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.coordinator.processes import ENVIRONMENT, etcd_members


@dataclass
class Coordinator:
    process: subprocess.Popen[str]
    address: str
    http: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Coordinator]


def command(*flags: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "server.cli.main",
        "coordinator",
        "--http-addr",
        "127.0.0.1:0",
        *flags,
    ]


def run_to_end(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*flags), env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


@contextmanager
def running(metadata: str, addr: str = "127.0.0.1:0") -> Iterator[Coordinator]:
    process = subprocess.Popen(
        command("--addr", addr, "--metadata", metadata),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())["endpoints"]
        yield Coordinator(process, ready["coordinator"], ready["http"])
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def running_etcd(directory: Path) -> Iterator[str]:
    directory.mkdir(exist_ok=True)
    with etcd_members(directory, 1) as (etcd,):
        yield etcd.address


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts coordinators that end with the test."""
    with ExitStack() as stack:
        yield lambda metadata, addr="127.0.0.1:0": stack.enter_context(running(metadata, addr))


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """A real etcd of the test's own, `host:port`."""
    with running_etcd(tmp_path / "etcd") as address:
        yield address


@pytest.fixture
def refused() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a coordinator that is expected to end by itself."""
    return run_to_end
