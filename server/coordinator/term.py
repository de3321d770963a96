"""One term of leadership: what the leader has in memory,
read before its first answer and dropped after its last.

`LeaderTerm` owns the cluster, the oracle, the safepoints and the RPC handlers over them.
`CurrentTerm` is where the shells that serve calls find the present one. Nothing is shared with
another term: a task of an earlier one that still runs finds its own state and its own fence, which
writes nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from kvproto import keyspacepb_pb2, pdpb_pb2
from prometheus_client import Counter, Gauge

from gcsafepoint.state.compat import Compat
from gcsafepoint.state.service import GcStateManager
from server.coordinator.cluster.cluster import Cluster, ClusterService, encode_cluster_id
from server.coordinator.cluster.global_config import GlobalConfigService
from server.coordinator.cluster.region_service import RegionService, RegionSplitService
from server.coordinator.errors import NotLeaderError
from server.coordinator.gc.keyspaces import KeyspaceService, keyspace_of
from server.coordinator.gc.service import GcService
from server.coordinator.header import Headers
from server.coordinator.keys import CLUSTER_ID, ClusterKeys
from server.coordinator.leadership.durable_limit import StateLostError
from server.coordinator.leadership.fenced_metadata import FencedMetadata, StateGuard
from server.coordinator.leadership.leadership import Leadership, batch_while_leading, while_leading
from server.coordinator.leadership.members import Members
from server.coordinator.pd_http.rules import RuleStore
from server.coordinator.tso import ClusterTsService, TimestampOracle, TsoService
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.front import Route, method_handlers
from storage.meta.errors import MetaUnavailableError
from storage.meta.meta import Get, Meta

_LEADER = Gauge("tidemark_coordinator_leader", "1 while this coordinator leads")
_TERMS_TOTAL = Counter("tidemark_coordinator_terms_total", "Terms of leadership begun")

_FLUSH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _State:
    """What a term reads from the metadata."""

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
            loops = [
                tasks.create_task(run) for run in (*runs, *(route.run() for route in self._routes))
            ]
            try:
                yield
            finally:
                for loop in loops:
                    loop.cancel()
                # stores report regions again
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
    """The term that calls are answered from; `term` is None while another coordinator leads."""

    def __init__(self, members: Members) -> None:
        self.term: LeaderTerm | None = None
        self._members = members

    @asynccontextmanager
    async def serving(self, term: LeaderTerm) -> AsyncIterator[None]:
        """Answer from `term` for the block; not one answer later."""
        async with term.running():
            self.term, self._members.leadership = term, term.leadership
            _LEADER.set(1)
            _TERMS_TOTAL.inc()
            try:
                yield
            finally:
                self.term = self._members.leadership = None
                term.leadership.end()
                _LEADER.set(0)
