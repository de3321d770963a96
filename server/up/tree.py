"""The process tree of `tidemark up`: the daemons in their starting order, with addresses and data
directories, and one `/metrics` for all.

The coordinator comes first, as the others ask it for their cluster, then all others at once, then
the Spark jobs, which need the capture. The children's samples are told apart by the label `daemon`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from server.config import HTTP_ADDRS, setting
from server.daemon import Endpoints
from server.process import Child
from server.rpc.client import scrape
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from server.spark.config import require_java
from storage.model.errors import UnavailableError
from storage.tasks import background_tasks

_SCRAPE_SECONDS = 2.0
_PORT_MAX = 0xFFFF
_AS_A_MEMBER = str.maketrans("- ", "__")


class DataDirError(UnavailableError):
    """The data directory cannot be used."""

    code = "ErrDataDirUnusable"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Configuration of the tree: its addresses, on loopback by default, and its data directory."""

    data_dir: str = setting("./data", "directory for everything the daemons keep")
    coordinator_addr: str = setting("127.0.0.1:2379", "coordinator's gRPC address")
    store_addr: str = setting("127.0.0.1:20160", "store's gRPC address")
    capture_addr: str = setting("127.0.0.1:8300", "capture's gRPC address")
    flight_addr: str = setting("127.0.0.1:8301", "capture's Arrow Flight address")
    pump_addr: str = setting("127.0.0.1:8250", "pump's gRPC address")
    gc_worker_addr: str = setting("127.0.0.1:8302", "GC worker's gRPC address")
    http_addr: str = setting(HTTP_ADDRS["up"], "/metrics of all daemons, /healthz, /readyz")
    spark: bool = setting(
        default=True,
        help_text="run a Spark job for each changefeed whose sink is a lake; --no-spark turns it off",
    )


class Scraped(Protocol):
    """A daemon with a name and, among its endpoints, an HTTP address."""

    name: str
    endpoints: dict[str, str]


class TreeCollector(Collector):
    """Asks each daemon of the tree for its metrics;
    one that does not answer is `tidemark_up_alive` 0.
    """

    def __init__(self, daemons: Sequence[Scraped]) -> None:
        self._daemons = daemons

    def describe(self) -> list[Metric]:
        """No family is known before the daemons are asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families of all daemons."""
        alive = Metric("tidemark_up_alive", "1 if the daemon answered this scrape", "gauge")
        families: dict[str, Metric] = {}
        for daemon in self._daemons:
            text = scrape(daemon.endpoints.get("http", ""), _SCRAPE_SECONDS)
            alive.add_sample(alive.name, {"daemon": daemon.name}, 0.0 if text is None else 1.0)
            for family in text_string_to_metric_families(text or ""):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    merged.add_sample(
                        sample.name, {**sample.labels, "daemon": daemon.name}, sample.value
                    )
        yield alive
        yield from families.values()


REGISTRY = CollectorRegistry()
"""The metrics of `tidemark up`: those of its children, not those of its own process."""


@contextmanager
def collect_from(daemons: Sequence[Scraped]) -> Iterator[None]:
    """Show the daemons' metrics in `REGISTRY` for the block."""
    collector = TreeCollector(daemons)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


@asynccontextmanager
async def open_tree(config: UpConfig, security: SecurityConfig) -> AsyncIterator[Endpoints]:
    """All daemons for the block; restarted when they die, drained in reverse order on the way out.

    Raises:
        ChildFailedError: a daemon could not start.
        DataDirError: the data directory cannot be created or written.
        JavaMissingError: lakes are asked for, and there is no Java.
    """
    if config.spark:
        require_java("or leave out the lakes with --no-spark")
    data = _usable(Path(config.data_dir))
    tls = _tls_flags(security)
    coordinator = Child(
        "coordinator",
        [
            "--addr",
            config.coordinator_addr,
            "--metadata",
            f"leveldb:{data / 'metadata'}",
            *_http_flags(config.http_addr, "coordinator"),
            *tls,
        ],
    )
    started: list[Child] = []
    try:
        # Noted before it starts: one that fails in the middle of starting is drained, too.
        started.append(coordinator)
        await coordinator.start()
        pd = coordinator.endpoints["coordinator"]
        others = _others(config, data, ["--coordinator", pd, *tls])
        started += others
        async with asyncio.TaskGroup() as starting:
            for child in others:
                starting.create_task(child.start(), name=child.name)
        if config.spark:
            common = ["--coordinator", pd, *_http_flags(config.http_addr, "spark-keep"), *tls]
            lakes = _lakes(data, started, common)
            started.append(lakes)
            await lakes.start()
        async with background_tasks(*(child.run() for child in started)):
            with collect_from(started):
                yield {"cluster_id": await _cluster_id(pd, security), **_endpoints(started)}
    finally:
        # In reverse: each daemon drains while those that it asks are still there.
        for child in reversed(started):
            await child.drain()


def _others(config: UpConfig, data: Path, common: list[str]) -> list[Child]:
    store = ["--addr", config.store_addr, "--data-dir", str(data / "store")]
    pump = ["--addr", config.pump_addr, "--data-dir", str(data / "pump")]
    capture = ["--addr", config.capture_addr, "--flight-addr", config.flight_addr]
    flags = {
        "store": store,
        "pump": pump,
        "gc-worker": ["--addr", config.gc_worker_addr],
        "capture": [*capture, "--data-dir", str(data / "capture")],
    }
    return [
        Child(name, [*own, *_http_flags(config.http_addr, name), *common])
        for name, own in flags.items()
    ]


async def _cluster_id(coordinator: str, security: SecurityConfig) -> str:
    async with PdClient.open(coordinator, security) as pd:
        return str(pd.cluster_id)


def _lakes(data: Path, started: list[Child], flags: list[str]) -> Child:
    capture = next(child.endpoints["capture"] for child in started if child.name == "capture")
    checkpoints = str(data / "checkpoints")
    return Child("spark keep", ["--capture", capture, "--checkpoint-dir", checkpoints, *flags])


def _http_flags(http_addr: str, name: str) -> tuple[str, str]:
    return "--http-addr", child_http_addr(http_addr, name)


def child_http_addr(http_addr: str, name: str) -> str:
    """Return the HTTP address of a daemon of the tree: its usual port, shifted as far as
    `http_addr` is from the tree's usual port, so that two trees can run; port 0 stays 0.
    """
    port, usual = _port(http_addr), _port(HTTP_ADDRS[name])
    own = usual + port - _port(HTTP_ADDRS["up"]) if port else 0
    return f"127.0.0.1:{own if 0 < own <= _PORT_MAX else 0}"


def _port(address: str) -> int:
    text = address.rpartition(":")[2]
    # One that is none is refused where it is listened on.
    return int(text) if text.isdecimal() else 0


def _endpoints(children: list[Child]) -> dict[str, str]:
    named = {
        f"{child.name} http" if name == "http" else name: address
        for child in children
        for name, address in child.endpoints.items()
        if name != "ready"
    }
    return {name.translate(_AS_A_MEMBER): address for name, address in named.items()}


def _usable(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as err:
        raise DataDirError(
            f"cannot write to {directory}: {err.strerror}; choose another --data-dir or correct "
            "its permissions"
        ) from err
    return directory


def _tls_flags(security: SecurityConfig) -> list[str]:
    files = {
        "--ca-path": security.ca_path,
        "--cert-path": security.cert_path,
        "--key-path": security.key_path,
    }
    flags = [part for flag, path in files.items() if path for part in (flag, path)]
    return flags + [
        part for name in security.cert_allowed_cn for part in ("--cert-allowed-cn", name)
    ]
