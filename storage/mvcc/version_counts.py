"""How many versions a region holds: enough to see whether GC would find anything. Pure.

TiKV keeps the same numbers in the properties of its table files. Here a walk of GC counts a region
exactly, and every record written since is added. Rows are only known from walks: what was written
since counts as old versions until the next walk, so that a region is looked at too often rather
than never.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from storage.kv import Reader, scan_prefix
from storage.model.errors import CorruptError
from storage.model.ts import MAX_TS
from storage.mvcc.layout import META, WRITE, split_version
from storage.mvcc.record import PUT
from storage.mvcc.region import Region, RegionMap

_RECORD: Final = struct.Struct(">QQQQQ")
_PREFIX: Final = META + b"versions/"


@dataclass(slots=True)
class VersionCounts:
    """Records of the write column: `versions` all of them, `puts` those that write a value,
    `rows` distinct keys.
    """

    rows: int = 0
    puts: int = 0
    versions: int = 0
    min_ts: int = MAX_TS

    def add(self, kind: int, commit_ts: int) -> None:
        """Count one record."""
        self.versions += 1
        self.puts += kind == PUT
        self.min_ts = min(self.min_ts, commit_ts)

    def plus(self, other: "VersionCounts") -> "VersionCounts":
        """Both together."""
        return VersionCounts(
            self.rows + other.rows,
            self.puts + other.puts,
            self.versions + other.versions,
            min(self.min_ts, other.min_ts),
        )

    def needs_gc(self, safe_point: int, ratio_threshold: float) -> bool:
        """TiKV's `check_need_gc`: more versions than rows, or than values,
        by more than the ratio; below 1: always.
        """
        if ratio_threshold < 1.0:
            return True
        if self.min_ts > safe_point:
            return False
        return self.versions > min(self.rows, self.puts) * ratio_threshold


def counts_key(region_id: int) -> bytes:
    """Where a region's counts are kept."""
    return _PREFIX + region_id.to_bytes(8)


def stored_versions(reader: Reader, regions: RegionMap) -> "RegionVersions":
    """The counts as the last batch left them; those of another version of their region are not
    believed.

    Raises:
        CorruptError: a record is not one.
    """
    counts_by_region: dict[int, VersionCounts] = {}
    for key, data in scan_prefix(reader, _PREFIX):
        if len(data) != _RECORD.size:
            raise CorruptError(
                f"a region's version counts have {len(data)} bytes, not {_RECORD.size}"
            )
        version, *counts = _RECORD.unpack(data)
        region = regions.get(int.from_bytes(key[len(_PREFIX) :]))
        if region is not None and region.version == version:
            counts_by_region[region.region_id] = VersionCounts(*counts)
    return RegionVersions(regions, counts_by_region)


class RegionVersions:
    """The counts of all regions; changed only between two groups, but for `count`,
    which the writer of groups calls.
    """

    def __init__(self, regions: RegionMap, known: Mapping[int, VersionCounts]) -> None:
        self._regions = regions
        self._known = dict(known)
        self._walked: dict[int, VersionCounts] = {}

    def get(self, region_id: int) -> VersionCounts | None:
        """A region's counts; None before its first walk."""
        return self._known.get(region_id)

    def count(self, ops: Mapping[bytes, bytes | None]) -> dict[bytes, bytes]:
        """Count what a group writes; returns what must be written with it,
        so that a crash forgets nothing.
        """
        touched: dict[int, Region] = {}
        for key, value in ops.items():
            if key[:1] != WRITE or value is None:
                continue
            encoded, commit_ts = split_version(key)
            region = self._regions.after(encoded)
            if region is not None and self._add(region.region_id, value[1], commit_ts):
                touched[region.region_id] = region
        return {counts_key(region.region_id): self._record(region) for region in touched.values()}

    def begin_walk(self, region: Region) -> None:
        """A snapshot of the region was taken now; what is written from here on is not in it."""
        self._walked[region.region_id] = VersionCounts()

    def end_walk(self, region: Region, left: VersionCounts) -> dict[bytes, bytes]:
        """The walk has left this of its snapshot; returns what to write.

        Nothing if the region changed meanwhile.
        """
        since = self._walked.pop(region.region_id, None)
        if since is None or self._regions.get(region.region_id) != region:
            return {}
        self._known[region.region_id] = left.plus(since)
        return {counts_key(region.region_id): self._record(region)}

    def forget(self, regions: RegionMap, changed: Iterable[int]) -> None:
        """Take over a new map; nothing is known of the regions that changed until they are
        walked.
        """
        self._regions = regions
        for region_id in changed:
            self._known.pop(region_id, None)
            self._walked.pop(region_id, None)

    def _add(self, region_id: int, kind: int, commit_ts: int) -> bool:
        if region_id in self._walked:
            self._walked[region_id].add(kind, commit_ts)
        if region_id not in self._known:
            return False
        self._known[region_id].add(kind, commit_ts)
        return True

    def _record(self, region: Region) -> bytes:
        counts = self._known[region.region_id]
        return _RECORD.pack(
            region.version, counts.rows, counts.puts, counts.versions, counts.min_ts
        )
