"""Garbage collection of old versions: the versions to delete, the store's progress, and the regions
that need it.

Pure over a frozen `Reader`: it says what to delete, batch by batch.

After GC at `safe_point`, every read at a timestamp >= safe_point returns what it returned before.
For each key: the newest version with commit_ts <= safe_point stays if it is a Put, and is removed
if it is a Delete; all older versions are removed, and so are the Lock and Rollback records up to
the safepoint. Locks are not touched. The Delete is removed last of its key: batches are applied in
order, so if a crash leaves some out, no version that the Delete hid comes back.

`RangeGC` collects a range. `GcWalk` is the progress of a store, which walks all its regions in key
order. If a newer safepoint comes in the middle of a walk, the rest is collected at that one; after
the end of the key space the walk begins again, and ends where the newer safepoint came (TiDB's GC
document: "100 % of the regions"). Each state of a walk is kept on disk, so that a store goes on
after a crash where it was.

`RegionVersions` counts the versions of each region, so that a walk skips regions without garbage.
TiKV keeps the same numbers in the properties of its table files. Here a walk counts a region
exactly, and every record written since is added. The number of rows is known from walks only:
records written since count as old versions, so that a region is scanned too often rather than
never.
"""

import struct
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from storage.kv import Reader, scan_prefix
from storage.model.errors import CorruptError
from storage.model.ts import MAX_TS
from storage.mvcc.record import (
    DELETE,
    META_COLUMN,
    PUT,
    WRITE_COLUMN,
    Write,
    column_range,
    decode_write,
    encode_document,
    reading_document,
    split_version,
    value_key,
)
from storage.mvcc.region import Region, RegionMap

BATCH_BYTES = 32 << 10
"""Keys of about this many bytes are deleted together (TiKV's MAX_TXN_WRITE_SIZE)."""
STEP_RECORDS = 2048
"""Records looked at before control goes back, garbage or not."""
WALK_KEY: Final = META_COLUMN + b"gc"
_FORMAT: Final = 1
_PREFIX: Final = META_COLUMN + b"versions/"
_RECORD: Final = struct.Struct(">QQQQQ")


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
        """The sum of both."""
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


class RangeGC:
    """One scan of the write records of the encoded range `[lower, upper)`, which says what to
    delete.
    """

    def __init__(self, reader: Reader, lower: bytes, upper: bytes, safe_point: int) -> None:
        self.left = VersionCounts()
        """The counts of what remains, once all batches were taken."""
        self.deleted_versions = 0
        self._reader = reader
        self._bounds = column_range(WRITE_COLUMN, lower, upper)
        self._safe_point = safe_point
        self._batch: list[bytes] = []
        self._batch_bytes = 0

    def batches(self) -> Generator[list[bytes], None, None]:
        """Batches of store keys to delete, in order; an empty one only gives control back, after
        `STEP_RECORDS` records.
        """
        current, kept_newest, newest_delete, left_at_start = b"", False, b"", 0
        for seen, (column_key, data) in enumerate(self._reader.scan(*self._bounds), 1):
            encoded, commit_ts = split_version(column_key)
            if encoded != current:
                self._end_row(newest_delete, left_at_start)
                current, kept_newest, newest_delete = encoded, False, b""
                left_at_start = self.left.versions
            write = decode_write(data)
            if commit_ts > self._safe_point:
                self.left.add(write.kind, commit_ts)
            elif kept_newest or write.kind not in (PUT, DELETE):
                self._drop(column_key, encoded, write)
            else:
                kept_newest = True
                if write.kind == PUT:
                    self.left.add(write.kind, commit_ts)
                else:
                    # The newest version is a Delete: it goes after everything it hides, or a crash
                    # in between would bring an old row back.
                    newest_delete = column_key
            if self._batch_bytes >= BATCH_BYTES or not seen % STEP_RECORDS:
                yield self._taken()
        self._end_row(newest_delete, left_at_start)
        if self._batch:
            yield self._taken()

    def _end_row(self, newest_delete: bytes, left_at_start: int) -> None:
        if newest_delete:
            self._append(newest_delete)
        self.left.rows += self.left.versions > left_at_start

    def _drop(self, column_key: bytes, encoded: bytes, write: Write) -> None:
        self._append(column_key)
        if write.kind == PUT and write.short_value is None:
            # Its record is in the same batch, so no record is left without its value.
            self._batch.append(value_key(encoded, write.start_ts))
            self._batch_bytes += len(column_key)

    def _append(self, column_key: bytes) -> None:
        self._batch.append(column_key)
        self._batch_bytes += len(column_key)
        self.deleted_versions += 1

    def _taken(self) -> list[bytes]:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        return batch


