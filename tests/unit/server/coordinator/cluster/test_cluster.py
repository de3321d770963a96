"""What the metadata has is in memory, though callers give up and answers are lost."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from kvproto import metapb_pb2

from server.coordinator.cluster.cluster import Cluster
from server.coordinator.cluster.rules import RuleStore
from server.coordinator.keys import ClusterKeys
from server.coordinator.leadership.leadership import FencedMetadata, Leadership
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import MetaUnavailableError
from storage.meta.meta import TxnResult

KEYS = ClusterKeys(7)
STORE = metapb_pb2.Store(id=1, address="127.0.0.1:20160")
REGION = metapb_pb2.Region(id=2, peers=[metapb_pb2.Peer(id=3, store_id=1)])


class Stalling(FencedMetadata):
    """The answer of a transaction takes until `go_on`; with `loses` it never comes."""

    def __init__(self, meta: EtcdMeta) -> None:
        super().__init__(meta, Leadership())
        self.stalled, self.go_on = asyncio.Event(), asyncio.Event()
        self.loses = False

    async def txn(self, compares: Any, success: Any, failure: Any = ()) -> TxnResult:
        result = await super().txn(compares, success, failure)
        if self.loses:
            self.loses = False
            raise MetaUnavailableError("no answer in time")
        self.stalled.set()
        await self.go_on.wait()
        return result


@pytest.fixture
async def metadata(tmp_path: Path) -> AsyncIterator[Stalling]:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        yield Stalling(EtcdMeta(etcd))


async def give_up(metadata: Stalling, call: Coroutine[Any, Any, Any]) -> None:
    """Cancel a call whose write is durable, and whose answer is on its way."""
    calling = asyncio.get_running_loop().create_task(call)
    await asyncio.wait_for(metadata.stalled.wait(), 60)
    calling.cancel()
    await asyncio.wait([calling])
    metadata.go_on.set()


async def test_a_cluster_whose_founder_gave_up_is_bootstrapped(metadata: Stalling) -> None:
    cluster = Cluster(metadata, KEYS)
    await give_up(metadata, cluster.bootstrap(STORE, REGION))
    assert not await cluster.bootstrap(STORE, REGION)
    assert cluster.bootstrapped
    assert cluster.stores == {1: STORE}
    assert len(cluster.regions) == 1


async def test_a_bootstrap_without_an_answer_is_read_when_it_is_repeated(
    metadata: Stalling,
) -> None:
    cluster = Cluster(metadata, KEYS)
    metadata.loses = True
    with pytest.raises(MetaUnavailableError):
        await cluster.bootstrap(STORE, REGION)
    assert not cluster.bootstrapped
    metadata.go_on.set()
    assert not await cluster.bootstrap(STORE, REGION)
    assert cluster.bootstrapped
    assert cluster.stores == {1: STORE}
    assert len(cluster.regions) == 1


async def test_a_registration_whose_caller_gave_up_is_known(metadata: Stalling) -> None:
    cluster = Cluster(metadata, KEYS)
    await give_up(metadata, cluster.put_store(STORE))
    await cluster.put_store(metapb_pb2.Store(id=4, address="127.0.0.1:20161"))
    assert set(cluster.stores) == {1, 4}


async def test_a_rule_whose_caller_gave_up_is_known(metadata: Stalling) -> None:
    rules = RuleStore(metadata, KEYS)
    await give_up(metadata, rules.change_labels([{"id": "a"}], []))
    await rules.change_labels([{"id": "b"}], [])
    assert set(rules.labels) == {"a", "b"}
