"""Real processes that can be killed, stopped, continued and started again at the same address."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}"}


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports nobody listens on now, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class Daemon:
    """One process that is started with the same command every time; `inside` is put in front of it (nsenter …)."""

    def __init__(self, command: Sequence[str], log: Path, inside: Sequence[str] = ()) -> None:
        self._command = [*inside, *command]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def launch(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=ENVIRONMENT, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, seconds: float = 15) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def kill(self) -> None:
        """kill -9, of a stopped process too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Etcd(Daemon):
    """One etcd member."""

    def __init__(
        self, name: str, ports: tuple[int, int], peers: dict[str, int], directory: Path, **more: object
    ) -> None:
        host = str(more.pop("host", "127.0.0.1"))
        self.address = f"{host}:{ports[0]}"
        client, peer = f"http://{self.address}", f"http://127.0.0.1:{ports[1]}"
        flags = {
            "name": name,
            "data-dir": str(directory / name),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(f"{peer}=http://127.0.0.1:{port}" for peer, port in peers.items()),
            **{key.replace("_", "-"): str(value) for key, value in more.items() if key != "inside"},
        }
        inside: Sequence[str] = more.get("inside", ())  # type: ignore[assignment]
        command = ["etcd", *(f"--{key}={value}" for key, value in flags.items())]
        super().__init__(command, directory / f"{name}.log", inside)

    def start(self) -> None:
        self.launch()
        self.wait_healthy()

    def wait_healthy(self, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://{self.address}/health", timeout=1) as answer:
                    if json.load(answer)["health"] == "true":
                        return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"etcd at {self.address} does not get healthy:\n{self.log[-2000:]}")

    def ctl(self, *arguments: str) -> str:
        """`etcdctl ARGUMENTS` on this member."""
        done = subprocess.run(
            ["etcdctl", "--endpoints", self.address, *arguments], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout


@contextmanager
def etcd_members(directory: Path, count: int = 1, **more: object) -> Iterator[list[Etcd]]:
    """A running etcd cluster of `count` members."""
    names = [f"etcd{number}" for number in range(count)]
    clients, peers = free_ports(2 * count)[:count], free_ports(2 * count)[count:]
    listed = dict(zip(names, peers, strict=True))
    members = [
        Etcd(name, (client, peer), listed, directory, **dict(more))
        for name, client, peer in zip(names, clients, peers, strict=True)
    ]
    try:
        for member in members:
            member.launch()
        for member in members:
            member.wait_healthy()
        yield members
    finally:
        for member in members:
            member.kill()


class Coordinator(Daemon):
    """One coordinator over etcd."""

    def __init__(
        self, address: str, metadata: str, log: Path, flags: Sequence[str] = (), inside: Sequence[str] = ()
    ) -> None:
        self.address = address
        program = [sys.executable, "-m", "server.cli.main", "coordinator", "--http-addr", "127.0.0.1:0"]
        super().__init__([*program, "--addr", address, "--metadata", metadata, *flags], log, inside)
