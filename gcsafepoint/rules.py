"""The safepoint rules (pure: the clock is an argument, in whole Unix seconds).

Services are peers (seed 000): each says below which timestamp it needs no history, and for how long it says so.
`gc_worker` stands for GC itself. With B the live services but `gc_worker`, w the safe point of `gc_worker`, t the txn
safe point (no reader may start below it), g the GC safe point (stores collect below it):

1. g <= t <= w, and t <= min(B): nothing that a live service still needs is collected.
2. t and g never go back; nor does min(B + w), for what would lie below it is refused.
3. An update of a service is stored iff its safe point >= min(B + w); the answer is the minimum after it. Whoever is
   answered more than it asked for was refused: the history may be gone.
4. A service is dropped with the first update after `expired_at`; a TTL <= 0 removes it at once; a huge TTL never ends.
5. `gc_worker` never expires, cannot be removed, and is there from the first update on. Its update moves t to
   min(w, min(B)).
6. An update of g moves it to at most min(B), never back, and takes t and w along; the answer is what holds.

Source: seed 000; PD's classic service safe points (before #9292), with t of today's PD.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from storage.model.errors import InvalidError
from storage.model.ts import MAX_TS

GC_WORKER = "gc_worker"
NEVER_S = (1 << 63) - 1


class SafePointRequestError(InvalidError):
    """The update can never be accepted as it is; the texts are PD's."""

    code = "ErrSafePointRequest"


@dataclass(frozen=True, slots=True)
class ServiceSafePoint:
    """What one service holds back; `expired_at` in Unix seconds, `NEVER_S` for ever."""

    service_id: str
    expired_at: int
    safe_point: int

    def ttl_s(self, now_s: int) -> int:
        """Seconds left, at least 0."""
        return max(0, self.expired_at - now_s)

    def expired(self, now_s: float) -> bool:
        """Whether its TTL is over: it blocks through the whole second `expired_at`."""
        return self.expired_at < now_s


@dataclass(slots=True)
class Changes:
    """What updates changed since the last look; a service of None was removed."""

    services: dict[str, ServiceSafePoint | None] = field(default_factory=dict)
    txn_safe_point: int | None = None
    gc_safe_point: int | None = None

    def __len__(self) -> int:
        return len(self.services) + (self.txn_safe_point is not None) + (self.gc_safe_point is not None)


