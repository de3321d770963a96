"""Which commits are complete: prewrites wait for their commit or rollback.

Pure; fed in the order of the log.

A transaction's commit_ts is taken from PD after its prewrite binlog was acknowledged, hence after
every commit that stands before that prewrite in the log. So while a prewrite waits, everything up
to the largest commit_ts *before it* is complete, and nothing later is. Invariants:

1. max_commit_ts never goes back, and is the largest commit_ts before the oldest waiting prewrite
   (of all, if none).
2. A commit or rollback may also come before its prewrite: the last `settled` outcomes are kept.
3. A waiting prewrite that never gets its outcome holds max_commit_ts back (head-of-line wait) until
   it is resolved.
"""

from collections import OrderedDict
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

P = TypeVar("P")
_SETTLED = 65_536


class Waiting(NamedTuple, Generic[P]):
    """A prewrite without an outcome: where it stands in the log,
    and the largest commit_ts before it.
    """

    position: P
    max_commit_ts: int


class Matcher(Generic[P]):
    """Matches by start_ts; `P` is a position in the log."""

    def __init__(self, max_commit_ts: int = 0, *, settled: int = _SETTLED) -> None:
        self._seen_commit_ts = max_commit_ts
        self._waiting: OrderedDict[int, Waiting[P]] = OrderedDict()
        self._settled: OrderedDict[int, int] = OrderedDict()
        self._settled_limit = settled

    @property
    def max_commit_ts(self) -> int:
        """Every commit up to here is known."""
        oldest = self.oldest
        return self._seen_commit_ts if oldest is None else oldest[1].max_commit_ts

    @property
    def oldest(self) -> tuple[int, Waiting[P]] | None:
        """start_ts and entry of the prewrite that holds max_commit_ts back."""
        return next(iter(self._waiting.items())) if self._waiting else None

    @property
    def waiting(self) -> int:
        """The number of prewrites that wait."""
        return len(self._waiting)

    def oldest_waiting(self, limit: int) -> list[tuple[int, P]]:
        """start_ts and position of the prewrites that have waited longest, at most `limit`,
        in the order of the log.
        """
        return [
            (start_ts, wait.position) for start_ts, wait in islice(self._waiting.items(), limit)
        ]

    def waits(self, start_ts: int) -> bool:
        """Whether the prewrite of `start_ts` is known and its outcome is not."""
        return start_ts in self._waiting

    def prewrite(self, start_ts: int, position: P) -> int | None:
        """Add a prewrite; None if it waits (a repeated one keeps its place), else its commit_ts,
        0 if rolled back.
        """
        outcome = self._settled.get(start_ts)
        if outcome is None:
            # A repeated prewrite keeps the smaller max_commit_ts of its first copy: the later one
            # would promise too much.
            self._waiting.setdefault(start_ts, Waiting(position, self._seen_commit_ts))
        return outcome

    def settle(self, start_ts: int, commit_ts: int) -> Waiting[P] | None:
        """Add a commit, or a rollback (commit_ts 0); returns the prewrite that waited for it,
        if one did.
        """
        self._seen_commit_ts = max(self._seen_commit_ts, commit_ts)
        self._settled[start_ts] = commit_ts
        if len(self._settled) > self._settled_limit:
            self._settled.popitem(last=False)
        return self._waiting.pop(start_ts, None)

    def advance(self, ts: int) -> None:
        """Add a heartbeat: every later commit has a commit_ts above `ts`."""
        self._seen_commit_ts = max(self._seen_commit_ts, ts)
