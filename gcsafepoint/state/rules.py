"""The safepoint rules of one keyspace (pure: the clock is an argument, in Unix seconds).

Two families of RPCs work on one state: the older UpdateServiceGCSafePoint and UpdateGCSafePoint,
and the newer SetGCBarrier, AdvanceTxnSafePoint and AdvanceGCSafePoint. A service safe point and a
GC barrier are the same thing, so `ServiceSafePoint` stands for both: a name, the timestamp from
which on its owner needs history, and an expiry.

The letters:

- B: the live barriers of the keyspace; G: the live global barriers, which hold in every keyspace;
- M: the start_ts of the oldest transaction of each TiDB server;
- w: the safe point of `gc_worker`, which is GC itself;
- t: the txn safe point; no transaction may start below it;
- g: the GC safe point; stores collect below it.

The rules:

1. g <= t <= min(B + G), and t <= w: nothing that a live service still needs is collected.
2. t, g and w never go back.
3. Advancing t to a target moves it to max(t, min(target, B + G + M)). A blocker below the target is
   named and is no error; a target below t is refused. A blocker below t does not pull t back: a
   TiDB server or an operator writes its record to etcd directly, and nothing checks it there.
4. Advancing g to a target moves it there iff g <= target <= t; anything else is refused.
5. A barrier is stored iff its timestamp is >= t; the timestamp may be lower than the barrier's
   former one. A barrier can have no expiry, and can be removed.
6. A barrier blocks until its TTL, rounded up to a whole second, is over. An expired barrier is
   ignored only by a transaction that also removes it, so a clock that jumps back does not revive
   it. Until that transaction it is listed, with no TTL left.
7. `gc_worker` is no barrier: it never expires and cannot be removed. When t advances beyond w, w
   advances with it; that is stored only where `gc_worker` has a record already (rule 10).

`Barriers` keeps the barriers of one scope by id, by timestamp and by expiry: the lowest and the
expired ones are found without a scan, an update costs O(log n), and the entries of renewed barriers
are dropped before they outnumber the live ones by much.

Blockers are described in PD's words, which clients compare, so texts are printed as Go prints them
(`quoted`, `time_text`).

The old calls are in `gcsafepoint.state.compat` (rules 8 to 11), the keyspaces in
`gcsafepoint.state.states`. Source: PD pkg/gc/gc_state_manager.go (the constraints 1 to 5 above its
code).
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gcsafepoint.state import errors
from storage.model.ts import MAX_TS

GC_WORKER = "gc_worker"
NATIVE_BR = "native_br"
NEVER_S = (1 << 63) - 1
_LAST_DATE_S = 253_402_300_799  # the year 9999
# PD counts nanoseconds in 63 bits: more is for ever
_LONGEST_TTL_S = NEVER_S // 1_000_000_000
# entries of replaced barriers that a heap may hold beyond twice the barriers
_SPARE = 64
# how Go's `%+q` writes characters
_ESCAPES = {
    '"': '\\"',
    "\\": "\\\\",
    "\a": "\\a",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\v": "\\v",
}
_ESCAPED_BYTES = range(0xDC80, 0xDD00)
_ASCII = 0x80
_BASIC = 0x10000


@dataclass(frozen=True, slots=True)
class ServiceSafePoint:
    """One service or GC barrier: it needs the history from `safe_point` (a TSO) on, until
    `expired_at` (Unix seconds, inclusive; `NEVER_S`: without end).
    """

    service_id: str
    expired_at: int
    safe_point: int

    def ttl_s(self, now_s: float) -> int:
        """Whole seconds left, at least 0; a huge number for one that never ends,
        as PD answers old calls.
        """
        return max(0, self.expired_at - math.ceil(now_s))

    def is_expired(self, now_s: float) -> bool:
        """Whether its TTL has expired; it still blocks during `expired_at` itself."""
        return self.expired_at < now_s

    def describe(self, kind: str = "GCBarrier") -> str:
        """PD's text for a barrier that blocks."""
        ends = "<nil>" if self.expired_at == NEVER_S else time_text(self.expired_at)
        fields = (
            f"BarrierID: {quoted(self.service_id)}, BarrierTS: {self.safe_point}, ExpirationTime: "
            f"{quoted(ends)}"
        )
        return f"{kind} {{ {fields} }}"


