"""What holds GC back at one moment, frozen, for whoever explains or shows it; the rules are in `gcsafepoint.rules`."""

from dataclasses import dataclass

from gcsafepoint.rules import ServiceSafePoint


@dataclass(frozen=True, slots=True)
class MinStartTs:
    """The oldest transaction of one TiDB server, as it writes it to `/tidb/server/minstartts/<owner>`."""

    owner: str
    start_ts: int


@dataclass(frozen=True, slots=True)
class GcView:
    """The state of the null keyspace; all tuples have the lowest timestamp first.

    Services and global barriers whose TTL is over are listed until the update that drops them: ask `expired(now_s)`.
    """

    now_s: int
    """The clock TTLs are measured by, Unix seconds."""
    gc_safe_point: int
    txn_safe_point: int
    minimum: ServiceSafePoint
    """The one that holds GC back most, `gc_worker` and global barriers included."""
    gc_worker: ServiceSafePoint
    services: tuple[ServiceSafePoint, ...]
    """All but `gc_worker`; GC barriers are the same thing."""
    global_barriers: tuple[ServiceSafePoint, ...] = ()
    min_start_ts: tuple[MinStartTs, ...] = ()
