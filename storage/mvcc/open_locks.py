"""What holds a change feed's resolved_ts back: open Put and Delete locks per region,
and commits in flight. Pure.

A lock holds it below its start_ts, whatever its transaction's kind. A commit_ts that the store
computes itself may be smaller than a timestamp of the oracle that was taken before the prewrite
came; `settle` keeps such commits above it.

Kept in memory by the thread that hands out changes, rebuilt from the lock column when the store
opens.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from storage.kv import Reader
from storage.mvcc.draft import COMMIT, PREWRITE, ROLLBACK, Change
from storage.mvcc.layout import LOCK, column_range
from storage.mvcc.read_fence import ReadFence
from storage.mvcc.record import decode_lock


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

    def forget(self, lower: bytes, upper: bytes) -> None:
        """Follow the destruction of an encoded range."""
        for encoded in [key for key in self._locks if lower <= key and (not upper or key < upper)]:
            self._close(encoded)

    def min_start_ts(self, start_key: bytes) -> int | None:
        """The oldest open lock of the region that starts at `start_key`, or None."""
        return min(self._counts[self._region(start_key)], default=None)

    def settle(self, now_ts: int) -> int:
        """What of `now_ts`, fresh from the oracle, may be promised where no lock is open.

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
    for column_key, data in reader.scan(*column_range(LOCK, b"", b"")):
        lock = decode_lock(data)
        if lock.changes_data:
            yield column_key[1:], lock.start_ts
