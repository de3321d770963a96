"""The pump put together: storage, service, registry entry, upkeep;
drained in the opposite order.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from tidemarkpb.v1 import pump_pb2 as stream_pb2
from tipb import pump_pb2

from server.daemon import Endpoints
from server.pump import metrics
from server.pump.admission import Admission
from server.pump.config import PumpConfig
from server.pump.disk import DiskWatch
from server.pump.http_api import HttpApi
from server.pump.node import ONLINE, Node, node_id
from server.pump.registry import Registry
from server.pump.service import PumpService
from server.pump.steering import Steering
from server.pump.stream_service import StreamService
from server.pump.unmatched import UnmatchedPrewrites
from server.pump.upkeep import GarbageCollector, rotate_segments, watch_index, write_heartbeats
from server.routes import Routes
from server.rpc.client import metadata_at
from server.rpc.credentials import SecurityConfig
from server.rpc.engine import Engine
from server.rpc.pd import PdClient
from server.rpc.server import RpcServer
from server.rpc.tikv import KvClient
from storage.model.errors import InvalidError
from storage.pump.indexer import Recovery
from storage.pump.storage import PumpStorage, open_pump_storage
from storage.vfs import RealFS

_SERVICE = pump_pb2.DESCRIPTOR.services_by_name["Pump"]
_STREAMS = stream_pb2.DESCRIPTOR.services_by_name["PumpService"]

_log = structlog.get_logger(__name__)


class ClusterMismatchError(InvalidError):
    """The coordinator is not the one of the cluster this pump was told to serve."""

    code = "ErrClusterMismatch"


@asynccontextmanager
async def opened(
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
        node = Node(node_id="", host="")
        registry = Registry(node, meta, pd, storage, config.heartbeat_seconds)
        steering = Steering(node, registry, storage, pd, meta, config.close_seconds)
        collector = GarbageCollector(
            storage, pd, meta, config.gc_retention_seconds, config.gc_force_seconds
        )
        admission = Admission(storage, pd.cluster_id, node, disk, config.waiting_prewrites_bytes)
        service = PumpService(storage, admission)
        server = RpcServer(security, suited=Engine.NATIVE)
        server.add_service(_SERVICE, service, batch={"WriteBinlog": service.write_binlog})
        server.add_service(_STREAMS, StreamService(storage, admission, steering))
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
    await registry.announce(ONLINE)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop) for loop in loops]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
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
