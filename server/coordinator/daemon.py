"""The coordinator put together: metadata, leadership, state, services.

With a real etcd one coordinator leads: it serves only while it holds `/pd/<cluster>/leader`, and every write of its own
carries that key's create revision. With embedded metadata the directory's lock does the same.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvproto import meta_storagepb_pb2, pdpb_pb2

from gcsafepoint.service import SafePointService
from server.config import ConfigError
from server.coordinator.cluster import Cluster, load_cluster_id
from server.coordinator.cluster_service import ClusterService
from server.coordinator.config import CoordinatorConfig
from server.coordinator.errors import MetadataUrlError
from server.coordinator.etcd_proxy import EtcdProxy
from server.coordinator.etcd_service import EtcdService, MetaStorageService
from server.coordinator.gc_service import GcService
from server.coordinator.header import Headers
from server.coordinator.keys import ClusterKeys
from server.coordinator.leader import Leadership, alone, leading
from server.coordinator.ledger import Ledger
from server.coordinator.region_service import RegionService
from server.coordinator.tso import TimestampOracle
from server.coordinator.tso_service import TsoService
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.server import RpcServer
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.remote import RemoteEtcd

_WILDCARDS = ("0.0.0.0", "[::]")  # noqa: S104 - compared with, not listened on


@asynccontextmanager
async def opened(config: CoordinatorConfig, security: SecurityConfig) -> AsyncIterator[Mapping[str, str]]:
    """Serve for the block; yields the bound address.

    Raises:
        ConfigError, MetadataUrlError, ClusterIdMismatchError, PortInUseError, and those of the metadata.
    """
    if config.addr.startswith(_WILDCARDS) and not config.advertise_addr:
        raise ConfigError(f"--addr {config.addr} is no address clients can use; give one with --advertise-addr")
    async with _open_metadata(config.metadata, security) as api:
        meta = EtcdMeta(api)
        keys = ClusterKeys(await load_cluster_id(meta, config.cluster_id))
        async with _leadership(api, meta, keys, config) as leadership:
            coordinator = await _Coordinator.load(Ledger(meta, leadership.fence), keys)
            async with coordinator.serving(api, leadership, config, security) as bound:
                yield {"coordinator": bound}


class _Coordinator:
    """The state one leader has in memory."""

    def __init__(
        self, keys: ClusterKeys, cluster: Cluster, oracle: TimestampOracle, safe_points: SafePointService
    ) -> None:
        self._keys = keys
        self._cluster = cluster
        self._oracle = oracle
        self._safe_points = safe_points

    @classmethod
    async def load(cls, ledger: Ledger, keys: ClusterKeys) -> "_Coordinator":
        """Read it all; nothing is answered before."""
        cluster = Cluster(ledger, keys)
        await cluster.load()
        safe_points = SafePointService(ledger, keys.gc)
        await safe_points.load()
        return cls(keys, cluster, await TimestampOracle.load(ledger, keys.path("timestamp")), safe_points)

    @asynccontextmanager
    async def serving(
        self,
        api: EmbeddedEtcd | RemoteEtcd,
        leadership: Leadership,
        config: CoordinatorConfig,
        security: SecurityConfig,
    ) -> AsyncIterator[str]:
        """Run the loops and listen for the block; yields the bound address."""
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(loop.run(), name=type(loop).__name__)
                for loop in (self._cluster, self._oracle, self._safe_points, leadership)
            ]
            server = RpcServer(security)
            members = ClusterService(self._headers(), self._cluster, config.advertise_addr or config.addr)
            self._add_pd(server, members)
            self._add_etcd(server, api, members, tasks)
            async with server.listen(config.addr) as bound:
                members.announce(config.advertise_addr or bound)
                yield bound
            await self._cluster.flush()
            for loop in loops:
                loop.cancel()

    def _headers(self) -> Headers:
        return Headers(self._keys.cluster_id, lambda: self._cluster.bootstrapped)

    def _add_pd(self, server: RpcServer, members: ClusterService) -> None:
        headers = self._headers()
        gc = GcService(headers, self._safe_points)
        calls: dict[str, Any] = {}
        for part in (members, RegionService(headers, self._cluster), TsoService(headers, self._oracle), gc):
            calls |= part.calls()
        server.add_service(pdpb_pb2.DESCRIPTOR.services_by_name["PD"], SimpleNamespace(**calls), batch=gc.batches())

    def _add_etcd(
        self, server: RpcServer, api: EmbeddedEtcd | RemoteEtcd, members: ClusterService, tasks: asyncio.TaskGroup
    ) -> None:
        meta_storage = MetaStorageService(api, self._keys.cluster_id)
        server.add_service(meta_storagepb_pb2.DESCRIPTOR.services_by_name["MetaStorage"], meta_storage)
        if isinstance(api, EmbeddedEtcd):
            EtcdService(api, self._keys.cluster_id, members, tasks).add_to(server)
        else:
            server.add_proxy(EtcdProxy(api))


def _open_metadata(
    url: str, security: SecurityConfig
) -> AbstractAsyncContextManager[EmbeddedEtcd] | AbstractAsyncContextManager[RemoteEtcd]:
    scheme, _, rest = url.partition(":")
    if scheme == "leveldb" and rest:
        return EmbeddedEtcd.open(Path(rest))
    endpoints = [endpoint for endpoint in rest.removeprefix("//").split(",") if endpoint]
    if scheme == "etcd" and endpoints:
        return RemoteEtcd.open(endpoints, lambda endpoint: connect(endpoint, security))
    raise MetadataUrlError(f"--metadata {url!r} must be etcd://host:port[,host:port…] or leveldb:DIRECTORY")


def _leadership(
    api: EmbeddedEtcd | RemoteEtcd, meta: EtcdMeta, keys: ClusterKeys, config: CoordinatorConfig
) -> AbstractAsyncContextManager[Leadership]:
    if isinstance(api, EmbeddedEtcd):
        return alone()
    address = config.advertise_addr or config.addr
    member = pdpb_pb2.Member(name=f"tidemark-{address}", client_urls=[f"http://{address}"])
    return leading(meta, keys.path("leader"), member)
