"""Whoever holds GC back by itself: services, global barriers, TiDB's running transactions, GC's own worker. Pure.

1. A holder whose TTL is over holds nothing, though it may be stored until the next update.
2. History after a holder's ts can be lost once it and all that stand at or below it have ended; one that renews itself
   or has no end puts that out of sight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gcsafepoint.explain.link import Kind
from gcsafepoint.explain.names import feed_of
from gcsafepoint.explain.situation import Situation
from gcsafepoint.rules import GC_WORKER, NEVER_S, ServiceSafePoint

TRANSACTION_PREFIX = "tidb/"


@dataclass(frozen=True, slots=True)
class Holder:
    """`expired_at` in Unix seconds, `NEVER_S` for ever; `renewed`: its owner lives and goes on setting it."""

    id: str
    kind: Kind
    ts: int
    expired_at: int = NEVER_S
    renewed: bool = False


def holders(situation: Situation) -> list[Holder]:
    """All live ones, the lowest first; of equals the first by id, and GC's own worker last: they hold it."""
    view = situation.view
    found = [Holder(GC_WORKER, Kind.GC_WORKER, view.gc_worker.safe_point)]
    for kind, barriers in ((Kind.SERVICE, view.services), (Kind.GLOBAL_BARRIER, view.global_barriers)):
        found += [_holder(barrier, kind, situation) for barrier in barriers if not barrier.expired(view.now_s)]
    found += [
        Holder(TRANSACTION_PREFIX + running.owner, Kind.TRANSACTION, running.start_ts) for running in view.min_start_ts
    ]
    return sorted(found, key=lambda holder: (holder.ts, holder.kind is Kind.GC_WORKER, holder.id))


def lost_at(ordered: Sequence[Holder], index: int) -> int | None:
    """The first Unix second in which history after `ordered[index]` may be lost; None: not in sight."""
    ends = 0
    for number, holder in enumerate(ordered):
        if number > index and holder.ts > ordered[index].ts:
            break
        if holder.kind is Kind.GC_WORKER:
            continue  # it moves as soon as it may
        if holder.renewed or holder.expired_at == NEVER_S:
            return None
        ends = max(ends, holder.expired_at)
    return ends + 1 if ends else None


def _holder(barrier: ServiceSafePoint, kind: Kind, situation: Situation) -> Holder:
    feed = situation.feeds.get(feed_of(barrier.service_id))
    renewed = feed is not None and feed.runs and bool(feed.capture)
    return Holder(barrier.service_id, kind, barrier.safe_point, barrier.expired_at, renewed)
