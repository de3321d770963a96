"""Half-open key ranges `[start_key, end_key)`: `KeyRange`,
and the `Span` of a table for pullers, sorter and sink.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """One table's raw (not memcomparable-encoded) key range; `end_key == b""` means no end."""

    table_id: int
    start_key: bytes
    end_key: bytes

    def contains(self, key: bytes) -> bool:
        """Whether `key` lies in `[start_key, end_key)`."""
        return self.start_key <= key and (not self.end_key or key < self.end_key)


@dataclass(frozen=True, slots=True)
class KeyRange:
    """`[start_key, end_key)`, raw or memcomparable-encoded as its user says;
    `end_key == b""` means no end.
    """

    start_key: bytes
    end_key: bytes

    def clip(self, other: "KeyRange") -> "KeyRange | None":
        """The part of `other` inside this range, or None."""
        start_key = max(self.start_key, other.start_key)
        end_key = min(
            (end_key for end_key in (self.end_key, other.end_key) if end_key), default=b""
        )
        return KeyRange(start_key, end_key) if not end_key or start_key < end_key else None
