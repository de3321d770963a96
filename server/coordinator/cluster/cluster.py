"""A cluster: its id, its stores, its regions and ids in memory and in the metadata;
and the RPCs about them.

Stores, bootstrap and ids are durable before they are answered. Regions are what stores report again
and again, so they are written behind, by `Cluster.run`; the metadata's copy only shortens the time
after a restart. `ClusterService` answers Bootstrap, AllocID, PutStore, StoreHeartbeat and the other
RPCs that are not about regions.
"""

import asyncio
import secrets
import struct
import time
from collections.abc import Mapping
from typing import Any

import structlog
from google.protobuf.message import DecodeError
from kvproto import metapb_pb2, pdpb_pb2

from server.coordinator.cluster.regions import KnownRegion, Regions, Reported
from server.coordinator.cluster.stores import cluster_version, is_removed, registered
from server.coordinator.errors import ClusterIdMismatchError, RefusedError
from server.coordinator.header import Headers
from server.coordinator.keys import CLUSTER_ID, ClusterKeys
from server.coordinator.leadership.durable_limit import DurableLimit
from server.coordinator.leadership.leadership import FencedMetadata
from storage.meta.errors import MetaUnavailableError
from storage.meta.meta import Compare, Delete, Get, Meta, Op, Put
from storage.model.errors import CorruptError
from storage.tasks import Changes

_U64 = struct.Struct(">Q")
_ID_WINDOW = 1000
_IDS_END = 1 << 64
_RETRY_SECONDS = 1.0

_log = structlog.get_logger(__name__)


async def load_cluster_id(meta: Meta, configured: int) -> int:
    """The stored cluster id; at first start `configured`, or if that is 0 a new one.

    Raises:
        ClusterIdMismatchError: another id than `configured` is stored.
    """
    pair = await meta.get(CLUSTER_ID)
    stored = int(_U64.unpack(pair.value)[0]) if pair else await _create_cluster_id(meta, configured)
    if configured and stored != configured:
        raise ClusterIdMismatchError(
            f"the metadata belongs to cluster {stored}, not {configured}; drop --cluster-id or "
            "use other metadata"
        )
    return stored


async def _create_cluster_id(meta: Meta, configured: int) -> int:
    fresh = configured or (int(time.time()) << 32) + secrets.randbits(32)
    # Several coordinators may start at once: the first one's id is everybody's.
    created = await meta.txn(
        [Compare.absent(CLUSTER_ID)], [Put(CLUSTER_ID, _U64.pack(fresh))], [Get(CLUSTER_ID)]
    )
    return fresh if created.succeeded else int(_U64.unpack(created.pairs[0][0].value)[0])


def encode_cluster_id(cluster_id: int) -> bytes:
    """The record of a cluster's id."""
    return _U64.pack(cluster_id)


