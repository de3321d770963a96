"""The fence between reads and transactions whose commit_ts the store computes itself (async commit,
1PC): no read misses such a transaction. TiKV's concurrency manager (max_ts and memory locks) does
the same.

Pure but for a lock.

Ordinary two-phase commit takes its commit_ts from the oracle after every lock is on disk, so a read
that found no lock has a smaller timestamp. A commit_ts that the store computes has no such order:
the store itself must keep it above every read so far. One mutex orders the two steps that matter:

- a reader at `ts` first raises `max_ts` to ts, and then takes its snapshot;
- a writer reserves its keys at a min_commit_ts above `max_ts`, and then writes; the group is on
  disk when `release` frees its reservations.

Proof: take a reader at ts and a writer that would commit at or below ts. If the reader came first,
min_commit_ts > max_ts >= ts, a contradiction. So the writer reserved first. If its reservation was
released, the snapshot has the lock or the version. If not, `enter` finds the reservation, and the
reader waits for `release`: at most one group, and only for keys that it reads.

A change feed that promises "nothing will commit at or below ts" uses the same fence: see `settle`.
Timestamps of reads are not stored, so a store must start with a fresh timestamp of the oracle.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from storage.model.ts import MAX_TS
from storage.mvcc.errors import StoreStoppedError


class Touch(NamedTuple):
    """The keys that a read at `ts` looks at: single raw keys, and the raw range `[lower, upper)`
    (b"" is no end).
    """

    ts: int
    keys: Sequence[bytes] = ()
    span: tuple[bytes, bytes] | None = None


class ReadFence:
    """The largest timestamp read so far, and the timestamps reserved by the group in flight;
    thread-safe.
    """

    def __init__(self, max_ts: int = 0) -> None:
        self._changed = threading.Condition()
        self._max_ts = max_ts
        self._reserved: dict[bytes, int] = {}
        self._closed = False

    @property
    def max_ts(self) -> int:
        """No computed commit_ts will be at or below this one."""
        return self._max_ts

    def enter(self, touches: Iterable[Touch]) -> None:
        """Let reads begin: take their snapshot after this returns.

        Blocks the thread while the group in flight has a reserved key that a read would miss.

        Raises:
            StoreStoppedError: that group's outcome will not be known before the store is started
                again.
        """
        with self._changed:
            touched = list(touches)
            for touch in touched:
                self._raise_to(touch.ts)
            self._changed.wait_for(lambda: self._closed or not self._hides_any(touched))
            if self._hides_any(touched):
                raise StoreStoppedError("the store is shutting down; try again when it is back")

    def read(self, ts: int) -> None:
        """Note that a write command looked at the newest state on behalf of a transaction that
        reads at `ts`.
        """
        with self._changed:
            self._raise_to(ts)

    def reserve(self, keys: Iterable[bytes], at_least: int) -> int:
        """A min_commit_ts for `keys` above every read so far, and not below `at_least`;
        in force until `release`.
        """
        with self._changed:
            min_commit_ts = max(at_least, self._max_ts + 1)
            self._reserved.update(dict.fromkeys(keys, min_commit_ts))
            return min_commit_ts

    def settle(self, ts: int) -> int:
        """The largest timestamp up to `ts` at or below which no transaction will commit at a
        computed commit_ts, but those that were released already.

        Call this on the loop that calls `release`, where the changes of released groups are known.
        """
        with self._changed:
            self._raise_to(ts)
            return min([ts, *(min_commit_ts - 1 for min_commit_ts in self._reserved.values())])

    def release(self) -> None:
        """The group in flight is on disk, and its observers know it."""
        with self._changed:
            if self._reserved:
                self._reserved = {}
                self._changed.notify_all()

    def close(self) -> None:
        """No group will be released any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _raise_to(self, ts: int) -> None:
        # MAX_TS asks for the newest that is committed by now: no promise about later
        if self._max_ts < ts < MAX_TS:
            self._max_ts = ts

    def _hides_any(self, touches: Sequence[Touch]) -> bool:
        return bool(self._reserved) and any(self._hides(touch) for touch in touches)

    def _hides(self, touch: Touch) -> bool:
        if touch.ts == MAX_TS:
            return False
        if any(self._reserved.get(key, MAX_TS) <= touch.ts for key in touch.keys):
            return True
        if touch.span is None:
            return False
        lower, upper = touch.span
        return any(
            min_commit_ts <= touch.ts and lower <= key and (not upper or key < upper)
            for key, min_commit_ts in self._reserved.items()
        )
