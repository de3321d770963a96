"""How far a store has come with GC at a safepoint: one walk over all its regions in key order. Pure.

A newer safepoint takes over in the middle of a walk; at the end of the key space the walk then comes back for what it
had done with the older one (TiDB's GC document: "100 % of the regions"). Every step is a value that is kept on disk, so
that a store goes on after a crash where it was.
"""

from dataclasses import dataclass, replace
from typing import Final

from storage.mvcc.document import encode_document, reading_document
from storage.mvcc.layout import META

WALK_KEY: Final = META + b"gc"
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class GcWalk:
    """Everything before `next_key` is collected at `safe_point`; after a wrap, everything from `rewind_key` on as well.

    `begun_safe_point` is the newest safepoint anything was collected at, in a walk or by request: history at or after
    it is whole, older history may have holes.
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
        return GcWalk(safe_point, self.next_key, self.next_key, finished=False, begun_safe_point=begun)

    def passed(self, end_key: bytes) -> "GcWalk":
        """The walk after everything up to `end_key` was collected; b"" is the end of the key space."""
        assert not self.finished, "a finished walk stands still"
        if self.wrapped and (not end_key or end_key >= self.rewind_key):
            return replace(self, finished=True, next_key=b"")
        if end_key:
            return replace(self, next_key=end_key)
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
