"""What Prometheus sees of the GC worker."""

from prometheus_client import Counter, Gauge, Histogram

LEADER = Gauge("tidemark_gc_leader", "1 while this worker is GC leader")
SAFE_POINT = Gauge("tidemark_gc_safe_point", "Safepoint of the last round of this worker, a TSO timestamp")
ROUNDS = Counter("tidemark_gc_rounds_total", "GC rounds by how they ended", ["result"])
RESOLVED_LOCKS = Counter("tidemark_gc_resolved_locks_total", "Locks committed or rolled back by GC")
DELETED_RANGES = Counter("tidemark_gc_deleted_ranges_total", "Ranges destroyed on all stores, or not", ["result"])
PHASE_SECONDS = Histogram(
    "tidemark_gc_phase_seconds",
    "Duration of each phase of a round that went through it",
    ["phase"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 1800),
)
TICK_FAILURES = Counter("tidemark_gc_tick_failures_total", "Ticks that could not ask the coordinator or its metadata")
