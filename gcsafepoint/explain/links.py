"""The links of a chain of blockers, and those below a changefeed: capture, reader, table,
region, lock (pure).

`Link` and `Chain` are what an explanation consists of. `feed_links` says what holds a changefeed's
checkpoint. The checkpoint of a running changefeed stands either because rows are ready and nobody
takes them (the reader), or because rows are not complete: a table's resolved_ts stands, for one of
its regions does, for an open lock does. What makes up more of the lag is named.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gcsafepoint.explain.names import quoted, shown
from gcsafepoint.explain.situation import Feed, Lock, Region, Situation, Table
from storage.model.ts import MAX_TS, physical_ms


class Kind(enum.StrEnum):
    """The kinds of links."""

    SERVICE = "service"
    GLOBAL_BARRIER = "global_barrier"
    GC_WORKER = "gc_worker"
    CHANGEFEED = "changefeed"
    CAPTURE = "capture"
    READER = "reader"
    TABLE = "table"
    REGION = "region"
    PUMP = "pump"
    LOCK = "lock"
    TRANSACTION = "transaction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Something that stands at `ts` and keeps the link before it from moving on."""

    kind: Kind
    name: str
    ts: int
    reason: str
    state: str = ""
    owner: str = ""
    commands: tuple[str, ...] = ()
    """The commands that end it, the mildest first."""
    expires_ms: int | None = None
    """Unix milliseconds at which it ends by itself; None: it does not."""
    history_lost_s: int | None = None
    """Unix seconds from which GC may collect what it needs; None: that is not in sight."""
    next_ts: int = MAX_TS
    """The timestamp at which the link before it would be without this one."""


@dataclass(frozen=True, slots=True)
class Chain:
    """One blocker of GC with its causes; `id` is the argument of `--what-if remove=`."""

    id: str
    links: tuple[Link, ...]
    blocks: bool
    """Whether it keeps GC below the ts that GC would reach without it."""

    @property
    def ts(self) -> int:
        """The timestamp up to which the chain lets GC go."""
        return self.links[0].ts

    def released(self) -> Iterator[tuple[Link, int]]:
        """Yield each link, and how far GC could go without it and the links before it."""
        low = MAX_TS
        for link in self.links:
            low = min(low, link.next_ts)
            yield link, low


_CALM_MS = 5_000
"""A lag that is no news: readers take cuts every few seconds."""


def feed_links(feed: Feed, situation: Situation) -> list[Link]:
    """Return the changefeed, and the causes that hold its checkpoint."""
    return [_changefeed_link(feed), *_links_below(feed, situation)]


def _changefeed_link(feed: Feed) -> Link:
    name = quoted(feed.id)
    resume, remove = (
        f"tidemark cli changefeed resume -c {name}",
        f"tidemark cli changefeed remove -c {name}",
    )
    why = f": {shown(feed.error_code)}: {shown(feed.error)}" if feed.error_code else ""
    state, reason = feed.state, f"its target has everything up to here{why}"
    commands: tuple[str, ...] = ()
    if feed.history_is_lost:
        reason = f"the history after its checkpoint is gone{why}"
        commands = (f"{resume} --overwrite-checkpoint-ts now", remove)
    elif feed.state == "stopped":
        reason, commands = (
            "it is paused: its checkpoint stands until it is resumed",
            (resume, remove),
        )
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


def _links_below(feed: Feed, situation: Situation) -> list[Link]:
    if not feed.runs or feed.history_is_lost:
        return []
    if not feed.capture:
        return [_capture_link(feed, situation)]
    if not feed.tables:
        return []
    behind = min(feed.tables, key=lambda table: table.resolved_ts)
    waiting_ms = physical_ms(behind.resolved_ts) - physical_ms(feed.checkpoint_ts)
    # What waits for the reader against what is still to come from upstream: the larger is named.
    if waiting_ms >= situation.now_ms - physical_ms(behind.resolved_ts):
        return [_reader_link(feed, behind.resolved_ts)] if waiting_ms > _CALM_MS else []
    return _upstream_links(
        behind, _second_lowest(table.resolved_ts for table in feed.tables), situation
    )


def _capture_link(feed: Feed, situation: Situation) -> Link:
    """The capture that should run it, as far as it is known."""
    suspects = [capture for capture in situation.captures if capture.problem]
    suspects.sort(key=lambda capture: not capture.is_owner)
    if suspects:
        capture = suspects[0]
        reason = (
            f"it does not answer ({shown(capture.problem)}); restart it, another capture takes "
            "over then"
        )
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


def _reader_link(feed: Feed, resolved_ts: int) -> Link:
    return Link(
        kind=Kind.READER,
        name="reader",
        state="behind",
        ts=feed.checkpoint_ts,
        next_ts=resolved_ts,
        reason="rows up to its resolved_ts are ready, and no reader has acknowledged them",
        commands=(
            (
                f"tidemark spark run --changefeed {quoted(feed.id)} --endpoint grpc://HOST:PORT "
                "--target URI"
            ),
        ),
    )


def _upstream_links(table: Table, next_ts: int, situation: Situation) -> list[Link]:
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
        links.append(
            _region_link(region, _second_lowest(region.resolved_ts for region in table.regions))
        )
        links += _lock_links(region, situation)
    return links


def _pump_link(region: Region, next_ts: int) -> Link:
    return Link(
        kind=Kind.PUMP,
        name=shown(region.pump),
        owner=f"at {shown(region.store)}" if region.store else "",
        ts=region.resolved_ts,
        next_ts=next_ts,
        reason=(
            "the others wait for its binlogs: it is down, or its oldest prewrite has no outcome yet"
        ),
        commands=(
            "tidemark cli pump list",
            f"curl http://PUMP/status  # of {quoted(region.store)}",
        ),
    )


def _region_link(region: Region, next_ts: int) -> Link:
    if region.pump:
        return _pump_link(region, next_ts)
    commands: tuple[str, ...] = ()
    if not region.region_id:
        reason = (
            shown(region.problem)
            or "a range of the table that no store serves at this moment; start the store"
        )
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


def _lock_links(region: Region, situation: Situation) -> list[Link]:
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
            next_ts=_second_lowest(lock.start_ts for lock in region.locks),
            expires_ms=ends_ms,
            reason=f"a {lock.kind or 'write'} lock on key {lock.key or lock.primary}: {waits}",
            commands=(_resolve(lock),),
        )
    ]


def _resolve(lock: Lock) -> str:
    return (
        f"tidemark cli unsafe resolve-lock --key {lock.key or lock.primary} --start-ts "
        f"{lock.start_ts}"
    )


def _because(problem: str) -> str:
    return f" ({shown(problem)})" if problem else ""


def _second_lowest(values: Iterable[int]) -> int:
    ordered: Sequence[int] = sorted(values)
    return ordered[1] if len(ordered) > 1 else MAX_TS
