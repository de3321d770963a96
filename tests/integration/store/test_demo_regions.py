"""The demo gives its tables several regions; other clusters begin with one."""

from pathlib import Path

from server.demo.bank import REGION_STARTS
from server.demo.run import split_regions
from storage.codec import encode_bytes
from tests.integration.store.daemons import running_cluster
from tests.integration.store.stubs import stubs_of


async def test_the_demo_splits_its_tables_once(tmp_path: Path) -> None:
    with running_cluster(tmp_path, "--split-keys", "") as cluster:
        async with stubs_of(cluster) as stubs:
            assert [route.region.start_key for route in await stubs.pd.scan_regions(b"")] == [b""]
            await split_regions(cluster.coordinator.addr)
            routes = await stubs.pd.scan_regions(b"")
            await split_regions(cluster.coordinator.addr)
            assert await stubs.pd.scan_regions(b"") == routes
    starts = [encode_bytes(key) for key in REGION_STARTS]
    assert [route.region.start_key for route in routes] == [b"", *starts]
