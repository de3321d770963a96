"""The owner of the changefeeds: it creates them, runs those of the cluster, whose tables it divides
among the captures, and says which captures run the logs (MySQL, pumps): one capture each, and
different changefeeds on different captures.

The owner writes its decisions about logs into the metadata (`keys.placement`), and the captures
carry them out (`server.capture.maintainers`). A log stays where it is while its capture lives;
those of a capture that is gone, or is drained, go to the captures with the fewest logs. A capture
that joins gets so many that the captures' counts differ by one at most.
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

_LOOK_EVERY_S: Final = 1.0
_SETTLED_S: Final = 10.0
"""For so long the captures are the same before logs move for balance alone."""
_log = structlog.get_logger(__name__)


def is_log(source_uri: str) -> bool:
    """Whether a changefeed is of one log for all tables, which one capture reads."""
    return bool(source_uri)


def places(
    logs: Collection[str], now: Mapping[str, str], captures: Collection[str], *, balanced: bool
) -> dict[str, str]:
    """The capture of each log, where `now` says which it has; `balanced`: logs also move for
    nothing but equal counts. Pure.

    Without captures nothing moves.
    """
    if not captures:
        return {log: now[log] for log in logs if log in now}
    staying = {log: now[log] for log in logs if now.get(log) in captures}
    logs_of: dict[str, list[str]] = {capture: [] for capture in sorted(captures)}
    for log in sorted(staying):
        logs_of[staying[log]].append(log)

    def least() -> list[str]:
        return min(logs_of.values(), key=len)

    for log in sorted(set(logs) - staying.keys()):
        least().append(log)
    while balanced and len(most := max(logs_of.values(), key=len)) > len(least()) + 1:
        least().append(most.pop())
    return {log: capture for capture, of_capture in logs_of.items() for log in of_capture}


class Placement:
    """The owner's decisions. `refused` are captures that the owner cannot reach, or whose version
    is not its own. `changed` is set when a changefeed was created, `decided` after decisions.
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
        self._settled_at_s = 0.0

    async def run(self) -> None:
        """Decide until cancelled."""
        try:
            while True:
                self.changed.clear()
                try:
                    await self.decide()
                except UnavailableError as err:
                    _log.warning("logs cannot be placed now", error=str(err))
                await wait_at_most(self.changed, _LOOK_EVERY_S)
        finally:
            metrics.UNMAINTAINED.clear()

    async def decide(self) -> None:
        """Place the logs by the captures that are there now; raises UnavailableError."""
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
        placed = places(logs, now, await self._eligible(), balanced=self._is_settled())
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
        # Where all are drained, as the one that was to take over has died, they go on.
        captures = frozenset((names - drained or names) - set(self._refused()))
        if captures != self._captures:
            self._captures = captures
            self._settled_at_s = time.monotonic() + _SETTLED_S
        return captures

    def _is_settled(self) -> bool:
        # A capture that dies again and again would take logs each time, and lose them.
        return time.monotonic() >= self._settled_at_s


def _is_of_log(info: KeyValue, placed: Collection[str]) -> bool:
    """Whether a record is of a log. One that cannot be read stays what it was: it has a placement,
    and then whoever has it shows why it does not run; or the owner has it.
    """
    try:
        return is_log(read_info(info.key, info.value).source_uri)
    except CorruptError:
        return info.key.removeprefix(keys.INFOS).decode(errors="replace") in placed


