"""Ids: given once only, by the hundred or the milliard, until there are none."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from kvproto import metapb_pb2

from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from tests.integration.coordinator.in_process import coordinator, refusal, region

LAST = (1 << 64) - 1


async def test_ids_are_given_once_whoever_asks_and_however_many(tmp_path: Path) -> None:
    given: list[range] = []
    for _ in range(3):
        async with coordinator(tmp_path) as pd:
            counts = [0, 1, 3, 999, 1001, 4_000_000_000, (1 << 32) - 1]
            answers = await asyncio.gather(*(pd.ask("AllocID", count=count) for count in counts))
            for count, answer in zip(counts, answers, strict=True):
                assert answer.count == (count if count > 1 else 0)
                given.append(range(answer.id - max(count, 1) + 1, answer.id + 1))
    given.sort(key=lambda one: one.start)
    assert given[0].start > 0
    assert all(before.stop <= after.start for before, after in pairwise(given))


async def set_last_id(directory: Path, cluster_id: int, last: int) -> None:
    """Write the record while no coordinator runs."""
    async with EmbeddedEtcd.open(directory / "meta") as etcd:
        await EtcdMeta(etcd).put(f"/pd/{cluster_id}/alloc_id".encode(), last.to_bytes(8))


async def test_when_ids_run_out_nobody_gets_one_twice(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        cluster_id = pd.cluster_id
    await set_last_id(tmp_path, cluster_id, LAST - 10)
    async with coordinator(tmp_path) as pd:
        assert await refusal(pd.ask("AllocID", count=11)) == (
            "UNKNOWN",
            "11 ids are asked for, 10 are left",
        )
        assert (await pd.ask("AllocID", count=10)).id == LAST
        assert await refusal(pd.ask("AllocID")) == ("UNKNOWN", "1 ids are asked for, 0 are left")
    async with coordinator(tmp_path) as pd:
        assert await refusal(pd.ask("AllocID")) == ("UNKNOWN", "1 ids are asked for, 0 are left")
        assert (await refusal(pd.ask("AskBatchSplit", region=region(), split_count=1)))[
            0
        ] == "UNKNOWN"


async def test_a_split_gets_an_id_for_each_region_and_each_peer(tmp_path: Path) -> None:
    asked = region()
    asked.peers.add(id=77, store_id=2)
    async with coordinator(tmp_path) as pd:
        ids = (await pd.ask("AskBatchSplit", region=asked, split_count=3)).ids
        assert not (await pd.ask("AskBatchSplit", region=asked)).ids
        following = (await pd.ask("AllocID")).id
    numbers = [number for split in ids for number in (split.new_region_id, *split.new_peer_ids)]
    assert numbers == list(range(following - 9, following))


async def test_a_split_of_a_region_with_countless_peers_gets_no_ids(tmp_path: Path) -> None:
    crowded = region()
    crowded.peers.extend(metapb_pb2.Peer(id=number, store_id=1) for number in range(1000, 2000))
    async with coordinator(tmp_path) as pd:
        status, text = await refusal(pd.ask("AskBatchSplit", region=crowded, split_count=1000))
        assert (status, "at most 10000 ids" in text) == ("UNKNOWN", True)


@pytest.mark.parametrize(
    ("asked", "count", "status", "text"),
    [
        (None, 1, "REGION_NOT_FOUND", "missing region for split"),
        (
            region(version=0),
            1,
            "UNKNOWN",
            "invalid region epoch, request: conf_ver: 1, current: conf_ver: 1 version: 1",
        ),
        (region(), 1001, "UNKNOWN", "a split makes at most 1000 regions, not 1001"),
        (region(), (1 << 32) - 1, "UNKNOWN", "a split makes at most 1000 regions, not 4294967295"),
    ],
)
async def test_a_split_that_cannot_be_gets_no_ids(
    tmp_path: Path, asked: metapb_pb2.Region | None, count: int, status: str, text: str
) -> None:
    async with coordinator(tmp_path) as pd:
        assert await refusal(pd.ask("AskBatchSplit", region=asked, split_count=count)) == (
            status,
            text,
        )
        await pd.heartbeat(region(2, b"", b"m", 2))
        lost = await refusal(pd.ask("AskBatchSplit", region=region(9, b"z"), split_count=1))
        assert lost == ("UNKNOWN", "region not found, request region: 9")
