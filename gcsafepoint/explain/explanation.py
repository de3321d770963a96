"""The answer to "what blocks GC?": chains of blockers, the lowest first, and the effect of removing
some (pure).

A `Holder` holds GC back by itself: a service, a global barrier, a TiDB server's running
transaction, GC's own worker. `explain` orders all live holders of a `Situation` and makes of each a
`Chain`: who set it, what stands behind it (`gcsafepoint.explain.links`), and how to end it.
`document` is the answer as numbers and texts, the same over gRPC, HTTP and the command line.

1. A holder whose TTL is over holds nothing, though it may be stored until the next update.
2. History after a holder's ts can be lost once it and all that stand at or below it have ended; one
   that renews itself or has no end puts that out of sight.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gcsafepoint.explain.links import Chain, Kind, Link, feed_links
from gcsafepoint.explain.names import (
    CREATING_PREFIX,
    feed_of,
    owner_of,
    quoted,
    shown,
)
from gcsafepoint.explain.situation import Situation
from gcsafepoint.state.rules import GC_WORKER, NEVER_S, ServiceSafePoint
from storage.model.errors import InvalidError, NotFoundError
from storage.model.ts import MAX_TS, physical_ms

MOST_CHAINS = 100
_COMPARED = 1000
TRANSACTION_PREFIX = "tidb/"
_LAST_DATE_MS = 253_402_300_799_000


class BlockerUnknownError(NotFoundError):
    """Nothing of this name holds GC back."""

    code = "ErrBlockerUnknown"


class BlockerFixedError(InvalidError):
    """GC's own worker cannot be removed."""

    code = "ErrBlockerFixed"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The situation without the services `removed`; `feeds` are the changefeeds among them whose
    history would be given up.
    """

    removed: tuple[str, ...]
    feeds: tuple[str, ...]
    next: Chain


@dataclass(frozen=True, slots=True)
class Explanation:
    """`chains` has at least GC's own worker; its first is what GC waits for now."""

    situation: Situation
    chains: tuple[Chain, ...]
    left_out: int = 0
    what_if: WhatIf | None = None

    @property
    def lowest(self) -> Chain:
        """The chain that GC waits for."""
        return self.chains[0]


@dataclass(frozen=True, slots=True)
class Holder:
    """`expired_at` in Unix seconds, `NEVER_S` for ever; `renewed`:
    its owner lives and goes on setting it.
    """

    id: str
    kind: Kind
    ts: int
    expired_at: int = NEVER_S
    renewed: bool = False


def explain(
    situation: Situation, remove: Sequence[str] = (), most: int = MOST_CHAINS
) -> Explanation:
    """Return all blockers in order, at most `most` of them, and the effect of removing those of
    `remove`.

    A name of `remove` is a service id, a changefeed's id, or the id of a chain.

    Raises:
        BlockerUnknownError: naming the nearest known one.
        BlockerFixedError: `gc_worker` is among them.
    """
    ordered = holders(situation)
    shown_now = range(min(len(ordered), max(1, most)))
    chains = tuple(chain_of(ordered, index, situation) for index in shown_now)
    what_if = _what_if(ordered, situation, remove) if remove else None
    return Explanation(situation, chains, len(ordered) - len(chains), what_if)


def _what_if(ordered: Sequence[Holder], situation: Situation, names: Sequence[str]) -> WhatIf:
    gone = {holder_id: None for name in names for holder_id in _named(ordered, situation, name)}
    own = {feed_of(each) for each in gone if not each.startswith(CREATING_PREFIX)}
    feeds = [feed for feed in situation.feeds if feed in own]
    rest = [holder for holder in ordered if holder.id not in gone]
    return WhatIf(tuple(gone), tuple(feeds), chain_of(rest, 0, situation))


