"""Binlogs of several pumps in one order. Pure.

A pump sends its transactions by commit_ts, and what it has sent up to is complete. So everything up
to the least of these positions is known, and comes out sorted; a transaction that two pumps have
comes out once.

Invariants:
1. Nothing comes out above the lowest position, nor above the ts up to which all pumps are known
   (`take`'s limit).
2. What comes out is above what came out before.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from storage.model.errors import CorruptError
from storage.model.ts import MAX_TS


class BinlogInvalidError(CorruptError):
    """A pump sent something that is no committed transaction."""

    code = "ErrBinlogInvalid"


class Transaction(NamedTuple):
    """A committed transaction, or a schema change, as its pump sent it."""

    commit_ts: int
    start_ts: int
    prewrite_value: bytes
    ddl_job_id: int
    ddl_query: bytes

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes."""
        return 256 + len(self.prewrite_value) + len(self.ddl_query)


@dataclass(slots=True)
class _Lane:
    """What one pump has sent."""

    position_ts: int
    waiting: deque[Transaction] = field(default_factory=deque)
    waiting_bytes: int = 0


class Merge:
    """The pumps are known by their names."""

    def __init__(self, start_ts: int) -> None:
        self.resolved_ts = start_ts
        self._lanes: dict[str, _Lane] = {}

    def __contains__(self, pump: object) -> bool:
        return pump in self._lanes

    @property
    def names(self) -> list[str]:
        """The pumps that are read."""
        return sorted(self._lanes)

    @property
    def slowest(self) -> tuple[str, int]:
        """The pump that holds the others back, and its position; ("", MAX_TS) without pumps."""
        positions = ((lane.position_ts, name) for name, lane in self._lanes.items())
        position_ts, name = min(positions, default=(MAX_TS, ""))
        return name, position_ts

    def add(self, pump: str) -> int:
        """Wait for one more pump; returns the ts above which it has to be read."""
        assert pump not in self._lanes, f"{pump} is read already"
        self._lanes[pump] = _Lane(self.resolved_ts)
        return self.resolved_ts

    def remove(self, pump: str) -> None:
        """Wait for a pump no more; what it sent is kept only if it came out."""
        assert not self._lanes[pump].waiting, f"{pump} has sent what nobody has had"
        del self._lanes[pump]

    def position_ts(self, pump: str) -> int:
        """How far a pump has sent."""
        return self._lanes[pump].position_ts

    def waiting_bytes(self, pump: str) -> int:
        """What a pump has sent and nobody has taken."""
        return self._lanes[pump].waiting_bytes

    def push(self, pump: str, transaction: Transaction) -> None:
        """Take the next transaction of a pump.

        Raises:
            BinlogInvalidError: it is not above what the pump sent before.
        """
        lane = self._lanes[pump]
        if transaction.commit_ts < lane.position_ts:
            raise BinlogInvalidError(
                f"pump {pump} sent a transaction with commit_ts {transaction.commit_ts} after one "
                f"with {lane.position_ts}"
            )
        # After a stream broke, a pump may send again what has come out.
        if transaction.commit_ts > self.resolved_ts:
            lane.waiting.append(transaction)
            lane.waiting_bytes += transaction.size_bytes
        lane.position_ts = transaction.commit_ts

    def heartbeat(self, pump: str, ts: int) -> None:
        """A pump says that it has nothing more up to `ts`."""
        lane = self._lanes[pump]
        lane.position_ts = max(lane.position_ts, ts)

    def take(self, limit_ts: int, most_bytes: int) -> list[Transaction]:
        """The next transactions, about `most_bytes` of them;
        moves `resolved_ts` on to where they are complete.
        """
        upto_ts = min(limit_ts, self.slowest[1])
        taken: list[Transaction] = []
        size = 0
        for transaction in self._merged(upto_ts):
            last = taken[-1] if taken else None
            # Never between transactions of one commit_ts: `resolved_ts` could not say which of
            # them have come out.
            if size >= most_bytes and last is not None and transaction.commit_ts > last.commit_ts:
                upto_ts = last.commit_ts
                break
            # TiDB writes to another pump when one does not answer in time: both may have it.
            position = (transaction.commit_ts, transaction.start_ts)
            if last is None or (last.commit_ts, last.start_ts) != position:
                taken.append(transaction)
                size += transaction.size_bytes
        self._drop_up_to(upto_ts)
        self.resolved_ts = max(self.resolved_ts, upto_ts)
        return taken

    def _merged(self, upto_ts: int) -> Iterator[Transaction]:
        def complete(lane: _Lane) -> Iterator[Transaction]:
            return (transaction for transaction in lane.waiting if transaction.commit_ts <= upto_ts)

        return heapq.merge(
            *map(complete, self._lanes.values()),
            key=lambda transaction: (transaction.commit_ts, transaction.start_ts),
        )

    def _drop_up_to(self, upto_ts: int) -> None:
        for lane in self._lanes.values():
            while lane.waiting and lane.waiting[0].commit_ts <= upto_ts:
                lane.waiting_bytes -= lane.waiting.popleft().size_bytes
