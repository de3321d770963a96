"""The composition root of the store daemon."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import structlog
from kvproto import cdcpb_pb2 as cdcpb
from kvproto import pdpb_pb2 as pdpb
from kvproto import tikvpb_pb2 as tikvpb

from server.daemon import Endpoints
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient, PdRefusedError
from server.rpc.server import RpcServer
from server.store import metrics
from server.store.collector import Collector
from server.store.config import StoreConfig
from server.store.feed.connection import FeedBackend
from server.store.feed.hub import FeedHub
from server.store.feed.service import ChangeDataService
from server.store.identity import Identity, announce, load_identity, report_regions
from server.store.methods import METHODS
from server.store.region_calls import RegionBackend
from server.store.region_check import RegionGate
from server.store.runner import Runner
from server.store.service import TikvService
from server.store.split import Splitter
from storage.kv import KV
from storage.leveldb import LevelDB
from storage.model.errors import UnavailableError
from storage.mvcc.engine import Engine
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.open_locks import OpenLocks, stored_locks
from storage.mvcc.read_fence import ReadFence

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def opened(config: StoreConfig, security: SecurityConfig) -> AsyncIterator[Endpoints]:
    """Run a store for the block.

    Raises:
        ClusterMismatchError: the data directory belongs to another cluster.
        PortInUseError, DirectoryLockedError, DirectoryUnusableError, CorruptDatabaseError: as named.
        PdUnavailableError: no coordinator answers.
    """
    split_keys = config.first_split_keys()
    with _database(config) as kv:
        async with PdClient.open(config.coordinator, security) as pd:
            identity = await load_identity(kv, pd, split_keys)
            async with _serving(config, security, kv, pd, identity) as bound:
                yield {"store": bound}


@contextmanager
def _database(config: StoreConfig) -> Iterator[KV]:
    kv = LevelDB(Path(config.data_dir) / "mvcc")
    try:
        yield kv
    finally:
        kv.close()


@asynccontextmanager
async def _serving(
    config: StoreConfig, security: SecurityConfig, kv: KV, pd: PdClient, identity: Identity
) -> AsyncIterator[str]:
    gate = RegionGate(identity.store_id, identity.regions)
    fence = ReadFence(await pd.tso())  # reads of the process before this one had smaller timestamps
    locks = OpenLocks(gate.regions.starts, stored_locks(kv), fence)
    metrics.OPEN_LOCKS.set(len(locks))
    hub = FeedHub(gate, locks)
    metrics.REGIONS.set(len(gate.regions))
    with (
        ThreadPoolExecutor(1, "mvcc-write") as writer,
        ThreadPoolExecutor(config.read_threads, "mvcc-read") as readers,
        ThreadPoolExecutor(1, "mvcc-scan") as scanners,
    ):
        engine = Engine(kv, fence)
        group = GroupCommit(engine, writer, hub.observe, metrics.observe_group)
        collector = Collector(kv, group, gate, scanners, hub.forget_locks)
        backend = FeedBackend(
            cluster_id=identity.cluster_id, engine=engine, group=group, gate=gate, hub=hub, scanners=scanners
        )
        async with asyncio.TaskGroup() as tasks:
            runner = Runner(kv, gate, group, readers)
            service = TikvService(tasks, runner, RegionBackend(gate, collector, Splitter(pd, gate, group, hub.split)))
            server = RpcServer(security)
            batch = {name: runner.handler(method) for name, method in METHODS.items() if not hasattr(service, name)}
            server.add_service(tikvpb.DESCRIPTOR.services_by_name["Tikv"], service, batch)
            feed = ChangeDataService(tasks, backend, config.feed_buffer_bytes)
            server.add_service(cdcpb.DESCRIPTOR.services_by_name["ChangeData"], feed)
            background = [tasks.create_task(group.run(), name="group-commit")]
            async with server.listen(config.addr) as bound:
                await announce(pd, identity, config.advertise_addr or bound)
                _log.info("store joined", cluster_id=identity.cluster_id, store_id=identity.store_id)
                background += [
                    tasks.create_task(hub.run(pd, config.resolved_ts_interval), name="resolved-ts"),
                    tasks.create_task(collector.run(pd, config.gc_poll_interval), name="gc"),
                    tasks.create_task(_heartbeats(pd, gate, config.heartbeat_interval), name="heartbeat"),
                ]
                try:
                    yield bound
                finally:
                    service.close()
                    feed.close()
            for task in background:
                task.cancel()


async def _heartbeats(pd: PdClient, gate: RegionGate, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await pd.store_heartbeat(pdpb.StoreStats(store_id=gate.store_id, region_count=len(gate.regions)))
            await report_regions(pd, gate.regions, gate.store_id)
        except (UnavailableError, PdRefusedError) as err:
            _log.warning("the coordinator does not take the heartbeat", error=err.message)
