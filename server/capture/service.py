"""`tidemarkpb.v1.ChangefeedService`, which every capture serves; the owner carries the calls out.

`new_changefeed` reads a request; `changefeed_message` shows a changefeed as it is now.
"""

import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import grpc.aio
from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from gcsafepoint.explain.explanation import time_of
from server.capture.audit import audit_silence
from server.capture.creation import NewChangefeed
from server.capture.dry_run import check_response, ineligible
from server.capture.errors import ParameterError, TableMoveError
from server.capture.feed import Feed
from server.capture.job_report import failed_by_job, shown_state
from server.capture.maintainers import Maintainers
from server.capture.routing import Router, is_local
from server.capture.traffic import NO_TRAFFIC, weights
from server.capture.update import ChangefeedUpdate, FilterPlan
from server.changefeed.event_filter import EventFilter
from server.changefeed.info import State
from server.changefeed.source import ON_UNCLEAR_DDL, with_option
from sink.flight.feeds import TableNotExistsError
from sink.retention import Retention
from sink.versions import Version
from sorter.errors import TableNotFoundError
from storage.model.span import Span
from storage.model.ts import MAX_TS, physical_ms
from storage.tidb.field_type import NULL_DATES

_CHANGES_SHOWN: Final = 20
_REQUEST_ID_CHARACTERS_MAX: Final = 128
_STORED_VALUES: Final = "a DDL changed stored values"
_STATES: Final = {
    State.NORMAL: pb.CHANGEFEED_STATE_NORMAL,
    State.STOPPED: pb.CHANGEFEED_STATE_STOPPED,
    State.WARNING: pb.CHANGEFEED_STATE_WARNING,
    State.FAILED: pb.CHANGEFEED_STATE_FAILED,
    State.FINISHED: pb.CHANGEFEED_STATE_FINISHED,
    State.REMOVED: pb.CHANGEFEED_STATE_REMOVED,
}
A = TypeVar("A")
Context = grpc.aio.ServicerContext[Any, Any]


