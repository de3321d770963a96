"""What Prometheus sees of the GC worker: TiDB's names where TiDB has one, so that its dashboards apply.

TiDB's counters `gc_failure`, `gc_action_result`, `gc_region_too_many_locks`, `gc_unsafe_destroy_range_failures` have no
`_total`, which this client always adds to a Counter: they are gauges here that only grow.
"""

from prometheus_client import Counter, Gauge, Histogram

ACTIONS = Counter("tidb_tikvclient_gc_worker_actions", "What the worker did", ["type"])
SECONDS = Histogram(
    "tidb_tikvclient_gc_seconds",
    "Duration of each stage of a round that went through it",
    ["stage"],
    buckets=tuple(2.0**power for power in range(-4, 20)),
)
CONFIG = Gauge("tidb_tikvclient_gc_config", "Settings of the GC leader, in seconds; 0 at a follower", ["type"])
FAILURES = Gauge("tidb_tikvclient_gc_failure", "Stages that an error ended; only grows", ["type"])
REGION_RESULTS = Gauge("tidb_tikvclient_gc_action_result", "Regions collected in mode central; only grows", ["type"])
TOO_MANY_LOCKS = Gauge("tidb_tikvclient_gc_region_too_many_locks", "Second looks at one region's locks; only grows")
DESTROY_FAILURES = Gauge(
    "tidb_tikvclient_gc_unsafe_destroy_range_failures", "Ranges that a store did not destroy; only grows", ["type"]
)
LEADER = Gauge("tidemark_gc_leader", "1 while this worker is GC leader")
SAFE_POINT = Gauge("tidemark_gc_safe_point", "Safepoint of the last round of this worker, a TSO timestamp")
ROUNDS = Counter("tidemark_gc_rounds_total", "GC rounds by how they ended", ["result"])
SKIPPED = Counter("tidemark_gc_skipped_total", "Rounds that did not resolve or collect anything", ["reason"])
RESOLVED_LOCKS = Counter("tidemark_gc_resolved_locks_total", "Locks committed or rolled back by GC")
DELETED_RANGES = Counter("tidemark_gc_deleted_ranges_total", "Ranges destroyed on all stores, or not", ["result"])
