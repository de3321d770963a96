"""The coordinator's settings, and the daemon put together: metadata, listener, members, election.

Over a real etcd every coordinator listens from the start, and one of them leads
(`server.coordinator.term`). Over embedded metadata the directory's lock makes this one the only
one: it leads from before it listens until after it has drained.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from kvproto import meta_storagepb_pb2, pdpb_pb2
from pyspark_tidemark.uri_secrets import masked
from tidemarkpb.v1 import explain_pb2

from gcsafepoint.state.compat import CompatError
from server.config import HTTP_ADDRS, ConfigError, setting
from server.coordinator.cluster.cluster import load_cluster_id
from server.coordinator.errors import MetadataUrlError
from server.coordinator.etcd.meta_storage import MetaStorageService
from server.coordinator.etcd.proxy import EtcdProxy
from server.coordinator.etcd.service import EtcdService
from server.coordinator.explain_service import Explainer, ExplainService
from server.coordinator.http_api import HttpApi
from server.coordinator.keys import ClusterKeys
from server.coordinator.leadership.durable_limit import StateLostError
from server.coordinator.leadership.leadership import Leadership
from server.coordinator.leadership.members import Members, MemberService, Membership, member_at
from server.coordinator.pd_http.api import PdHttp
from server.coordinator.term import CurrentTerm, Election, LeaderTerm, MemberForwarder, TermRouter
from server.routes import Handler, Route, Routes
from server.rpc.access_guard import guarded
from server.rpc.access_list import open_access
from server.rpc.call_access import check_provable
from server.rpc.client import LoginInAddressError, connect, diagnose
from server.rpc.config import Engine, Limits
from server.rpc.credentials import SecurityConfig
from server.rpc.server import RpcServer
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import MetaUnavailableError, UnsupportedError
from storage.meta.meta import Meta
from storage.meta.remote import RemoteEtcd
from storage.meta.store.state import Retention
from storage.tasks import background_tasks

_WILDCARDS = ("0.0.0.0", "[::]")  # noqa: S104 - compared with, not listened on
_METADATA_TIMEOUT_S = 2.0
_RETRY_S = 1.0
# etcd takes 1.5 MiB in one transaction; nothing of PD's comes near
_LIMITS = Limits(message_bytes=16 << 20)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Configuration of a coordinator: its addresses, and where its state is kept."""

    addr: str = setting("127.0.0.1:2379", "host:port for PD's and etcd's gRPC services")
    http_addr: str = setting(
        HTTP_ADDRS["coordinator"], "host:port for /metrics, /healthz and /readyz"
    )
    advertise_addr: str = setting(
        "", "host:port that clients are told to use; empty: the listening address"
    )
    metadata: str = setting(
        "leveldb:data/coordinator", "etcd://host:port[,host:port…] or leveldb:DIRECTORY"
    )
    metadata_keep_revisions: int = setting(
        10_000, "embedded metadata: revisions of history to keep; 0: all"
    )
    metadata_keep_s: int = setting(
        3600, "embedded metadata: seconds of history to keep at most; 0: no limit"
    )
    metadata_quota_bytes: int = setting(
        256 << 20, "embedded metadata: most bytes of keys and values; puts beyond it are refused"
    )
    gc_compat: str = setting(
        "classic", "answers to old GC calls: classic (the true minimum) or pd-9 (PD since 2025)"
    )
    leader_lease: int = setting(
        3,
        "seconds after which others may lead when this leader is gone (PD: leader-lease)",
        least=1,
    )
    capture_token_file: str = setting(
        "",
        "file with the token by which gc explain asks captures that have an access file; role read",
    )
    cluster_id: int = setting(0, "the cluster id; 0: the stored one, or a new one at first start")

    access_file: str = setting(
        "",
        "TOML file with the clients that may call, by certificate or token, and their roles; empty: "
        "everybody who reaches a port may do everything (docs/security.md)",
    )

    def check_with(self, security: SecurityConfig) -> None:
        """Check that the cluster's own processes can identify themselves; raises ConfigError."""
        check_provable(self.access_file, security)

    def checked(self) -> "CoordinatorConfig":
        """This configuration.

        Raises:
            MetadataUrlError: the metadata is neither etcd's nor a directory.
            LoginInAddressError: etcd's address has a login.
            CompatError: there is no such dialect.
        """
        if not _directory(self.metadata) and not _etcd_endpoints(self.metadata):
            raise MetadataUrlError(
                f"--metadata {masked(self.metadata)!r} must be etcd://host:port[,host:port…] or "
                "leveldb:DIRECTORY"
            )
        LoginInAddressError.check(",".join(_etcd_endpoints(self.metadata)))
        CompatError.check(self.gc_compat)
        return self


