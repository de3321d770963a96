"""How far a round may go (pure): now - life_time, held back by running transactions and by other services.

1. A snapshot at or after the safepoint reads the same before and after GC.
2. The safepoint never goes back: what a longer life_time would keep may be gone already.
3. Of all services the one with the smallest safepoint decides (seed: adaptive GC safepoint).
"""

from storage.model.ts import compose, physical_ms


def wanted(now_ts: int, life_time_ms: int, running_ts: int | None) -> int:
    """The safepoint we would take were we alone; `running_ts`: start_ts of the oldest running transaction."""
    by_age = compose(max(0, physical_ms(now_ts) - life_time_ms))
    return by_age if running_ts is None else min(by_age, running_ts - 1)


def granted(asked: int, service_min: int) -> int:
    """What remains of `asked` after the minimum over all services."""
    return min(asked, service_min)


def is_new(safe_point: int, last: int) -> bool:
    """Whether a round up to `safe_point` can find anything that the round up to `last` did not."""
    return safe_point > last


def is_due(now_ms: int, last_run_ms: int | None, run_interval_ms: int) -> bool:
    """Whether the next round's time has come."""
    return last_run_ms is None or now_ms - last_run_ms >= run_interval_ms
