"""Regions of a running cluster: how many there are, and a row put wherever its region is."""

import asyncio

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.pd import PdClient
from server.rpc.region_cache import RegionRoute
from server.rpc.tikv import KvClient

QUICK = ("--region-check-interval", "0.2", "--heartbeat-interval", "0.2")


async def regions_of(pd: PdClient) -> list[RegionRoute]:
    """All of them, without a hole or an overlap: as they are reported one by one,
    there may be one for a moment.
    """
    async with asyncio.timeout(60):
        while True:
            routes = await pd.scan_regions(b"")
            if [b"", *(route.region.end_key for route in routes)] == [
                *(it.region.start_key for it in routes),
                b"",
            ]:
                return routes
            await asyncio.sleep(0.01)


async def put(client: KvClient, pd: PdClient, key: bytes, value: bytes) -> None:
    """One transaction, wherever its region is by now."""
    start_ts = await pd.tso()
    mutation = kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value)
    await client.prewrite([mutation], primary=key, start_version=start_ts, lock_ttl_ms=3000)
    await client.commit([key], start_ts, await pd.tso())


async def wait_regions(pd: PdClient, least: int, most: int = 1000) -> list[RegionRoute]:
    async with asyncio.timeout(60):
        while True:
            routes = await regions_of(pd)
            if least <= len(routes) <= most:
                return routes
            await asyncio.sleep(0.1)
