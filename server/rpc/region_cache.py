"""The cache of regions and their stores by key: the coordinator's last answer, corrected by what
stores answer. Pure.

Invariants: cached regions never overlap; a region is never replaced by an older epoch of the same
key range. Keys in the cache are memcomparable-encoded, as the coordinator sends them; the functions
on a route's bounds give raw keys, of which an empty end key is no end.
"""

import bisect
from dataclasses import dataclass

from kvproto import metapb_pb2 as metapb

from storage.codec import decode_bytes


@dataclass(frozen=True, slots=True)
class RegionRoute:
    """The store that serves a region; bounds in `region` are memcomparable-encoded, `end_key ==
    b""` means no end.
    """

    region: metapb.Region
    leader: metapb.Peer
    address: str


def region_end(route: RegionRoute) -> bytes:
    """The raw end key of the region; empty means no end."""
    return decode_bytes(route.region.end_key)[0] if route.region.end_key else b""


def region_start(route: RegionRoute) -> bytes:
    """The raw start key of the region; empty is the least."""
    return decode_bytes(route.region.start_key)[0] if route.region.start_key else b""


def nearer(left: bytes, right: bytes) -> bytes:
    """The smaller of two end keys; an empty one is no end, and so the larger."""
    return min(left, right) if left and right else left or right


def after(route: RegionRoute, end_key: bytes) -> bytes | None:
    """The key from which the range that ends at `end_key` goes on behind the region; None if it
    ends within it.
    """
    upper = region_end(route)
    return None if not upper or (end_key and upper >= end_key) else upper


def below(key: bytes) -> bytes:
    """A key below `key` with no likely key in between; for a search backwards from `key`."""
    return key[:-1] if key.endswith(b"\0") else key[:-1] + bytes((key[-1] - 1,)) + b"\xff" * 16


def covers(region: metapb.Region, key: bytes) -> bool:
    """Whether `key` lies in `[start_key, end_key)`; an empty end is unbounded."""
    return region.start_key <= key and (not region.end_key or key < region.end_key)


class RegionCache:
    """Regions ordered by start key."""

    def __init__(self) -> None:
        self._starts: list[bytes] = []
        self._routes: list[RegionRoute] = []

    def __len__(self) -> int:
        return len(self._routes)

    def find(self, key: bytes) -> RegionRoute | None:
        """The cached region that covers `key`."""
        index = bisect.bisect_right(self._starts, key) - 1
        if index < 0 or not covers(self._routes[index].region, key):
            return None
        return self._routes[index]

    def insert(self, route: RegionRoute) -> bool:
        """Take `route` in place of all it overlaps; False, and nothing changed,
        if one of those is newer.
        """
        first, last = self._overlapped(route.region)
        # An answer of the coordinator may be older than what a store has said since; taking it
        # would send requests back to the old region.
        if any(_newer(old.region, route.region) for old in self._routes[first:last]):
            return False
        self._routes[first:last] = [route]
        self._starts[first:last] = [route.region.start_key]
        return True

    def drop(self, region: metapb.Region) -> None:
        """Drop every cached region that overlaps this one, unless the cached one is newer."""
        first, last = self._overlapped(region)
        for index in reversed(range(first, last)):
            if not _newer(self._routes[index].region, region):
                del self._routes[index], self._starts[index]

    def _overlapped(self, region: metapb.Region) -> tuple[int, int]:
        first = max(bisect.bisect_right(self._starts, region.start_key) - 1, 0)
        if first < len(self._routes) and _ends_before(self._routes[first].region, region.start_key):
            first += 1
        last = (
            bisect.bisect_left(self._starts, region.end_key)
            if region.end_key
            else len(self._starts)
        )
        return first, max(first, last)


def _ends_before(region: metapb.Region, key: bytes) -> bool:
    return bool(region.end_key) and region.end_key <= key


def _newer(left: metapb.Region, right: metapb.Region) -> bool:
    left_epoch, right_epoch = left.region_epoch, right.region_epoch
    return (left_epoch.version, left_epoch.conf_ver) > (right_epoch.version, right_epoch.conf_ver)