class ChangefeedService:
    """`tidemarkpb.v1.ChangefeedService`."""

    def __init__(self, maintainers: Maintainers, router: Router) -> None:
        self._maintainers = maintainers
        self._owner = maintainers.owner
        self._router = router

    async def CreateChangefeed(self, request: pb.CreateChangefeedRequest, context: Context) -> Any:
        """Make a changefeed."""
        request_key = _request_key("CreateChangefeed", request)

        async def create() -> pb.CreateChangefeedResponse:
            change = self._owner.create(replace(new_changefeed(request), request=request_key))
            return pb.CreateChangefeedResponse(
                changefeed=self._shown(await self._owner.carry_out(change))
            )

        return await self._by_owner("CreateChangefeed", request, context, create)

    async def CheckChangefeed(self, request: pb.CreateChangefeedRequest, context: Context) -> Any:
        """Answer what CreateChangefeed would do."""

        async def check() -> pb.CheckChangefeedResponse:
            new = new_changefeed(request)
            return check_response(await self._owner.check(new), new)

        return await self._by_owner("CheckChangefeed", request, context, check)

    async def ListChangefeeds(self, request: pb.ListChangefeedsRequest, context: Context) -> Any:
        """All changefeeds."""
        if is_local(context):
            return pb.ListChangefeedsResponse(changefeeds=self._here())

        async def listed() -> pb.ListChangefeedsResponse:
            return pb.ListChangefeedsResponse(changefeeds=await self._all(request))

        return await self._by_owner("ListChangefeeds", request, context, listed)

    async def QueryChangefeed(self, request: pb.QueryChangefeedRequest, context: Context) -> Any:
        """One changefeed."""

        async def queried() -> pb.QueryChangefeedResponse:
            return pb.QueryChangefeedResponse(
                changefeed=self._shown(self._maintainers.feed(request.id))
            )

        return await self._by_runner("QueryChangefeed", request, context, queried)

    async def PauseChangefeed(self, request: pb.PauseChangefeedRequest, context: Context) -> Any:
        """Stop pulling."""
        request_key = _request_key("PauseChangefeed", request)

        async def pause() -> pb.PauseChangefeedResponse:
            here = self._maintainers.changefeeds_of(request.id)
            feed = await here.carry_out(here.pause(request.id, request_key))
            return pb.PauseChangefeedResponse(changefeed=self._shown(feed))

        return await self._by_runner("PauseChangefeed", request, context, pause)

    async def ResumeChangefeed(self, request: pb.ResumeChangefeedRequest, context: Context) -> Any:
        """Pull again."""
        request_key = _request_key("ResumeChangefeed", request)

        async def resume() -> pb.ResumeChangefeedResponse:
            ts, with_now = request.overwrite_checkpoint_ts, request.overwrite_with_now
            here = self._maintainers.changefeeds_of(request.id)
            change = here.resume(request.id, ts, with_now=with_now, request=request_key)
            feed = await here.carry_out(change)
            return pb.ResumeChangefeedResponse(changefeed=self._shown(feed))

        return await self._by_runner("ResumeChangefeed", request, context, resume)

    async def UpdateChangefeed(self, request: pb.UpdateChangefeedRequest, context: Context) -> Any:
        """Change its filter, sink URI, treatment of unclear DDL, audit or retention."""
        request_key = _request_key("UpdateChangefeed", request)

        async def update() -> pb.UpdateChangefeedResponse:
            here = self._maintainers.changefeeds_of(request.id)
            changes = replace(changefeed_update(request), request=request_key)
            changes.check()
            # Planned before the changefeed is stopped, so that an impossible update does not stop
            # it.
            plan = None
            if changes.changes_tables and not await here.is_carried_out(request.id, request_key):
                plan = await here.plan_filter(request.id, changes)
            feed = here.feed(request.id)
            if not request.dry_run:
                feed = await here.carry_out(here.update(request.id, changes))
            change = None if plan is None else filter_change_message(plan)
            return pb.UpdateChangefeedResponse(changefeed=self._shown(feed), filter_change=change)

        return await self._by_runner("UpdateChangefeed", request, context, update)

    async def RemoveChangefeed(self, request: pb.RemoveChangefeedRequest, context: Context) -> Any:
        """Forget it."""
        request_key = _request_key("RemoveChangefeed", request)

        async def remove() -> pb.RemoveChangefeedResponse:
            here = self._maintainers.changefeeds_of(request.id)
            feed = await here.carry_out(here.remove(request.id, request_key))
            gone = pb.Changefeed(id=request.id, state=pb.CHANGEFEED_STATE_REMOVED)
            return pb.RemoveChangefeedResponse(changefeed=self._shown(feed) if feed else gone)

        return await self._by_runner("RemoveChangefeed", request, context, remove)

    async def MoveTable(self, request: pb.MoveTableRequest, context: Context) -> Any:
        """Move a table to another capture."""

        async def move() -> pb.MoveTableResponse:
            feed, version = self._table_of(request)
            if not request.give_up_history:
                check_history(feed, version, request.capture)
            await feed.processor.move_table(version.span, request.capture)
            return pb.MoveTableResponse(table=_table(feed, version))

        return await self._by_runner("MoveTable", request, context, move)

    async def SplitTable(self, request: pb.SplitTableRequest, context: Context) -> Any:
        """Split a table over all captures, or put it together again."""

        async def split() -> pb.SplitTableResponse:
            feed, version = self._table_of(request)
            if not request.give_up_history:
                check_history(feed, version, "")
            await feed.processor.split_table(version.span, put_together=request.put_together)
            return pb.SplitTableResponse(table=_table(feed, version))

        return await self._by_runner("SplitTable", request, context, split)

    def _table_of(
        self, request: pb.MoveTableRequest | pb.SplitTableRequest
    ) -> tuple[Feed, Version]:
        feed = self._maintainers.changefeeds_of(request.id).feed(request.id)
        version = feed.catalog.named(request.table)
        if version is None:
            raise TableNotExistsError(
                f"changefeed {feed.id} has no table {request.table[:256]!r} now"
            )
        return feed, version

    async def AddReader(self, request: pb.AddReaderRequest, context: Context) -> Any:
        """One more reader, with a position of its own."""
        request_key = _request_key("AddReader", request)

        async def add() -> pb.AddReaderResponse:
            here = self._maintainers.changefeeds_of(request.id)
            change = here.add_reader(request.id, request.name, request.start_ts, request_key)
            feed = await here.carry_out(change)
            return pb.AddReaderResponse(changefeed=self._shown(feed))

        return await self._by_runner("AddReader", request, context, add)

    async def RemoveReader(self, request: pb.RemoveReaderRequest, context: Context) -> Any:
        """Hold nothing for a reader any more."""
        request_key = _request_key("RemoveReader", request)

        async def remove() -> pb.RemoveReaderResponse:
            here = self._maintainers.changefeeds_of(request.id)
            change = here.remove_reader(request.id, request.name, request_key)
            feed = await here.carry_out(change)
            return pb.RemoveReaderResponse(changefeed=self._shown(feed))

        return await self._by_runner("RemoveReader", request, context, remove)

    async def _by_owner(
        self, method: str, request: Any, context: Context, call: Callable[[], Awaitable[A]]
    ) -> Any:
        return await self._router.carry_out(ChangefeedServiceStub, method, request, context, call)

    async def _by_runner(
        self, method: str, request: Any, context: Context, call: Callable[[], Awaitable[A]]
    ) -> Any:
        return await self._router.carry_out(
            ChangefeedServiceStub, method, request, context, call, request.id
        )

    def _here(self) -> list[pb.Changefeed]:
        return list(map(self._shown, self._maintainers.feeds.values()))

    def _shown(self, feed: Feed) -> pb.Changefeed:
        is_here = self._maintainers.has(feed.id)
        return changefeed_message(feed, self._maintainers.id if is_here else "")

    async def _all(self, request: pb.ListChangefeedsRequest) -> list[pb.Changefeed]:
        """All changefeeds of the cluster. One that no capture runs now, or whose capture does not
        answer, is shown by its records in the metadata.
        """
        answers = await self._router.ask_others(ChangefeedServiceStub, "ListChangefeeds", request)
        messages = {each.id: each for answer in answers for each in answer.changefeeds}
        messages |= {each.id: each for each in self._here()}
        for feed in await self._owner.recorded(messages):
            messages[feed.id] = changefeed_message(feed)
        return [messages[each] for each in sorted(messages)]


