"""The resolved_ts of a span: the minimum over its sub-ranges, each served by a region or being
located.

Pure.

The span is always tiled by pieces without hole or overlap. A piece is owned by one subscription, or
is a gap; a gap keeps the timestamp it had when its subscription ended, so a split, a merge or a
lost leader never moves the span back nor lets it run ahead. Keys are memcomparable-encoded, as
regions bound them; `end == b""` means no end.
"""

import bisect
from dataclasses import dataclass

from storage.model.span import KeyRange


@dataclass(slots=True)
class _Piece:
    start: bytes
    end: bytes
    ts: int
    owner: int | None = None


class Frontier:
    """The pieces of one span and their timestamps."""

    def __init__(self, span: KeyRange, start_ts: int) -> None:
        self._pieces = [_Piece(span.start_key, span.end_key, start_ts)]
        self._owned: dict[int, _Piece] = {}

    @property
    def resolved_ts(self) -> int:
        """The ts up to which every change has been received. O(pieces); never goes back."""
        return min(piece.ts for piece in self._pieces)

    def __len__(self) -> int:
        """Owned pieces."""
        return len(self._owned)

    def gaps(self) -> list[KeyRange]:
        """The key ranges without a subscription, neighbours joined, in key order."""
        gaps: list[KeyRange] = []
        touching = False
        for piece in self._pieces:
            if piece.owner is not None:
                touching = False
                continue
            # Neighbours with different timestamps are one range to locate: a region that has merged
            # covers both.
            start = gaps.pop().start_key if touching else piece.start
            gaps.append(KeyRange(start, piece.end))
            touching = True
        return gaps

    def lowest_gap(self) -> int | None:
        """The timestamp of the gap that is furthest behind; None: there is no gap."""
        return min((piece.ts for piece in self._pieces if piece.owner is None), default=None)

    def assign(self, part: KeyRange, owner: int) -> int:
        """Give a part of a gap to subscription `owner`; returns the timestamp to pull from.

        That is the lowest of what it covers: some of it may come twice, nothing is left out.
        """
        assert owner not in self._owned, f"subscription {owner} already has a piece"
        self._split(part.start_key)
        if part.end_key:
            self._split(part.end_key)
        first = self._index(part.start_key)
        after = self._index(part.end_key) if part.end_key else len(self._pieces)
        covered = self._pieces[first:after]
        assert covered, "an empty part was assigned"
        assert all(piece.owner is None for piece in covered), "the part is not a gap"
        piece = _Piece(part.start_key, part.end_key, min(piece.ts for piece in covered), owner)
        self._pieces[first:after] = [piece]
        self._owned[owner] = piece
        return piece.ts

    def advance(self, owner: int, ts: int) -> None:
        """Raise the piece of `owner`; an unknown owner (already released) and a lower ts change
        nothing.
        """
        piece = self._owned.get(owner)
        if piece is not None and ts > piece.ts:
            piece.ts = ts

    def release(self, owner: int) -> None:
        """Make the piece of `owner` a gap; it keeps its timestamp."""
        piece = self._owned.pop(owner, None)
        if piece is not None:
            piece.owner = None

    def _index(self, start: bytes) -> int:
        index = bisect.bisect_left(self._pieces, start, key=lambda piece: piece.start)
        assert index == len(self._pieces) or self._pieces[index].start == start, "not a border"
        return index

    def _split(self, key: bytes) -> None:
        """Make `key` a border between pieces."""
        index = bisect.bisect_right(self._pieces, key, key=lambda piece: piece.start) - 1
        assert index >= 0, "the key lies before the span"
        piece = self._pieces[index]
        if piece.start == key or (piece.end and key >= piece.end):
            return
        assert piece.owner is None, "the part is not a gap"
        self._pieces[index : index + 1] = [
            _Piece(piece.start, key, piece.ts),
            _Piece(key, piece.end, piece.ts),
        ]
