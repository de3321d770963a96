"""The regions of this store: which requests they admit, with TiKV's errors,
and how their table is changed.

Every request passes `RegionGate`. `RegionTable` makes one change at a time: on disk before it is in
force, then reported. No data moves when regions change, and every request carries an epoch. A
request that was admitted just before a change therefore still does what it asked for: the same keys
lie on the same store.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import structlog
from kvproto import errorpb_pb2 as errorpb
from kvproto import metapb_pb2 as metapb

from server.rpc.pd import PdClient, PdRefusedError
from server.store.identity import REGIONS_KEY, region_message
from storage.codec import encode_bytes
from storage.model.errors import UnavailableError
from storage.mvcc.engine import Draft
from storage.mvcc.gc import RegionVersions, counts_key
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.region import Region, RegionMap, encode_regions
from storage.tasks import Changes

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class RegionGate:
    """The current regions; replaced as a whole by a split, a merge or a handover."""

    def __init__(self, store_id: int, regions: RegionMap) -> None:
        self.store_id = store_id
        self.regions = regions
        self.leaving: frozenset[int] = frozenset()
        """Regions that are about to be handed over: nobody is admitted,
        until the handover is done or given up.
        """

    def admit(
        self, context: Any, keys: Sequence[bytes], *, raw: bool = False
    ) -> Region | errorpb.Error:
        """The region of a request's kvrpcpb.Context, or the error it must get;
        `keys` are user keys.

        Keys of raw requests lie in regions as they are, those of transactions
        memcomparable-encoded.
        """
        if context.peer.store_id and context.peer.store_id != self.store_id:
            mismatch = errorpb.StoreNotMatch(
                request_store_id=context.peer.store_id, actual_store_id=self.store_id
            )
            return errorpb.Error(message="the peer is not on this store", store_not_match=mismatch)
        region = self.find(context.region_id, context.region_epoch)
        if isinstance(region, errorpb.Error) or not keys:
            return region
        # A region is a range: if the least and the greatest key are inside, all are.
        for key in {min(keys), max(keys)}:
            if not region.contains(key if raw else encode_bytes(key)):
                return outside(key, region)
        return region

    def find(self, region_id: int, epoch: metapb.RegionEpoch) -> Region | errorpb.Error:
        """The region of that id if the caller knows it as it is now, or the error it must get."""
        region = self.regions.get(region_id)
        if region is None:
            missing = errorpb.RegionNotFound(region_id=region_id)
            return errorpb.Error(
                message=f"region {region_id} is not on this store", region_not_found=missing
            )
        # NotLeader makes a client ask the coordinator again, which knows the new store soon.
        if region_id in self.leaving:
            nobody = errorpb.NotLeader(region_id=region_id)
            return errorpb.Error(
                message=f"region {region_id} is being handed over", not_leader=nobody
            )
        if epoch.version != region.version or epoch.conf_ver != region.conf_ver:
            return errorpb.Error(
                message=f"the epoch of region {region_id} has changed",
                epoch_not_match=self.current(region),
            )
        return region

    def current(self, region: Region) -> errorpb.EpochNotMatch:
        """The present regions around `region`, for a client with an old map of it."""
        return self.changed_to(self.regions.around(region))

    def changed_to(self, regions: Iterable[Region]) -> errorpb.EpochNotMatch:
        """The answer for a client whose region became these."""
        return errorpb.EpochNotMatch(
            current_regions=[region_message(region, self.store_id) for region in regions]
        )


def outside(key: bytes, region: Region) -> errorpb.Error:
    """The error for a user key that is not in a region."""
    lies = errorpb.KeyNotInRegion(
        key=key, region_id=region.region_id, start_key=region.start_key, end_key=region.end_key
    )
    return errorpb.Error(
        message=f"key {key.hex()} is not in region {region.region_id}", key_not_in_region=lies
    )


@dataclass(slots=True)
class RegionTable:
    """Changes regions: from reading `gate.regions` to `replace` all of it within `change`."""

    pd: PdClient
    gate: RegionGate
    group: GroupCommit
    versions: RegionVersions
    on_change: Callable[[Sequence[Region], Sequence[Region]], None]
    """Called with what was and what is, on the loop between two groups,
    when the change is in force.
    """
    _changes: Changes = field(default_factory=Changes)

    async def change(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call `make` while nobody else changes the table; returns what it returns."""
        # To its end, whoever gives up: a table that is on disk and not in force is served by
        # nobody, and the next change would overwrite it.
        return await self._changes.make(make)

    async def replace(
        self,
        old: Sequence[Region],
        new: Sequence[Region],
        notes: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """Put `new` in the place of `old`; durable and in force when it returns,
        all of it or nothing after a crash.

        `notes` are written in the same batch.

        Raises:
            StoreStoppedError: the store is closing; the change may have happened.
        """
        regions = self.gate.regions.replaced(old, new)
        changed = sorted({region.region_id for region in (*old, *new)})
        await self.group.submit(
            [partial(_persist, regions=regions, changed=changed, notes=notes or {})]
        )
        # Durable first, in force between two groups: no group is admitted by the old table and
        # applied under the new one.
        await self.group.quiet(lambda: self._put_in_force(regions, changed, old, new))
        if new:
            await self._report(new)

    async def _report(self, regions: Sequence[Region]) -> None:
        """Tell the coordinator; a silent one hears of it with the next heartbeat."""
        messages = [region_message(region, self.gate.store_id) for region in regions]
        try:
            if len(messages) > 1:
                # all at once: between heartbeats there would be a hole
                await self.pd.report_batch_split(messages)
            else:
                await self.pd.region_heartbeat(messages)
        except (UnavailableError, PdRefusedError) as err:
            _log.warning("the coordinator does not know the new regions yet", error=err.message)

    def _put_in_force(
        self, regions: RegionMap, changed: list[int], old: Sequence[Region], new: Sequence[Region]
    ) -> None:
        self.gate.regions = regions
        self.versions.replace_map(regions, changed)
        self.on_change(old, new)


def _persist(
    draft: Draft, regions: RegionMap, changed: list[int], notes: Mapping[bytes, bytes]
) -> None:
    draft.put(REGIONS_KEY, encode_regions(regions))
    for key, value in notes.items():
        draft.put(key, value)
    for region_id in changed:
        # Counts of another range would make GC skip a region that needs it.
        draft.delete(counts_key(region_id))
