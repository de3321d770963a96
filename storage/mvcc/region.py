"""Regions: the key ranges a store serves, with epochs that tell a client its map is old;
and where to split them. Pure.

Bounds are memcomparable-encoded, as the coordinator's; `b""` is the end of the key space. Epochs as
TiKV's: a split keeps the old id for the right-most part (`right-derive-when-split`) and raises the
version of all parts by the number of new ones; a merge keeps the target's id, and its version is
above both. So of two regions that hold a key, the one with the greater version is the newer.

LevelDB knows the size of any key range from its table indexes. The place where half of a region
lies is therefore found by bisection over the key space, and the split key is the next user key that
exists there: all versions of a row stay in one region. No data is read but the keys to split at.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from storage.kv import KV
from storage.model.errors import NotFoundError
from storage.mvcc.record import (
    LOCK_COLUMN,
    RAW_COLUMN,
    VALUE_COLUMN,
    WRITE_COLUMN,
    column_range,
    encode_document,
    reading_document,
    split_version,
)

_FORMAT = 1
_COLUMNS = (LOCK_COLUMN, WRITE_COLUMN, VALUE_COLUMN, RAW_COLUMN)
_WIDTH = 48
"""Bytes of a key that bisection looks at; keys that differ later only are not told apart."""


@dataclass(frozen=True, slots=True)
class Region:
    """One range `[start_key, end_key)` and the store's peer of it."""

    region_id: int
    peer_id: int
    start_key: bytes = b""
    end_key: bytes = b""
    conf_ver: int = 1
    version: int = 1

    def contains(self, encoded: bytes) -> bool:
        """Whether an encoded key lies inside."""
        return self.start_key <= encoded and (not self.end_key or encoded < self.end_key)

    def clamp(self, lower: bytes, upper: bytes) -> tuple[bytes, bytes]:
        """The part of the encoded range `[lower, upper)` that lies inside;
        empty when lower >= upper comes back.
        """
        low = max(lower, self.start_key)
        if upper and self.end_key:
            return low, min(upper, self.end_key)
        return low, upper or self.end_key

    def split(self, keys: Sequence[bytes], ids: Sequence[tuple[int, int]]) -> list["Region"]:
        """The parts in key order; `keys` are sorted and inside, `ids` (region,
        peer) one for each new part.
        """
        bounds = [self.start_key, *keys, self.end_key]
        # right-derive-when-split: the old id stays with the last part, where appends go on.
        ids_in_order = [*ids, (self.region_id, self.peer_id)]
        version = self.version + len(keys)
        return [
            replace(
                self,
                region_id=region,
                peer_id=peer,
                start_key=bounds[at],
                end_key=bounds[at + 1],
                version=version,
            )
            for at, (region, peer) in enumerate(ids_in_order)
        ]

    def overlaps(self, lower: bytes, upper: bytes) -> bool:
        """Whether a key of the encoded range `[lower, upper)` lies inside."""
        return (not upper or self.start_key < upper) and (not self.end_key or lower < self.end_key)

    def touches(self, other: "Region") -> bool:
        """Whether one region ends where the other begins."""
        is_left = bool(self.end_key) and self.end_key == other.start_key
        is_right = bool(other.end_key) and other.end_key == self.start_key
        return is_left or is_right

    def merged(self, source: "Region") -> "Region":
        """This region, the target, grown over its neighbour.

        Version as in TiKV: preparing the merge raises the source's, committing it goes above both.
        """
        assert self.touches(source), "only neighbours merge"
        first, last = sorted((self, source), key=lambda region: region.start_key)
        version = max(self.version, source.version + 1) + 1
        return replace(self, start_key=first.start_key, end_key=last.end_key, version=version)


class RegionMissingError(NotFoundError):
    """The region is not in this store."""

    code = "ErrRegionNotFound"


