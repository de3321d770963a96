"""The memory quota of a changefeed's sink: a pure ledger, and the lock and condition around it.

Invariants: used = what tasks hold + what is recorded for tables; only `force` exceeds the total, so
the excess is at most the unfinished transactions of the running tasks, but that a request larger
than the quota is granted when nothing else is taken: a batch of any size passes. `block` returns as
soon as the memory is there; who waits must hold nothing that is not recorded, else everybody could
wait for everybody (tests/unit/sink/test_quota_model.py). Source: TiCDC's memquota;
docs/design/0014-sink-manager.md.
"""

import bisect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sink import metrics
from sink.errors import QuotaClosedError
from sink.progress import ResolvedTs
from storage.model.span import Span


@dataclass(slots=True)
class _Account:
    """Memory of one table by the ResolvedTs with which it may go, ascending."""

    resolved: list[ResolvedTs] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class QuotaLedger:
    """The bytes that each table has taken. Pure; not thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        # made by the first record: most tables have none
        self._accounts: dict[Span, _Account | None] = {}

    def has_room(self, size: int) -> bool:
        """Whether there is so much memory; when nothing is taken there always is."""
        return not self.used_bytes or self.used_bytes + size <= self.total_bytes

    def try_acquire(self, size: int) -> bool:
        """Take memory if there is enough."""
        if not self.has_room(size):
            return False
        self.used_bytes += size
        return True

    def force_acquire(self, size: int) -> None:
        """Take memory even beyond the total."""
        self.used_bytes += size

    def refund(self, size: int) -> None:
        """Give back what was acquired and not recorded."""
        assert 0 <= size <= self.used_bytes, "more memory refunded than acquired"
        self.used_bytes -= size

    def add_table(self, span: Span) -> None:
        """Open an account for the table; one that is open stays."""
        self._accounts.setdefault(span, None)

    def record(self, span: Span, resolved: ResolvedTs, size: int) -> None:
        """Charge acquired memory to the table until `release` reaches `resolved`; where the table
        has left, give it back.
        """
        if span not in self._accounts:
            self.refund(size)
            return
        account = self._accounts[span] or _Account()
        self._accounts[span] = account
        assert not account.resolved or account.resolved[-1] <= resolved, (
            "records of a table must ascend"
        )
        account.resolved.append(resolved)
        account.sizes.append(size)

    def release(self, span: Span, checkpoint: ResolvedTs) -> int:
        """Free the table's records up to `checkpoint` (inclusive); returns the bytes."""
        account = self._accounts.get(span)
        if account is None:
            return 0
        count = bisect.bisect_right(account.resolved, checkpoint)
        freed = sum(account.sizes[:count])
        del account.resolved[:count], account.sizes[:count]
        self.refund(freed)
        if not account.sizes:
            self._accounts[span] = None
        return freed

    def remove_table(self, span: Span) -> int:
        """Free all records of the table and close its account; returns the bytes."""
        freed = self.recorded_bytes(span)
        self._accounts.pop(span, None)
        self.refund(freed)
        return freed

    def recorded_bytes(self, span: Span) -> int:
        """The bytes that the table has recorded."""
        account = self._accounts.get(span)
        return sum(account.sizes) if account else 0


class MemQuota:
    """The ledger, shared by threads."""

    def __init__(self, total_bytes: int) -> None:
        self._ledger = QuotaLedger(total_bytes)
        self._room = threading.Condition()
        self._closed = False

    @property
    def total_bytes(self) -> int:
        """The quota."""
        return self._ledger.total_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes taken now."""
        return self._ledger.used_bytes

    def try_acquire(self, size: int) -> bool:
        """See `QuotaLedger.try_acquire`."""
        with self._accounted():
            return self._ledger.try_acquire(size)

    def force_acquire(self, size: int) -> None:
        """See `QuotaLedger.force_acquire`."""
        with self._accounted():
            self._ledger.force_acquire(size)

    def block_acquire(self, size: int) -> None:
        """Wait until there is room, then take it; the caller holds no memory that is not recorded.

        Raises:
            QuotaClosedError: the quota was closed.
        """
        with self._room:
            self._room.wait_for(lambda: self._closed or self._ledger.has_room(size))
            if self._closed:
                raise QuotaClosedError("the memory quota is closed: the sink manager is stopping")
            # Under the same lock as the look (a Condition's is re-entrant): nobody is between.
            self.force_acquire(size)

    def refund(self, size: int) -> None:
        """See `QuotaLedger.refund`."""
        with self._accounted():
            self._ledger.refund(size)

    def add_table(self, span: Span) -> None:
        """See `QuotaLedger.add_table`."""
        with self._room:
            self._ledger.add_table(span)

    def record(self, span: Span, resolved: ResolvedTs, size: int) -> None:
        """See `QuotaLedger.record`."""
        with self._accounted():
            self._ledger.record(span, resolved, size)

    def release(self, span: Span, checkpoint: ResolvedTs) -> int:
        """See `QuotaLedger.release`."""
        with self._accounted():
            return self._ledger.release(span, checkpoint)

    def remove_table(self, span: Span) -> int:
        """See `QuotaLedger.remove_table`."""
        with self._accounted():
            return self._ledger.remove_table(span)

    def close(self) -> None:
        """Wake up everybody who waits."""
        with self._room:
            self._closed = True
            self._room.notify_all()

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """Hold the lock for the block; then show the bytes used, and wake those who wait if there
        is more room.
        """
        with self._room:
            before = self._ledger.used_bytes
            try:
                yield
            finally:
                change = self._ledger.used_bytes - before
                if change:
                    metrics.MEMORY_BYTES.inc(change)
                if change < 0:
                    self._room.notify_all()