async def captures_of(meta: Meta, prefix: bytes) -> dict[str, str]:
    """The capture of each log: that is to run it (`keys.PLACEMENTS`), or runs it
    (`keys.MAINTAINERS`).
    """
    pairs = await meta.get_prefix(prefix)
    # What is no text was written by nobody of ours, and must not stop the others.
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
    """The changefeeds that the owner runs: those that `placement` places on no other capture;
    without a placement all.
    """

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
            new, source = await self._usable(new)
        except TidemarkError:
            # The capture that carried it out first may have had what this one lacks.
            if made := await self._made_before(new):
                return made
            raise
        async with self._changing:
            self._check_active()
            try:
                await self._make_free(new.id)
            except ChangefeedExistsError:
                if made := await self._made_before(new):
                    return made
                raise
            if await self.is_carried_out(new.id, new.request):
                raise ChangefeedNotExistsError(
                    f"this request has made changefeed {new.id}, which was removed since: to make "
                    "another one, send a request with another request_id"
                )
            start_ts, creating = await self._protected_start(source, new)
            try:
                feed, tables = await self._planned(new, source, start_ts)
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
            await self._hand_over(feed, creating)
            if placement is None:
                self._start(feed)
            else:
                placement.changed.set()
        _log.info(
            "changefeed created", changefeed=new.id, start_ts=start_ts, tables=len(feed.tables)
        )
        return feed

    async def check(self, new: NewChangefeed) -> Checked:
        """What `create` would do; nothing is made, and nothing is kept.

        Tables that cannot be replicated are reported, not raised; raises as `create` otherwise.
        """
        new, source = await self._usable(replace(new, ignore_ineligible=True))
        async with self._changing:
            self._check_active()
            await self._make_free(new.id)
            creating = ""
            try:
                start_ts, creating = await self._protected_start(source, new)
                selection = await new.selection(source, start_ts)
            finally:
                await self._safepoints.give_up_creation(creating)
                # A log source saved a position for its `now`, which no changefeed will use.
                await self._records.clear(new.id)
        return Checked(start_ts, selection.read, selection.refused, selection.not_taken)

    async def recorded(self, loaded_ids: Collection[str]) -> list[Feed]:
        """Changefeeds other than `loaded_ids`, as their records are; they do not run."""
        records = [each for each in await self._records.load() if each.info.id not in loaded_ids]
        if not records:
            return []
        jobs = await self._records.load_jobs(time.monotonic())
        audits = await self._records.load_audits()
        feeds = [await self.loaded(record) for record in records]
        for feed in feeds:
            # Else one whose lake job has given up would seem to be well for a moment, and whoever
            # keeps the jobs would start it again.
            feed.job, feed.audit = jobs.get(feed.id), audits.get(feed.id, Audit())
        return feeds

    async def place_logs(self) -> None:
        """Place the logs anew, by the captures that are there now; raises UnavailableError."""
        if self._placement is not None:
            await self._placement.decide()

    async def tables_of(self, changefeeds: Collection[str]) -> int:
        """How many tables changefeeds have together, by their records."""
        histories = [History(await self._records.schemas.load(each)) for each in changefeeds]
        return sum(len(history.at(MAX_TS)) for history in histories)

    async def _records_of_mine(self) -> list[ChangefeedRecord]:
        records = await self._records.load()
        if self._placement is None:
            return records
        placed = await self._records.placed()
        return [
            record
            for record in records
            if not (record.info.id in placed if record.error else is_log(record.info.source_uri))
        ]

    def _is_mine(self, feed: Feed) -> bool:
        if self._placement is None or not is_log(feed.info.source_uri):
            return True
        self._placement.changed.set()
        return False

    async def _go_on(self) -> None:
        metrics.OWNER.set(1)
        try:
            if self._placement is None:
                await super()._go_on()
            else:
                async with background_tasks(self._placement.run()):
                    await super()._go_on()
        finally:
            metrics.OWNER.set(0)

    async def _made_before(self, new: NewChangefeed) -> Feed | None:
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

    async def _planned(
        self, new: NewChangefeed, source: Source, start_ts: int
    ) -> tuple[Feed, tuple[TableRecord, ...]]:
        """The new changefeed, of which nothing is written yet, and its tables."""
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

    async def _usable(self, new: NewChangefeed) -> tuple[NewChangefeed, Source]:
        """A changefeed whose parameters can be used, with its salt, and its source; raises as
        `create`.
        """
        new.records()
        new = await new.with_salt()
        ignores_events = bool(new.event_filters)
        await self._check_audit(
            new.audit_s, new.sink_uri, new.source_uri, ignores_events=ignores_events
        )
        return new, self._factory.make_source(new.id, new.source_uri)

    async def _protected_start(self, source: Source, new: NewChangefeed) -> tuple[int, str]:
        """Where it begins, and the service that keeps the history from there on for its
        creation.
        """
        now_ts = await source.now()
        start_ts = new.start_ts or now_ts
        check_range(start_ts, new.target_ts, now_ts)
        return start_ts, await self._safepoints.protect_creation(source, new.id, start_ts)

    async def _make_free(self, changefeed: str) -> None:
        """See that a changefeed of this id can be made here,
        and forget what an earlier one has left: a log source saves its position for `now` next.

        Raises:
            NotOwnerError, ChangefeedExistsError: it cannot.
        """
        self._check_active()
        if changefeed in self._unknown_outcomes:
            await self._read_again(changefeed)
        if changefeed in self.feeds:
            raise ChangefeedExistsError(
                f"changefeed {changefeed} exists already; choose another id or remove it"
            )
        await self._records.clear(changefeed)