def expiry(now_s: float, ttl_s: int) -> int:
    """Return the time at which a TTL that begins now expires: Unix seconds, rounded up so that
    nobody gets less than requested.
    """
    return NEVER_S if ttl_s > _LONGEST_TTL_S else math.ceil(now_s) + ttl_s


class Barriers:
    """The barriers of one keyspace, or the global ones, and their changes since `take_changes`.

    Not thread-safe, but for `snapshot`.
    """

    def __init__(self, barriers: Iterable[ServiceSafePoint] = ()) -> None:
        self._by_id = {barrier.service_id: barrier for barrier in barriers}
        self._changes: dict[str, ServiceSafePoint | None] = {}
        self._rebuild()

    def __iter__(self) -> Iterator[ServiceSafePoint]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def pending(self) -> int:
        """The number of barriers that `take_changes` would return."""
        return len(self._changes)

    def get(self, barrier_id: str) -> ServiceSafePoint | None:
        """The barrier of that id, expired or not."""
        return self._by_id.get(barrier_id)

    def snapshot(self) -> list[ServiceSafePoint]:
        """All barriers at one moment; safe to call from another thread."""
        return list(self._by_id.values())

    def put(self, barrier: ServiceSafePoint) -> None:
        """Set or replace."""
        self._by_id[barrier.service_id] = self._changes[barrier.service_id] = barrier
        # Entries of the barrier that is replaced stay in the heaps, where finding them would cost
        # as much as there are; they are dropped when they come up, or all at once.
        heapq.heappush(self._by_safe_point, (barrier.safe_point, barrier.service_id))
        heapq.heappush(self._by_expiry, (barrier.expired_at, barrier.service_id))
        if max(len(self._by_safe_point), len(self._by_expiry)) > 2 * len(self._by_id) + _SPARE:
            self._rebuild()

    def remove(self, barrier_id: str) -> ServiceSafePoint | None:
        """Remove a barrier; returns it."""
        removed = self._by_id.pop(barrier_id, None)
        if removed is not None:
            self._changes[barrier_id] = None
        return removed

    def drop_expired(self, now_s: float) -> None:
        """Remove the expired ones."""
        while self._by_expiry and self._by_expiry[0][0] < now_s:
            expired_at, barrier_id = heapq.heappop(self._by_expiry)
            # A barrier that was renewed since has another entry.
            barrier = self._by_id.get(barrier_id)
            if barrier is not None and barrier.expired_at == expired_at:
                self.remove(barrier_id)

    def lowest(self) -> ServiceSafePoint | None:
        """The one with the smallest timestamp; of equals the first by name."""
        while self._by_safe_point:
            safe_point, barrier_id = self._by_safe_point[0]
            barrier = self._by_id.get(barrier_id)
            if barrier is not None and barrier.safe_point == safe_point:
                return barrier
            heapq.heappop(self._by_safe_point)
        return None

    def mark_all(self) -> None:
        """Make `take_changes` return every barrier that can expire, changed or not."""
        self._changes |= {
            barrier.service_id: barrier for barrier in self if barrier.expired_at != NEVER_S
        }

    def take_changes(self) -> dict[str, ServiceSafePoint | None]:
        """The barriers set or (None) removed since the last call."""
        changes, self._changes = self._changes, {}
        return changes

    def _rebuild(self) -> None:
        self._by_safe_point = [(barrier.safe_point, barrier.service_id) for barrier in self]
        self._by_expiry = [(barrier.expired_at, barrier.service_id) for barrier in self]
        heapq.heapify(self._by_safe_point)
        heapq.heapify(self._by_expiry)


@dataclass(slots=True)
class Changes:
    """The changes since the last `take_changes`; a service of None was removed."""

    services: dict[str, ServiceSafePoint | None] = field(default_factory=dict)
    txn_safe_point: int | None = None
    gc_safe_point: int | None = None

    def __len__(self) -> int:
        return (
            len(self.services)
            + (self.txn_safe_point is not None)
            + (self.gc_safe_point is not None)
        )