def _request_key(method: str, request: Any) -> str:
    """What tells a request to change a changefeed from all others, and is the same for each
    repetition of it. A request without `request_id` gets one: its client does not repeat it, but
    this capture may.

    Raises:
        ParameterError: `request_id` is too long.
    """
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    if len(request.request_id) > _REQUEST_ID_CHARACTERS_MAX:
        raise ParameterError(
            f"a request_id has at most {_REQUEST_ID_CHARACTERS_MAX} characters, such as a UUID"
        )
    # Another change with the same id by mistake is another request.
    content = method.encode() + request.SerializeToString(deterministic=True)
    return hashlib.sha256(content).hexdigest()


def check_history(feed: Feed, version: Version, target: str) -> None:
    """Check that a move loses no kept history.

    Raises:
        TableMoveError: it does.
    """
    kept_ts, checkpoint_ts = feed.kept_ts, feed.processor.checkpoint_ts
    if kept_ts >= checkpoint_ts or feed.processor.worker_of(version.span) == target:
        return
    raise TableMoveError(
        f"changefeed {feed.id} keeps history from {kept_ts} ({time_of(kept_ts)}) on, and a table "
        f"that moves leaves its own behind: that of all tables would begin at the checkpoint "
        f"{checkpoint_ts}, and late readers below it would be lost. Move it with --give-up-history"
    )


def new_changefeed(request: pb.CreateChangefeedRequest) -> NewChangefeed:
    """Return the changefeed that a request describes."""
    return NewChangefeed(
        id=request.id,
        sink_uri=request.sink_uri,
        source_uri=with_option(request.source_uri, ON_UNCLEAR_DDL, request.on_unclear_ddl),
        start_ts=request.start_ts,
        target_ts=request.target_ts,
        tables=[(table.schema_name, table.table_info_json) for table in request.tables],
        rules=list(request.filter),
        columns=list(request.columns),
        event_filters=list(map(_event_filter, request.event_filters)),
        masks=list(request.masks),
        routes=list(request.routes),
        salt_file=request.salt_file,
        zero_dates=request.zero_dates or NULL_DATES,
        ignore_ineligible=request.ignore_ineligible_table,
        audit_s=request.audit_s,
        retention=Retention(request.retain_s, request.retain_bytes),
        reader_ttl_s=request.reader_ttl_s,
        region_threshold=request.region_threshold,
    )


def changefeed_update(request: pb.UpdateChangefeedRequest) -> ChangefeedUpdate:
    """Return the changes that a request describes."""
    return ChangefeedUpdate(
        sink_uri=request.sink_uri,
        on_unclear_ddl=request.on_unclear_ddl,
        audit_s=request.audit_s if request.HasField("audit_s") else None,
        retention=_retention(request.retention) if request.HasField("retention") else None,
        reader_ttl_s=request.reader_ttl_s if request.HasField("reader_ttl_s") else None,
        target_ts=request.target_ts if request.HasField("target_ts") else None,
        region_threshold=request.region_threshold if request.HasField("region_threshold") else None,
        rules=tuple(request.filter),
        columns=tuple(request.columns.texts) if request.HasField("columns") else None,
        event_filters=(
            tuple(map(_event_filter, request.event_filters.filters))
            if request.HasField("event_filters")
            else None
        ),
        masks=tuple(request.masks.texts) if request.HasField("masks") else None,
        salt_file=request.salt_file,
        dumps=not request.no_dump,
    )


