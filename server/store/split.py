"""Region splits by call and by size: new ids from the coordinator, then the new table."""

from collections.abc import Sequence

import structlog
from kvproto import errorpb_pb2 as errorpb
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.pd import PdClient
from server.store import metrics
from server.store.identity import region_message
from server.store.region_check import outside
from server.store.region_table import RegionTable
from storage.codec import encode_bytes
from storage.mvcc.region import Region

_log = structlog.get_logger(__name__)


class Splitter:
    """Splits regions one call at a time."""

    def __init__(self, pd: PdClient, table: RegionTable) -> None:
        self._pd = pd
        self._table = table

    async def split(self, request: kvrpcpb.SplitRegionRequest) -> kvrpcpb.SplitRegionResponse:
        """Split the request's region at its keys; those that are its border already change nothing."""
        gate = self._table.gate
        async with self._table.lock:
            region = gate.admit(request.context, ())
            if not isinstance(region, Region):
                return kvrpcpb.SplitRegionResponse(region_error=region)
            keys = _asked_keys(request, region)
            if isinstance(keys, errorpb.Error):
                return kvrpcpb.SplitRegionResponse(region_error=keys)
            parts = await self._split(region, keys) if keys else [region]
        messages = [region_message(part, gate.store_id) for part in parts]
        return kvrpcpb.SplitRegionResponse(left=messages[0], right=messages[-1], regions=messages)

    async def split_unchanged(self, region: Region, keys: Sequence[bytes]) -> None:
        """Split a region at encoded keys inside it, unless it has changed since they were chosen."""
        async with self._table.lock:
            if keys and self._table.gate.regions.get(region.region_id) == region:
                await self._split(region, keys)

    async def _split(self, region: Region, keys: Sequence[bytes]) -> list[Region]:
        given = await self._pd.ask_batch_split(region_message(region, self._table.gate.store_id), len(keys))
        parts = region.split(keys, [(split_id.new_region_id, split_id.new_peer_ids[0]) for split_id in given])
        await self._table.replace([region], parts)
        metrics.REGION_SPLITS.inc()
        _log.info("region split", region_id=region.region_id, parts=[part.region_id for part in parts])
        return parts


def _asked_keys(request: kvrpcpb.SplitRegionRequest, region: Region) -> list[bytes] | errorpb.Error:
    asked = request.split_keys or [request.split_key]
    if not all(asked):
        return errorpb.Error(message="a split key must not be empty")
    keys = {key: key if request.is_raw_kv else encode_bytes(key) for key in asked}
    for key, encoded in keys.items():
        if not region.contains(encoded):
            return outside(key, region)
    return sorted(set(keys.values()) - {region.start_key})
