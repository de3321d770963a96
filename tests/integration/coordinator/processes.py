"""Real processes that can be killed, stopped, continued and started again at the same address."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from server.rpc.credentials import SecurityConfig
from tests.ports import free_ports

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}"}


class Daemon:
    """One process that is started with the same command every time;
    `inside` is put in front of it (nsenter …).
    """

    def __init__(self, command: Sequence[str], log: Path, inside: Sequence[str] = ()) -> None:
        self._command = [*inside, *command]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def launch(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=ENVIRONMENT, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, seconds: float = 60) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def kill(self) -> None:
        """kill -9, of a stopped process too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Etcd(Daemon):
    """One etcd member; with `security` its clients need certificates."""

    def __init__(
        self,
        name: str,
        ports: tuple[int, int],
        peers: Mapping[str, int],
        directory: Path,
        *,
        host: str = "127.0.0.1",
        settings: Mapping[str, object] = MappingProxyType({}),
        security: SecurityConfig | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        self.address = f"{host}:{ports[0]}"
        self._security = security
        client, peer = (
            f"{'https' if security else 'http'}://{self.address}",
            f"http://127.0.0.1:{ports[1]}",
        )
        flags = {
            "name": name,
            "data-dir": directory / name,
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(
                f"{peer}=http://127.0.0.1:{port}" for peer, port in peers.items()
            ),
            **settings,
        }
        if security:
            flags |= {"trusted-ca-file": security.ca_path, "cert-file": security.cert_path}
            flags |= {"key-file": security.key_path, "client-cert-auth": "true"}
        command = ["etcd", *(f"--{key}={value}" for key, value in flags.items())]
        super().__init__(command, directory / f"{name}.log", inside)

    def start(self) -> None:
        self.launch()
        self.wait_healthy()

    def wait_healthy(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self.ctl("--command-timeout", "5s", "endpoint", "health")
            except subprocess.CalledProcessError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError(f"etcd at {self.address} does not get healthy:\n{self.log[-2000:]}")

    def ctl(self, *arguments: str) -> str:
        """`etcdctl ARGUMENTS` on this member."""
        tls = self._security
        keys = (
            [f"--cacert={tls.ca_path}", f"--cert={tls.cert_path}", f"--key={tls.key_path}"]
            if tls
            else []
        )
        command = ["etcdctl", "--endpoints", self.address, *keys, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout


@contextmanager
def etcd_members(directory: Path, count: int, **settings: Any) -> Iterator[list[Etcd]]:
    """A running etcd cluster of `count` members."""
    ports = free_ports(2 * count)
    peers = {f"etcd{number}": port for number, port in enumerate(ports[count:])}
    members = [
        Etcd(name, (client, peers[name]), peers, directory, **settings)
        for name, client in zip(peers, ports[:count], strict=True)
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
        self,
        address: str,
        metadata: str,
        log: Path,
        flags: Sequence[str] = (),
        inside: Sequence[str] = (),
    ) -> None:
        self.address = address
        program = [
            sys.executable,
            "-m",
            "server.cli.main",
            "coordinator",
            "--http-addr",
            "127.0.0.1:0",
        ]
        super().__init__([*program, "--addr", address, "--metadata", metadata, *flags], log, inside)