@asynccontextmanager
async def open_coordinator(
    config: CoordinatorConfig, security: SecurityConfig, routes: Routes | None = None
) -> AsyncIterator[Mapping[str, str]]:
    """Serve for the block, `routes` on the HTTP port included; yields the bound address.

    Raises:
        ConfigError, MetadataUrlError, CompatError, ClusterIdMismatchError, PortInUseError, and
        those of the metadata.
    """
    config.checked()
    # Not among what `config check` refuses of a file: the other address may come by a variable.
    if config.addr.startswith(_WILDCARDS) and not config.advertise_addr:
        raise ConfigError(
            f"--addr {config.addr} is no address clients can use; give one with --advertise-addr"
        )
    async with _open_metadata(config, security) as api:
        meta = EtcdMeta(api)
        endpoints = _etcd_endpoints(config.metadata)
        keys = ClusterKeys(await _cluster_id(meta, config.cluster_id, endpoints, security))
        coordinator = _Coordinator(api, keys, config, security, routes or Routes())
        opening = (
            coordinator.alone(meta) if isinstance(api, EmbeddedEtcd) else coordinator.electing(meta)
        )
        async with opening as bound:
            yield {"coordinator": bound}


class _Coordinator:
    """The parts that outlive a term: the listener, the members, the holder of the current term."""

    def __init__(
        self,
        api: EmbeddedEtcd | RemoteEtcd,
        keys: ClusterKeys,
        config: CoordinatorConfig,
        security: SecurityConfig,
        routes: Routes,
    ) -> None:
        self._api = api
        self._keys = keys
        self._config = config
        self._compat = CompatError.check(config.gc_compat)
        self._security = security
        self._routes = routes
        self._access = open_access(config.access_file)
        self._members = Members(self._me(config.addr))
        self._current = CurrentTerm(self._members)

    @asynccontextmanager
    async def alone(self, meta: Meta) -> AsyncIterator[str]:
        """Lead one term for the block; calls that are under way at its end are answered."""
        leadership = Leadership()
        # Loaded before the port is bound: nobody else can lead, so there is no follower to answer
        # meanwhile.
        term = await self._load(meta, leadership)
        async with (
            self._current.serving(term),
            self._listening() as bound,
            background_tasks(_stop_with(leadership)),
        ):
            yield bound

    @asynccontextmanager
    async def electing(self, meta: Meta) -> AsyncIterator[str]:
        """Follow and lead in turns for the block; at its end another coordinator leads before this
        one stops listening.
        """
        async with self._listening() as bound:
            leader = self._keys.path("leader")
            election = Election(
                meta, leader, self._members, self._current, partial(self._load, meta)
            )
            membership = Membership(meta, self._keys, self._members)
            # The election ends inside the listener's block: the term is over and another
            # coordinator leads before this port closes, so clients are told where to go.
            async with background_tasks(election.run(self._config.leader_lease), membership.run()):
                yield bound

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[str]:
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as channels:
            server = RpcServer(self._security, _LIMITS, Engine.NATIVE, self._access)
            self._add_pd(server, channels)
            self._add_etcd(server, tasks)
            server.serve_http1(PdHttp(self._keys.cluster_id, self._current, self._members).answer)
            # A follower is ready, too: it answers GetMembers and passes etcd's calls on.
            self._routes.not_ready = self._not_ready
            with self._routes.serving(self._explaining(server)):
                async with server.listen(self._config.addr) as bound:
                    self._members.set_own(self._me(bound))
                    yield bound

    def _not_ready(self) -> str:
        """Return why a coordinator is not ready, for `/readyz`: it is ready when it leads or knows
        the leader.
        """
        leader = self._members.leader
        has_leader = leader is not None and leader.client_urls
        return "" if has_leader else "no coordinator leads now; see the log of the one that did"

    def _explaining(self, server: RpcServer) -> Mapping[Route, Handler]:
        """Add `gc explain`; returns what the HTTP port serves."""
        to_capture = partial(
            connect, security=self._security, token_file=self._config.capture_token_file
        )
        explainer = Explainer(EtcdMeta(self._api), self._current, self._members, to_capture)
        service = explain_pb2.DESCRIPTOR.services_by_name["ExplainService"]
        server.add_service(service, guarded(service, ExplainService(explainer), self._access))
        return HttpApi(self._current, self._members, explainer).handlers()

    async def _load(self, meta: Meta, leadership: Leadership) -> LeaderTerm:
        return await LeaderTerm.load(leadership, meta, self._keys, self._security, self._compat)

    def _me(self, address: str) -> pdpb_pb2.Member:
        return member_at(self._config.advertise_addr or address, tls=self._security.enabled)

    def _add_pd(self, server: RpcServer, channels: AsyncExitStack) -> None:
        members = MemberService(self._keys.cluster_id, self._members)
        server.add_service(pdpb_pb2.DESCRIPTOR.services_by_name["PD"], members)
        forwarder = MemberForwarder(self._members, self._security, channels)
        # Behind the member calls, which every coordinator answers itself; all other methods of PD
        # are looked up in the term of the moment.
        server.add_generic_handler(TermRouter(self._current, self._members, forwarder))

    def _add_etcd(self, server: RpcServer, tasks: asyncio.TaskGroup) -> None:
        meta_storage = MetaStorageService(self._api, self._keys.cluster_id)
        server.add_service(
            meta_storagepb_pb2.DESCRIPTOR.services_by_name["MetaStorage"], meta_storage
        )
        if isinstance(self._api, EmbeddedEtcd):
            EtcdService(self._api, self._keys.cluster_id, self._members, tasks).add_to(server)
        else:
            server.add_generic_handler(EtcdProxy(self._api, self._members))


