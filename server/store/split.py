"""Region splits: new ids from the coordinator, the new table on disk, then in force, then reported."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.pd import PdClient
from server.store.identity import REGIONS_KEY, region_message
from server.store.region_check import RegionGate
from storage.codec import encode_bytes
from storage.mvcc.draft import Draft
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.region import Region, encode_regions

_log = structlog.get_logger(__name__)


class Splitter:
    """Splits regions one call at a time."""

    def __init__(
        self,
        pd: PdClient,
        gate: RegionGate,
        group: GroupCommit,
        on_split: Callable[[Region, Sequence[Region]], None],
    ) -> None:
        """`on_split(old, parts)` is called on the loop between two groups, after the new regions are in force."""
        self._pd = pd
        self._gate = gate
        self._group = group
        self._on_split = on_split
        self._lock = asyncio.Lock()

    async def split(self, request: kvrpcpb.SplitRegionRequest) -> kvrpcpb.SplitRegionResponse:
        """Split the request's region at those of its keys that lie inside and are not borders yet."""
        async with self._lock:
            region = self._gate.admit(request.context, ())
            if not isinstance(region, Region):
                return kvrpcpb.SplitRegionResponse(region_error=region)
            asked = request.split_keys or [request.split_key]
            encoded = {key if request.is_raw_kv else encode_bytes(key) for key in asked if key}
            keys = sorted(key for key in encoded if region.contains(key) and key != region.start_key)
            parts = await self._split(region, keys) if keys else [region]
        messages = [region_message(part, self._gate.store_id) for part in parts]
        return kvrpcpb.SplitRegionResponse(left=messages[0], right=messages[-1], regions=messages)

    async def _split(self, region: Region, keys: Sequence[bytes]) -> list[Region]:
        store_id = self._gate.store_id
        given = await self._pd.ask_batch_split(region_message(region, store_id), len(keys))
        parts = region.split(keys, [(split_id.new_region_id, split_id.new_peer_ids[0]) for split_id in given])
        regions = self._gate.regions.with_parts(parts)
        await self._group.submit([partial(_persist, data=encode_regions(regions))])

        def put_in_force() -> None:
            self._gate.regions = regions
            self._on_split(region, parts)

        await self._group.quiet(put_in_force)
        await self._pd.region_heartbeat([region_message(part, store_id) for part in parts])
        _log.info("region split", region_id=region.region_id, parts=len(parts))
        return parts


def _persist(draft: Draft, data: bytes) -> None:
    draft.put(REGIONS_KEY, data)
