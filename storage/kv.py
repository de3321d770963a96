"""The ordered key-value store every room writes to: Protocol, write batch, and the in-memory oracle of the tests."""

import bisect
from collections.abc import Iterator
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

    def scan(self, lower: bytes, upper: bytes = b"", *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with `lower <= key < upper` in key order (`upper == b""`: to the end); stop iterating at any time."""
        ...


class Snapshot(Reader, Protocol):
    """A frozen state; close it when done."""

    def close(self) -> None:
        """Release what keeps old files alive."""
        ...


class KV(Reader, Protocol):
    """An ordered store of bytes; safe to call from several threads."""

    def snapshot(self) -> Snapshot:
        """Freeze the state of now."""
        ...

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """Apply `batch` atomically; with `sync` it is durable when this returns."""
        ...

    def delete_range(self, lower: bytes, upper: bytes) -> int:
        """Delete `lower <= key < upper`, in bounded batches, and compact the range; returns the number of keys."""
        ...

    def delete_some(self, lower: bytes, upper: bytes, most: int) -> tuple[int, bytes]:
        """Delete the first `most` keys of `lower <= key < upper`; returns how many there were, and where to go on.

        Durable with the next synced write.
        """
        ...

    def approximate_bytes(self, lower: bytes, upper: bytes) -> int:
        """About how many bytes of disk `lower <= key < upper` takes; what was written last may be missing. Fast."""
        ...

    def compact(self, lower: bytes, upper: bytes) -> None:
        """Give back the disk space of what was deleted from `lower <= key < upper`; may take long."""
        ...

    def level0_files(self) -> int:
        """How many files wait to be merged into the sorted ones; many of them slow writes down. Fast."""
        ...

    def close(self) -> None:
        """Flush and release the directory."""
        ...


def scan_prefix(reader: Reader, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All pairs whose key starts with `prefix`, in key order."""
    return reader.scan(prefix, prefix_end(prefix))


class MemoryKV:
    """A dict with order: the oracle that LevelDB is tested against."""

    def __init__(self, pairs: dict[bytes, bytes] | None = None) -> None:
        self._pairs = dict(pairs or {})

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`."""
        return self._pairs.get(key)

    def scan(self, lower: bytes, upper: bytes = b"", *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """See `Reader.scan`; the state of the moment of the call."""
        keys = sorted(self._pairs)
        chosen = keys[bisect.bisect_left(keys, lower) : bisect.bisect_left(keys, upper) if upper else len(keys)]
        pairs = [(key, self._pairs[key]) for key in (reversed(chosen) if reverse else chosen)]
        return iter(pairs)

    def snapshot(self) -> "MemoryKV":
        """See `KV.snapshot`."""
        return MemoryKV(self._pairs)

    def write(self, batch: WriteBatch, *, sync: bool) -> None:  # noqa: ARG002 - memory is as durable as it gets
        """See `KV.write`."""
        for key, value in batch.ops.items():
            if value is None:
                self._pairs.pop(key, None)
            else:
                self._pairs[key] = value

    def delete_range(self, lower: bytes, upper: bytes) -> int:
        """See `KV.delete_range`."""
        doomed = [key for key, _ in self.scan(lower, upper)]
        for key in doomed:
            del self._pairs[key]
        return len(doomed)

    def delete_some(self, lower: bytes, upper: bytes, most: int) -> tuple[int, bytes]:
        """See `KV.delete_some`."""
        doomed = [key for key, _ in self.scan(lower, upper)][:most]
        for key in doomed:
            del self._pairs[key]
        return len(doomed), doomed[-1] + b"\0" if doomed else lower

    def approximate_bytes(self, lower: bytes, upper: bytes) -> int:
        """See `KV.approximate_bytes`."""
        return sum(len(key) + len(value) for key, value in self.scan(lower, upper))

    def compact(self, lower: bytes, upper: bytes) -> None:
        """Nothing to give back."""

    def level0_files(self) -> int:
        """None."""
        return 0

    def close(self) -> None:
        """Nothing to release."""
