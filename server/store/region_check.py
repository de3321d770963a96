"""Which requests this store may answer: the region checks every request passes, with TiKV's errors."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvproto import errorpb_pb2 as errorpb
from kvproto import metapb_pb2 as metapb

from server.store.identity import region_message
from storage.codec import encode_bytes
from storage.mvcc.region import Region, RegionMap


class RegionGate:
    """The current regions; replaced as a whole by a split, a merge or a handover."""

    def __init__(self, store_id: int, regions: RegionMap) -> None:
        self.store_id = store_id
        self.regions = regions
        self.leaving: frozenset[int] = frozenset()
        """Regions that are about to be handed over: nobody is admitted, until the handover is done or given up."""

    def admit(self, context: Any, keys: Sequence[bytes], *, raw: bool = False) -> Region | errorpb.Error:
        """The region of a request's kvrpcpb.Context, or the error it must get; `keys` are user keys.

        Keys of raw requests lie in regions as they are, those of transactions memcomparable-encoded.
        """
        if context.peer.store_id and context.peer.store_id != self.store_id:
            mismatch = errorpb.StoreNotMatch(request_store_id=context.peer.store_id, actual_store_id=self.store_id)
            return errorpb.Error(message="the peer is not on this store", store_not_match=mismatch)
        found = self.find(context.region_id, context.region_epoch)
        if isinstance(found, errorpb.Error) or not keys:
            return found
        for key in {min(keys), max(keys)}:
            if not found.contains(key if raw else encode_bytes(key)):
                return outside(key, found)
        return found

    def find(self, region_id: int, epoch: metapb.RegionEpoch) -> Region | errorpb.Error:
        """The region of that id if the caller knows it as it is now, or the error it must get."""
        region = self.regions.get(region_id)
        if region is None:
            missing = errorpb.RegionNotFound(region_id=region_id)
            return errorpb.Error(message=f"region {region_id} is not on this store", region_not_found=missing)
        if region_id in self.leaving:
            nobody = errorpb.NotLeader(region_id=region_id)
            return errorpb.Error(message=f"region {region_id} is being handed over", not_leader=nobody)
        if epoch.version != region.version or epoch.conf_ver != region.conf_ver:
            return errorpb.Error(
                message=f"the epoch of region {region_id} has changed", epoch_not_match=self.current(region)
            )
        return region

    def current(self, region: Region) -> errorpb.EpochNotMatch:
        """What a client with an old map of `region` should learn."""
        return self.changed_to(self.regions.around(region))

    def changed_to(self, regions: Iterable[Region]) -> errorpb.EpochNotMatch:
        """What a client should learn whose region became these."""
        return errorpb.EpochNotMatch(current_regions=[region_message(known, self.store_id) for known in regions])


def outside(key: bytes, region: Region) -> errorpb.Error:
    """The error for a user key that is not in a region."""
    lies = errorpb.KeyNotInRegion(
        key=key, region_id=region.region_id, start_key=region.start_key, end_key=region.end_key
    )
    return errorpb.Error(message=f"key {key.hex()} is not in region {region.region_id}", key_not_in_region=lies)
