"""The pump daemon: its settings, and the pump put together (storage, service, registry entry,
upkeep); drained in the opposite order.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from tidemarkpb.v1 import pump_pb2 as stream_pb2
from tipb import pump_pb2

from server.config import HTTP_ADDRS, setting
from server.daemon import Endpoints
from server.pump import metrics
from server.pump.http_api import HttpApi
from server.pump.registry import ONLINE, Node, PumpLifecycle, Registry, node_id
from server.pump.service import Admission, BinlogPump, PumpService, WriteBinlogCalls
from server.pump.unmatched import UnmatchedPrewrites
from server.pump.upkeep import (
    DiskWatch,
    GarbageCollector,
    rotate_segments,
    watch_index,
    write_heartbeats,
)
from server.routes import Routes
from server.rpc.access_guard import guarded
from server.rpc.access_list import open_access
from server.rpc.call_access import check_provable
from server.rpc.client import metadata_at
from server.rpc.config import Engine
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from server.rpc.server import RpcServer
from server.rpc.tikv import KvClient
from storage.model.errors import InvalidError
from storage.pump.storage import PumpStorage, open_pump_storage
from storage.pump.write_pipeline import Recovery
from storage.value_log import SEGMENT_BYTES
from storage.vfs import RealFS

_SERVICE = pump_pb2.DESCRIPTOR.services_by_name["Pump"]
_STREAMS = stream_pb2.DESCRIPTOR.services_by_name["PumpService"]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PumpConfig:
    """`[pump]`."""

    addr: str = setting("127.0.0.1:8250", "address for binlog.Pump, host:port")
    advertise_addr: str = setting("", "address that TiDB is told to write to; empty: --addr")
    http_addr: str = setting(
        HTTP_ADDRS["pump"], "address for /metrics, /healthz, /readyz, /status, /state and /debug"
    )
    coordinator: str = setting("127.0.0.1:2379", "coordinators (or PDs), host:port[,host:port…]")
    cluster_id: int = setting(
        0, "refuse to start in another cluster than this; 0: take the coordinator's"
    )
    access_file: str = setting(
        "",
        "TOML file with the clients that may call, by certificate or token, and their roles; empty: "
        "everybody who reaches a port may do everything (docs/security.md)",
    )
    data_dir: str = setting("data/pump", "directory of the value log (value/) and its index (kv/)")
    node_id: str = setting(
        "", "name in the registry, kept in the data directory; empty: hostname:port"
    )
    segment_bytes: int = setting(SEGMENT_BYTES, "size at which a value log segment is finalised")
    segment_seconds: float = setting(
        3600.0,
        "age at which a segment is finalised, so that GC can give its space back",
        least=0.001,
    )
    sync_log: bool = setting(True, "fdatasync each group before it is acknowledged")  # noqa: FBT003 - a default
    stop_write_at_available_bytes: int = setting(
        1 << 30, "refuse binlogs while the disk has less space than this"
    )
    fake_binlog_seconds: float = setting(
        3.0, "write a heartbeat binlog after this long without a binlog", least=0.001
    )
    waiting_prewrites_bytes: int = setting(
        256 << 20, "refuse prewrites while those without an outcome take more memory than this"
    )
    lonely_seconds: float = setting(
        1.0, "ask the store for the outcome of a prewrite that waits longer than this", least=0.001
    )
    txn_timeout_seconds: float = setting(
        600.0,
        "a prewrite of which the store knows nothing after this long is rolled back in the store, "
        "too",
    )
    heartbeat_seconds: float = setting(2.0, "how often the registry entry is renewed", least=0.001)
    close_seconds: float = setting(
        3600.0, "a pump that is closed waits this long until all readers have everything"
    )
    gc_retention_seconds: int = setting(
        7 * 24 * 3600, "binlogs older than this are removed once all readers have them"
    )
    gc_force_seconds: int = setting(
        10 * 24 * 3600, "binlogs older than this are removed even from connected readers"
    )
    gc_interval_seconds: float = setting(3600.0, "how often GC runs", least=0.001)

    def check_with(self, security: SecurityConfig) -> None:
        """Check that the cluster's own processes can identify themselves; raises ConfigError."""
        check_provable(self.access_file, security)


