"""What a cluster is made of: its id, stores, regions, and the numbers they are named with.

Stores, bootstrap and ids are durable before they are answered. Regions are what stores report again and again, so they
are written behind, by `run`; the metadata's copy only shortens the time after a restart.
"""

import asyncio
import secrets
import struct
import time

import structlog
from google.protobuf.message import DecodeError
from kvproto import metapb_pb2, pdpb_pb2

from server.coordinator import metrics
from server.coordinator.cluster.regions import KnownRegion, Regions, Reported
from server.coordinator.errors import ClusterIdMismatchError, RefusedError
from server.coordinator.keys import CLUSTER_ID, ClusterKeys
from server.coordinator.leadership.durable_limit import DurableLimit
from server.coordinator.leadership.ledger import Ledger
from storage.meta.errors import MetaUnavailableError
from storage.meta.meta import Compare, Delete, Get, Meta, Op, Put
from storage.model.errors import CorruptError

_U64 = struct.Struct(">Q")
_ID_WINDOW = 1000
_IDS_END = 1 << 64
_RETRY_SECONDS = 1.0

_log = structlog.get_logger(__name__)


async def load_cluster_id(meta: Meta, wanted: int) -> int:
    """The stored cluster id; at first start `wanted`, or if that is 0 a new one.

    Raises:
        ClusterIdMismatchError: another id than `wanted` is stored.
    """
    found = await meta.get(CLUSTER_ID)
    stored = int(_U64.unpack(found.value)[0]) if found else await _create_cluster_id(meta, wanted)
    if wanted and stored != wanted:
        raise ClusterIdMismatchError(
            f"the metadata belongs to cluster {stored}, not {wanted}; drop --cluster-id or use other metadata"
        )
    return stored


async def _create_cluster_id(meta: Meta, wanted: int) -> int:
    fresh = wanted or (int(time.time()) << 32) + secrets.randbits(32)
    created = await meta.txn([Compare.absent(CLUSTER_ID)], [Put(CLUSTER_ID, _U64.pack(fresh))], [Get(CLUSTER_ID)])
    return fresh if created.succeeded else int(_U64.unpack(created.pairs[0][0].value)[0])


def encode_cluster_id(cluster_id: int) -> bytes:
    """The record of a cluster's id."""
    return _U64.pack(cluster_id)


class Cluster:
    """The cluster's state in memory, and its way to the metadata."""

    def __init__(self, ledger: Ledger, keys: ClusterKeys) -> None:
        self.id = keys.cluster_id
        self.regions = Regions()
        self.stores: dict[int, metapb_pb2.Store] = {}
        self.stats: dict[int, pdpb_pb2.StoreStats] = {}
        self.min_resolved_ts: dict[int, int] = {}
        self.bootstrapped = False
        self._ledger = ledger
        self._keys = keys
        self._next_id = 1
        self._ids = DurableLimit(ledger, keys.path("alloc_id"))
        self._allocating = asyncio.Lock()
        self._unsaved: dict[int, metapb_pb2.Region | None] = {}
        self._wake = asyncio.Event()

    async def load(self) -> None:
        """Read everything from the metadata.

        Raises:
            CorruptError: a record cannot be read.
        """
        ledger = self._ledger
        self.bootstrapped = await ledger.get(self._keys.path("raft")) is not None
        try:
            for pair in await ledger.get_prefix(self._keys.path("raft/s/")):
                store = metapb_pb2.Store.FromString(pair.value)
                self.stores[store.id] = store
            for pair in await ledger.get_prefix(self._keys.path("raft/r/")):
                self.regions.report(metapb_pb2.Region.FromString(pair.value), metapb_pb2.Peer())
        except DecodeError as err:
            raise CorruptError(f"a stored store or region cannot be read: {err}; restore the metadata") from err
        await self._ids.load()
        self._next_id = self._ids.value + 1
        self._count()

    async def run(self) -> None:
        """Write regions behind their reports, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self.flush()
            except MetaUnavailableError as err:
                _log.warning("regions are not saved yet", reason=err.message)
                await asyncio.sleep(_RETRY_SECONDS)
                self._wake.set()

    async def flush(self) -> None:
        """Make every region reported so far durable."""
        unsaved, self._unsaved = self._unsaved, {}
        ops: list[Op] = [
            Put(self._keys.region(region_id), region.SerializeToString())
            if region
            else Delete(self._keys.region(region_id))
            for region_id, region in unsaved.items()
        ]
        try:
            await self._ledger.write(ops)
        except BaseException:
            self._unsaved = unsaved | self._unsaved
            raise

    async def bootstrap(self, store: metapb_pb2.Store, region: metapb_pb2.Region) -> bool:
        """Start the cluster; returns False if it was started before."""
        made = metapb_pb2.Cluster(id=self.id, max_peer_count=3)
        root = self._keys.path("raft")
        result = await self._ledger.txn(
            [Compare.absent(root)],
            [
                Put(root, made.SerializeToString()),
                Put(self._keys.store(store.id), store.SerializeToString()),
                Put(self._keys.region(region.id), region.SerializeToString()),
            ],
        )
        if result.succeeded:
            self.bootstrapped = True
            self.stores[store.id] = store
            self.regions.report(region, metapb_pb2.Peer())
            self._count()
        return result.succeeded

    async def put_store(self, store: metapb_pb2.Store) -> None:
        """Register a store or what changed of it; durable when it returns."""
        await self._ledger.txn((), [Put(self._keys.store(store.id), store.SerializeToString())])
        self.stores[store.id] = store
        self._count()

    def heartbeat(self, stats: pdpb_pb2.StoreStats) -> None:
        """Note that a store lives, and how it is."""
        self.stores[stats.store_id].last_heartbeat = time.time_ns()
        self.stats[stats.store_id] = stats

    def report(self, region: metapb_pb2.Region, leader: metapb_pb2.Peer) -> Reported:
        """Take a region's report in; it is written soon."""
        reported = self.regions.report(region, leader)
        if reported.saved is not None:
            self._unsaved[region.id] = reported.saved
        self._unsaved |= dict.fromkeys(reported.removed)
        if self._unsaved:
            self._wake.set()
        metrics.REGIONS.set(len(self.regions))
        return reported

    async def alloc_id(self, count: int = 1) -> int:
        """Reserve `count` numbers nobody else ever gets; returns the last.

        Raises:
            RefusedError: so many are not left.
        """
        async with self._allocating:
            while self._next_id + count - 1 > self._ids.value:
                await self._reserve_ids(count)
            self._next_id += count
            return self._next_id - 1

    async def _reserve_ids(self, count: int) -> None:
        if self._next_id + count > _IDS_END:
            raise RefusedError(pdpb_pb2.UNKNOWN, f"{count} ids are asked for, {_IDS_END - self._next_id} are left")
        await self._ids.raise_to(min(self._next_id + max(count, _ID_WINDOW), _IDS_END) - 1)

    async def put_back_ids(self) -> None:
        """See `DurableLimit.put_back`."""
        await self._ids.put_back()

    def _count(self) -> None:
        metrics.STORES.set(len(self.stores))
        metrics.REGIONS.set(len(self.regions))


def message_of(known: KnownRegion) -> pdpb_pb2.Region:
    """A region as PD's scans answer it."""
    return pdpb_pb2.Region(region=known.region, leader=known.leader)
