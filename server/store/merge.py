"""Region merges: two neighbours of this store become one, under the target's id."""

import structlog

from server.store import metrics
from server.store.region_table import RegionTable
from storage.model.errors import InvalidError
from storage.mvcc.region import Region, RegionMissingError

_log = structlog.get_logger(__name__)


class NotNeighboursError(InvalidError):
    """Only regions that touch each other can merge."""

    code = "ErrRegionsNotAdjacent"


class Merger:
    """Merges regions one call at a time."""

    def __init__(self, table: RegionTable) -> None:
        self._table = table

    async def merge(self, source_id: int, target_id: int) -> Region:
        """Merge the source into the target; returns the target as it is now, durable.

        Raises:
            RegionMissingError: one of them is not on this store.
            NotNeighboursError: they do not touch, or are the same.
        """
        async with self._table.lock:
            return await self._merge(self._known(source_id), self._known(target_id))

    async def merge_unchanged(self, source: Region, target: Region) -> None:
        """Like `merge`, unless one of them has changed since they were chosen."""
        async with self._table.lock:
            if all(self._table.gate.regions.get(region.region_id) == region for region in (source, target)):
                await self._merge(source, target)

    async def _merge(self, source: Region, target: Region) -> Region:
        if not target.touches(source):
            raise NotNeighboursError(
                f"regions {source.region_id} and {target.region_id} are no neighbours; merge regions that touch"
            )
        merged = target.merged(source)
        await self._table.replace([source, target], [merged])
        metrics.REGION_MERGES.inc()
        _log.info("regions merged", source=source.region_id, target=target.region_id, version=merged.version)
        return merged

    def _known(self, region_id: int) -> Region:
        region = self._table.gate.regions.get(region_id)
        if region is None:
            raise RegionMissingError(f"region {region_id} is not on this store; ask the coordinator where it is")
        return region