class Cluster:
    """The cluster's state in memory, which it writes to the metadata."""

    def __init__(self, metadata: FencedMetadata, keys: ClusterKeys) -> None:
        self.id = keys.cluster_id
        self.regions = Regions()
        self.stores: dict[int, metapb_pb2.Store] = {}
        self.stats: dict[int, pdpb_pb2.StoreStats] = {}
        self.min_resolved_ts: dict[int, int] = {}
        self.bootstrapped = False
        self._metadata = metadata
        self._keys = keys
        # To their end, though callers give up: memory must know what the metadata has.
        self._changes = Changes()
        self._next_id = 1
        self._ids = DurableLimit(metadata, keys.path("alloc_id"))
        self._allocating = asyncio.Lock()
        self._unsaved: dict[int, metapb_pb2.Region | None] = {}
        self._wake = asyncio.Event()

    async def load(self) -> None:
        """Read everything from the metadata.

        Raises:
            CorruptError: a record cannot be read.
        """
        await self._load_bootstrapped()
        await self._ids.load()
        # Ids below the saved limit may have been handed out before the restart; all of them are
        # skipped.
        self._next_id = self._ids.value + 1

    async def _load_bootstrapped(self) -> None:
        """Read what is there since a bootstrap."""
        metadata = self._metadata
        bootstrapped = await metadata.get(self._keys.path("raft")) is not None
        try:
            for pair in await metadata.get_prefix(self._keys.path("raft/s/")):
                store = metapb_pb2.Store.FromString(pair.value)
                self.stores[store.id] = store
            for pair in await metadata.get_prefix(self._keys.path("raft/r/")):
                self.regions.report(metapb_pb2.Region.FromString(pair.value), metapb_pb2.Peer())
        except DecodeError as err:
            raise CorruptError(
                f"a stored store or region cannot be read: {err}; restore the metadata"
            ) from err
        # Last: what is read while others ask is whole before they hear of it.
        self.bootstrapped = bootstrapped

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
        # Reports that arrive while this part is written gather in the new one; those win over it if
        # the write fails.
        unsaved, self._unsaved = self._unsaved, {}
        ops: list[Op] = [
            Put(self._keys.region(region_id), region.SerializeToString())
            if region
            else Delete(self._keys.region(region_id))
            for region_id, region in unsaved.items()
        ]
        try:
            await self._metadata.write(ops)
        except BaseException:
            self._unsaved = unsaved | self._unsaved
            raise

    async def bootstrap(self, store: metapb_pb2.Store, region: metapb_pb2.Region) -> bool:
        """Start the cluster; returns False if it was started before."""
        return await self._changes.make(lambda: self._bootstrap(store, region))

    async def _bootstrap(self, store: metapb_pb2.Store, region: metapb_pb2.Region) -> bool:
        if self.bootstrapped:
            return False
        made = metapb_pb2.Cluster(id=self.id, max_peer_count=3)
        root = self._keys.path("raft")
        # One transaction for cluster, store and region: half a bootstrap could neither be used nor
        # begun again.
        result = await self._metadata.txn(
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
        else:
            # An earlier write of ours, whose answer was lost: memory does not have it yet.
            await self._load_bootstrapped()
        return result.succeeded

    async def put_store(self, store: metapb_pb2.Store) -> None:
        """Register a store or what changed of it; durable when it returns.

        Raises:
            RefusedError: it may not register.
        """
        await self._changes.make(lambda: self._put_store(store))

    async def _put_store(self, given: metapb_pb2.Store) -> None:
        # Checked against the stores and written without another registration in between: addresses
        # must stay unique. Durable before it is seen in memory: a store must not be told of a
        # registration that a new leader does not know.
        store = registered(given, self.stores)
        await self._metadata.txn((), [Put(self._keys.store(store.id), store.SerializeToString())])
        self.stores[store.id] = store

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
        return reported

    async def alloc_id(self, count: int = 1) -> int:
        """Reserve `count` numbers nobody else ever gets; returns the last.

        Raises:
            RefusedError: so many are not left.
        """
        # Callers that need a new window wait for one write of it instead of each making one.
        async with self._allocating:
            while self._next_id + count - 1 > self._ids.value:
                await self._reserve_ids(count)
            self._next_id += count
            return self._next_id - 1

    async def _reserve_ids(self, count: int) -> None:
        if self._next_id + count > _IDS_END:
            raise RefusedError(
                pdpb_pb2.UNKNOWN, f"{count} ids are asked for, {_IDS_END - self._next_id} are left"
            )
        await self._ids.raise_to(min(self._next_id + max(count, _ID_WINDOW), _IDS_END) - 1)

    async def put_back_ids(self) -> None:
        """See `DurableLimit.put_back`."""
        await self._ids.put_back()


def message_of(entry: KnownRegion) -> pdpb_pb2.Region:
    """A region as PD's scans answer it."""
    return pdpb_pb2.Region(region=entry.region, leader=entry.leader)


class ClusterService:
    """PD's calls about the cluster itself."""

    def __init__(self, headers: Headers, cluster: Cluster) -> None:
        self._headers = headers
        self._cluster = cluster

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        before_bootstrap = self._headers.calls(
            self.IsBootstrapped, self.Bootstrap, self.AllocID, before_bootstrap=True
        )
        afterwards = self._headers.calls(
            self.GetStore,
            self.GetAllStores,
            self.PutStore,
            self.StoreHeartbeat,
            self.GetClusterConfig,
        )
        return {**before_bootstrap, **afterwards}

    async def IsBootstrapped(
        self, _request: pdpb_pb2.IsBootstrappedRequest
    ) -> pdpb_pb2.IsBootstrappedResponse:
        """Whether a store has bootstrapped the cluster."""
        return pdpb_pb2.IsBootstrappedResponse(bootstrapped=self._cluster.bootstrapped)

    async def Bootstrap(self, request: pdpb_pb2.BootstrapRequest) -> pdpb_pb2.BootstrapResponse:
        """Take the first store and the region that covers everything."""
        if self._cluster.bootstrapped:
            raise RefusedError(pdpb_pb2.ALREADY_BOOTSTRAPPED, "cluster is already bootstrapped")
        if fault := _bootstrap_fault(request, self._cluster.id):
            raise RefusedError(pdpb_pb2.UNKNOWN, fault)
        if not await self._cluster.bootstrap(request.store, request.region):
            raise RefusedError(pdpb_pb2.ALREADY_BOOTSTRAPPED, "cluster is already bootstrapped")
        return pdpb_pb2.BootstrapResponse()

    async def AllocID(self, request: pdpb_pb2.AllocIDRequest) -> pdpb_pb2.AllocIDResponse:
        """Reserve `count` ids (0 means 1); `id` is the last of them."""
        count = request.count or 1
        last = await self._cluster.alloc_id(count)
        return pdpb_pb2.AllocIDResponse(id=last, count=count if count > 1 else 0)

    async def GetStore(self, request: pdpb_pb2.GetStoreRequest) -> pdpb_pb2.GetStoreResponse:
        """Return a store and its last heartbeat's values."""
        store = self._cluster.stores.get(request.store_id)
        if store is None:
            raise RefusedError(pdpb_pb2.UNKNOWN, f"invalid store ID {request.store_id}, not found")
        return pdpb_pb2.GetStoreResponse(store=store, stats=self._cluster.stats.get(store.id))

    async def GetAllStores(
        self, request: pdpb_pb2.GetAllStoresRequest
    ) -> pdpb_pb2.GetAllStoresResponse:
        """All stores, or all that are not removed."""
        stores = [
            store
            for store in self._cluster.stores.values()
            if not (request.exclude_tombstone_stores and is_removed(store))
        ]
        return pdpb_pb2.GetAllStoresResponse(stores=stores)

    async def PutStore(self, request: pdpb_pb2.PutStoreRequest) -> pdpb_pb2.PutStoreResponse:
        """Register a store, or what changed of it; durable when it returns."""
        await self._cluster.put_store(request.store)
        return pdpb_pb2.PutStoreResponse()

    async def StoreHeartbeat(
        self, request: pdpb_pb2.StoreHeartbeatRequest
    ) -> pdpb_pb2.StoreHeartbeatResponse:
        """A store lives; its numbers are kept in memory."""
        store_id = request.stats.store_id
        store = self._cluster.stores.get(store_id)
        if store is None:
            raise RefusedError(pdpb_pb2.UNKNOWN, f"store {store_id} not found")
        if is_removed(store):
            raise RefusedError(pdpb_pb2.STORE_TOMBSTONE, "store is tombstone")
        self._cluster.heartbeat(request.stats)
        version = cluster_version(self._cluster.stores.values())
        return pdpb_pb2.StoreHeartbeatResponse(cluster_version=version)

    async def GetClusterConfig(
        self, _request: pdpb_pb2.GetClusterConfigRequest
    ) -> pdpb_pb2.GetClusterConfigResponse:
        """The cluster's id and replica count."""
        return pdpb_pb2.GetClusterConfigResponse(
            cluster=metapb_pb2.Cluster(id=self._cluster.id, max_peer_count=3)
        )


def _bootstrap_fault(request: pdpb_pb2.BootstrapRequest, cluster_id: int) -> str:
    """The fault of the first store and region, in PD's words (server/util: checkBootstrapRequest);
    or nothing.
    """
    store, region, where = request.store, request.region, f"for bootstrap {cluster_id}"
    peers = region.peers
    peer = peers[0] if peers else metapb_pb2.Peer()
    faults = [
        (not request.HasField("store"), f"missing store meta {where}"),
        (not store.id, "invalid zero store id"),
        (not request.HasField("region"), f"missing region meta {where}"),
        (
            region.start_key or region.end_key,
            f"invalid first region key range, must all be empty {where}",
        ),
        (not region.id, "invalid zero region id"),
        (len(peers) != 1, f"invalid first region peer count {len(peers)}, must be 1 {where}"),
        (peer.store_id != store.id, f"invalid peer store id {peer.store_id} != {store.id} {where}"),
        (not peer.id, "invalid zero peer id"),
    ]
    return next((text for wrong, text in faults if wrong), "")