def _retention(message: pb.Retention) -> Retention:
    return Retention(message.retain_s, message.retain_bytes)


def filter_change_message(plan: FilterPlan) -> pb.FilterChange:
    """The tables that a new filter brings, and those that it leaves out."""
    return pb.FilterChange(
        ts=plan.ts,
        coming=sorted(table.name for table in plan.coming),
        going=plan.going,
        changing=sorted(table.name for table in plan.changing),
        ineligible=ineligible(plan.refused),
    )


def _event_filter(message: pb.EventFilter) -> EventFilter:
    return EventFilter(
        tuple(message.matcher),
        tuple(message.ignore_event),
        message.ignore_insert_value_expr,
        message.ignore_update_new_value_expr,
        message.ignore_update_old_value_expr,
        message.ignore_delete_value_expr,
        tuple(message.ignore_update_only_columns),
        tuple(message.ignore_sql),
    )


def changefeed_message(feed: Feed, maintainer: str = "") -> pb.Changefeed:
    """A changefeed as it is now, and the capture that runs it; empty: none."""
    info, processor = feed.info, feed.processor
    state, error = shown_state(info, feed.job, feed.audit, time.monotonic())
    return pb.Changefeed(
        id=info.id,
        state=_STATES[state],
        sink_uri=info.shown_sink_uri,
        start_ts=info.start_ts,
        target_ts=info.target_ts,
        checkpoint_ts=processor.checkpoint_ts,
        resolved_ts=processor.resolved_ts,
        create_time=info.create_time,
        error=pb.RunningError(code=error.code, message=error.message, time=error.time)
        if error
        else None,
        tables=_tables(feed),
        source_uri=info.source_uri,
        filter=info.rules,
        columns=info.columns,
        event_filters=[pb.EventFilter(**each.to_document()) for each in info.event_filters],
        masks=info.masks,
        routes=info.routes,
        salt_file=info.salt_file,
        zero_dates=info.zero_dates,
        region_threshold=info.region_threshold,
        ignored_tables=info.ignored,
        schema_changes=_changes(feed),
        holding=_holding(feed),
        lake_job=_lake_job(feed),
        warnings=[
            *feed.source.warnings,
            *filter(None, [audit_silence(info, feed.audit, datetime.now(UTC))]),
        ],
        rereads=_rereads(feed),
        skipped=[pb.SkippedRange(**asdict(each)) for each in info.skipped],
        audit_s=info.audit_s,
        reading=_reading(feed),
        delivery=_delivery(feed),
        maintainer=maintainer,
        filter_update=_filter_update(feed),
        ignore_ineligible_table=info.ignore_ineligible,
        readers=[
            pb.Reader(
                name=each.name,
                checkpoint_ts=each.checkpoint_ts,
                state=each.state,
                silent_s=int(each.silent_s),
            )
            for each in feed.readers.states(feed.kept_ts)
        ],
        retain_s=info.retain_s,
        retain_bytes=info.retain_bytes,
        reader_ttl_s=info.reader_limit_s,
        kept_history=_kept_history(feed),
    )


def _kept_history(feed: Feed) -> pb.KeptHistory | None:
    """Describe the acknowledged history that can still be read; None: none is kept."""
    if not feed.history.is_kept or feed.processor.sink is None:
        return None
    return pb.KeptHistory(kept_ts=feed.kept_ts, bytes=feed.history.size_bytes)


def _filter_update(feed: Feed) -> pb.FilterUpdate | None:
    update = feed.info.filter_update
    if update is None:
        return None
    return pb.FilterUpdate(ts=update.ts, before=update.before[0], error=feed.filter_error)


def _delivery(feed: Feed) -> pb.Delivery:
    """Describe how many rows readers have taken, and when the last row or DDL was committed."""
    checkpoint_ts = feed.processor.checkpoint_ts
    ddls = [
        change.commit_ts
        for change in feed.catalog.history.last(_CHANGES_SHOWN)
        if change.commit_ts <= checkpoint_ts
    ]
    return pb.Delivery(rows=feed.delivery.rows, last_ts=max([feed.delivery.last_ts, *ddls]))


def _reading(feed: Feed) -> pb.Reading | None:
    """Describe since when the changefeed has not been read; None: it does not run."""
    if not feed.info.state.is_running:
        return None
    # `asked_s` is of this owner only: a checkpoint that has moved proves that somebody read before.
    never = feed.reading.asked_s is None and feed.checkpoint_ts == feed.info.start_ts
    return pb.Reading(idle_s=int(feed.reading.idle_s(time.monotonic())), never=never)


