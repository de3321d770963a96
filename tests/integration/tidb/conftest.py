"""A cluster whose store holds the history of a real TiDB."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from server.puller.source import SourceContext
from server.puller.tikv.feed import EventFeeds
from server.rpc.client import connect
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.meta.client import open_meta
from tests.integration.store.daemons import Cluster, running_cluster
from tests.integration.tidb.history import load, txns


@asynccontextmanager
async def context_of(cluster: Cluster) -> AsyncIterator[SourceContext]:
    """What a capture has for its sources."""
    address = cluster.coordinator.addr
    async with (
        PdClient.open(address) as pd,
        EventFeeds.open(pd.cluster_id) as feeds,
        KvClient.open(pd) as kv,
        open_meta(f"etcd://{address}", connect) as meta,
    ):
        yield SourceContext(pd, feeds, kv, meta)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Read only for tests."""
    with running_cluster(tmp_path_factory.mktemp("tidb")) as started:
        asyncio.run(_load(started))
        yield started


async def _load(cluster: Cluster) -> None:
    async with PdClient.open(cluster.coordinator.addr) as pd, KvClient.open(pd) as kv:
        await load(kv, txns())


@pytest.fixture
async def context(cluster: Cluster) -> AsyncIterator[SourceContext]:
    """Of that cluster."""
    async with context_of(cluster) as found:
        yield found
