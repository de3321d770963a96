"""Regions: the key ranges a store serves, with epochs that tell a client its map is old. Pure.

Bounds are memcomparable-encoded, as the coordinator's; `b""` is the end of the key space. A split keeps the old id for
the right-most part and raises the version of all parts (TiKV's `right-derive-when-split`).
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from storage.model.errors import CorruptError, NotFoundError

_FORMAT = 1


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
        """The part of the encoded range `[lower, upper)` that lies inside; empty when lower >= upper comes back."""
        low = max(lower, self.start_key)
        return low, min(upper, self.end_key) if upper and self.end_key else upper or self.end_key

    def split(self, keys: Sequence[bytes], ids: Sequence[tuple[int, int]]) -> list["Region"]:
        """The parts in key order; `keys` are sorted and inside, `ids` (region, peer) one for each new part."""
        bounds = [self.start_key, *keys, self.end_key]
        named = [*ids, (self.region_id, self.peer_id)]
        version = self.version + len(keys)
        return [
            replace(self, region_id=region, peer_id=peer, start_key=bounds[at], end_key=bounds[at + 1], version=version)
            for at, (region, peer) in enumerate(named)
        ]


class RegionMissingError(NotFoundError):
    """No region of this store is meant."""

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
        """The region and its neighbours: what a client with an old map should learn."""
        index = self._regions.index(region)
        return [region, *self._regions[max(0, index - 1) : index], *self._regions[index + 1 : index + 2]]

    def with_parts(self, parts: Sequence[Region]) -> "RegionMap":
        """The map after the region with the last part's id was split into `parts`."""
        return RegionMap([*(region for region in self if region.region_id != parts[-1].region_id), *parts])


def encode_regions(regions: Iterable[Region]) -> bytes:
    """The bytes kept in the store's META column (docs/format/mvcc.md)."""
    rows = [[r.region_id, r.peer_id, r.start_key.hex(), r.end_key.hex(), r.conf_ver, r.version] for r in regions]
    return json.dumps({"format": _FORMAT, "regions": rows}).encode()


def decode_regions(data: bytes) -> RegionMap:
    """Read what `encode_regions` wrote.

    Raises:
        CorruptError: not such bytes.
    """
    try:
        document = json.loads(data)
        if document["format"] != _FORMAT:
            raise CorruptError(
                f"the store's region table has format {document['format']}; this program knows {_FORMAT}"
            )
        return RegionMap(
            Region(region, peer, bytes.fromhex(start), bytes.fromhex(end), conf_ver, version)
            for region, peer, start, end, conf_ver, version in document["regions"]
        )
    except (ValueError, KeyError, TypeError) as err:
        raise CorruptError(f"the store's region table is damaged: {err}; restore the store from a backup") from err
