"""How far a round may go (pure): now - life_time, held back by running transactions and by other services.

1. A snapshot at or after the safepoint reads the same before and after GC, and its transaction may still commit.
2. The safepoint never goes back: what a longer life_time would keep may be gone already.
3. Of all services the one with the smallest safepoint decides (seed: adaptive GC safepoint).
"""

from dataclasses import dataclass

from storage.model.ts import compose, physical_ms


@dataclass(frozen=True, slots=True)
class Bound:
    """A safepoint, and who keeps it from being greater; "" if only life_time does."""

    ts: int
    blocker: str = ""


def wanted(now_ts: int, life_time_ms: int, running: tuple[int, str] | None) -> Bound:
    """The safepoint we would take were we alone; `running`: start_ts and server of the oldest running transaction."""
    by_age = compose(max(0, physical_ms(now_ts) - life_time_ms))
    if running is None or running[0] >= by_age:
        return Bound(by_age)
    start_ts, server = running
    return Bound(start_ts, f"the transaction {start_ts} of TiDB server {server}")


def granted(asked: Bound, service_min: int, service_id: str) -> Bound:
    """What remains of `asked` after the minimum over all services, which is `service_id`'s."""
    return Bound(service_min, f"the service {service_id}") if service_min < asked.ts else asked


def is_due(now_ms: int, last_run_ms: int | None, run_interval_ms: int) -> bool:
    """Whether the next round's time has come."""
    return last_run_ms is None or now_ms - last_run_ms >= run_interval_ms
