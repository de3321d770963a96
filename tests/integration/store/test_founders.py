"""Stores that start together before there is a cluster."""

from contextlib import closing
from pathlib import Path

import pytest

from server.rpc.pd import PdClient
from server.store.identity import ClusterMismatchError, announce, load_identity
from storage.leveldb import LevelDB
from tests.integration.store.daemons import start


async def test_of_two_founders_one_joins_without_the_regions_that_it_made(tmp_path: Path) -> None:
    coordinator = start(
        "coordinator", "--addr", "127.0.0.1:0", "--metadata", f"leveldb:{tmp_path / 'meta'}"
    )
    try:
        async with PdClient.open(coordinator.addr) as pd:
            with (
                closing(LevelDB(tmp_path / "one")) as one,
                closing(LevelDB(tmp_path / "two")) as two,
            ):
                first, second = [await load_identity(kv, pd, []) for kv in (one, two)]
                assert len(first.regions) == len(second.regions) == 1
                await announce(pd, first, "127.0.0.1:1")
                with pytest.raises(ClusterMismatchError, match="start this one again"):
                    await announce(pd, second, "127.0.0.1:2")

                again = await load_identity(two, pd, [])
                assert (again.store_id, list(again.regions)) == (second.store_id, [])
                await announce(pd, again, "127.0.0.1:2")
                assert not (await load_identity(two, pd, [])).is_founder

                # One that died before it had noted that it won keeps its regions.
                kept = await load_identity(one, pd, [])
                assert list(kept.regions) == list(first.regions)
                await announce(pd, kept, "127.0.0.1:1")
                routes = await pd.scan_regions(b"")
                assert [route.leader.store_id for route in routes] == [first.store_id]
    finally:
        coordinator.kill()