def _named(ordered: Sequence[Holder], situation: Situation, name: str) -> list[str]:
    # Without it nothing would ever be collected, so no question about it makes sense.
    if name == GC_WORKER:
        raise BlockerFixedError(
            "gc_worker is GC itself and cannot be removed; see `tidemark cli gc status`"
        )
    ids = {holder.id for holder in ordered if holder.kind is not Kind.GC_WORKER}
    if name in ids:
        return [name]
    of_feed = sorted(service for service in ids if feed_of(service) == name)
    if of_feed:
        return of_feed
    if name in situation.feeds:
        raise BlockerUnknownError(
            f"changefeed {shown(name)} has no live safe point: it holds nothing back"
        )
    # Comparing takes long where there are very many names, and the coordinator waits for it.
    near = difflib.get_close_matches(name, [*ids, *situation.feeds][:_COMPARED], n=1, cutoff=0.0)
    hint = f"did you mean {shown(near[0])}?" if near else "nothing but gc_worker does"
    raise BlockerUnknownError(f"no service and no changefeed {shown(name)!r} holds GC back; {hint}")


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
    below = (
        feed_links(feed, situation) if feed and not holder.id.startswith(CREATING_PREFIX) else []
    )
    return Chain(holder.id, (first, *below), blocks)


def _service(holder: Holder, next_ts: int, lost_s: int | None, situation: Situation) -> Link:
    state, owner, reason = _service_state(holder, situation)
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


def _service_state(holder: Holder, situation: Situation) -> tuple[str, str, str]:
    """State, owner and reason of a service or a barrier."""
    changefeed = feed_of(holder.id)
    feed = situation.feeds.get(changefeed)
    name = shown(changefeed)
    if not changefeed:
        whom = "all keyspaces" if holder.kind is Kind.GLOBAL_BARRIER else "its readers"
        return "foreign", owner_of(holder.id), f"somebody asked to keep history for {whom}"
    if holder.id.startswith(CREATING_PREFIX):
        reason = (
            "the changefeed was being made or resumed; it ends by itself"
            if feed
            else "nothing came of it"
        )
        return ("creating" if feed else "orphan"), f"changefeed {name}", reason
    if feed is None:
        return "orphan", "", f"there is no changefeed {name}: it was removed, or its record is gone"
    if feed.history_is_lost:
        return (
            "lost",
            f"changefeed {name}",
            "what the changefeed needs is gone already; nobody renews this",
        )
    if not feed.runs:
        return feed.state, f"changefeed {name}", "the changefeed does not run; nobody renews this"
    if not feed.capture:
        return "dead", f"changefeed {name}", "no capture renews this"
    return "renewed", f"changefeed {name}", "the changefeed needs what comes after its checkpoint"


def _end(holder: Holder, state: str) -> str:
    """The command that gives the history up.

    A safe point of a changefeed that lives comes back, so the changefeed has to go.
    """
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
        commands=(
            (
                f"etcdctl del {quoted(f'/tidb/server/minstartts/{owner}')}  # only if that server is "
                "gone"
            ),
        ),
    )


def holders(situation: Situation) -> list[Holder]:
    """All live holders, the lowest first; of equals the first by id, and GC's own worker last:
    the others hold it.
    """
    view = situation.view
    live = [Holder(GC_WORKER, Kind.GC_WORKER, view.gc_worker.safe_point)]
    for kind, barriers in (
        (Kind.SERVICE, view.services),
        (Kind.GLOBAL_BARRIER, view.global_barriers),
    ):
        live += [
            _holder(barrier, kind, situation)
            for barrier in barriers
            if not barrier.is_expired(view.now_s)
        ]
    live += [
        Holder(TRANSACTION_PREFIX + running.owner, Kind.TRANSACTION, running.start_ts)
        for running in view.min_start_ts
    ]
    return sorted(live, key=lambda holder: (holder.ts, holder.kind is Kind.GC_WORKER, holder.id))


def lost_at(ordered: Sequence[Holder], index: int) -> int | None:
    """The first Unix second in which history after `ordered[index]` may be lost; None:
    not in sight.
    """
    ends = 0
    for number, holder in enumerate(ordered):
        # Those that stand higher do not keep this history.
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


def document(explanation: Explanation) -> dict[str, Any]:
    """Members as in `tidemarkpb.v1.ExplainGCResponse`."""
    situation, view = explanation.situation, explanation.situation.view
    minimum = explanation.lowest.ts
    return {
        "now": _time_of_ms(situation.now_ms),
        "summary": _summary(explanation),
        "blocked": explanation.lowest.blocks,
        "gc_safe_point": view.gc_safe_point,
        "gc_safe_point_time": time_of(view.gc_safe_point),
        "txn_safe_point": view.txn_safe_point,
        "min_safe_point": minimum,
        "min_safe_point_time": time_of(minimum),
        "min_safe_point_id": shown(explanation.lowest.id),
        "wanted_safe_point": situation.wanted_ts,
        "wanted_safe_point_time": time_of(situation.wanted_ts),
        "blockers": [_chain_document(chain, minimum, situation) for chain in explanation.chains],
        "blockers_left_out": explanation.left_out,
        "what_if": _what_if_document(explanation.what_if, minimum, situation)
        if explanation.what_if
        else None,
        "problems": [shown(problem) for problem in situation.problems],
    }


