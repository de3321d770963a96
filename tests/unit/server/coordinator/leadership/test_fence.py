"""A deposed leader that does not know it: every call it would still answer writes nothing."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kvproto import metapb_pb2

from gcsafepoint.state.compat import Compat, ServiceUpdate
from gcsafepoint.state.states import NULL_KEYSPACE
from server.coordinator.cluster.cluster import encode_cluster_id
from server.coordinator.errors import NotLeaderError
from server.coordinator.keys import CLUSTER_ID, ClusterKeys
from server.coordinator.leadership.leadership import Leadership
from server.coordinator.term import LeaderTerm
from server.rpc.credentials import SecurityConfig
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.meta import Compare, Meta

NEVER_S = (1 << 63) - 1
KEYS = ClusterKeys(7)
LEADER = KEYS.path("leader")
STORE = metapb_pb2.Store(id=1, address="127.0.0.1:20160", version="8.5.0")


def region(version: int) -> metapb_pb2.Region:
    epoch = metapb_pb2.RegionEpoch(conf_ver=1, version=version)
    return metapb_pb2.Region(id=2, region_epoch=epoch, peers=[metapb_pb2.Peer(id=3, store_id=1)])


async def report_and_flush(term: LeaderTerm) -> None:
    term.cluster.report(region(9), metapb_pb2.Peer())
    await term.cluster.flush()


async def grow(term: LeaderTerm) -> None:
    term.oracle._oracle.limit_ms = 0
    await term.oracle.take(1)


WRITES: dict[str, Callable[[LeaderTerm], Awaitable[Any]]] = {
    "a window of timestamps": grow,
    "ids": lambda term: term.cluster.alloc_id(5000),
    "a store": lambda term: term.cluster.put_store(STORE),
    "regions": report_and_flush,
    "a service safe point": lambda term: term.safe_points.update_services(
        [ServiceUpdate("ticdc-a", 3600, 60)]
    ),
    "a gc safe point": lambda term: term.safe_points.update_gc_safe_point(40),
    "a txn safe point": lambda term: term.safe_points.advance_txn_safe_point(NULL_KEYSPACE, 60),
    "a barrier": lambda term: term.safe_points.set_barrier(NULL_KEYSPACE, "br", 60, 3600),
    "a global barrier": lambda term: term.safe_points.set_global_barrier("br", 60, 3600),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
async def test_it_writes_nothing_and_ends_its_term(
    write: Callable[[LeaderTerm], Awaitable[Any]], tmp_path: Path
) -> None:
    async with led_term(tmp_path) as (meta, term):
        await depose(meta)
        before = await meta.get_prefix(b"")
        with pytest.raises(NotLeaderError):
            await write(term)
        assert await meta.get_prefix(b"") == before
        assert not term.leadership.held


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
async def test_the_same_write_of_a_leader_is_kept(
    write: Callable[[LeaderTerm], Awaitable[Any]], tmp_path: Path
) -> None:
    async with led_term(tmp_path) as (meta, term):
        before = await meta.get_prefix(b"")
        await write(term)
        assert await meta.get_prefix(b"") != before
        assert term.leadership.held


@asynccontextmanager
async def led_term(directory: Path) -> AsyncIterator[tuple[Meta, LeaderTerm]]:
    async with EmbeddedEtcd.open(directory) as etcd:
        meta = EtcdMeta(etcd)
        await meta.put(CLUSTER_ID, encode_cluster_id(KEYS.cluster_id))
        revision = await meta.put(LEADER, b"us")
        leadership = Leadership((Compare.created_at(LEADER, revision),), lambda: math.inf)
        term = await LeaderTerm.load(leadership, meta, KEYS, SecurityConfig(), Compat.CLASSIC)
        await term.cluster.bootstrap(STORE, region(1))
        await term.safe_points.update_services([ServiceUpdate("gc_worker", NEVER_S, 50)])
        yield meta, term


async def depose(meta: Meta) -> None:
    await meta.delete(LEADER)
    await meta.put(LEADER, b"another")
