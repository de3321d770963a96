"""The store's own record of its regions: one change at a time, on disk before it is in force, then reported.

No data moves when regions change, and every request carries an epoch. A request that was admitted just before a change
therefore still does what it asked for: the same keys lie on the same store.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from server.rpc.pd import PdClient, PdRefusedError
from server.store.identity import REGIONS_KEY, region_message
from server.store.region_check import RegionGate
from storage.model.errors import UnavailableError
from storage.mvcc.draft import Draft
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.region import Region, RegionMap, encode_regions
from storage.mvcc.version_counts import RegionVersions, counts_key

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class RegionTable:
    """Changes regions; hold `lock` from reading `gate.regions` to `replace`."""

    pd: PdClient
    gate: RegionGate
    group: GroupCommit
    versions: RegionVersions
    on_change: Callable[[Sequence[Region], Sequence[Region]], None]
    """Called with what was and what is, on the loop between two groups, when the change is in force."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def replace(
        self, old: Sequence[Region], new: Sequence[Region], notes: Mapping[bytes, bytes] | None = None
    ) -> None:
        """Put `new` in the place of `old`; durable and in force when it returns, all of it or nothing after a crash.

        `notes` are written in the same batch.

        Raises:
            StoreStoppedError: the store is closing; the change may have happened.
        """
        regions = self.gate.regions.replaced(old, new)
        changed = sorted({region.region_id for region in (*old, *new)})
        await self.group.submit([partial(_persist, regions=regions, changed=changed, notes=notes or {})])
        await self.group.quiet(lambda: self._put_in_force(regions, changed, old, new))
        if new:
            await self._report(new)

    async def _report(self, regions: Sequence[Region]) -> None:
        """Tell the coordinator; a silent one hears of it with the next heartbeat."""
        messages = [region_message(region, self.gate.store_id) for region in regions]
        try:
            if len(messages) > 1:
                await self.pd.report_batch_split(messages)  # all at once: between heartbeats there would be a hole
            else:
                await self.pd.region_heartbeat(messages)
        except (UnavailableError, PdRefusedError) as err:
            _log.warning("the coordinator does not know the new regions yet", error=err.message)

    def _put_in_force(
        self, regions: RegionMap, changed: list[int], old: Sequence[Region], new: Sequence[Region]
    ) -> None:
        self.gate.regions = regions
        self.versions.forget(regions, changed)
        self.on_change(old, new)


def _persist(draft: Draft, regions: RegionMap, changed: list[int], notes: Mapping[bytes, bytes]) -> None:
    draft.put(REGIONS_KEY, encode_regions(regions))
    for key, value in notes.items():
        draft.put(key, value)
    for region_id in changed:
        draft.delete(counts_key(region_id))