def _gain_ms(from_ts: int, to_ts: int, situation: Situation) -> int:
    """Return the history between two timestamps in milliseconds, up to now; the part from 0 on is
    unknown.
    """
    if not physical_ms(from_ts):
        return 0
    return max(0, min(physical_ms(to_ts), situation.now_ms) - physical_ms(from_ts))


def _chain_document(chain: Chain, minimum: int, situation: Situation) -> dict[str, Any]:
    return {
        "id": shown(chain.id),
        "safe_point": chain.ts,
        "blocks": chain.blocks,
        "chain": [
            _link_document(link, max(low, minimum), minimum, situation)
            for link, low in chain.released()
        ],
    }


def _link_document(link: Link, released: int, minimum: int, situation: Situation) -> dict[str, Any]:
    ends = link.expires_ms
    return {
        "kind": link.kind.value,
        "name": link.name,
        "state": link.state,
        "owner": link.owner,
        "ts": link.ts,
        "time": time_of(link.ts),
        "age_seconds": max(0, situation.now_ms - physical_ms(link.ts)) // 1000 if link.ts else 0,
        "ttl_left_seconds": None if ends is None else max(0, ends - situation.now_ms) // 1000,
        "expires_at": "" if ends is None else _time_of_ms(ends),
        "history_lost_at": ""
        if link.history_lost_s is None
        else _time_of_ms(link.history_lost_s * 1000),
        "minimum_without": min(released, situation.now_ts) if released == MAX_TS else released,
        "holds_back_seconds": _gain_ms(minimum, released, situation) // 1000,
        "reason": link.reason,
        "commands": list(link.commands),
    }


def _what_if_document(what_if: WhatIf, minimum: int, situation: Situation) -> dict[str, Any]:
    after = what_if.next
    gained = _gain_ms(minimum, after.ts, situation)
    moved = (
        f"the minimum would move by {span(gained)} to {shown(after.id)}"
        if gained
        else "nothing would move"
    )
    given_up = (
        f", and the history of {', '.join(map(shown, what_if.feeds))} be given up"
        if what_if.feeds
        else ""
    )
    return {
        "removed": [shown(name) for name in what_if.removed],
        "min_safe_point": after.ts,
        "min_safe_point_time": time_of(after.ts),
        "min_safe_point_id": shown(after.id),
        "gain_seconds": gained // 1000,
        "blocked": after.blocks,
        "history_given_up": [shown(feed) for feed in what_if.feeds],
        "next": _chain_document(after, after.ts, situation),
        "summary": f"without {', '.join(map(shown, what_if.removed))} {moved}{given_up}",
    }


def _summary(explanation: Explanation) -> str:
    situation, lowest = explanation.situation, explanation.lowest
    if not lowest.blocks:
        return "nothing holds GC back: the minimum is where GC wants it"
    cause = lowest.links[-1]
    whom = (
        shown(lowest.id)
        if len(lowest.links) == 1
        else f"{shown(lowest.id)}, because of {cause.kind} {cause.name}"
    )
    behind = _gain_ms(lowest.ts, situation.wanted_ts, situation)
    at = (
        f"at {time_of(lowest.ts)}, {span(behind)} behind what it wants,"
        if time_of(lowest.ts)
        else "at its beginning"
    )
    return f"GC is held {at} by {whom} ({cause.state or lowest.links[0].state or 'waiting'})"


def time_of(ts: int) -> str:
    """Return the wall clock of a timestamp, RFC 3339 in UTC; empty for 0 and for times that cannot
    be formatted.
    """
    return _time_of_ms(physical_ms(ts)) if ts else ""


def _time_of_ms(unix_ms: int) -> str:
    """The same of Unix milliseconds."""
    if not 0 <= unix_ms <= _LAST_DATE_MS:
        return ""
    return datetime.fromtimestamp(unix_ms / 1e3, UTC).isoformat(timespec="milliseconds")


def span(milliseconds: int) -> str:
    """A duration for people: its two largest units."""
    rest, parts = max(0, milliseconds) // 1000, []
    for unit, seconds in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, seconds)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
