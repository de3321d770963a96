"""The ordered key-value store that all durable state is written to:
its Protocol and its write batch.

`storage.leveldb.LevelDB` is the one that daemons use.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from storage.codec import prefix_end


class WriteBatch:
    """Puts and deletes that become visible, and durable, together; the last write of a key wins."""

    __slots__ = ("ops",)

    def __init__(self) -> None:
        self.ops: dict[bytes, bytes | None] = {}

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key`."""
        self.ops[key] = value

    def delete(self, key: bytes) -> None:
        """Remove `key`, whether or not it exists."""
        self.ops[key] = None

    def __len__(self) -> int:
        return len(self.ops)


class Reader(Protocol):
    """A readable state of the store: the store itself, or a frozen snapshot of it."""

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`, or None."""
        ...

    def scan(
        self, lower: bytes, upper: bytes = b"", *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with `lower <= key < upper` in key order (`upper == b""`: to the end);
        stop iterating at any time.
        """
        ...


class Snapshot(Reader, Protocol):
    """A frozen state; close it when done."""

    def close(self) -> None:
        """Release the snapshot, which keeps old files alive."""
        ...


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of `KV.delete_some`: keys deleted, their bytes together, and where to go on."""

    keys: int
    key_bytes: int
    next_key: bytes


class KV(Reader, Protocol):
    """An ordered store of bytes; safe to call from several threads."""

    def snapshot(self) -> Snapshot:
        """Freeze the state of now."""
        ...

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """Apply `batch` atomically; with `sync` it is durable when this returns.

        After a write that failed, further ones are refused until `renew`.
        """
        ...

    def renew(self) -> None:
        """Take writes again after one that failed, which is there whole or not at all; nothing
        happens where none failed.

        No thread may read meanwhile, and snapshots from before are closed.
        """
        ...

    def delete_range(self, lower: bytes, upper: bytes) -> int:
        """Delete `lower <= key < upper`, in bounded batches, and compact the range;
        returns the number of keys.
        """
        ...

    def delete_some(self, lower: bytes, upper: bytes, most: int) -> Deleted:
        """Delete the first `most` keys of `lower <= key < upper`; fewer only at its end.

        Durable with the next synced write.
        """
        ...

    def approximate_bytes(self, lower: bytes, upper: bytes) -> int:
        """Estimate the disk space of `lower <= key < upper` in bytes; the newest writes may be
        missing. Fast.
        """
        ...

    def compact(self, lower: bytes, upper: bytes) -> None:
        """Return the disk space of deleted keys in `lower <= key < upper`; may take long."""
        ...

    def level0_files(self) -> int:
        """The number of files that wait to be merged into the sorted ones; many of them slow writes
        down.

        Fast.
        """
        ...

    def close(self) -> None:
        """Flush and release the directory."""
        ...


def scan_prefix(reader: Reader, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All pairs whose key starts with `prefix`, in key order."""
    return reader.scan(prefix, prefix_end(prefix))
