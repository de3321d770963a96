"""Counting regions for PD's HTTP API: each is looked at once, in slices,
however many stores there are.
"""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from kvproto import metapb_pb2

from server.coordinator.cluster.regions import Regions
from server.coordinator.pd_http import api

REGIONS, STORES = 5000, 40


class CountedRegions(Regions):
    """Knows how many regions were looked at."""

    looked_at = 0

    def scan(self, start_key: bytes, end_key: bytes) -> Any:
        for known in super().scan(start_key, end_key):
            self.looked_at += 1
            yield known


@pytest.fixture
def regions() -> CountedRegions:
    made = CountedRegions()
    for number in range(REGIONS):
        store = number % STORES + 1
        peers = [metapb_pb2.Peer(id=10_000 + number, store_id=store)]
        last = number == REGIONS - 1
        region = metapb_pb2.Region(
            id=number + 1,
            start_key=key(number),
            end_key=b"" if last else key(number + 1),
            peers=peers,
        )
        made.report(region, peers[0])
    made.looked_at = 0
    return made


def key(number: int) -> bytes:
    return number.to_bytes(4) if number else b""


async def test_stores_are_counted_in_one_pass(regions: CountedRegions) -> None:
    stores = {
        number: metapb_pb2.Store(id=number, address=f"s{number}:1")
        for number in range(1, STORES + 1)
    }
    term: Any = SimpleNamespace(cluster=SimpleNamespace(regions=regions, stores=stores, stats={}))
    answer = await api.stores(term, None, ())  # type: ignore[arg-type]  # it has no parameters
    assert answer.body.count(b'"region_count": 125') == STORES
    assert answer.body.count(b'"leader_count": 125') == STORES
    assert regions.looked_at == REGIONS


async def test_others_have_their_turn_meanwhile(regions: CountedRegions) -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(other())
        walked = Counter([known.region.id async for known in api.scan_in_turns(regions, b"", b"")])
        task.cancel()
    assert walked == Counter(range(1, REGIONS + 1))
    assert turns >= REGIONS // 1024


async def test_regions_that_merge_meanwhile_are_not_counted_again(regions: CountedRegions) -> None:
    ids = []
    async for known in api.scan_in_turns(regions, b"", b""):
        ids.append(known.region.id)
        if len(ids) == 1024:  # what was passed and what comes become one
            peers = [metapb_pb2.Peer(id=9, store_id=1)]
            epoch = metapb_pb2.RegionEpoch(version=5)
            merged = metapb_pb2.Region(
                id=2000, start_key=key(500), end_key=key(2000), region_epoch=epoch, peers=peers
            )
            regions.report(merged, peers[0])
    assert len(ids) == len(set(ids))
    assert ids[-1] == REGIONS
