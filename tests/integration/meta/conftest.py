"""Real servers of the etcd API: a private etcd of one or three members;
coordinators over LevelDB or before an etcd.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import grpc.aio
import pytest

from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from storage.meta.client import EtcdMeta, open_meta
from tests.ports import free_ports

ROOT = Path(__file__).parents[3]
READY_S = 60.0


@dataclass
class Process:
    """A server that can be killed, stopped and started again with the same arguments."""

    arguments: Sequence[str]
    address: str = ""
    running: subprocess.Popen[str] | None = None
    wait_ready: Callable[["Process"], None] = field(default=lambda _: None)

    def start(self) -> None:
        self.running = subprocess.Popen(
            self.arguments,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.wait_ready(self)

    def signal(self, number: int) -> None:
        assert self.running is not None
        self.running.send_signal(number)

    def kill(self) -> None:
        if self.running is not None:
            self.running.kill()
            self.running.wait()
            assert self.running.stdout is not None
            self.running.stdout.close()


@dataclass(frozen=True)
class Api:
    """A server of the etcd API, and how to reach it."""

    addresses: Sequence[str]
    security: SecurityConfig

    @property
    def url(self) -> str:
        return f"etcd://{','.join(self.addresses)}"

    def channel(self, address: str) -> grpc.aio.Channel:
        return connect(address, self.security)

    def etcdctl(self, *arguments: str, text: str = "", check: bool = True) -> str:
        """What Debian's etcdctl prints."""
        flags = [f"--endpoints={','.join(self.addresses)}", *etcdctl_tls(self.security)]
        done = subprocess.run(
            ["etcdctl", *flags, *arguments],
            env={**os.environ, "ETCDCTL_API": "3"},
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout if check else done.stdout + done.stderr


def etcdctl_tls(security: SecurityConfig) -> list[str]:
    if not security.enabled:
        return []
    return [
        f"--cacert={security.ca_path}",
        f"--cert={security.cert_path}",
        f"--key={security.key_path}",
    ]


def _announced(process: Process) -> None:
    assert process.running is not None
    assert process.running.stdout is not None
    process.address = json.loads(process.running.stdout.readline())["endpoints"]["coordinator"]


@contextmanager
def coordinator(
    metadata: str, *flags: str, security: SecurityConfig | None = None
) -> Iterator[Process]:
    """A coordinator on a port of its own; it keeps the port when it is started again."""
    tls = security or SecurityConfig()
    (port,) = free_ports(1)
    paths = [(f"--{name}-path", getattr(tls, f"{name}_path")) for name in ("ca", "cert", "key")]
    process = Process(
        [
            *(sys.executable, "-m", "server.cli.main", "coordinator", "--http-addr", "127.0.0.1:0"),
            *("--addr", f"127.0.0.1:{port}", "--metadata", metadata, *flags),
            *(part for flag, path in paths if path for part in (flag, path)),
        ],
        wait_ready=_announced,
    )
    process.start()
    try:
        yield process
    finally:
        process.kill()


@contextmanager
def etcd_cluster(
    directory: Path, size: int, *flags: str, security: SecurityConfig | None = None
) -> Iterator[list[Process]]:
    """A private etcd cluster; with `security`, clients need a certificate."""
    tls = security or SecurityConfig()
    scheme = "https" if tls.enabled else "http"
    ports = free_ports(2 * size)
    peers = [f"http://127.0.0.1:{port}" for port in ports[size:]]
    certificates = [
        "--client-cert-auth",
        f"--trusted-ca-file={tls.ca_path}",
        f"--cert-file={tls.cert_path}",
    ]
    certificates.append(f"--key-file={tls.key_path}")
    members: list[Process] = []
    for number in range(size):
        client = f"{scheme}://127.0.0.1:{ports[number]}"
        settings = {
            "name": f"m{number}",
            "data-dir": str(directory / f"m{number}"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peers[number],
            "initial-advertise-peer-urls": peers[number],
            "initial-cluster": ",".join(f"m{other}={peer}" for other, peer in enumerate(peers)),
            "logger": "zap",
            "log-level": "error",
        }
        arguments = ["etcd", *(f"--{name}={value}" for name, value in settings.items()), *flags]
        members.append(
            Process(
                [*arguments, *(certificates if tls.enabled else [])], f"127.0.0.1:{ports[number]}"
            )
        )
    try:
        for member in members:
            member.start()
        for member in members:
            wait_healthy(Api([member.address], tls))
        yield members
    finally:
        for member in members:
            member.kill()


def wait_healthy(api: Api) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if "is healthy" in api.etcdctl("endpoint", "health", "--command-timeout=5s", check=False):
            return
    raise AssertionError(f"{api.addresses} does not get healthy")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    """A CA and one certificate it signed for 127.0.0.1, for servers and clients."""
    directory = tmp_path_factory.mktemp("certificates")
    (directory / "san").write_text(
        "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth"
    )
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    sign = [
        "-in",
        "node.csr",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-out",
        "node.pem",
        "-days",
        "2",
    ]
    for arguments in (
        [
            "req",
            "-x509",
            *key,
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
            "-subj",
            "/CN=ca",
            "-days",
            "2",
        ],
        ["req", "-new", *key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node"],
        ["x509", "-req", *sign, "-extfile", "san"],
    ):
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)
    return SecurityConfig(
        ca_path=str(directory / "ca.pem"),
        cert_path=str(directory / "node.pem"),
        key_path=str(directory / "node.key"),
    )


@pytest.fixture(scope="session")
def real_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A real etcd of one member."""
    with etcd_cluster(tmp_path_factory.mktemp("etcd"), 1) as (member,):
        yield Api([member.address], SecurityConfig())


@pytest.fixture(scope="session", params=["embedded", "etcd", "passed-on", "passed-on-tls"])
def etcd_api(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    certificates: SecurityConfig,
) -> Iterator[Api]:
    """The etcd API four ways: ours embedded, a real etcd, a coordinator before one,
    and before three with mTLS.
    """
    directory = tmp_path_factory.mktemp("metadata")
    plain = SecurityConfig()
    with ExitStack() as stack:
        if request.param == "embedded":
            yield Api([stack.enter_context(coordinator(f"leveldb:{directory}")).address], plain)
            return
        tls = certificates if request.param == "passed-on-tls" else plain
        members = stack.enter_context(
            etcd_cluster(directory, 3 if tls.enabled else 1, security=tls)
        )
        etcd = Api([member.address for member in members], tls)
        if request.param == "etcd":
            yield etcd
        else:
            yield Api([stack.enter_context(coordinator(etcd.url, security=tls)).address], tls)


@pytest.fixture
async def channel(etcd_api: Api) -> AsyncIterator[grpc.aio.Channel]:
    async with etcd_api.channel(etcd_api.addresses[0]) as opened:
        yield opened


@pytest.fixture
async def meta(etcd_api: Api) -> AsyncIterator[EtcdMeta]:
    async with open_meta(etcd_api.url, etcd_api.channel) as opened:
        yield opened


@pytest.fixture
def prefix() -> bytes:
    return f"/test/{uuid.uuid4()}/".encode()


@pytest.fixture(scope="session")
def servers() -> ModuleType:
    """This module: its servers for tests that need ones of their own."""
    return sys.modules[__name__]
