"""An ordered key-value store in memory, for tests."""

import asyncio
import bisect
import threading
from collections.abc import Iterator

from storage.kv import Deleted, WriteBatch


class MemoryKV:
    """A `storage.kv.KV` in memory; LevelDB is tested against it."""

    def __init__(self, pairs: dict[bytes, bytes] | None = None) -> None:
        self._pairs = dict(pairs or {})

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`."""
        return self._pairs.get(key)

    def scan(
        self, lower: bytes, upper: bytes = b"", *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `Reader.scan`; the state of the moment of the call."""
        keys = sorted(self._pairs)
        chosen = keys[
            bisect.bisect_left(keys, lower) : bisect.bisect_left(keys, upper)
            if upper
            else len(keys)
        ]
        pairs = [(key, self._pairs[key]) for key in (reversed(chosen) if reverse else chosen)]
        return iter(pairs)

    def snapshot(self) -> "MemoryKV":
        """See `KV.snapshot`."""
        return MemoryKV(self._pairs)

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """See `KV.write`."""
        for key, value in batch.ops.items():
            if value is None:
                self._pairs.pop(key, None)
            else:
                self._pairs[key] = value

    def renew(self) -> None:
        """See `KV.renew`."""

    def delete_range(self, lower: bytes, upper: bytes) -> int:
        """See `KV.delete_range`."""
        deleted = [key for key, _ in self.scan(lower, upper)]
        for key in deleted:
            del self._pairs[key]
        return len(deleted)

    def delete_some(self, lower: bytes, upper: bytes, most: int) -> Deleted:
        """See `KV.delete_some`."""
        deleted = [key for key, _ in self.scan(lower, upper)][:most]
        for key in deleted:
            del self._pairs[key]
        following = deleted[-1] + b"\0" if deleted else lower
        return Deleted(len(deleted), sum(map(len, deleted)), following)

    def approximate_bytes(self, lower: bytes, upper: bytes) -> int:
        """See `KV.approximate_bytes`."""
        return sum(len(key) + len(value) for key, value in self.scan(lower, upper))

    def compact(self, lower: bytes, upper: bytes) -> None:
        """See `KV.compact`; memory has nothing to give back."""

    def level0_files(self) -> int:
        """See `KV.level0_files`."""
        return 0

    def close(self) -> None:
        """See `KV.close`."""


class StallingKV(MemoryKV):
    """Writes of `key` take until `go_on`, as on a slow disk; `stalled` is set when one waits."""

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self.stalled = asyncio.Event()
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._may_go_on = threading.Event()

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """See `KV.write`."""
        if self._key in batch.ops:
            self._loop.call_soon_threadsafe(self.stalled.set)
            assert self._may_go_on.wait(60)
        super().write(batch, sync=sync)

    def go_on(self) -> None:
        """Finish the write that waits, and delay no other."""
        self._may_go_on.set()
