"""Below a changefeed: the capture that does not answer, the reader that does not acknowledge, or table, region, lock.

The checkpoint of a running changefeed stands either because rows are ready and nobody takes them, or because rows are
not complete: a table's resolved_ts stands, for one of its regions does, for an open lock does. What makes up more of
the lag is named. Pure.
"""

from collections.abc import Iterable, Sequence

from gcsafepoint.explain.link import Kind, Link
from gcsafepoint.explain.names import quoted, shown
from gcsafepoint.explain.situation import Feed, Lock, Region, Situation, Table
from storage.model.ts import MAX_TS, physical_ms

_CALM_MS = 5_000
"""A lag that is no news: readers take cuts every few seconds."""


def feed_links(feed: Feed, situation: Situation) -> list[Link]:
    """The changefeed, and what holds its checkpoint."""
    return [_changefeed(feed), *_below(feed, situation)]


def _changefeed(feed: Feed) -> Link:
    name = quoted(feed.id)
    resume, remove = f"tidemark cli changefeed resume -c {name}", f"tidemark cli changefeed remove -c {name}"
    why = f": {shown(feed.error_code)}: {shown(feed.error)}" if feed.error_code else ""
    state, reason = feed.state, f"its target has everything up to here{why}"
    commands: tuple[str, ...] = ()
    if feed.history_is_lost:
        reason = f"the history after its checkpoint is gone{why}"
        commands = (f"{resume} --overwrite-checkpoint-ts now", remove)
    elif feed.state == "stopped":
        reason, commands = "it is paused: its checkpoint stands until it is resumed", (resume, remove)
    elif feed.state == "failed":
        reason, commands = f"it has failed{why}", (resume, remove)
    elif feed.runs and not feed.capture:
        state, reason = "dead", f"no capture runs it: its checkpoint stands{why}"
        commands = ("tidemark cli capture list", remove)
    elif feed.runs:
        commands = (f"tidemark cli changefeed query -c {name}",)
    return Link(
        kind=Kind.CHANGEFEED,
        name=shown(feed.id),
        ts=feed.checkpoint_ts,
        state=state,
        owner=f"capture {feed.capture}" if feed.capture else "",
        reason=reason,
        commands=commands,
    )


def _below(feed: Feed, situation: Situation) -> list[Link]:
    if not feed.runs or feed.history_is_lost:
        return []
    if not feed.capture:
        return [_silent(feed, situation)]
    if not feed.tables:
        return []
    behind = min(feed.tables, key=lambda table: table.resolved_ts)
    waiting_ms = physical_ms(behind.resolved_ts) - physical_ms(feed.checkpoint_ts)
    if waiting_ms >= situation.now_ms - physical_ms(behind.resolved_ts):
        return [_reader(feed, behind.resolved_ts)] if waiting_ms > _CALM_MS else []
    return _upstream(behind, _second(table.resolved_ts for table in feed.tables), situation)


def _silent(feed: Feed, situation: Situation) -> Link:
    """The capture that should run it, as far as it is known."""
    suspects = [capture for capture in situation.captures if capture.problem]
    suspects.sort(key=lambda capture: not capture.is_owner)
    if suspects:
        capture = suspects[0]
        reason = f"it does not answer ({shown(capture.problem)}); restart it, another capture takes over then"
        name, owner = shown(capture.id), shown(capture.address)
        state = "owner, silent" if capture.is_owner else "silent"
    else:
        reason, name, owner, state = "no capture is alive; start one", "none", "", "absent"
        if situation.captures:
            reason = "no capture owns the changefeeds; an election is under way"
    return Link(
        kind=Kind.CAPTURE,
        name=name,
        owner=owner,
        state=state,
        ts=feed.checkpoint_ts,
        reason=reason,
        commands=("tidemark capture --coordinator HOST:PORT --data-dir DIR",),
    )


def _reader(feed: Feed, resolved_ts: int) -> Link:
    return Link(
        kind=Kind.READER,
        name="reader",
        state="behind",
        ts=feed.checkpoint_ts,
        next_ts=resolved_ts,
        reason="rows up to its resolved_ts are ready, and no reader has acknowledged them",
        commands=(f"tidemark spark run --changefeed {quoted(feed.id)} --endpoint grpc://HOST:PORT --target URI",),
    )


def _upstream(table: Table, next_ts: int, situation: Situation) -> list[Link]:
    links = [
        Link(
            kind=Kind.TABLE,
            name=shown(table.name),
            ts=table.resolved_ts,
            next_ts=next_ts,
            reason="the last of its changefeed to be complete",
        )
    ]
    if table.regions:
        region = min(table.regions, key=lambda region: region.resolved_ts)
        links.append(_region(region, _second(region.resolved_ts for region in table.regions)))
        links += _lock(region, situation)
    return links


def _pump(region: Region, next_ts: int) -> Link:
    return Link(
        kind=Kind.PUMP,
        name=shown(region.pump),
        owner=f"at {shown(region.store)}" if region.store else "",
        ts=region.resolved_ts,
        next_ts=next_ts,
        reason="the others wait for its binlogs: it is down, or its oldest prewrite has no outcome yet",
        commands=("tidemark cli pump list", f"curl http://PUMP/status  # of {quoted(region.store)}"),
    )


def _region(region: Region, next_ts: int) -> Link:
    if region.pump:
        return _pump(region, next_ts)
    commands: tuple[str, ...] = ()
    if not region.region_id:
        reason = shown(region.problem) or "a range of the table that no store serves at this moment; start the store"
    elif region.locks:
        reason = f"its resolved_ts cannot pass {len(region.locks)} open lock(s)"
    else:
        reason = f"its store sends no newer resolved_ts{_because(region.problem)}"
        commands = (f"curl http://STORE/metrics  # of {quoted(region.store)}",)
    return Link(
        kind=Kind.REGION,
        name=str(region.region_id) if region.region_id else "unserved",
        owner=f"store {shown(region.store)}" if region.store else "",
        ts=region.resolved_ts,
        next_ts=next_ts,
        reason=reason,
        commands=commands,
    )


def _lock(region: Region, situation: Situation) -> list[Link]:
    if not region.locks:
        return []
    lock = min(region.locks, key=lambda lock: lock.start_ts)
    ends_ms = physical_ms(lock.start_ts) + lock.ttl_ms
    alive = ends_ms > situation.now_ms
    waits = "its TTL is not over: its client lives, or died just now"
    if not alive:
        waits = "its TTL is over: captures and GC resolve it"
    return [
        Link(
            kind=Kind.LOCK,
            name=f"transaction {lock.start_ts}",
            state="live" if alive else "expired",
            owner=f"primary key {lock.primary}",
            ts=lock.start_ts,
            next_ts=_second(lock.start_ts for lock in region.locks),
            expires_ms=ends_ms,
            reason=f"a {lock.kind or 'write'} lock on key {lock.key or lock.primary}: {waits}",
            commands=(_resolve(lock),),
        )
    ]


def _resolve(lock: Lock) -> str:
    return f"tidemark cli unsafe resolve-lock --key {lock.key or lock.primary} --start-ts {lock.start_ts}"


def _because(problem: str) -> str:
    return f" ({shown(problem)})" if problem else ""


def _second(values: Iterable[int]) -> int:
    ordered: Sequence[int] = sorted(values)
    return ordered[1] if len(ordered) > 1 else MAX_TS
