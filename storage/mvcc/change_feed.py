"""The store as a change feed needs it: the commits since a checkpoint, and the locks that hold
resolved_ts back. Pure over a frozen `Reader`.

`changes_since` is the incremental scan, which tells a new subscriber what it has missed.

`OpenLocks` says how far resolved_ts may go: below the oldest open Put or Delete lock of a region,
whatever its transaction's kind. A commit_ts that the store computes itself may be smaller than a
timestamp of the oracle that was taken before the prewrite came; `settle` keeps such commits above
it (`storage.mvcc.read_fence`). The locks are kept in memory by the thread that hands out changes,
and rebuilt from the lock column when the store opens.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Iterable, Sequence

from storage.kv import Reader
from storage.mvcc.engine import COMMIT, COMMITTED, PREWRITE, ROLLBACK, Change, Versions
from storage.mvcc.read_fence import ReadFence
from storage.mvcc.record import (
    DELETE,
    LOCK_COLUMN,
    PUT,
    WRITE_COLUMN,
    Lock,
    column_range,
    decode_lock,
    decode_write,
    split_version,
    user_key,
)


def changes_since(
    reader: Reader, lower: bytes, upper: bytes, checkpoint_ts: int, *, old_values: bool
) -> Generator[Change, None, None]:
    """Open data locks as PREWRITE, then every version after `checkpoint_ts` as COMMITTED,
    newest first per key.

    The range is encoded. With `old_values`, each change carries the value it replaced.
    """
    versions = Versions(reader)
    # What is locked now commits live, and a live COMMIT carries no value: the subscriber matches it
    # with this PREWRITE.
    for column_key, data in reader.scan(*column_range(LOCK_COLUMN, lower, upper)):
        lock = decode_lock(data)
        if lock.changes_data:
            yield _prewritten(versions, column_key[1:], lock, old_values=old_values)
    pending: Change | None = None
    for column_key, data in reader.scan(*column_range(WRITE_COLUMN, lower, upper)):
        encoded, commit_ts = split_version(column_key)
        if pending is not None and pending.encoded != encoded:
            yield pending
            pending = None
        # Of the versions up to the checkpoint, one is read where a newer one needs its old value.
        if pending is None and commit_ts <= checkpoint_ts:
            continue
        write = decode_write(data)
        if write.kind not in (PUT, DELETE):
            continue
        value = versions.written_value(encoded, write) if write.kind == PUT else b""
        if pending is not None:
            yield pending._replace(old_value=value) if old_values else pending
            pending = None
        if commit_ts > checkpoint_ts:
            pending = Change(
                COMMITTED,
                user_key(encoded),
                encoded,
                write.kind,
                write.start_ts,
                commit_ts,
                value,
                txn_source=write.txn_source,
            )
    if pending is not None:
        yield pending


def _prewritten(versions: Versions, encoded: bytes, lock: Lock, *, old_values: bool) -> Change:
    value = versions.written_value(encoded, lock) if lock.kind == PUT else b""
    old_value = (versions.value(encoded) or b"") if old_values else b""
    key = user_key(encoded)
    return Change(
        PREWRITE, key, encoded, lock.kind, lock.start_ts, 0, value, old_value, lock.txn_source
    )


class OpenLocks:
    """Which transactions hold data locks, by region."""

    def __init__(
        self,
        starts: Sequence[bytes],
        locks: Iterable[tuple[bytes, int]] = (),
        fence: ReadFence | None = None,
    ) -> None:
        """`starts` are the sorted region start keys, encoded;
        `locks` are (encoded key, start_ts).
        """
        self._locks = dict(locks)
        self._fence = fence or ReadFence()
        self.rebuild(starts)

    def rebuild(self, starts: Sequence[bytes]) -> None:
        """Take over new region borders."""
        self._starts = list(starts)
        self._counts: list[Counter[int]] = [Counter() for _ in self._starts]
        for encoded, start_ts in self._locks.items():
            self._counts[self._region(encoded)][start_ts] += 1

    def apply(self, change: Change) -> None:
        """Follow one change."""
        if change.event == PREWRITE:
            self._open(change.encoded, change.start_ts)
        elif change.event in (COMMIT, ROLLBACK):
            self._close(change.encoded)

    def remove_range(self, lower: bytes, upper: bytes) -> None:
        """Follow the destruction of an encoded range."""
        destroyed = [
            encoded
            for encoded in self._locks
            if lower <= encoded and (not upper or encoded < upper)
        ]
        for encoded in destroyed:
            self._close(encoded)

    def min_start_ts(self, start_key: bytes) -> int | None:
        """The oldest open lock of the region that starts at `start_key`, or None."""
        return min(self._counts[self._region(start_key)], default=None)

    def settle(self, now_ts: int) -> int:
        """The part of `now_ts`, fresh from the oracle, that may be promised where no lock is open.

        Async commits and 1PCs that are decided later get a commit_ts above it; those in flight are
        kept above it.
        """
        return self._fence.settle(now_ts)

    def __len__(self) -> int:
        return len(self._locks)

    def _open(self, encoded: bytes, start_ts: int) -> None:
        self._close(encoded)
        self._locks[encoded] = start_ts
        self._counts[self._region(encoded)][start_ts] += 1

    def _close(self, encoded: bytes) -> None:
        start_ts = self._locks.pop(encoded, None)
        if start_ts is None:
            return
        counts = self._counts[self._region(encoded)]
        counts[start_ts] -= 1
        if not counts[start_ts]:
            del counts[start_ts]

    def _region(self, encoded: bytes) -> int:
        return max(0, bisect_right(self._starts, encoded) - 1)


def stored_locks(reader: Reader) -> Iterable[tuple[bytes, int]]:
    """(encoded key, start_ts) of every Put and Delete lock on disk."""
    for column_key, data in reader.scan(*column_range(LOCK_COLUMN, b"", b"")):
        lock = decode_lock(data)
        if lock.changes_data:
            yield column_key[1:], lock.start_ts
