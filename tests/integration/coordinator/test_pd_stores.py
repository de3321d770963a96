"""Bootstrap, stores and their heartbeats, in PD's words (observed on PD of August 2026)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kvproto import metapb_pb2, pdpb_pb2

from tests.integration.coordinator.in_process import Pd, coordinator, refusal, region, store

TWO_PEERS = [metapb_pb2.Peer(id=3, store_id=1), metapb_pb2.Peer(id=4, store_id=1)]


def first_region(**fields: Any) -> metapb_pb2.Region:
    changed = region()
    for name, value in fields.items():
        if name == "peers":
            del changed.peers[:]
            changed.peers.extend(value)
        else:
            setattr(changed, name, value)
    return changed


@pytest.mark.parametrize(
    ("first_store", "first", "text"),
    [
        (None, None, "missing store meta for bootstrap {}"),
        (store(), None, "missing region meta for bootstrap {}"),
        (store(0), region(), "invalid zero store id"),
        (store(), first_region(id=0), "invalid zero region id"),
        (
            store(),
            first_region(start_key=b"a"),
            "invalid first region key range, must all be empty for bootstrap {}",
        ),
        (
            store(),
            first_region(peers=[]),
            "invalid first region peer count 0, must be 1 for bootstrap {}",
        ),
        (
            store(),
            first_region(peers=TWO_PEERS),
            "invalid first region peer count 2, must be 1 for bootstrap {}",
        ),
        (store(7), region(), "invalid peer store id 1 != 7 for bootstrap {}"),
        (store(), first_region(peers=[metapb_pb2.Peer(store_id=1)]), "invalid zero peer id"),
    ],
)
async def test_a_bad_bootstrap_starts_nothing(
    tmp_path: Path, first_store: Any, first: Any, text: str
) -> None:
    async with coordinator(tmp_path, bootstrapped=False) as pd:
        refused = await refusal(pd.ask("Bootstrap", store=first_store, region=first))
        assert refused == ("UNKNOWN", text.format(pd.cluster_id))
        assert not (await pd.ask("IsBootstrapped")).bootstrapped


async def test_a_cluster_is_bootstrapped_once(tmp_path: Path) -> None:
    async with coordinator(tmp_path, bootstrapped=False) as pd:
        racing = await asyncio.gather(
            *(
                refusal(pd.ask("Bootstrap", store=store(number), region=region_of(number)))
                for number in range(1, 9)
            )
        )
        again = ("ALREADY_BOOTSTRAPPED", "cluster is already bootstrapped")
        assert sorted(racing) == sorted([("OK", ""), *[again] * 7])
        assert await refusal(pd.ask("Bootstrap")) == again
        assert len((await pd.ask("GetAllStores")).stores) == 1


def region_of(store_id: int) -> metapb_pb2.Region:
    return first_region(peers=[metapb_pb2.Peer(id=9, store_id=store_id)])


async def put(pd: Pd, one: metapb_pb2.Store) -> tuple[str, str]:
    return await refusal(pd.ask("PutStore", store=one))


async def test_no_two_stores_share_an_address(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        assert await put(pd, store(4, "h:4", peer_address="h:40")) == ("OK", "")
        for wanted, kind in [
            (store(5, "h:4"), "address"),
            (store(5, "h:40"), "address"),
            (store(5, "h:5", peer_address="h:40"), "peer address"),
            (store(5, "h:5", peer_address="h:4"), "peer address"),
        ]:
            status, text = await put(pd, wanted)
            assert (status, text.split(":")[0]) == ("UNKNOWN", f"duplicated store {kind}")
            assert "already registered by id: 4" in text
        assert await put(pd, store(4, "h:44")) == ("OK", "")
        assert await put(pd, store(5, "h:4")) == ("OK", "")
        racing = await asyncio.gather(*(put(pd, store(number, "h:9")) for number in range(20, 30)))
        assert [status for status, _ in racing].count("OK") == 1


async def test_a_removed_store_never_comes_back_and_its_address_is_free(tmp_path: Path) -> None:
    gone = store(6, "h:6", state=metapb_pb2.Tombstone, node_state=metapb_pb2.Removed)
    async with coordinator(tmp_path) as pd:
        assert await put(pd, gone) == ("OK", "")
        assert await put(pd, store(6, "h:6")) == ("STORE_TOMBSTONE", "store is tombstone")
        beat = pd.ask("StoreHeartbeat", stats=pdpb_pb2.StoreStats(store_id=6))
        assert await refusal(beat) == ("STORE_TOMBSTONE", "store is tombstone")
        assert await put(pd, store(7, "h:6")) == ("OK", "")
        everybody = await pd.ask("GetAllStores")
        living = await pd.ask("GetAllStores", exclude_tombstone_stores=True)
    assert sorted(one.id for one in everybody.stores) == [1, 6, 7]
    assert sorted(one.id for one in living.stores) == [1, 7]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (store(0), "invalid put store "),
        (store(9, ""), "invalid put store "),
        (store(9, version="x.y"), "x.y is not in dotted-tri format"),
        (store(9, version="8.5"), "8.5 is not in dotted-tri format"),
    ],
)
async def test_what_is_no_store_is_refused(
    tmp_path: Path, wanted: metapb_pb2.Store, text: str
) -> None:
    async with coordinator(tmp_path) as pd:
        status, said = await put(pd, wanted)
        assert (status, text in said) == ("UNKNOWN", True)
        assert await refusal(pd.ask("GetStore", store_id=9)) == (
            "UNKNOWN",
            "invalid store ID 9, not found",
        )


async def test_a_store_keeps_its_state_and_labels_when_it_registers_again(tmp_path: Path) -> None:
    labels = [
        metapb_pb2.StoreLabel(key="zone", value="a"),
        metapb_pb2.StoreLabel(key="host", value="x"),
    ]
    async with coordinator(tmp_path) as pd:
        await put(pd, store(4, "h:4", state=metapb_pb2.Offline, labels=labels))
        await put(pd, store(4, "h:5", labels=[metapb_pb2.StoreLabel(key="host", value="y")]))
    async with coordinator(tmp_path) as pd:
        kept = (await pd.ask("GetStore", store_id=4)).store
    assert (kept.address, kept.state) == ("h:5", metapb_pb2.Offline)
    assert {label.key: label.value for label in kept.labels} == {"zone": "a", "host": "y"}


async def test_heartbeats_of_stores_are_told_and_unknown_ones_refused(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        for store_id in (0, 77):
            beat = pd.ask("StoreHeartbeat", stats=pdpb_pb2.StoreStats(store_id=store_id))
            assert await refusal(beat) == ("UNKNOWN", f"store {store_id} not found")
        await put(pd, store(4, "h:4", version="v7.5.1-alpha"))
        answer = await pd.ask("StoreHeartbeat", stats=pdpb_pb2.StoreStats(store_id=1, capacity=100))
        assert answer.cluster_version == "7.5.1"
        told = await pd.ask("GetStore", store_id=1)
        assert told.stats.capacity == 100
        assert told.store.last_heartbeat > 0
