"""The chain of one holder: who set it, what stands behind it, and how to end it. Pure."""

from collections.abc import Sequence

from gcsafepoint.explain.feed_links import feed_links
from gcsafepoint.explain.holder import TRANSACTION_PREFIX, Holder, lost_at
from gcsafepoint.explain.link import Chain, Kind, Link
from gcsafepoint.explain.names import CREATING_PREFIX, feed_of, owner_of, quoted, shown
from gcsafepoint.explain.situation import Situation
from gcsafepoint.rules import NEVER_S
from storage.model.ts import MAX_TS


def chain_of(ordered: Sequence[Holder], index: int, situation: Situation) -> Chain:
    """The chain of `ordered[index]`; `ordered` are all live holders."""
    holder = ordered[index]
    next_ts = next((other.ts for other in ordered[:2] if other is not holder), MAX_TS)
    lost_s = lost_at(ordered, index)
    blocks = holder.ts < situation.wanted_ts
    if holder.kind is Kind.GC_WORKER:
        lateness = ("held" if next_ts <= holder.ts else "late") if blocks else ""
        return Chain(holder.id, (_worker(holder, next_ts, situation, lateness),), blocks)
    if holder.kind is Kind.TRANSACTION:
        return Chain(holder.id, (_transaction(holder, next_ts),), blocks)
    feed = situation.feeds.get(feed_of(holder.id))
    first = _service(holder, next_ts, lost_s, situation)
    below = feed_links(feed, situation) if feed and not holder.id.startswith(CREATING_PREFIX) else []
    return Chain(holder.id, (first, *below), blocks)


def _service(holder: Holder, next_ts: int, lost_s: int | None, situation: Situation) -> Link:
    state, owner, reason = _standing(holder, situation)
    return Link(
        kind=holder.kind,
        name=shown(holder.id),
        ts=holder.ts,
        state=state,
        owner=owner,
        reason=reason,
        expires_ms=None if holder.expired_at == NEVER_S else holder.expired_at * 1000,
        history_lost_s=lost_s,
        next_ts=next_ts,
        commands=(_end(holder, state),),
    )


def _standing(holder: Holder, situation: Situation) -> tuple[str, str, str]:
    """State, owner and reason of a service or a barrier."""
    changefeed = feed_of(holder.id)
    feed = situation.feeds.get(changefeed)
    name = shown(changefeed)
    if not changefeed:
        whom = "all keyspaces" if holder.kind is Kind.GLOBAL_BARRIER else "its readers"
        return "foreign", owner_of(holder.id), f"somebody asked to keep history for {whom}"
    if holder.id.startswith(CREATING_PREFIX):
        reason = "the changefeed was being made or resumed; it ends by itself" if feed else "nothing came of it"
        return ("creating" if feed else "orphan"), f"changefeed {name}", reason
    if feed is None:
        return "orphan", "", f"there is no changefeed {name}: it was removed, or its record is gone"
    if feed.history_is_lost:
        return "lost", f"changefeed {name}", "what the changefeed needs is gone already; nobody renews this"
    if not feed.runs:
        return feed.state, f"changefeed {name}", "the changefeed does not run; nobody renews this"
    if not feed.capture:
        return "dead", f"changefeed {name}", "no capture renews this"
    return "renewed", f"changefeed {name}", "the changefeed needs what comes after its checkpoint"


def _end(holder: Holder, state: str) -> str:
    """What gives the history up. A safe point of a changefeed that lives comes back, so the changefeed has to go."""
    if holder.kind is Kind.GLOBAL_BARRIER and holder.id != "native_br":
        return f'grpcurl -d \'{{"barrier_id": "{shown(holder.id)}"}}\' COORDINATOR pdpb.PD/DeleteGlobalGCBarrier'
    if state in ("renewed", "stopped", "failed"):
        return f"tidemark cli changefeed remove -c {quoted(feed_of(holder.id))}"
    needs_yes = " --yes" if state not in ("orphan", "lost") else ""
    return f"tidemark cli service-gc-safepoint delete {quoted(holder.id)}{needs_yes}"


def _worker(holder: Holder, next_ts: int, situation: Situation, lateness: str) -> Link:
    worker = situation.worker
    state = "in time"
    commands: tuple[str, ...] = ("tidemark cli gc status",)
    reason = f"GC keeps everything of the last {worker.life_time_ms / 1000:g} s"
    if not worker.enabled:
        state, reason = "disabled", "GC is switched off (tikv_gc_enable)"
        commands = ("tidemark cli gc config set tikv_gc_enable=true",)
    elif lateness == "held":
        state, reason = lateness, "it may not pass what stands before it"
    elif lateness and not worker.leader:
        state, commands = "absent", ("tidemark gc-worker --coordinator HOST:PORT",)
        reason = "no GC worker of ours leads (TiDB's keeps its records in mysql.tidb)"
    elif lateness:
        state, commands = lateness, ("tidemark cli gc run", "tidemark cli gc status")
        reason = f"its last round was at {shown(worker.last_run) or 'no time yet'}"
    if worker.problem:
        reason = f"{reason}; {shown(worker.problem)}"
    return Link(
        kind=Kind.GC_WORKER,
        name=holder.id,
        ts=holder.ts,
        state=state,
        owner=shown(worker.leader),
        reason=reason,
        next_ts=next_ts,
        commands=commands,
    )


def _transaction(holder: Holder, next_ts: int) -> Link:
    owner = holder.id.removeprefix(TRANSACTION_PREFIX)
    return Link(
        kind=Kind.TRANSACTION,
        name=f"transaction {holder.ts}",
        ts=holder.ts,
        state="running",
        owner=f"TiDB server {shown(owner)}",
        reason="the oldest transaction this server reports as running",
        next_ts=next_ts,
        commands=(f"etcdctl del {quoted(f'/tidb/server/minstartts/{owner}')}  # only if that server is gone",),
    )
