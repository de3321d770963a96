"""One term of leadership: how a coordinator is elected, what the leader has in memory, and how a
call finds it.

`Election` follows until the leader key is free, takes it under a lease, serves a term, and begins
again. A lease is granted only when the key is free, as in PD: a follower has none to keep alive.
`LeaderTerm` owns the cluster, the oracle, the safepoints and the RPC handlers over them. It reads
all of them before its first answer, and drops them after its last one. `CurrentTerm` holds the
present term for the servers of RPCs and HTTP.

Terms share nothing: a task of an earlier term that still runs has that term's state and fence, and
can write nothing.

`TermRouter` takes PD's RPCs on every coordinator. Only the leader answers them; a follower refuses
with PD's words (docs/design/0009-coordinator-ha.md says why it does not forward them by itself). A
client may name a member in the metadata `pd-forwarded-host`, which is PD's way around a network
that is broken between a client and the leader: `MemberForwarder` then sends the call, byte for
byte, to that member. It reaches members of this cluster only, and does not send the name on, so a
call is forwarded once.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import structlog
from kvproto import keyspacepb_pb2, pdpb_pb2
from prometheus_client import Counter, Gauge

from gcsafepoint.state.compat import Compat
from gcsafepoint.state.service import GcStateManager
from server.coordinator.cluster.cluster import Cluster, ClusterService, encode_cluster_id
from server.coordinator.cluster.global_config import GlobalConfigService
from server.coordinator.cluster.region_service import RegionService, RegionSplitService
from server.coordinator.cluster.rules import RuleStore
from server.coordinator.errors import NotLeaderError
from server.coordinator.gc_service import GcService
from server.coordinator.header import Headers
from server.coordinator.keys import CLUSTER_ID, ClusterKeys
from server.coordinator.keyspaces import KeyspaceService, keyspace_of
from server.coordinator.leadership.durable_limit import StateLostError
from server.coordinator.leadership.leadership import (
    FencedMetadata,
    Leadership,
    StateGuard,
    batch_while_leading,
    while_leading,
)
from server.coordinator.leadership.members import Members
from server.coordinator.tso import ClusterTsService, TimestampOracle, TsoService
from server.leader_gauge import LeaderGauge
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.errors import status_of
from server.rpc.front import Route, method_handlers
from storage.meta.errors import LeaseNotFoundError, MetaUnavailableError
from storage.meta.meta import Compare, Delete, Get, Lease, Meta, Put
from storage.tasks import background_tasks, run_in_task

FORWARDED_HOST = "pd-forwarded-host"
_LEADER = Gauge("tidemark_coordinator_leader", "1 while this coordinator leads")
_REGIONS = LeaderGauge("tidemark_coordinator_regions", "Regions known; only at the leader")
_STORES = LeaderGauge("tidemark_coordinator_stores", "Stores known; only at the leader")
_TERMS_TOTAL = Counter("tidemark_coordinator_terms_total", "Terms of leadership begun")
_FLUSH_SECONDS = 1.0
_RETRY_S = 0.2
_LEADER_SERVICES = ("/pdpb.PD/", "/keyspacepb.Keyspace/")
_NOT_FORWARDED = (":", "grpc-", "user-agent", "content-type", "te", FORWARDED_HOST)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _State:
    """The state that a term reads from the metadata."""

    metadata: FencedMetadata
    cluster: Cluster
    oracle: TimestampOracle
    safe_points: GcStateManager
    rules: RuleStore
    guard: StateGuard


class LeaderTerm:
    """The state of one term and the RPCs answered from it: `handlers`,
    by gRPC's full method name.
    """

    def __init__(self, state: "_State", security: SecurityConfig) -> None:
        self.leadership = leadership = state.metadata.leadership
        self.cluster = cluster = state.cluster
        self.oracle = state.oracle
        self.safe_points = state.safe_points
        self.rules = state.rules
        self._guard = state.guard
        self.headers = Headers(cluster.id, lambda: cluster.bootstrapped, leadership)
        self.handlers: dict[str, Any] = {}
        self._routes: list[Route] = []
        self._add_pd(state.metadata, security)

    @classmethod
    async def load(
        cls,
        leadership: Leadership,
        meta: Meta,
        keys: ClusterKeys,
        security: SecurityConfig,
        compat: Compat,
    ) -> "LeaderTerm":
        """Read the term's state from the metadata; `security` is for calls to stores.

        Raises:
            CorruptError: a record cannot be read, or is gone.
            MetaUnavailableError, NotLeaderError: not now.
        """
        metadata = FencedMetadata(meta, leadership)
        guard = StateGuard(metadata, keys, await _check_cluster_id(metadata, keys) + 1)
        cluster = Cluster(metadata, keys)
        # The cluster first: only a bootstrapped one must have a saved limit of timestamps.
        await cluster.load()
        safe_points = GcStateManager(metadata, keys.gc, compat=compat, keyspace_of=keyspace_of)
        await safe_points.load()
        oracle = await TimestampOracle.load(
            metadata, keys.path("timestamp"), must_exist=cluster.bootstrapped
        )
        rules = RuleStore(metadata, keys)
        await rules.load()
        return cls(_State(metadata, cluster, oracle, safe_points, rules, guard), security)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the term's background tasks for the block."""
        async with asyncio.TaskGroup() as tasks:
            guarding = self._guard.run([self.oracle.put_back, self.cluster.put_back_ids])
            runs = [self.cluster.run(), self.oracle.run(), self.safe_points.run(), guarding]
            # All stop with the block: no task of this term answers or writes after the next one has
            # begun.
            loops = [
                tasks.create_task(run) for run in (*runs, *(route.run() for route in self._routes))
            ]
            try:
                yield
            finally:
                for loop in loops:
                    loop.cancel()
                # Region reports are written behind. Saving them here spares the next leader a wait
                # for the stores' heartbeats; if it fails, those bring them again.
                with suppress(MetaUnavailableError, NotLeaderError, TimeoutError):
                    async with asyncio.timeout(_FLUSH_SECONDS):
                        await self.cluster.flush()

    def _add_pd(self, metadata: FencedMetadata, security: SecurityConfig) -> None:
        gc = GcService(self.headers, self.safe_points)
        tso = TsoService(self.headers, self.oracle)
        cluster = ClusterService(self.headers, self.cluster)
        parts = (
            cluster,
            RegionService(self.headers, self.cluster),
            RegionSplitService(self.headers, self.cluster, partial(connect, security=security)),
            ClusterTsService(self.headers, self.cluster, self.oracle, metadata),
            GlobalConfigService(self.headers, metadata),
            tso,
            gc,
        )
        calls: dict[str, Any] = {}
        for part in parts:
            calls |= part.calls()
        self._add(
            pdpb_pb2.DESCRIPTOR.services_by_name["PD"],
            SimpleNamespace(**calls),
            {**gc.batches(), **tso.batches()},
        )
        keyspaces = KeyspaceService(self.headers, metadata, ClusterKeys(self.cluster.id).gc)
        self._add(
            keyspacepb_pb2.DESCRIPTOR.services_by_name["Keyspace"],
            SimpleNamespace(**keyspaces.calls()),
            {},
        )

    def _add(self, service: Any, servicer: object, batch: Mapping[str, Any]) -> None:
        # Every RPC is interrupted when the term ends, so that no client waits for an answer that
        # cannot come.
        guarded = {
            name: batch_while_leading(function, self.leadership) for name, function in batch.items()
        }
        handlers, routes = method_handlers(service, servicer, guarded, self.leadership.refusal)
        for name, handler in handlers.items():
            self.handlers[f"/{service.full_name}/{name}"] = while_leading(handler, self.leadership)
        self._routes += routes


