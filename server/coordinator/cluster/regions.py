"""The region map (pure): regions sorted by encoded start key, never overlapping.

Invariants (PD's core.RegionsInfo):
1. At most one region holds a key.
2. A report is stale, and changes nothing, when its epoch is behind the known one of the same
   region, or its version behind that of a region it overlaps.
3. A report that is not stale replaces what it overlaps: a split or merge was heard of from its
   outcome.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from google.protobuf.message import Message
from google.protobuf.text_format import MessageToString
from kvproto import metapb_pb2, pdpb_pb2

from server.coordinator.errors import RefusedError


@dataclass(frozen=True, slots=True)
class KnownRegion:
    """A region and its leader."""

    region: metapb_pb2.Region
    leader: metapb_pb2.Peer


@dataclass(frozen=True, slots=True)
class Reported:
    """The effect of a report: `saved` is set when there is something new to keep, `removed` are ids
    that are gone.

    `newer` is set when it did nothing: a known region that the report is stale beside.
    """

    newer: metapb_pb2.Region | None = None
    saved: metapb_pb2.Region | None = None
    removed: list[int] = field(default_factory=list)

    @property
    def stale(self) -> bool:
        """Whether the report was stale."""
        return self.newer is not None


class Regions:
    """All known regions."""

    def __init__(self) -> None:
        self._by_id: dict[int, KnownRegion] = {}
        self._starts: list[bytes] = []
        self._ids: list[int] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def report(self, region: metapb_pb2.Region, leader: metapb_pb2.Peer) -> Reported:
        """Take one heartbeat in; without a leader the known one stays,
        or else the first peer is taken.
        """
        entry = self._by_id.get(region.id)
        # Heartbeats of an old leader may arrive after a split was reported.
        if entry is not None and _behind(region.region_epoch, entry.region.region_epoch):
            return Reported(newer=entry.region)
        overlapped = [
            other.region for other in self._overlapping(region) if other.region.id != region.id
        ]
        for other in overlapped:
            if region.region_epoch.version < other.region_epoch.version:
                return Reported(newer=other)
        # A report with a newer version says what became of the range: whatever it overlaps was
        # split or merged away.
        for gone in overlapped:
            self._remove(gone)
        self._set(KnownRegion(region, _leader(region, leader, entry)))
        changed = entry is None or entry.region != region
        return Reported(saved=region if changed else None, removed=[gone.id for gone in overlapped])

    def by_id(self, region_id: int) -> KnownRegion | None:
        """The region of that id."""
        return self._by_id.get(region_id)

    def find(self, key: bytes) -> KnownRegion | None:
        """The region that holds `key`."""
        at = bisect.bisect_right(self._starts, key) - 1
        entry = self._by_id[self._ids[at]] if at >= 0 else None
        return entry if entry is not None and _reaches(entry.region, key) else None

    def before(self, key: bytes) -> KnownRegion | None:
        """The region that ends where the one that holds `key` starts."""
        holder = self.find(key)
        if holder is None or not holder.region.start_key:
            return None
        at = bisect.bisect_left(self._starts, holder.region.start_key) - 1
        entry = self._by_id[self._ids[at]] if at >= 0 else None
        return (
            entry if entry is not None and entry.region.end_key == holder.region.start_key else None
        )

    def scan(self, start_key: bytes, end_key: bytes) -> Iterator[KnownRegion]:
        """Regions that touch `[start_key, end_key)`, in key order; `end_key == b""`: to the end."""
        first = max(0, bisect.bisect_right(self._starts, start_key) - 1)
        for at in range(first, len(self._ids)):
            entry = self._by_id[self._ids[at]]
            if end_key and entry.region.start_key >= end_key:
                return
            if _reaches(entry.region, start_key):
                yield entry

    def _overlapping(self, region: metapb_pb2.Region) -> list[KnownRegion]:
        return list(self.scan(region.start_key, region.end_key))

    def _set(self, entry: KnownRegion) -> None:
        previous = self._by_id.get(entry.region.id)
        if previous is not None and previous.region.start_key == entry.region.start_key:
            self._by_id[entry.region.id] = entry
            return
        if previous is not None:
            self._remove(previous.region)
        at = bisect.bisect_left(self._starts, entry.region.start_key)
        self._starts.insert(at, entry.region.start_key)
        self._ids.insert(at, entry.region.id)
        self._by_id[entry.region.id] = entry

    def _remove(self, region: metapb_pb2.Region) -> None:
        at = bisect.bisect_left(self._starts, region.start_key)
        del self._starts[at], self._ids[at], self._by_id[region.id]


def _reaches(region: metapb_pb2.Region, key: bytes) -> bool:
    return not region.end_key or key < region.end_key


def _behind(new: metapb_pb2.RegionEpoch, current: metapb_pb2.RegionEpoch) -> bool:
    return new.version < current.version or new.conf_ver < current.conf_ver


def _leader(
    region: metapb_pb2.Region, leader: metapb_pb2.Peer, entry: KnownRegion | None
) -> metapb_pb2.Peer:
    if leader.id:
        return leader
    if entry is not None and entry.leader in region.peers:
        return entry.leader
    return region.peers[0] if region.peers else leader


def check_region(region: metapb_pb2.Region) -> None:
    """Refuse a region that cannot exist; PD accepts reversed bounds and loses the keys that they
    cover.

    Raises:
        RefusedError: it cannot.
    """
    bounded = not region.end_key or region.start_key < region.end_key
    if not (region.id and region.peers and region.region_epoch.version and bounded):
        text = (
            "invalid request region, it needs an id, peers, an epoch and bounds in order: "
            f"{one_line(region)}"
        )
        raise RefusedError(pdpb_pb2.UNKNOWN, text)


def one_line(message: Message) -> str:
    """A message as PD puts it into its texts."""
    return MessageToString(message, as_one_line=True)