def _rereads(feed: Feed) -> pb.Rereads | None:
    """Tables that are read again, for which cuts wait; None: there are none."""
    holds, versions = feed.catalog.holds, feed.catalog.versions
    names = {
        each.span.table_id: feed.catalog.of(each).name
        for of_span in versions.spans(versions.start_ts)
        for each in of_span
    }
    tables = [
        pb.Reread(table=names.get(table_id, str(table_id)), since_ts=ts, reason=reason)
        for table_id, (ts, reason) in holds.waiting.items()
    ]
    tables += [
        pb.Reread(table=table.name, since_ts=table.reread_ts, reason=_STORED_VALUES)
        for table in feed.tables
        # A table that is only coming has no position, and counts as below its DDL.
        if table.reread_ts and _position(feed, table.span, 0)[0] <= table.reread_ts
    ]
    since_ts = min((each.since_ts for each in tables), default=0)
    return pb.Rereads(since_ts=holds.open_since or since_ts, tables=tables) if tables else None


def _lake_job(feed: Feed) -> pb.LakeJob | None:
    job = feed.job
    if job is None:
        return None
    report, own = job.report, feed.info
    error = (
        pb.RunningError(code=report.code, message=report.message, time=job.time)
        if report.code
        else None
    )
    return pb.LakeJob(
        state=job.state(time.monotonic()),
        cut_ts=report.cut_ts,
        time=job.time,
        error=error,
        failed_changefeed=failed_by_job(own, job),
        commits=report.commits,
        spark_ui=report.ui,
    )


def _tables(feed: Feed) -> list[pb.TableStatus]:
    """The tables that have rows above the checkpoint, in each of their spans the newest."""
    versions = [
        of_span[-1] for of_span in feed.catalog.versions.spans(feed.processor.checkpoint_ts)
    ]
    traffic = feed.processor.traffic()
    weight = weights(len(versions), traffic)
    statuses = [_table(feed, version) for version in versions]
    for version, status in zip(versions, statuses, strict=True):
        changes = traffic.get(version.span, NO_TRAFFIC)
        status.rows_per_s, status.bytes_per_s = changes
        status.weight = weight.get(version.span, 1.0)
    return statuses


def _table(feed: Feed, version: Version) -> pb.TableStatus:
    table = feed.catalog.of(version)
    resolved_ts, checkpoint_ts = _position(feed, version.span, version.from_ts)
    status = pb.TableStatus(
        name=table.name,
        target=table.place if table.place != table.name else "",
        table_id=version.span.table_id,
        resolved_ts=resolved_ts,
        checkpoint_ts=checkpoint_ts,
        schema_ts=version.from_ts,
        state=_table_state(feed, version),
        capture=feed.processor.worker_of(version.span),
    )
    status.moving_to, status.moving_resolved_ts = feed.processor.moving_to(version.span)
    if feed.processor.sink is not None:
        status.resolved_lag_ms = _lag_ms(resolved_ts)
        status.checkpoint_lag_ms = _lag_ms(checkpoint_ts)
    return status


def _lag_ms(ts: int) -> int:
    return max(0, int(time.time() * 1000) - physical_ms(ts))


def _position(feed: Feed, span: Span, otherwise: int) -> tuple[int, int]:
    """Describe how far a table is sorted and acknowledged; `otherwise` while the table is being
    opened or closed.
    """
    sink, start_ts = feed.processor.sink, feed.processor.start_ts
    if sink is None:
        return start_ts, start_ts
    try:
        return sink.resolved_ts(span), sink.checkpoint_ts(span)
    except TableNotFoundError:
        return otherwise, otherwise


def _table_state(feed: Feed, version: Version) -> pb.TableState.ValueType:
    if feed.processor.sink is None:
        return pb.TABLE_STATE_PENDING if feed.info.state.is_running else pb.TABLE_STATE_STOPPED
    if version.span in feed.processor.repairing:
        return pb.TABLE_STATE_REPAIRING
    return pb.TABLE_STATE_REPLICATING if version.to_ts == MAX_TS else pb.TABLE_STATE_ENDING


def _changes(feed: Feed) -> list[pb.SchemaChange]:
    return [
        pb.SchemaChange(
            commit_ts=change.commit_ts,
            query=change.query,
            tables=[table.name for table in change.tables],
            dropped=change.dropped,
            truncated=change.truncated,
        )
        for change in feed.catalog.history.last(_CHANGES_SHOWN)
        if change.query
    ]


def _holding(feed: Feed) -> pb.Holding:
    return pb.Holding(**asdict(feed.processor.stats()))
