"""pdpb.PD: stores, ids, bootstrap, heartbeats of stores."""

import asyncio
from collections.abc import Mapping
from typing import Any

from kvproto import metapb_pb2, pdpb_pb2

from server.coordinator.cluster.cluster import Cluster
from server.coordinator.cluster.stores import cluster_version, is_removed, registered
from server.coordinator.errors import RefusedError
from server.coordinator.header import Headers


class ClusterService:
    """What clients ask about the cluster itself."""

    def __init__(self, headers: Headers, cluster: Cluster) -> None:
        self._headers = headers
        self._cluster = cluster
        self._registering = asyncio.Lock()

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here."""
        door = self._headers
        return {
            "IsBootstrapped": door.open(pdpb_pb2.IsBootstrappedResponse, self.is_bootstrapped),
            "Bootstrap": door.open(pdpb_pb2.BootstrapResponse, self.bootstrap),
            "AllocID": door.open(pdpb_pb2.AllocIDResponse, self.alloc_id),
            "GetStore": door.bound(pdpb_pb2.GetStoreResponse, self.get_store),
            "GetAllStores": door.bound(pdpb_pb2.GetAllStoresResponse, self.get_all_stores),
            "PutStore": door.bound(pdpb_pb2.PutStoreResponse, self.put_store),
            "StoreHeartbeat": door.bound(pdpb_pb2.StoreHeartbeatResponse, self.store_heartbeat),
            "GetClusterConfig": door.bound(pdpb_pb2.GetClusterConfigResponse, self.get_cluster_config),
        }

    async def is_bootstrapped(self, _request: pdpb_pb2.IsBootstrappedRequest) -> pdpb_pb2.IsBootstrappedResponse:
        """Whether a store has started the cluster."""
        return pdpb_pb2.IsBootstrappedResponse(bootstrapped=self._cluster.bootstrapped)

    async def bootstrap(self, request: pdpb_pb2.BootstrapRequest) -> pdpb_pb2.BootstrapResponse:
        """Take the first store and the region that covers everything."""
        if self._cluster.bootstrapped:
            raise RefusedError(pdpb_pb2.ALREADY_BOOTSTRAPPED, "cluster is already bootstrapped")
        if fault := _bootstrap_fault(request, self._cluster.id):
            raise RefusedError(pdpb_pb2.UNKNOWN, fault)
        if not await self._cluster.bootstrap(request.store, request.region):
            raise RefusedError(pdpb_pb2.ALREADY_BOOTSTRAPPED, "cluster is already bootstrapped")
        return pdpb_pb2.BootstrapResponse()

    async def alloc_id(self, request: pdpb_pb2.AllocIDRequest) -> pdpb_pb2.AllocIDResponse:
        """Reserve `count` ids (0 means 1); `id` is the last of them."""
        count = request.count or 1
        last = await self._cluster.alloc_id(count)
        return pdpb_pb2.AllocIDResponse(id=last, count=count if count > 1 else 0)

    async def get_store(self, request: pdpb_pb2.GetStoreRequest) -> pdpb_pb2.GetStoreResponse:
        """One store, and what it told of itself last."""
        store = self._cluster.stores.get(request.store_id)
        if store is None:
            raise RefusedError(pdpb_pb2.UNKNOWN, f"invalid store ID {request.store_id}, not found")
        return pdpb_pb2.GetStoreResponse(store=store, stats=self._cluster.stats.get(store.id))

    async def get_all_stores(self, request: pdpb_pb2.GetAllStoresRequest) -> pdpb_pb2.GetAllStoresResponse:
        """All stores, or all that are not removed."""
        stores = [
            store
            for store in self._cluster.stores.values()
            if not (request.exclude_tombstone_stores and is_removed(store))
        ]
        return pdpb_pb2.GetAllStoresResponse(stores=stores)

    async def put_store(self, request: pdpb_pb2.PutStoreRequest) -> pdpb_pb2.PutStoreResponse:
        """Register a store, or what changed of it; durable when it returns."""
        async with self._registering:
            await self._cluster.put_store(registered(request.store, self._cluster.stores))
        return pdpb_pb2.PutStoreResponse()

    async def store_heartbeat(self, request: pdpb_pb2.StoreHeartbeatRequest) -> pdpb_pb2.StoreHeartbeatResponse:
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

    async def get_cluster_config(self, _request: pdpb_pb2.GetClusterConfigRequest) -> pdpb_pb2.GetClusterConfigResponse:
        """The cluster's id and replica count."""
        return pdpb_pb2.GetClusterConfigResponse(cluster=metapb_pb2.Cluster(id=self._cluster.id, max_peer_count=3))


def _bootstrap_fault(request: pdpb_pb2.BootstrapRequest, cluster_id: int) -> str:
    """What is wrong with the first store and region, in PD's words (server/util: checkBootstrapRequest); or nothing."""
    store, region, where = request.store, request.region, f"for bootstrap {cluster_id}"
    peers = region.peers
    peer = peers[0] if peers else metapb_pb2.Peer()
    faults = [
        (not request.HasField("store"), f"missing store meta {where}"),
        (not store.id, "invalid zero store id"),
        (not request.HasField("region"), f"missing region meta {where}"),
        (region.start_key or region.end_key, f"invalid first region key range, must all be empty {where}"),
        (not region.id, "invalid zero region id"),
        (len(peers) != 1, f"invalid first region peer count {len(peers)}, must be 1 {where}"),
        (peer.store_id != store.id, f"invalid peer store id {peer.store_id} != {store.id} {where}"),
        (not peer.id, "invalid zero peer id"),
    ]
    return next((text for wrong, text in faults if wrong), "")