async def _stop_with(leadership: Leadership) -> None:
    """Stop the daemon when the leadership ends: nobody else can lead,
    and a term's memory is not used again.

    Raises:
        StateLostError: it ended.
    """
    # The embedded metadata has one owner, so a term that ended has no successor in another process;
    # a restart is the only way to read the state afresh.
    await leadership.ended.wait()
    raise StateLostError(
        f"{leadership.reason}; start the coordinator again, it reads its state afresh"
    )


async def _cluster_id(
    meta: Meta, configured: int, endpoints: Sequence[str], security: SecurityConfig
) -> int:
    """Wait for the cluster's id from a metadata server; meanwhile log the errors of those that do
    not give it.
    """
    while True:
        try:
            # gRPC waits for its channel without saying why; after two seconds `diagnose` finds out
            # for the log.
            async with asyncio.timeout(_METADATA_TIMEOUT_S):
                return await load_cluster_id(meta, configured)
        except TimeoutError:
            answers = [await diagnose(endpoint, security) for endpoint in endpoints]
            _log.warning(
                "waiting for the metadata", reason="; ".join(answers) or "no server answers yet"
            )
        except (MetaUnavailableError, UnsupportedError) as err:
            _log.warning("waiting for the metadata", reason=err.message, servers=endpoints)
            await asyncio.sleep(_RETRY_S)


def _open_metadata(
    config: CoordinatorConfig, security: SecurityConfig
) -> AbstractAsyncContextManager[EmbeddedEtcd] | AbstractAsyncContextManager[RemoteEtcd]:
    if directory := _directory(config.metadata):
        kept = Retention(
            revisions=config.metadata_keep_revisions,
            age_s=config.metadata_keep_s,
            quota_bytes=config.metadata_quota_bytes,
        )
        return EmbeddedEtcd.open(Path(directory), kept)
    endpoints = _etcd_endpoints(config.metadata)
    return RemoteEtcd.open(endpoints, lambda endpoint: connect(endpoint, security))


def _directory(url: str) -> str:
    scheme, _, rest = url.partition(":")
    return rest if scheme == "leveldb" else ""


def _etcd_endpoints(url: str) -> list[str]:
    scheme, _, rest = url.partition(":")
    return (
        [endpoint for endpoint in rest.removeprefix("//").split(",") if endpoint]
        if scheme == "etcd"
        else []
    )
