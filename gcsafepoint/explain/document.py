"""An explanation as a document of numbers and texts, the same over gRPC, HTTP and the command line.

Pure.
"""

from datetime import UTC, datetime
from typing import Any

from gcsafepoint.explain.explanation import Explanation, WhatIf
from gcsafepoint.explain.links import Chain, Link
from gcsafepoint.explain.names import shown
from gcsafepoint.explain.situation import Situation
from storage.model.ts import MAX_TS, physical_ms

_LAST_DATE_MS = 253_402_300_799_000


def document(explanation: Explanation) -> dict[str, Any]:
    """Members as in `tidemarkpb.v1.ExplainGCResponse`."""
    situation, view = explanation.situation, explanation.situation.view
    minimum = explanation.lowest.ts
    return {
        "now": time_of_ms(situation.now_ms),
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
        "blockers": [_chain(chain, minimum, situation) for chain in explanation.chains],
        "blockers_left_out": explanation.left_out,
        "what_if": _what_if(explanation.what_if, minimum, situation)
        if explanation.what_if
        else None,
        "problems": [shown(problem) for problem in situation.problems],
    }


def time_of(ts: int) -> str:
    """The wall clock of a timestamp, RFC 3339 in UTC; empty for 0 and for what no clock shows."""
    return time_of_ms(physical_ms(ts)) if ts else ""


def time_of_ms(unix_ms: int) -> str:
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


def gain_ms(from_ts: int, to_ts: int, situation: Situation) -> int:
    """The history between two timestamps, milliseconds; nothing after now counts,
    and from 0 on nobody knows.
    """
    if not physical_ms(from_ts):
        return 0
    return max(0, min(physical_ms(to_ts), situation.now_ms) - physical_ms(from_ts))


def _chain(chain: Chain, minimum: int, situation: Situation) -> dict[str, Any]:
    return {
        "id": shown(chain.id),
        "safe_point": chain.ts,
        "blocks": chain.blocks,
        "chain": [
            _link(link, max(low, minimum), minimum, situation) for link, low in chain.released()
        ],
    }


def _link(link: Link, released: int, minimum: int, situation: Situation) -> dict[str, Any]:
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
        "expires_at": "" if ends is None else time_of_ms(ends),
        "history_lost_at": ""
        if link.history_lost_s is None
        else time_of_ms(link.history_lost_s * 1000),
        "minimum_without": min(released, situation.now_ts) if released == MAX_TS else released,
        "holds_back_seconds": gain_ms(minimum, released, situation) // 1000,
        "reason": link.reason,
        "commands": list(link.commands),
    }


def _what_if(what_if: WhatIf, minimum: int, situation: Situation) -> dict[str, Any]:
    after = what_if.next
    gained = gain_ms(minimum, after.ts, situation)
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
        "next": _chain(after, after.ts, situation),
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
    behind = gain_ms(lowest.ts, situation.wanted_ts, situation)
    at = (
        f"at {time_of(lowest.ts)}, {span(behind)} behind what it wants,"
        if time_of(lowest.ts)
        else "at its beginning"
    )
    return f"GC is held {at} by {whom} ({cause.state or lowest.links[0].state or 'waiting'})"