class ClusterMismatchError(InvalidError):
    """The coordinator is of another cluster than the configured one."""

    code = "ErrClusterMismatch"


@asynccontextmanager
async def open_pump(
    config: PumpConfig, security: SecurityConfig, routes: Routes | None = None
) -> AsyncIterator[Endpoints]:
    """Run a pump for the block.

    Raises:
        ClusterMismatchError: the coordinator serves another cluster than `cluster_id`.
        TidemarkError: the coordinator, the data directory or the address cannot be used.
    """
    fs, data_dir = RealFS(), Path(config.data_dir)
    async with (
        PdClient.open(config.coordinator, security) as pd,
        metadata_at(config.coordinator, security) as meta,
        KvClient.open(pd, security) as kv,
        open_pump_storage(
            fs, data_dir, segment_bytes=config.segment_bytes, sync=config.sync_log
        ) as storage,
    ):
        _check_cluster(config, pd)
        _report(storage.recovery)
        disk = DiskWatch(fs, data_dir, config.stop_write_at_available_bytes)
        metrics.watch(storage, disk)
        # Named after the port is bound, since the name may contain it; others keep this object, not
        # a copy.
        node = Node(node_id="", host="")
        registry = Registry(node, meta, pd, storage, config.heartbeat_seconds)
        steering = PumpLifecycle(node, registry, storage, pd, meta, config.close_seconds)
        collector = GarbageCollector(
            storage, pd, meta, config.gc_retention_seconds, config.gc_force_seconds
        )
        admission = Admission(storage, pd.cluster_id, node, disk, config.waiting_prewrites_bytes)
        service = BinlogPump(storage, admission)
        access = open_access(config.access_file)
        server = RpcServer(security, suited=Engine.NATIVE, access=access)
        calls = WriteBinlogCalls(storage, admission)
        server.add_service(_SERVICE, service, queues={"WriteBinlog": calls})
        streams = PumpService(storage, admission, steering)
        server.add_service(_STREAMS, guarded(_STREAMS, streams, access))
        async with server.listen(config.addr) as bound:
            node.host = config.advertise_addr or bound
            node.node_id = node_id(data_dir, config.node_id, node.host)
            loops = (
                registry.run(),
                steering.run(),
                disk.run(),
                UnmatchedPrewrites(storage, pd, kv, config.txn_timeout_seconds).run(
                    config.lonely_seconds
                ),
                write_heartbeats(storage, pd, config.fake_binlog_seconds),
                collector.run(config.gc_interval_seconds),
                watch_index(storage),
                rotate_segments(storage, config.segment_seconds),
            )
            api = HttpApi(storage, meta, steering, collector)
            with (routes or Routes()).serving(api.handlers()):
                async with _attended(registry, storage, loops):
                    yield {"pump": bound}


@asynccontextmanager
async def _attended(
    registry: Registry, storage: PumpStorage, loops: Iterable[Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """Online for the block, with everything that runs by itself;
    paused and without readers after it.
    """
    # Last of the start: from now on TiDB writes here.
    await registry.announce(ONLINE)
    await registry.write_start()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop) for loop in loops]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
            # Before the readers are let go: TiDB must choose another pump while this one still
            # answers.
            await registry.leave()
            storage.end_pulls()


def _check_cluster(config: PumpConfig, pd: PdClient) -> None:
    if config.cluster_id not in (0, pd.cluster_id):
        raise ClusterMismatchError(
            f"--cluster-id is {config.cluster_id}, but the coordinator at {config.coordinator} "
            f"serves cluster {pd.cluster_id}; correct --cluster-id or --coordinator"
        )


def _report(recovery: Recovery) -> None:
    _log.info("value log opened", replayed=recovery.replayed, index_rebuilt=recovery.rebuilt)
    for skipped in recovery.skipped:
        metrics.SKIPPED_BYTES.inc(skipped.length)
        # a torn tail was never acknowledged; damage was
        log = _log.warning if skipped.torn else _log.error
        log("value log bytes skipped", **skipped._asdict())
