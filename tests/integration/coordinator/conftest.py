"""Real processes: coordinators and a private etcd, each on free ports."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@dataclass
class Coordinator:
    process: subprocess.Popen[str]
    address: str
    http: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Coordinator]


def process_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}"}


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "server.cli.main", "coordinator", "--http-addr", "127.0.0.1:0", *flags]


def run_to_end(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*flags), env=process_environment(), capture_output=True, text=True, timeout=30, check=False
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(metadata: str, addr: str = "127.0.0.1:0") -> Iterator[Coordinator]:
    process = subprocess.Popen(
        command("--addr", addr, "--metadata", metadata),
        env=process_environment(),
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
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    flags = {
        "data-dir": str(directory),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
    }
    process = subprocess.Popen(
        ["/usr/bin/etcd", *(f"--{name}={value}" for name, value in flags.items())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_healthy(client)
        yield client.removeprefix("http://")
    finally:
        process.kill()
        process.wait()


def wait_healthy(url: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
                if json.load(answer)["health"] == "true":
                    return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"etcd at {url} does not get healthy")


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


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment our code runs in as a process."""
    return process_environment()


@pytest.fixture
def launch() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a coordinator that is not expected to get ready soon; its log can be read from `stderr`."""
    with ExitStack() as stack:

        def launched(metadata: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                command("--addr", "127.0.0.1:0", "--metadata", metadata),
                env=process_environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield launched
