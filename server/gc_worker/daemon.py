"""The gc-worker daemon: its settings, and the worker put together with its clients and its admin
service.
"""

import asyncio
import datetime as dt
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.config import BOUNDS, Bounds, DurationError, parse_duration_ns
from gcsafepoint.worker.election import Election
from gcsafepoint.worker.worker import GCWorker
from server.config import HTTP_ADDRS, ConfigError, setting
from server.daemon import Endpoints
from server.gc_worker.cluster import TikvCluster
from server.gc_worker.listener import LogAndCount
from server.gc_worker.service import GCService
from server.gc_worker.view import MetaRecords
from server.rpc.access_guard import guarded
from server.rpc.access_list import open_access
from server.rpc.client import metadata_at
from server.rpc.config import Engine
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient, PdUnavailableError
from server.rpc.server import RpcServer
from server.rpc.tikv import KvClient
from server.version import VERSION
from storage.model.ts import physical_ms
from storage.tasks import background_tasks

_LEAST_LEASE_S = 2.0
_BOOTSTRAP_POLL_S = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GCWorkerConfig:
    """Configuration of a GC worker: its address and its cluster; how it collects is set at run time
    (SetGCConfig).
    """

    addr: str = setting("127.0.0.1:8302", "gRPC address of the admin service, host:port")
    advertise_addr: str = setting(
        "", "host:port where the command line finds the leader; empty: the listening address"
    )
    http_addr: str = setting(HTTP_ADDRS["gc-worker"], "address of /metrics, /healthz and /readyz")
    coordinator: str = setting("127.0.0.1:2379", "coordinators (or PDs), host:port[,host:port…]")
    access_file: str = setting(
        "",
        "TOML file with the clients that may call, by token or certificate, and their roles; empty: "
        "everybody who reaches the port may do everything (docs/security.md)",
    )
    tick_seconds: float = setting(
        60.0, "seconds between looks at the leadership and at what is due", least=0.001
    )
    lease_seconds: float = setting(
        120.0,
        "seconds a leader leads without renewing; at least 2, and at least twice --tick-seconds",
    )
    min_gc_time: str = setting(
        "10m0s",
        "shortest life time and run interval that may be set, as TiDB's; lower it only if no reader "
        "needs old versions",
    )

    def checked(self) -> "GCWorkerConfig":
        """This configuration.

        Raises:
            ConfigError: the lease would run out between two ticks.
        """
        if (
            not 0 < self.tick_seconds * 2 <= self.lease_seconds
            or self.lease_seconds < _LEAST_LEASE_S
        ):
            raise ConfigError(
                f"--lease-seconds ({self.lease_seconds:g}) must be at least 2, and two "
                f"--tick-seconds ({self.tick_seconds:g})"
            )
        self.bounds()
        return self

    def bounds(self) -> Bounds:
        """The bounds of life time and run interval; raises ConfigError."""
        try:
            least_ms = parse_duration_ns(self.min_gc_time) // 10**6
        except DurationError as err:
            raise ConfigError(f"--min-gc-time: {err.message}") from err
        if not 1 <= least_ms <= BOUNDS.most_ms:
            raise ConfigError(f"--min-gc-time {self.min_gc_time} must be between 1ms and a year")
        return Bounds(least_ms=least_ms)


@asynccontextmanager
async def open_gc_worker(
    config: GCWorkerConfig, security: SecurityConfig
) -> AsyncIterator[Endpoints]:
    """Run a worker for the block; yields where it listens."""
    config.checked()
    access = open_access(config.access_file)
    async with (
        PdClient.open(config.coordinator, security) as pd,
        KvClient.open(pd, security) as kv,
        metadata_at(config.coordinator, security) as meta,
    ):
        records = MetaRecords(meta)
        cluster, server = (
            TikvCluster(pd, kv, records, security),
            RpcServer(security, suited=Engine.NATIVE),
        )
        # A TSO as identity: unique in the cluster, and it says when this worker began, as TiDB's
        # does.
        started_ts = await pd.tso()
        election = Election(
            records,
            uuid=f"{started_ts:x}",
            desc=(
                f"host:{socket.gethostname()}, pid:{os.getpid()}, start at "
                f"{_go_time(physical_ms(started_ts))}, version:{VERSION}"
            ),
            lease_ms=int(config.lease_seconds * 1000),
            monotonic_s=_since_boot_s,
        )
        worker = GCWorker(
            cluster,
            records,
            election,
            LogAndCount(election.uuid),
            monotonic_s=_since_boot_s,
            bounds=config.bounds(),
        )
        service = gc_pb2.DESCRIPTOR.services_by_name["GCService"]
        servicer = GCService(worker, cluster, records, pd)
        server.add_service(service, guarded(service, servicer, access))
        async with server.listen(config.addr) as bound:
            # Set before the first tick: the leader's record names the address that the command line
            # calls.
            election.address = config.advertise_addr or _advertised(bound)
            async with background_tasks(_work(worker, pd, config.tick_seconds)):
                yield {"gc-worker": bound}


def _advertised(bound: str) -> str:
    """The address to advertise for a listener at `bound`:
    the host's name in place of a wildcard.
    """
    host, _, port = bound.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]", "") else bound  # noqa: S104 - only compared


def _since_boot_s() -> float:
    """A clock that goes on while the machine is suspended, as a lease must expire then, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _go_time(unix_ms: int) -> str:
    """A moment as Go prints it, in UTC."""
    return dt.datetime.fromtimestamp(unix_ms / 1000, dt.UTC).strftime(
        "%Y-%m-%d %H:%M:%S.%f +0000 UTC"
    )


async def _work(worker: GCWorker, pd: PdClient, tick_s: float) -> None:
    """Work once there is a store; before that there is nothing to collect."""
    # Safepoints of a cluster without stores would be refused, and logged as failures.
    while not await _bootstrapped(pd):
        _log.info("waiting for the first store")
        await asyncio.sleep(_BOOTSTRAP_POLL_S)
    await worker.run(tick_s)


async def _bootstrapped(pd: PdClient) -> bool:
    try:
        return await pd.is_bootstrapped()
    except PdUnavailableError:
        return False
