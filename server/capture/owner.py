"""The owner of the changefeeds. It creates them, runs those of the cluster itself, dividing their
tables among the captures, and places each log (a MySQL or pump changefeed) on one capture.

The owner writes the placements into the metadata (`keys.placement`), and the captures follow them
(`server.capture.maintainers`). A log stays on its capture as long as that lives. Logs of a capture
that has died or is drained go to the captures with the fewest logs. When a capture joins, logs move
to it until the captures' numbers of logs differ by at most one.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog

from server.capture import metrics
from server.capture.audit import Audit
from server.capture.changefeeds import Changefeeds
from server.capture.creation import Checked, NewChangefeed, check_range
from server.capture.errors import (
    ChangefeedExistsError,
    ChangefeedNotExistsError,
    ChangeInterruptedError,
    NotOwnerError,
)
from server.capture.feed import Feed, FeedFactory
from server.capture.fence import Fence, FencedMeta
from server.capture.records import ChangefeedRecord
from server.changefeed import keys
from server.changefeed.history import History, SchemaChange, by_id
from server.changefeed.info import ChangefeedInfo, State, read_info
from server.changefeed.table import TableRecord
from server.puller.source import Source
from server.rpc.pd import PdClient
from storage.meta.meta import Delete, KeyValue, Meta, Op, Put
from storage.model.errors import CorruptError, TidemarkError, UnavailableError
from storage.model.ts import MAX_TS
from storage.tasks import background_tasks, wait_at_most

_DECIDE_EVERY_S: Final = 1.0
_BALANCE_AFTER_S: Final = 10.0
"""How long the set of captures must stay the same before logs move for balance alone."""
_log = structlog.get_logger(__name__)


def is_log(source_uri: str) -> bool:
    """Whether a changefeed is of one log for all tables, which one capture reads."""
    return bool(source_uri)


def assign_logs(
    logs: Collection[str], now: Mapping[str, str], captures: Collection[str], *, balanced: bool
) -> dict[str, str]:
    """Assign each log to a capture, where `now` is the present assignment. With `balanced`, logs of
    living captures move, too, until counts differ by at most one. Without captures nothing moves.
    Pure.
    """
    if not captures:
        return {log: now[log] for log in logs if log in now}
    staying = {log: now[log] for log in logs if now.get(log) in captures}
    logs_of: dict[str, list[str]] = {capture: [] for capture in sorted(captures)}
    for log in sorted(staying):
        logs_of[staying[log]].append(log)

    def fewest() -> list[str]:
        return min(logs_of.values(), key=len)

    for log in sorted(set(logs) - staying.keys()):
        fewest().append(log)
    while balanced and len(most := max(logs_of.values(), key=len)) > len(fewest()) + 1:
        fewest().append(most.pop())
    return {log: capture for capture, of_capture in logs_of.items() for log in of_capture}


class Placement:
    """Places logs on captures. `refused` gives the captures that the owner cannot reach, or that
    have another version. `changed` is set when a changefeed was created, `decided` when logs were
    placed.
    """

    def __init__(
        self, meta: Meta, fence: Fence, refused: Callable[[], Collection[str]] = frozenset
    ) -> None:
        self.changed = asyncio.Event()
        self.decided = asyncio.Event()
        self._meta = FencedMeta(meta, fence)
        self._refused = refused
        self._deciding = asyncio.Lock()
        self._captures: frozenset[str] = frozenset()
        self._balance_at_s = 0.0

    async def run(self) -> None:
        """Place logs whenever captures or changefeeds have changed, until cancelled."""
        try:
            while True:
                self.changed.clear()
                try:
                    await self.decide()
                except UnavailableError as err:
                    _log.warning("logs cannot be placed now", error=str(err))
                await wait_at_most(self.changed, _DECIDE_EVERY_S)
        finally:
            metrics.UNMAINTAINED.clear()

    async def decide(self) -> None:
        """Place the logs on the captures that live now; raises UnavailableError."""
        async with self._deciding:
            await self._decide()

    async def _decide(self) -> None:
        now = await captures_of(self._meta, keys.PLACEMENTS)
        logs = [
            pair.key.removeprefix(keys.INFOS).decode(errors="replace")
            for pair in await self._meta.get_prefix(keys.INFOS)
            if _is_of_log(pair, now)
        ]
        running = await captures_of(self._meta, keys.MAINTAINERS)
        metrics.UNMAINTAINED.set(len(set(logs) - running.keys()))
        placed = assign_logs(logs, now, await self._eligible(), balanced=self._is_settled())
        moves = {log: capture for log, capture in placed.items() if now.get(log) != capture}
        ops: list[Op] = [Put(keys.placement(log), each.encode()) for log, each in moves.items()]
        ops += [Delete(keys.placement(log)) for log in now.keys() - placed.keys()]
        if not ops:
            return
        await self._meta.write_all(ops)
        self.decided.set()
        for log, capture in moves.items():
            if log in now:
                metrics.MOVES.labels(log).inc()
            _log.info("changefeed placed", changefeed=log, capture=capture, before=now.get(log, ""))

    async def _eligible(self) -> frozenset[str]:
        """The captures that may run logs."""
        alive = await self._meta.get_prefix(keys.CAPTURES)
        draining = await self._meta.get_prefix(keys.DRAINING)
        names = {
            pair.key.removeprefix(keys.CAPTURES).decode() for pair in alive if _is_text(pair.key)
        }
        drained = {
            pair.key.removeprefix(keys.DRAINING).decode(errors="replace") for pair in draining
        }
        # If all are drained, because the one that was to take over has died, they keep their logs.
        captures = frozenset((names - drained or names) - set(self._refused()))
        if captures != self._captures:
            self._captures = captures
            self._balance_at_s = time.monotonic() + _BALANCE_AFTER_S
        return captures

    def _is_settled(self) -> bool:
        # Otherwise a capture that dies again and again would get logs each time, and lose them.
        return time.monotonic() >= self._balance_at_s


def _is_of_log(info: KeyValue, placed: Collection[str]) -> bool:
    """Whether a record is of a log. An unreadable record is of a log if it has a placement: it
    stays with that capture, or with the owner, which then shows why it does not run.
    """
    try:
        return is_log(read_info(info.key, info.value).source_uri)
    except CorruptError:
        return info.key.removeprefix(keys.INFOS).decode(errors="replace") in placed


async def captures_of(meta: Meta, prefix: bytes) -> dict[str, str]:
    """The capture of each log: the one that is to run it (prefix `keys.PLACEMENTS`), or that runs
    it (`keys.MAINTAINERS`).
    """
    pairs = await meta.get_prefix(prefix)
    # A record that is not text was not written by us, and must not stop the others.
    return {
        pair.key.removeprefix(prefix).decode(): pair.value.decode()
        for pair in pairs
        if _is_text(pair.key) and _is_text(pair.value)
    }


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class Owner(Changefeeds):
    """The changefeeds that the owner runs: those of the cluster; without `placement` all."""

    def __init__(
        self, factory: FeedFactory, pd: PdClient, placement: Placement | None = None
    ) -> None:
        super().__init__(factory, pd)
        self._placement = placement

    async def create(self, new: NewChangefeed) -> Feed:
        """Make a changefeed. Durable.

        Raises:
            InvalidError: a parameter cannot be used; its subclass says which.
            AuditUnsupportedError: an audit is asked for, and lake and source cannot be compared.
            TableIneligibleError: a table cannot be replicated.
            StartTsBeforeGcError: GC may have collected what it would need.
            ChangefeedExistsError: the id is taken, and not by this request.
            ChangefeedNotExistsError: this request has made it, and it was removed since.
            ChangeInterruptedError: whether it is made is not known; with any other error it is not.
        """
        try:
            new, source = await self._validated(new)
        except TidemarkError:
            # The capture that carried it out first may have had what this one lacks.
            if made := await self._created_by(new):
                return made
            raise
        async with self._changing:
            self._check_active()
            try:
                await self._ensure_free_id(new.id)
            except ChangefeedExistsError:
                if made := await self._created_by(new):
                    return made
                raise
            if await self.is_carried_out(new.id, new.request):
                raise ChangefeedNotExistsError(
                    f"this request has made changefeed {new.id}, which was removed since: to make "
                    "another one, send a request with another request_id"
                )
            start_ts, creating = await self._protect_start(source, new)
            try:
                feed, tables = await self._plan_feed(new, source, start_ts)
                await self._write(feed.info, tables, new.request)
            except ChangeInterruptedError:
                # The record may be there, and then needs its history. The creation's safepoint
                # stays until `CheckpointSaver` sweeps it.
                self._unknown_outcomes.add(new.id)
                raise
            except Exception:
                await self._safepoints.give_up_creation(creating)
                raise
            placement = self._placement if is_log(feed.info.source_uri) else None
            if placement is None:
                self.feeds[new.id] = feed
            await self._hand_over_safepoint(feed, creating)
            if placement is None:
                self._start(feed)
            else:
                placement.changed.set()
        _log.info(
            "changefeed created", changefeed=new.id, start_ts=start_ts, tables=len(feed.tables)
        )
        return feed

    async def check(self, new: NewChangefeed) -> Checked:
        """Return what `create` would make, without making it. Tables that cannot be replicated are
        reported, not raised; raises as `create` otherwise.
        """
        new, source = await self._validated(replace(new, ignore_ineligible=True))
        async with self._changing:
            self._check_active()
            await self._ensure_free_id(new.id)
            creating = ""
            try:
                start_ts, creating = await self._protect_start(source, new)
                selection = await new.selection(source, start_ts)
            finally:
                await self._safepoints.give_up_creation(creating)
                # A log source saved a position for its `now`, which no changefeed will use.
                await self._records.clear(new.id)
        return Checked(start_ts, selection.read, selection.refused, selection.not_taken)

    async def recorded(self, loaded_ids: Collection[str]) -> list[Feed]:
        """The changefeeds other than `loaded_ids`, built from their records; they do not run."""
        records = [each for each in await self._records.load() if each.info.id not in loaded_ids]
        if not records:
            return []
        jobs = await self._records.load_jobs(time.monotonic())
        audits = await self._records.load_audits()
        feeds = [await self.loaded(record) for record in records]
        for feed in feeds:
            # Without the report, a changefeed whose lake job has given up would look healthy for a
            # moment, and `spark keep` would start the job again.
            feed.job, feed.audit = jobs.get(feed.id), audits.get(feed.id, Audit())
        return feeds

    async def place_logs(self) -> None:
        """Place the logs on the captures that live now; raises UnavailableError."""
        if self._placement is not None:
            await self._placement.decide()

    async def tables_of(self, changefeeds: Collection[str]) -> int:
        """The number of tables of these changefeeds together, by their records."""
        histories = [History(await self._records.schemas.load(each)) for each in changefeeds]
        return sum(len(history.at(MAX_TS)) for history in histories)

    async def _own_records(self) -> list[ChangefeedRecord]:
        records = await self._records.load()
        if self._placement is None:
            return records
        placed = await self._records.placed()
        return [
            record
            for record in records
            if not (record.info.id in placed if record.error else is_log(record.info.source_uri))
        ]

    def _runs_here(self, feed: Feed) -> bool:
        if self._placement is None or not is_log(feed.info.source_uri):
            return True
        self._placement.changed.set()
        return False

    async def _run_background(self) -> None:
        metrics.OWNER.set(1)
        try:
            if self._placement is None:
                await super()._run_background()
            else:
                async with background_tasks(self._placement.run()):
                    await super()._run_background()
        finally:
            metrics.OWNER.set(0)

    async def _created_by(self, new: NewChangefeed) -> Feed | None:
        """The changefeed, if an earlier call of the same request has made it, and nobody is
        removing it.
        """
        if not await self._records.is_made_by(new.id, new.request):
            return None
        feed = self.feeds.get(new.id)
        if feed is None:
            record = await self._records.load_one(new.id)
            feed = None if record is None else await self.loaded(record)
        return None if feed is None or feed.info.state is State.REMOVED else feed

    async def _plan_feed(
        self, new: NewChangefeed, source: Source, start_ts: int
    ) -> tuple[Feed, tuple[TableRecord, ...]]:
        """Build the new changefeed and its tables' records; writes nothing."""
        selection = await new.selection(source, start_ts)
        generation = await self._records.next_gc_generation(new.id)
        info = replace(new.info(start_ts, selection), gc_generation=generation)
        start = SchemaChange(start_ts, tables=by_id(selection.tables))
        return await Feed.of(self._factory, info, start_ts, [start]), selection.tables

    async def _write(
        self, info: ChangefeedInfo, tables: Sequence[TableRecord], request: str
    ) -> None:
        """Write the records of a new changefeed; raises as `create`."""
        try:
            await self._records.create(info, tables, request)
        except NotOwnerError:
            raise
        except UnavailableError as err:
            raise ChangeInterruptedError.by_metadata(info.id, err) from err

    async def _validated(self, new: NewChangefeed) -> tuple[NewChangefeed, Source]:
        """Check the parameters; returns them with the salt read, and the source. Raises as
        `create`.
        """
        new.records()
        new = await new.with_salt()
        ignores_events = bool(new.event_filters)
        await self._check_audit(
            new.audit_s, new.sink_uri, new.source_uri, ignores_events=ignores_events
        )
        return new, self._factory.make_source(new.id, new.source_uri)

    async def _protect_start(self, source: Source, new: NewChangefeed) -> tuple[int, str]:
        """Choose the start ts, and protect the history after it; returns both the ts and the
        service of the creation's safepoint.
        """
        now_ts = await source.now()
        start_ts = new.start_ts or now_ts
        check_range(start_ts, new.target_ts, now_ts)
        return start_ts, await self._safepoints.protect_creation(source, new.id, start_ts)

    async def _ensure_free_id(self, changefeed: str) -> None:
        """Check that the id is free, and delete what an earlier changefeed of the id has left. That
        must be before `source.now()`, as a log saves its position then.

        Raises:
            NotOwnerError, ChangefeedExistsError: this capture is not the owner, or the id is taken.
        """
        self._check_active()
        if changefeed in self._unknown_outcomes:
            await self._reload(changefeed)
        if changefeed in self.feeds:
            raise ChangefeedExistsError(
                f"changefeed {changefeed} exists already; choose another id or remove it"
            )
        await self._records.clear(changefeed)