async def _check_cluster_id(metadata: FencedMetadata, keys: ClusterKeys) -> int:
    """The revision of now, if the metadata still belongs to this cluster.

    Raises:
        StateLostError: somebody has deleted or replaced everything, and what was handed out is not
            known any more.
    """
    result = await metadata.txn((), [Get(CLUSTER_ID)])
    stored = [pair.value for pair in result.pairs[0]]
    if stored != [encode_cluster_id(keys.cluster_id)]:
        raise StateLostError(
            f"{CLUSTER_ID.decode()} is not that of cluster {keys.cluster_id} any more: the "
            "metadata was deleted or replaced while this coordinator ran; restore it from a "
            "snapshot, then start the coordinators again"
        )
    return result.revision


class CurrentTerm:
    """Holds the term that answers calls; `term` is None while another coordinator leads."""

    def __init__(self, members: Members) -> None:
        self.term: LeaderTerm | None = None
        self._members = members

    @asynccontextmanager
    async def serving(self, term: LeaderTerm) -> AsyncIterator[None]:
        """Answer calls from `term` during the block, and none after it."""
        cluster = term.cluster
        async with term.running():
            self.term, self._members.leadership = term, term.leadership
            _LEADER.set(1)
            _TERMS_TOTAL.inc()
            try:
                with (
                    _REGIONS.showing(lambda: len(cluster.regions)),
                    _STORES.showing(lambda: len(cluster.stores)),
                ):
                    yield
            finally:
                self.term = self._members.leadership = None
                term.leadership.end()
                _LEADER.set(0)


LoadTerm = Callable[[Leadership], Awaitable[LeaderTerm]]


