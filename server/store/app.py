"""The composition root of the store daemon."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from kvproto import cdcpb_pb2 as cdcpb
from kvproto import debugpb_pb2 as debugpb
from kvproto import pdpb_pb2 as pdpb
from kvproto import tikvpb_pb2 as tikvpb
from tidemarkpb.v1 import store_pb2

from server.daemon import Endpoints
from server.rpc.access_guard import guarded
from server.rpc.access_list import Access, open_access
from server.rpc.config import Engine as RpcEngine
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient, PdRefusedError
from server.rpc.server import RpcServer
from server.store import metrics
from server.store.admin_service import DebugService, OnlineConfig, StoreService
from server.store.config import StoreConfig
from server.store.feed.hub import FeedHub
from server.store.feed.service import ChangeDataService, FeedBackend
from server.store.gc import AutoGc, Collector, CollectorParts
from server.store.handover import Handover
from server.store.identity import Identity, announce, founded, load_identity, report_regions
from server.store.methods import METHODS
from server.store.paced_scan import ByteRate
from server.store.region_table import RegionGate, RegionTable
from server.store.runner import Runner, TimestampCheck
from server.store.service import RegionBackend, TikvService
from server.store.split_merge import Merger, SizeCheck, Splitter
from storage.kv import WriteBatch
from storage.leveldb import LevelDB
from storage.model.errors import UnavailableError
from storage.mvcc.change_feed import OpenLocks, stored_locks
from storage.mvcc.engine import Engine
from storage.mvcc.gc import RegionVersions, stored_versions
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.read_fence import ReadFence
from storage.queue import ByteBudget

_REMEDY: Final = (
    "Restore the store's data directory from a backup; keys outside of the damage can be read "
    "until then"
)
_log = structlog.get_logger(__name__)


class Database(LevelDB):
    """`count` is set once the regions are known; before that nothing but identity is written."""

    def __init__(self, directory: Path, write_buffer_bytes: int) -> None:
        super().__init__(directory, write_buffer_bytes=write_buffer_bytes, remedy=_REMEDY)
        self.count: Callable[[Mapping[bytes, bytes | None]], Mapping[bytes, bytes]] = lambda _: {}

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """See `KV.write`; adds the new counts of the regions it writes to."""
        # In the same batch: the counts decide whether GC may skip a region, so they must not
        # survive a write that does not.
        batch.ops.update(self.count(batch.ops))
        super().write(batch, sync=sync)


@asynccontextmanager
async def open_store(config: StoreConfig, security: SecurityConfig) -> AsyncIterator[Endpoints]:
    """Run a store for the block.

    Raises:
        ClusterMismatchError: the data directory belongs to another cluster.
        PortInUseError, DirectoryLockedError, DirectoryUnusableError, CorruptDatabaseError: as
            named.
        PdUnavailableError: no coordinator answers.
    """
    split_keys = config.first_split_keys()
    with _database(config) as kv:
        async with PdClient.open(config.coordinator, security) as pd:
            identity = await load_identity(kv, pd, split_keys)
            async with _serving(config, security, kv, pd, identity) as bound:
                yield {"store": bound}


@contextmanager
def _database(config: StoreConfig) -> Iterator[Database]:
    kv = Database(Path(config.data_dir) / "mvcc", config.write_buffer_bytes)
    try:
        yield kv
    finally:
        kv.close()


@asynccontextmanager
async def _serving(
    config: StoreConfig, security: SecurityConfig, kv: Database, pd: PdClient, identity: Identity
) -> AsyncIterator[str]:
    # Reads of the process before this one had smaller timestamps; a fence below them would let a
    # computed commit_ts slip under a read that saw nothing.
    fence = ReadFence(await pd.tso())
    with ExitStack() as stack:
        threads = _Threads(
            writer=stack.enter_context(ThreadPoolExecutor(1, "mvcc-write")),
            readers=stack.enter_context(ThreadPoolExecutor(config.read_threads, "mvcc-read")),
            scanners=stack.enter_context(ThreadPoolExecutor(1, "mvcc-scan")),
            gc=stack.enter_context(ThreadPoolExecutor(1, "mvcc-gc")),
        )
        parts = _Parts(config, security, _Foundation(kv, pd, identity, fence), threads)
        async with asyncio.TaskGroup() as tasks:
            backend = RegionBackend(
                parts.gate, parts.collector, parts.splitter, parts.hub, parts.gc
            )
            service = TikvService(tasks, parts.runner, backend, config.wait_for_lock_timeout)
            feed = ChangeDataService(tasks, parts.feed)
            server = _server(security, open_access(config.access_file), parts, service, feed)
            # Before the port: a request that arrives at once must find the group commit running.
            background = [tasks.create_task(parts.group.run(), name="group-commit")]
            async with server.listen(config.addr) as bound:
                # After the port is bound: the coordinator hands the address out, and clients call
                # at once.
                await announce(pd, identity, config.advertise_addr or bound)
                if identity.is_founder:
                    await parts.group.submit([founded])
                _log.info(
                    "store joined", cluster_id=identity.cluster_id, store_id=identity.store_id
                )
                background += [
                    tasks.create_task(
                        parts.hub.run(pd, config.resolved_ts_interval), name="resolved-ts"
                    ),
                    tasks.create_task(parts.gc.run(), name="gc"),
                    tasks.create_task(parts.sizes.run(), name="region-sizes"),
                    tasks.create_task(parts.handover.run(), name="region-handover"),
                    tasks.create_task(
                        _heartbeats(pd, parts.gate, config.heartbeat_interval), name="heartbeat"
                    ),
                ]
                try:
                    yield bound
                finally:
                    # Streams have no end of their own; without this the listener would wait for
                    # their clients until its deadline.
                    service.close()
                    feed.close()
            for task in background:
                task.cancel()


def _server(
    security: SecurityConfig,
    access: Access,
    parts: "_Parts",
    service: TikvService,
    feed: ChangeDataService,
) -> RpcServer:
    server = RpcServer(security, suited=RpcEngine.NATIVE, access=access)
    batch = {
        name: parts.runner.handler(method)
        for name, method in METHODS.items()
        if not hasattr(service, name)
    }
    server.add_service(tikvpb.DESCRIPTOR.services_by_name["Tikv"], service, batch)
    server.add_service(cdcpb.DESCRIPTOR.services_by_name["ChangeData"], feed)
    server.add_service(debugpb.DESCRIPTOR.services_by_name["Debug"], DebugService(parts.online))
    admin = store_pb2.DESCRIPTOR.services_by_name["StoreService"]
    server.add_service(admin, guarded(admin, parts.admin, access))
    return server


@dataclass(frozen=True, slots=True)
class _Threads:
    """The thread pools: one for each kind of work that may block, so that none waits for another's
    disk.
    """

    writer: ThreadPoolExecutor
    readers: ThreadPoolExecutor
    scanners: ThreadPoolExecutor
    gc: ThreadPoolExecutor


@dataclass(frozen=True, slots=True)
class _Foundation:
    """The parts that exist before any of the store's own objects."""

    kv: Database
    pd: PdClient
    identity: Identity
    fence: ReadFence


