"""Spans: the half-open key ranges `[start_key, end_key)` that pullers, sorter and sink work on."""

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
