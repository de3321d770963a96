"""Disks: what is synced outlives a crash, what is not may."""

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping
from random import Random

from storage.kv import Deleted, WriteBatch
from storage.leveldb import DirectoryUnusableError


class _Pairs:
    """Sorted pairs that copies share until one of them is written to."""

    def __init__(self, pairs: dict[bytes, bytes], keys: list[bytes]) -> None:
        self.pairs, self.keys = pairs, keys
        self._is_shared = False

    def shared(self) -> "_Pairs":
        self._is_shared = True
        copy = _Pairs(self.pairs, self.keys)
        copy._is_shared = True
        return copy

    def put(self, key: bytes, value: bytes | None) -> bytes | None:
        """Write one; returns what it was."""
        if self._is_shared:
            self.pairs, self.keys, self._is_shared = dict(self.pairs), list(self.keys), False
        before = self.pairs.get(key)
        if value is not None:
            if before is None:
                bisect.insort(self.keys, key)
            self.pairs[key] = value
        elif before is not None:
            del self.pairs[key], self.keys[bisect.bisect_left(self.keys, key)]
        return before


class View:
    """Implements `storage.kv.Snapshot`."""

    def __init__(self, state: _Pairs) -> None:
        self._state = state

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`."""
        return self._state.pairs.get(key)

    def scan(
        self, lower: bytes, upper: bytes = b"", *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `Reader.scan`; reads the state of the moment of the first step."""
        pairs, keys = self._state.pairs, self._state.keys
        first = bisect.bisect_left(keys, lower)
        end = bisect.bisect_left(keys, upper) if upper else len(keys)
        chosen = keys[first:end]
        for key in reversed(chosen) if reverse else chosen:
            yield key, pairs[key]

    def close(self) -> None:
        """See `Snapshot.close`."""


class DiskKV(View):
    """Implements `storage.kv.KV`, for one life of a process; `crashed` is what the next one finds.

    As LevelDB's log does it, writes become durable in their order.
    """

    def __init__(self, state: _Pairs | None = None) -> None:
        super().__init__(state or _Pairs({}, []))
        self._undo: list[dict[bytes, bytes | None]] = []
        self.is_full = False
        self.count: Callable[[Mapping[bytes, bytes | None]], Mapping[bytes, bytes]] = lambda _: {}

    def snapshot(self) -> View:
        """See `KV.snapshot`."""
        return View(self._state.shared())

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """See `KV.write`."""
        if self.is_full:
            raise DirectoryUnusableError("cannot write: no space left on device; free some space")
        batch.ops.update(self.count(batch.ops))
        undo = {key: self._state.put(key, value) for key, value in batch.ops.items()}
        self._undo.append(undo)
        if sync:
            self._undo.clear()

    def renew(self) -> None:
        """See `KV.renew`; here a write that failed tears nothing."""

    def delete_range(self, lower: bytes, upper: bytes) -> int:
        """See `KV.delete_range`."""
        return self.delete_some(lower, upper, len(self._state.keys)).keys

    def delete_some(self, lower: bytes, upper: bytes, most: int) -> Deleted:
        """See `KV.delete_some`."""
        keys = [key for key, _ in self.scan(lower, upper)][:most]
        batch = WriteBatch()
        for key in keys:
            batch.delete(key)
        if keys:
            self.write(batch, sync=False)
        return Deleted(len(keys), sum(map(len, keys)), keys[-1] + b"\0" if keys else lower)

    def approximate_bytes(self, lower: bytes, upper: bytes) -> int:
        """See `KV.approximate_bytes`."""
        return sum(len(key) + len(value) for key, value in self.scan(lower, upper))

    def compact(self, lower: bytes, upper: bytes) -> None:
        """See `KV.compact`; memory has nothing to give back."""

    def level0_files(self) -> int:
        """See `KV.level0_files`."""
        return 0

    def crashed(self, chance: Random) -> "DiskKV":
        """The disk as a crash of the machine leaves it: of the writes that were not synced, some of
        the first happen to be there.
        """
        state = self._state.shared()
        forgotten = self._undo[chance.randint(0, len(self._undo)) :]
        for undo in reversed(forgotten):
            for key, value in undo.items():
                state.put(key, value)
        return DiskKV(state)

    @contextlib.contextmanager
    def opened(self) -> Iterator["DiskKV"]:
        """For the block that a database is open."""
        yield self