class SafePoints:
    """The state the rules hold of; updates answer at once, and `take_changes` says what to make durable."""

    def __init__(
        self, services: Iterable[ServiceSafePoint] = (), txn_safe_point: int = 0, gc_safe_point: int = 0
    ) -> None:
        """Take over a stored state; what an older PD left is lifted to rule 1 as far as t and w go."""
        self.gc_safe_point = gc_safe_point
        self.txn_safe_point = max(txn_safe_point, gc_safe_point)
        self.services = {service.service_id: service for service in services}
        stored = self.services.pop(GC_WORKER, None)
        self._has_gc_worker = stored is not None
        lowest = stored.safe_point if stored else 0
        self.gc_worker = ServiceSafePoint(GC_WORKER, NEVER_S, max(lowest, self.txn_safe_point))
        self._changes = Changes()
        self._by_safe_point = [(service.safe_point, service.service_id) for service in self.services.values()]
        self._by_expiry = [(service.expired_at, service.service_id) for service in self.services.values()]
        heapq.heapify(self._by_safe_point)
        heapq.heapify(self._by_expiry)

    def minimum(self) -> ServiceSafePoint:
        """The service that holds GC back most; of equals the first by name."""
        lowest = self._lowest_service()
        if lowest is None:
            return self.gc_worker
        return min(lowest, self.gc_worker, key=lambda service: (service.safe_point, service.service_id))

    def update_service(self, service_id: str, ttl_s: int, safe_point: int, now_s: int) -> ServiceSafePoint:
        """Rules 3 to 5; returns the minimum after it.

        Raises:
            SafePointRequestError: no service id, or a TTL that `gc_worker` cannot have.
        """
        if not service_id:
            raise SafePointRequestError("[PD:common:ErrInvalidArgument]invalid argument for barrierID: ")
        if service_id == GC_WORKER:
            _check_gc_worker(ttl_s)
        self._drop_expired(now_s)
        self._keep_gc_worker()
        if ttl_s <= 0:
            self._remove(service_id)
        elif safe_point >= self.minimum().safe_point:
            if service_id == GC_WORKER:
                self._move_gc_worker(safe_point)
            else:
                self._set(ServiceSafePoint(service_id, min(now_s + ttl_s, NEVER_S), safe_point))
        return self.minimum()

    def update_gc_safe_point(self, safe_point: int, now_s: int) -> int:
        """Rule 6; returns the GC safe point that holds."""
        self._drop_expired(now_s)
        wanted = min(safe_point, self._lowest_needed())
        if wanted > self.gc_safe_point:
            self.gc_safe_point = self._changes.gc_safe_point = wanted
            self._lift_txn_safe_point(wanted)
        return self.gc_safe_point

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    @property
    def pending(self) -> int:
        """How many records `take_changes` would return."""
        return len(self._changes)

    def _move_gc_worker(self, safe_point: int) -> None:
        self.gc_worker = self._changes.services[GC_WORKER] = ServiceSafePoint(GC_WORKER, NEVER_S, safe_point)
        self._lift_txn_safe_point(min(safe_point, self._lowest_needed()))

    def _lift_txn_safe_point(self, safe_point: int) -> None:
        if safe_point > self.txn_safe_point:
            self.txn_safe_point = self._changes.txn_safe_point = safe_point
        if self.txn_safe_point > self.gc_worker.safe_point:
            self.gc_worker = ServiceSafePoint(GC_WORKER, NEVER_S, self.txn_safe_point)
            self._changes.services[GC_WORKER] = self.gc_worker

    def _keep_gc_worker(self) -> None:
        if not self._has_gc_worker:
            self._has_gc_worker = True
            self._changes.services[GC_WORKER] = self.gc_worker

    def _set(self, service: ServiceSafePoint) -> None:
        self.services[service.service_id] = self._changes.services[service.service_id] = service
        heapq.heappush(self._by_safe_point, (service.safe_point, service.service_id))
        heapq.heappush(self._by_expiry, (service.expired_at, service.service_id))
        if len(self._by_safe_point) > 2 * len(self.services) + 64:
            self._by_safe_point = [(kept.safe_point, kept.service_id) for kept in self.services.values()]
            self._by_expiry = [(kept.expired_at, kept.service_id) for kept in self.services.values()]
            heapq.heapify(self._by_safe_point)
            heapq.heapify(self._by_expiry)

    def _remove(self, service_id: str) -> None:
        if self.services.pop(service_id, None) is not None:
            self._changes.services[service_id] = None

    def _drop_expired(self, now_s: int) -> None:
        while self._by_expiry and self._by_expiry[0][0] < now_s:
            expired_at, service_id = heapq.heappop(self._by_expiry)
            service = self.services.get(service_id)
            if service is not None and service.expired_at == expired_at:
                self._remove(service_id)

    def _lowest_service(self) -> ServiceSafePoint | None:
        while self._by_safe_point:
            safe_point, service_id = self._by_safe_point[0]
            service = self.services.get(service_id)
            if service is not None and service.safe_point == safe_point:
                return service
            heapq.heappop(self._by_safe_point)
        return None

    def _lowest_needed(self) -> int:
        lowest = self._lowest_service()
        return lowest.safe_point if lowest else MAX_TS


def _check_gc_worker(ttl_s: int) -> None:
    if ttl_s <= 0:
        raise SafePointRequestError("cannot remove service safe point of gc_worker")
    if ttl_s != NEVER_S:
        raise SafePointRequestError("TTL of gc_worker's service safe point must be infinity")