class Election:
    """One coordinator's part in the election: a candidate, and the leader while it is elected."""

    def __init__(
        self, meta: Meta, key: bytes, members: Members, current: CurrentTerm, load: LoadTerm
    ) -> None:
        self._meta = meta
        self._key = key
        self._load = load
        self._members = members
        self._current = current
        self._last_key: Compare | None = None

    async def run(self, lease_s: int) -> None:
        """Follow, campaign and lead, until cancelled. A leader that is cancelled revokes its lease,
        so that the next one need not wait for it.
        """
        while True:
            # A lease that etcd gives new time after its restart would keep our old key alive, and
            # everybody waiting for it.
            await self._delete_last_key()
            await self._members.wait_leaderless()
            try:
                await run_in_task(self._campaign_once(lease_s))
            except* NotLeaderError:
                _log.warning("this coordinator led, and does no longer")
            except* (MetaUnavailableError, LeaseNotFoundError) as errors:
                _log.warning("this coordinator cannot lead now", reason=str(errors.exceptions[0]))
                await asyncio.sleep(_RETRY_S)

    async def _campaign_once(self, lease_s: int) -> None:
        """Campaign once, with a new lease, and lead if elected."""
        async with await self._meta.grant_lease(lease_s) as lease:
            await self._campaign(lease)

    async def _campaign(self, lease: Lease) -> None:
        me = self._members.me.SerializeToString()
        # The key exists once: of several candidates the first transaction wins, and the key goes
        # with its lease.
        result = await self._meta.txn([Compare.absent(self._key)], [Put(self._key, me, lease.id)])
        if not result.succeeded:
            return
        # The create revision tells this term's key from that of any later term, even from one of
        # our own.
        self._last_key = fence = Compare.created_at(self._key, result.revision)
        leadership = Leadership((fence,), lambda: lease.deadline, self._members.not_leader)
        async with background_tasks(_end_with_lease(lease, leadership)):
            async with leadership.while_held():
                # Read after the election: what an earlier leader wrote last is durable and seen.
                term = await self._load(leadership)
            _log.info("leading", revision=result.revision, lease=lease.id)
            async with self._current.serving(term):
                await leadership.ended.wait()
            _log.warning(
                "leading no longer",
                revision=result.revision,
                reason=leadership.reason or "the lease is over",
            )

    async def _delete_last_key(self) -> None:
        """Delete the key of our last term, if it is still there:
        an etcd that comes back gives old leases new time.
        """
        while self._last_key is not None:
            try:
                await self._meta.txn([self._last_key], [Delete(self._key)])
                self._last_key = None
            except MetaUnavailableError as err:
                _log.warning("the last term's key cannot be given up", reason=err.message)
                await asyncio.sleep(_RETRY_S)


async def _end_with_lease(lease: Lease, leadership: Leadership) -> None:
    """End the leadership when the lease is lost, or at its deadline by the clock, even if the
    metadata says nothing.
    """
    # The deadline moves with each renewal, so it is read again after each wait.
    while leadership.held:
        try:
            async with asyncio.timeout_at(lease.deadline):
                await lease.lost.wait()
                break
        except TimeoutError:
            continue
    leadership.end()


class MemberForwarder:
    """Forwards calls to other members, by channels that `stack` closes."""

    def __init__(self, members: Members, security: SecurityConfig, stack: AsyncExitStack) -> None:
        self._members = members
        self._security = security
        self._stack = stack
        self._channels: dict[str, grpc.aio.Channel] = {}

    def handler(self, details: grpc.HandlerCallDetails) -> Any:
        """A handler that forwards the call to the member it names; None if that is this one."""
        host = next(
            (
                str(value)
                for key, value in details.invocation_metadata or ()
                if key == FORWARDED_HOST
            ),
            "",
        )
        if not host or _host(host) == _host(self._members.url):
            return None
        return grpc.stream_stream_rpc_method_handler(self._forward(details.method, _host(host)))

    def _forward(self, method: str, host: str) -> Callable[[AsyncIterator[bytes], Any], Any]:
        async def forward(requests: AsyncIterator[bytes], context: Any) -> None:
            # Only members of the cluster are reached: otherwise this port would call any address
            # that a client names.
            if all(
                _host(url) != host for member in self._members.listed for url in member.client_urls
            ):
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE, f"{host} is no coordinator of this cluster"
                )
            metadata = [
                (key, value)
                for key, value in context.invocation_metadata()
                if not key.startswith(_NOT_FORWARDED)
            ]
            call = self._channel(host).stream_stream(method, None, None)(
                requests, timeout=context.time_remaining(), metadata=metadata
            )
            try:
                async for answer in call:
                    await context.write(answer)
            except grpc.aio.AioRpcError as err:
                await context.abort(
                    err.code(), err.details() or "", tuple(err.trailing_metadata() or ())
                )
            finally:
                call.cancel()

        return forward

    def _channel(self, host: str) -> grpc.aio.Channel:
        if host not in self._channels:
            self._channels[host] = connect(host, self._security)
            self._stack.push_async_exit(self._channels[host])
        return self._channels[host]


class TermRouter(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """The gRPC handler of the methods that only the leader answers."""

    def __init__(self, current: CurrentTerm, members: Members, forwarder: MemberForwarder) -> None:
        self._current = current
        self._members = members
        self._forwarder = forwarder
        self._refusing = grpc.stream_stream_rpc_method_handler(self._refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method; None if even the leader does not have it."""
        method = handler_call_details.method
        if not method.startswith(_LEADER_SERVICES):
            return None
        if forwarding := self._forwarder.handler(handler_call_details):
            return forwarding
        term = self._current.term
        # Looked up at each call, since the next term has handlers of its own.
        return term.handlers.get(method) if term else self._refusing

    async def _refuse(self, _requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(*status_of(self._members.not_leader()))


def _host(url: str) -> str:
    return url.rpartition("//")[2]