@dataclass(frozen=True, slots=True)
class GcWalk:
    """Everything before `next_key` is collected at `safe_point`; after a wrap,
    everything from `rewind_key` on as well.

    `begun_safe_point` is the newest safepoint anything was collected at, in a walk or by request:
    history at or after it is whole, older history may have holes.
    """

    safe_point: int = 0
    next_key: bytes = b""
    rewind_key: bytes = b""
    wrapped: bool = False
    finished: bool = True
    begun_safe_point: int = 0

    def switched(self, safe_point: int) -> "GcWalk":
        """The walk under a newer safepoint, from where it is."""
        assert safe_point > self.safe_point, "safepoints only grow"
        begun = max(safe_point, self.begun_safe_point)
        if self.finished:
            return GcWalk(safe_point, finished=False, begun_safe_point=begun)
        return GcWalk(
            safe_point, self.next_key, self.next_key, finished=False, begun_safe_point=begun
        )

    def passed(self, end_key: bytes) -> "GcWalk":
        """The walk after everything up to `end_key` was collected;
        b"" is the end of the key space.
        """
        assert not self.finished, "a finished walk stands still"
        if self.wrapped and (not end_key or end_key >= self.rewind_key):
            return replace(self, finished=True, next_key=b"")
        if end_key:
            return replace(self, next_key=end_key)
        # The first part of the key space was done at an older safepoint: walk up to there once
        # more.
        if self.rewind_key:
            return replace(self, next_key=b"", wrapped=True)
        return replace(self, finished=True, next_key=b"")

    def begun(self, safe_point: int) -> "GcWalk":
        """The same walk after something else was collected at `safe_point`."""
        return replace(self, begun_safe_point=max(safe_point, self.begun_safe_point))

    def encode(self) -> bytes:
        """The bytes kept at `WALK_KEY` (docs/format/mvcc.md)."""
        return encode_document(
            _FORMAT,
            safe_point=self.safe_point,
            next_key=self.next_key.hex(),
            rewind_key=self.rewind_key.hex(),
            wrapped=self.wrapped,
            finished=self.finished,
            begun_safe_point=self.begun_safe_point,
        )


def decode_walk(data: bytes) -> GcWalk:
    """Read what `GcWalk.encode` wrote.

    Raises:
        CorruptError: not such bytes.
    """
    with reading_document(data, _FORMAT, "the GC progress") as document:
        return GcWalk(
            safe_point=int(document["safe_point"]),
            next_key=bytes.fromhex(document["next_key"]),
            rewind_key=bytes.fromhex(document["rewind_key"]),
            wrapped=bool(document["wrapped"]),
            finished=bool(document["finished"]),
            begun_safe_point=int(document["begun_safe_point"]),
        )


class RegionVersions:
    """The counts of all regions; changed only between two groups, but for `count`,
    which the writer of groups calls.
    """

    def __init__(self, regions: RegionMap, counts: Mapping[int, VersionCounts]) -> None:
        self._regions = regions
        self._counts = dict(counts)
        # What is written to a region since its walk took its snapshot: the walk does not see it.
        self._since_walk: dict[int, VersionCounts] = {}

    def get(self, region_id: int) -> VersionCounts | None:
        """A region's counts; None before its first walk."""
        return self._counts.get(region_id)

    def count(self, ops: Mapping[bytes, bytes | None]) -> dict[bytes, bytes]:
        """Count a group's writes; returns the counts to write with it, so that a crash
        loses none.
        """
        touched: dict[int, Region] = {}
        for key, value in ops.items():
            if key[:1] != WRITE_COLUMN or value is None:
                continue
            encoded, commit_ts = split_version(key)
            region = self._regions.after(encoded)
            if region is not None and self._add(region.region_id, value[1], commit_ts):
                touched[region.region_id] = region
        return {counts_key(region.region_id): self._record(region) for region in touched.values()}

    def begin_walk(self, region: Region) -> None:
        """Note that a snapshot of the region was taken: later writes are not in it."""
        self._since_walk[region.region_id] = VersionCounts()

    def end_walk(self, region: Region, left: VersionCounts) -> dict[bytes, bytes]:
        """Note the versions that a walk has left of its snapshot; returns what to write.

        Nothing if the region changed meanwhile.
        """
        since = self._since_walk.pop(region.region_id, None)
        if since is None or self._regions.get(region.region_id) != region:
            return {}
        self._counts[region.region_id] = left.plus(since)
        return {counts_key(region.region_id): self._record(region)}

    def replace_map(self, regions: RegionMap, changed: Iterable[int]) -> None:
        """Take over a new map, and drop the counts of the regions that changed until they are
        walked.
        """
        self._regions = regions
        for region_id in changed:
            self._counts.pop(region_id, None)
            self._since_walk.pop(region_id, None)

    def _add(self, region_id: int, kind: int, commit_ts: int) -> bool:
        if region_id in self._since_walk:
            self._since_walk[region_id].add(kind, commit_ts)
        if region_id not in self._counts:
            return False
        self._counts[region_id].add(kind, commit_ts)
        return True

    def _record(self, region: Region) -> bytes:
        counts = self._counts[region.region_id]
        return _RECORD.pack(
            region.version, counts.rows, counts.puts, counts.versions, counts.min_ts
        )


def counts_key(region_id: int) -> bytes:
    """The key of a region's counts."""
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