@dataclass(frozen=True, slots=True)
class Blocker:
    """The lowest obstacle on the way of the txn safe point: its timestamp, PD's text for it, and
    the service id that old calls are answered.
    """

    ts: int
    description: str
    service_id: str


@dataclass(frozen=True, slots=True)
class Advance:
    """The outcome of moving the txn safe point; `blocker` is None when nothing lies below the
    target.
    """

    old: int
    new: int
    blocker: Blocker | None


class GcState:
    """The state that the rules apply to, in memory: no call waits or writes, and `take_changes`
    returns what the caller has to make durable before it answers.
    """

    def __init__(
        self,
        services: Iterable[ServiceSafePoint] = (),
        txn_safe_point: int = 0,
        gc_safe_point: int = 0,
    ) -> None:
        """Take over a stored state; t and w are raised to g <= t <= w where an older PD stored
        lower ones.
        """
        by_id = {service.service_id: service for service in services}
        stored = by_id.pop(GC_WORKER, None)
        # Below g history may be collected already: whatever t was stored, no reader may be promised
        # it.
        self.gc_safe_point = gc_safe_point
        self.txn_safe_point = max(txn_safe_point, gc_safe_point)
        self.has_gc_worker = stored is not None
        stored_ts = stored.safe_point if stored else 0
        self.gc_worker = ServiceSafePoint(GC_WORKER, NEVER_S, max(stored_ts, self.txn_safe_point))
        self.barriers = Barriers(by_id.values())
        self.global_barriers = Barriers()
        """Shared by all keyspaces: `GcStates` sets it."""
        self.min_start_ts: Mapping[str, int] = {}
        """TiDB server -> its oldest start_ts (M); the caller reads it anew before each advance of
        t.
        """
        self._changes = Changes()

    def advance_txn_safe_point(self, target: int, now_s: float) -> Advance:
        """Rule 3.

        Raises:
            SafePointRequestError: the target lies below the txn safe point.
        """
        old = self.txn_safe_point
        if target < old:
            raise errors.txn_safe_point_goes_back(old, target)
        # Rule 6: what ignores an expired barrier removes it, in one transaction.
        self.drop_expired(now_s)
        blocker = self.blocker(target)
        self.lift_txn_safe_point(blocker.ts if blocker else target)
        return Advance(old, self.txn_safe_point, blocker)

    def advance_gc_safe_point(self, target: int) -> int:
        """Apply rule 4; returns the former value.

        Raises:
            SafePointRequestError: the target lies below the GC safe point, or above the txn safe
                point.
        """
        old = self.gc_safe_point
        if target < old:
            raise errors.gc_safe_point_goes_back(old, target)
        if target > self.txn_safe_point:
            raise errors.gc_safe_point_too_large(old, target, self.txn_safe_point)
        self.lift_gc_safe_point(target)
        return old

    def set_barrier(
        self, barrier_id: str, barrier_ts: int, ttl_s: int, now_s: float
    ) -> ServiceSafePoint:
        """Rule 5; `ttl_s` > 0.

        Raises:
            BehindTxnSafePointError: the timestamp lies below the txn safe point.
            SafePointRequestError: no id, or a reserved one.
        """
        check_barrier_id(barrier_id)
        if barrier_ts < self.txn_safe_point:
            raise errors.barrier_behind(barrier_ts, self.txn_safe_point)
        barrier = ServiceSafePoint(barrier_id, expiry(now_s, ttl_s), barrier_ts)
        self.barriers.put(barrier)
        return barrier

    def delete_barrier(self, barrier_id: str) -> ServiceSafePoint | None:
        """Remove a barrier; returns it, None if there was none.

        Raises:
            SafePointRequestError: no id, or a reserved one.
        """
        check_barrier_id(barrier_id)
        return self.barriers.remove(barrier_id)

    def minimum(self) -> ServiceSafePoint:
        """The lowest service safe point, `gc_worker` included; of equals the first by name."""
        lowest = (self.barriers.lowest(), self.global_barriers.lowest())
        peers = [self.gc_worker, *(barrier for barrier in lowest if barrier is not None)]
        return min(peers, key=lambda service: (service.safe_point, service.service_id))

    def blocker(self, target: int) -> Blocker | None:
        """The lowest obstacle below `target`; of equals a barrier before a TiDB server before a
        global barrier.
        """
        blocker: Blocker | None = None
        lowest = self.barriers.lowest()
        if lowest and lowest.safe_point < target:
            blocker = Blocker(lowest.safe_point, lowest.describe(), lowest.service_id)
        # 0 is what a TiDB server without transactions reports.
        running = [(start_ts, owner) for owner, start_ts in self.min_start_ts.items() if start_ts]
        start_ts, owner = min(running, default=(MAX_TS, ""))
        if start_ts < (blocker.ts if blocker else target):
            # PD prints where t stays, not where the transaction began
            shown = max(start_ts, self.txn_safe_point)
            text = f"TiDBMinStartTS {{ Key: {quoted(owner)}, MinStartTS: {shown} }}"
            blocker = Blocker(start_ts, text, f"tidb_min_start_ts_{owner}")
        lowest = self.global_barriers.lowest()
        if lowest and lowest.safe_point < (blocker.ts if blocker else target):
            blocker = Blocker(
                lowest.safe_point, lowest.describe("GlobalGCBarrier"), lowest.service_id
            )
        return blocker

    def lowest_needed(self) -> int:
        """The lowest timestamp that is still needed, `gc_worker` left out."""
        blocker = self.blocker(MAX_TS)
        return blocker.ts if blocker else MAX_TS

    def drop_expired(self, now_s: float) -> None:
        """Rule 6: remove the barriers whose TTL is over; the caller makes that durable together
        with what it decides without them.
        """
        self.barriers.drop_expired(now_s)
        self.global_barriers.drop_expired(now_s)

    def lift_txn_safe_point(self, safe_point: int) -> None:
        """Move t up to `safe_point` if it is below, and w with it; the caller keeps rule 1."""
        if safe_point > self.txn_safe_point:
            self.txn_safe_point = self._changes.txn_safe_point = safe_point
        if safe_point > self.gc_worker.safe_point:
            self.gc_worker = ServiceSafePoint(GC_WORKER, NEVER_S, safe_point)
            # Rule 10: nobody writes its record but its own first update.
            if self.has_gc_worker:
                self._changes.services[GC_WORKER] = self.gc_worker

    def lift_gc_safe_point(self, safe_point: int) -> None:
        """Move g up to `safe_point` if it is below; the caller keeps rule 1."""
        if safe_point > self.gc_safe_point:
            self.gc_safe_point = self._changes.gc_safe_point = safe_point

    def lift_gc_worker(self, safe_point: int) -> None:
        """Move w up to `safe_point` if it is below; afterwards there is a record of it."""
        if safe_point > self.gc_worker.safe_point or not self.has_gc_worker:
            self.has_gc_worker = True
            lifted = max(safe_point, self.gc_worker.safe_point)
            self.gc_worker = self._changes.services[GC_WORKER] = ServiceSafePoint(
                GC_WORKER, NEVER_S, lifted
            )

    def take_changes(self) -> Changes:
        """The changes since the last call; global barriers have their own."""
        changes, self._changes = self._changes, Changes()
        changes.services |= self.barriers.take_changes()
        return changes

    @property
    def pending(self) -> int:
        """The number of records that `take_changes` would return."""
        return len(self._changes) + self.barriers.pending


def check_barrier_id(barrier_id: str) -> None:
    """Raises: SafePointRequestError: no id, or a reserved one."""
    if barrier_id == GC_WORKER:
        raise errors.reserved_id(barrier_id)
    if not barrier_id:
        raise errors.bad_argument("barrierID", "")


def quoted(text: str) -> str:
    """`text` as Go's `%+q` prints it: in double quotes, all ASCII."""
    return f'"{"".join(_ESCAPES.get(char) or _char(ord(char)) for char in text)}"'


def _char(number: int) -> str:
    if number in _ESCAPED_BYTES:
        return f"\\x{number - 0xDC00:02x}"
    if number < _ASCII:
        return chr(number) if chr(number).isprintable() else f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < _BASIC else f"\\U{number:08x}"


def time_text(unix_s: int) -> str:
    """Go's `time.Time.String()` of a whole second in UTC;
    the bare number where there is no such date.
    """
    if not 0 <= unix_s <= _LAST_DATE_S:
        return str(unix_s)
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S +0000 UTC")