class _Parts:
    """The store's objects, each made from those before it."""

    def __init__(
        self,
        config: StoreConfig,
        security: SecurityConfig,
        foundation: _Foundation,
        threads: _Threads,
    ) -> None:
        kv, pd = foundation.kv, foundation.pd
        identity, fence = foundation.identity, foundation.fence
        self.gate = RegionGate(identity.store_id, identity.regions)
        locks = OpenLocks(self.gate.regions.starts, stored_locks(kv), fence)
        metrics.OPEN_LOCKS.set(len(locks))
        metrics.REGIONS.set(len(self.gate.regions))
        versions = stored_versions(kv, self.gate.regions)
        # Set before anything but the identity is written, so that every version is counted.
        kv.count = versions.count
        self.hub = FeedHub(self.gate, locks)
        engine = Engine(kv, fence)
        self.group = GroupCommit(engine, threads.writer, self.hub.observe, metrics.observe_group)
        self.runner = Runner(
            kv, self.gate, self.group, threads.readers, TimestampCheck(pd.tso, fence.max_ts)
        )
        table = RegionTable(pd, self.gate, self.group, versions, self.hub.replaced)
        self.splitter, self.merger = Splitter(pd, table), Merger(table)
        self.sizes = SizeCheck(kv, self.gate, self.splitter, self.merger, threads.scanners, config)
        garbage = self._collector_parts(config, kv, versions, threads)
        self.collector = Collector(garbage)
        self.gc = AutoGc(pd, self.gate, self.collector, config.gc_poll_interval)
        self.feed = self._feed_backend(config, identity, engine, threads)
        followers = {
            "gc.max-write-bytes-per-sec": garbage.rate.limit,
            "cdc.incremental-scan-speed-limit": self.feed.scan_rate.limit,
        }
        self.online = OnlineConfig(kv, self.group, followers)
        self.handover = Handover(
            cluster_id=identity.cluster_id,
            kv=kv,
            pd=pd,
            table=table,
            collector=self.collector,
            fence=fence,
            security=security,
            interval_s=config.region_check_interval,
            enabled=config.share_regions,
        )
        self.admin = StoreService(
            identity, garbage, self.gc, self.hub, self.merger, self.handover, threads.scanners
        )

    def _collector_parts(
        self, config: StoreConfig, kv: Database, versions: RegionVersions, threads: _Threads
    ) -> CollectorParts:
        rate = ByteRate(config.gc_max_write_bytes_per_sec)
        metrics.GC_MAX_WRITE_BYTES.set_function(lambda: rate.bytes_per_s)
        return CollectorParts(
            kv=kv,
            group=self.group,
            gate=self.gate,
            versions=versions,
            scanners=threads.gc,
            forget_locks=self.hub.forget_locks,
            rate=rate,
            ratio_threshold=config.gc_ratio_threshold,
            destroy_share=config.destroy_range_share,
        )

    def _feed_backend(
        self, config: StoreConfig, identity: Identity, engine: Engine, threads: _Threads
    ) -> FeedBackend:
        memory = ByteBudget(config.feed_memory_bytes)
        metrics.FEED_QUEUED_BYTES.set_function(lambda: memory.used_bytes)
        return FeedBackend(
            cluster_id=identity.cluster_id,
            engine=engine,
            group=self.group,
            gate=self.gate,
            hub=self.hub,
            scanners=threads.scanners,
            scan_rate=ByteRate(config.feed_scan_bytes_per_sec),
            memory=memory,
            buffer_bytes=config.feed_buffer_bytes,
            history_begins=lambda: self.collector.walk.begun_safe_point,
        )


async def _heartbeats(pd: PdClient, gate: RegionGate, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await pd.store_heartbeat(
                pdpb.StoreStats(store_id=gate.store_id, region_count=len(gate.regions))
            )
            await report_regions(pd, gate.regions, gate.store_id)
        except (UnavailableError, PdRefusedError) as err:
            _log.warning("the coordinator does not take the heartbeat", error=err.message)
