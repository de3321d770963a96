"""How far central GC has come, and in which order it goes on (pure).

The key space is walked as a ring, as a TiKV does: a round that was broken off at a key is taken up there. At the same
safepoint only what was left is done; at a newer one that comes first, and then the rest as well.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

from gcsafepoint.worker.cluster import KeyRange


@dataclass(frozen=True, slots=True)
class Position:
    """At `safe_point`, what is left goes from `key` round to `until`; all of it if they are the same."""

    safe_point: int
    key: bytes
    until: bytes

    def to_json(self) -> str:
        """The record's value."""
        return json.dumps(asdict(self) | {"key": self.key.hex(), "until": self.until.hex()})

    @classmethod
    def from_json(cls, text: str) -> "Position | None":
        """Read what `to_json` wrote; None for anything else: then all is done again, which harms nobody."""
        try:
            fields = json.loads(text)
            keys = {name: bytes.fromhex(fields[name]) for name in ("key", "until")}
            return cls(**(fields | keys))
        except (ValueError, TypeError, KeyError):
            return None


class Course:
    """The ranges of one walk in order, each with its store, and which of them are done."""

    def __init__(self, safe_point: int, until: bytes, legs: Sequence[tuple[int, KeyRange]]) -> None:
        self.safe_point = safe_point
        self.legs = legs
        self._until = until
        self._done: set[bytes] = set()
        self._first_left = 0

    @classmethod
    def plan(cls, stores: Mapping[int, Sequence[KeyRange]], broke_off: Position | None, safe_point: int) -> "Course":
        """The order in which a round at `safe_point` goes, given where an earlier one broke off."""
        legs = sorted(
            ((store, it) for store, ranges in stores.items() for it in ranges), key=lambda leg: leg[1].start_key
        )
        if broke_off is None:
            return cls(safe_point, b"", legs)
        key = broke_off.key
        until = broke_off.until if broke_off.safe_point == safe_point else key
        legs = list(_cut(_cut(legs, key), until))
        behind = [leg for leg in legs if leg[1].start_key >= key]
        before = [leg for leg in legs if leg[1].start_key < key]
        ring = behind + before
        left = ring[:1] + list(takewhile(lambda leg: leg[1].start_key != until, ring[1:]))
        return cls(safe_point, until, left)

    @property
    def position(self) -> Position:
        """Where to go on: the first range in order that is not done."""
        left = self.legs[self._first_left :]
        return Position(self.safe_point, left[0][1].start_key if left else self._until, self._until)

    def by_store(self) -> list[list[KeyRange]]:
        """The ranges, store by store, in order."""
        found: dict[int, list[KeyRange]] = {}
        for store, it in self.legs:
            found.setdefault(store, []).append(it)
        return list(found.values())

    def reached(self, within: KeyRange) -> bool:
        """Note that a range is done; returns whether `position` moved, and is not the end yet."""
        self._done.add(within.start_key)
        before = self._first_left
        while self._first_left < len(self.legs) and self.legs[self._first_left][1].start_key in self._done:
            self._first_left += 1
        return before < self._first_left < len(self.legs)


def _cut(legs: Iterable[tuple[int, KeyRange]], key: bytes) -> Iterable[tuple[int, KeyRange]]:
    """The same ranges, the one that holds `key` in two."""
    for store, it in legs:
        if it.start_key < key and (not it.end_key or key < it.end_key):
            yield store, KeyRange(it.start_key, key)
            yield store, KeyRange(key, it.end_key)
        else:
            yield store, it
