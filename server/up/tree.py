"""The process tree of `tidemark up`: who is started in which order, on which addresses,
with which data directory.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from server.child import Child
from server.config import setting
from server.daemon import Endpoints
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from server.spark.java import require_java
from server.up.metrics import collect_from
from storage.model.errors import UnavailableError
from storage.tasks import beside


class DataDirError(UnavailableError):
    """The data directory cannot be used."""

    code = "ErrDataDirUnusable"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Where the tree listens (all on loopback by default) and where its data lies."""

    data_dir: str = setting("./data", "directory for everything the daemons keep")
    coordinator_addr: str = setting("127.0.0.1:2379", "coordinator's gRPC address")
    store_addr: str = setting("127.0.0.1:20160", "store's gRPC address")
    capture_addr: str = setting("127.0.0.1:8300", "capture's gRPC address")
    flight_addr: str = setting("127.0.0.1:8301", "capture's Arrow Flight address")
    pump_addr: str = setting("127.0.0.1:8250", "pump's gRPC address")
    gc_worker_addr: str = setting("127.0.0.1:8302", "GC worker's gRPC address")
    http_addr: str = setting("127.0.0.1:8390", "/metrics of all daemons, /healthz, /readyz")
    spark: bool = setting(
        default=True,
        help_text="run a Spark job for each changefeed whose sink is a lake; --no-spark turns it off",
    )


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
            *_HTTP,
            *tls,
        ],
    )
    started: list[Child] = []
    try:
        started.append(coordinator)
        await coordinator.start()
        pd = coordinator.endpoints["coordinator"]
        others = _others(config, data, ["--coordinator", pd, *_HTTP, *tls])
        started += others
        async with asyncio.TaskGroup() as starting:
            for child in others:
                starting.create_task(child.start(), name=child.name)
        if config.spark:
            lakes = _lakes(data, started, ["--coordinator", pd, *tls])
            started.append(lakes)
            await lakes.start()
        async with beside(*(child.run() for child in started)):
            with collect_from(started):
                yield {"cluster_id": await _cluster_id(pd, security), **_endpoints(started)}
    finally:
        for child in reversed(started):
            await child.drain()


_HTTP = ("--http-addr", "127.0.0.1:0")


def _others(config: UpConfig, data: Path, common: list[str]) -> list[Child]:
    return [
        Child("store", ["--addr", config.store_addr, "--data-dir", str(data / "store"), *common]),
        Child("pump", ["--addr", config.pump_addr, "--data-dir", str(data / "pump"), *common]),
        Child("gc-worker", ["--addr", config.gc_worker_addr, *common]),
        Child(
            "capture",
            [
                *("--addr", config.capture_addr, "--flight-addr", config.flight_addr),
                *("--data-dir", str(data / "capture"), *common),
            ],
        ),
    ]


async def _cluster_id(coordinator: str, security: SecurityConfig) -> str:
    async with PdClient.open(coordinator, security) as pd:
        return str(pd.cluster_id)


def _lakes(data: Path, started: list[Child], flags: list[str]) -> Child:
    capture = next(child.endpoints["capture"] for child in started if child.name == "capture")
    checkpoints = str(data / "checkpoints")
    return Child(
        "spark keep", ["--capture", capture, "--checkpoint-dir", checkpoints, *_HTTP, *flags]
    )


def _endpoints(children: list[Child]) -> dict[str, str]:
    return {
        name.replace("-", "_"): address
        for child in children
        for name, address in child.endpoints.items()
        if name not in ("http", "ready")
    }


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
    return [part for flag, path in files.items() if path for part in (flag, path)]
