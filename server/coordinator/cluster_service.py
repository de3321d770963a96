"""pdpb.PD: stores, ids, bootstrap, heartbeats of stores."""

from collections.abc import Mapping
from typing import Any

from kvproto import metapb_pb2, pdpb_pb2

from server.coordinator.cluster import Cluster
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.header import Headers

MAX_IDS = 100_000


class ClusterService:
    """What clients ask about the cluster itself."""

    def __init__(self, headers: Headers, cluster: Cluster) -> None:
        self._headers = headers
        self._cluster = cluster

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
        region = request.region
        if not request.store.id or not region.id or region.start_key or region.end_key or len(region.peers) != 1:
            raise RequestError(
                "a bootstrap needs a store with an id, and one region with an id, without bounds, with one peer"
            )
        if not await self._cluster.bootstrap(request.store, region):
            raise RefusedError(pdpb_pb2.ALREADY_BOOTSTRAPPED, "cluster is already bootstrapped")
        return pdpb_pb2.BootstrapResponse()

    async def alloc_id(self, request: pdpb_pb2.AllocIDRequest) -> pdpb_pb2.AllocIDResponse:
        """Reserve `count` ids (0 means 1); `id` is the last of them."""
        count = request.count or 1
        if count > MAX_IDS:
            raise RequestError(f"at most {MAX_IDS} ids a call, not {count}")
        return pdpb_pb2.AllocIDResponse(id=await self._cluster.alloc_id(count), count=count)

    async def get_store(self, request: pdpb_pb2.GetStoreRequest) -> pdpb_pb2.GetStoreResponse:
        """One store."""
        return pdpb_pb2.GetStoreResponse(store=self._store(request.store_id))

    async def get_all_stores(self, request: pdpb_pb2.GetAllStoresRequest) -> pdpb_pb2.GetAllStoresResponse:
        """All stores, or all that are not removed."""
        stores = [
            store
            for store in self._cluster.stores.values()
            if not (request.exclude_tombstone_stores and store.state == metapb_pb2.Tombstone)
        ]
        return pdpb_pb2.GetAllStoresResponse(stores=stores)

    async def put_store(self, request: pdpb_pb2.PutStoreRequest) -> pdpb_pb2.PutStoreResponse:
        """Register a store; two stores cannot have one address."""
        store = request.store
        if not store.id or not store.address:
            raise RequestError("a store needs an id and an address")
        for other in self._cluster.stores.values():
            if other.address == store.address and other.id != store.id and other.state != metapb_pb2.Tombstone:
                raise RequestError(
                    f"[PD:core:ErrStoreDuplicate]duplicated store address: {store.address} is store {other.id}'s"
                )
        await self._cluster.put_store(store)
        return pdpb_pb2.PutStoreResponse()

    async def store_heartbeat(self, request: pdpb_pb2.StoreHeartbeatRequest) -> pdpb_pb2.StoreHeartbeatResponse:
        """A store lives."""
        self._store(request.stats.store_id)
        self._cluster.heartbeat(request.stats)
        return pdpb_pb2.StoreHeartbeatResponse()

    async def get_cluster_config(self, _request: pdpb_pb2.GetClusterConfigRequest) -> pdpb_pb2.GetClusterConfigResponse:
        """The cluster's id and replica count."""
        return pdpb_pb2.GetClusterConfigResponse(cluster=metapb_pb2.Cluster(id=self._cluster.id, max_peer_count=3))

    def _store(self, store_id: int) -> metapb_pb2.Store:
        store = self._cluster.stores.get(store_id)
        if store is None:
            raise RefusedError(pdpb_pb2.UNKNOWN, f"invalid store ID {store_id}, not found")
        return store