class RegionMap:
    """The regions of this store in key order; immutable."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.start_key)
        self._by_id = {region.region_id: region for region in self._regions}
        self.starts = [region.start_key for region in self._regions]

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def __len__(self) -> int:
        return len(self._regions)

    def get(self, region_id: int) -> Region | None:
        """The region with this id."""
        return self._by_id.get(region_id)

    def at(self, encoded: bytes) -> Region:
        """The region that holds an encoded key.

        Raises:
            RegionMissingError: none of this store does.
        """
        index = bisect_right(self.starts, encoded) - 1
        if index < 0 or not self._regions[index].contains(encoded):
            raise RegionMissingError(f"key {encoded.hex()} lies in no region of this store")
        return self._regions[index]

    def around(self, region: Region) -> list[Region]:
        """Return the region and its neighbours, to correct a client's old map."""
        index = self._regions.index(region)
        left = self._regions[max(0, index - 1) : index]
        right = self._regions[index + 1 : index + 2]
        return [region, *left, *right]

    def after(self, encoded: bytes) -> Region | None:
        """The first region that holds an encoded key or lies behind it."""
        index = max(0, bisect_right(self.starts, encoded) - 1)
        following = (
            region for region in self._regions[index : index + 2] if not _ends(region, encoded)
        )
        return next(following, None)

    def replaced(self, old: Sequence[Region], new: Sequence[Region]) -> "RegionMap":
        """The map after `old` became `new`, by a split or a merge."""
        return RegionMap([*(region for region in self if region not in old), *new])


def _ends(region: Region, encoded: bytes) -> bool:
    return bool(region.end_key) and region.end_key <= encoded


def encode_regions(regions: Iterable[Region]) -> bytes:
    """The bytes kept in the store's META column (docs/format/mvcc.md)."""
    rows = [
        [r.region_id, r.peer_id, r.start_key.hex(), r.end_key.hex(), r.conf_ver, r.version]
        for r in regions
    ]
    return encode_document(_FORMAT, regions=rows)


def decode_regions(data: bytes) -> RegionMap:
    """Read what `encode_regions` wrote.

    Raises:
        CorruptError: not such bytes.
    """
    with reading_document(data, _FORMAT, "the store's region table") as document:
        return RegionMap(
            Region(region, peer, bytes.fromhex(start), bytes.fromhex(end), conf_ver, version)
            for region, peer, start, end, conf_ver, version in document["regions"]
        )


def range_bytes(kv: KV, lower: bytes, upper: bytes) -> int:
    """About how much disk the encoded range `[lower, upper)` takes, raw keys included."""
    return sum(kv.approximate_bytes(*column_range(column, lower, upper)) for column in _COLUMNS)


def region_bytes(kv: KV, region: Region) -> int:
    """About how much disk a region takes."""
    return range_bytes(kv, region.start_key, region.end_key)


def is_empty(kv: KV, region: Region) -> bool:
    """Whether a region is empty: no version, no lock, no raw key."""
    return all(_first(kv, column, region.start_key, region.end_key) is None for column in _COLUMNS)


def split_keys(kv: KV, region: Region, part_bytes: int) -> list[bytes]:
    """Encoded keys that cut a region into parts of about `part_bytes`; sorted, inside, each once.

    May be empty.
    """
    whole = region_bytes(kv, region)
    parts = round(whole / part_bytes) if part_bytes > 0 else 1
    keys = (_key_near(kv, region, whole * at // parts) for at in range(1, parts))
    return sorted({key for key in keys if key is not None and key > region.start_key})


def _key_near(kv: KV, region: Region, offset_bytes: int) -> bytes | None:
    """The first user key behind which all but `offset_bytes` of a region lie."""
    low = int.from_bytes(region.start_key[:_WIDTH].ljust(_WIDTH, b"\x00"))
    high = int.from_bytes((region.end_key or b"\xff" * _WIDTH)[:_WIDTH].ljust(_WIDTH, b"\x00"))
    while low < high:
        middle = (low + high) // 2
        if range_bytes(kv, region.start_key, middle.to_bytes(_WIDTH)) < offset_bytes:
            low = middle + 1
        else:
            high = middle
    candidates = (_first(kv, column, low.to_bytes(_WIDTH), region.end_key) for column in _COLUMNS)
    return min((key for key in candidates if key is not None), default=None)


def _first(kv: KV, column: bytes, lower: bytes, upper: bytes) -> bytes | None:
    for key, _ in kv.scan(*column_range(column, lower, upper)):
        return split_version(key)[0] if column in (WRITE_COLUMN, VALUE_COLUMN) else key[1:]
    return None
