"""The owner of the changefeeds: it creates them, runs those of the cluster, whose tables it divides
among the captures, and says which captures run the logs.
"""

import time
from collections.abc import Collection
from dataclasses import replace

import structlog

from server.capture import metrics
from server.capture.audit import Audit
from server.capture.changefeeds import Changefeeds
from server.capture.creation import Checked, NewChangefeed, check_range
from server.capture.errors import ChangefeedExistsError
from server.capture.feed import Feed, FeedFactory
from server.capture.placement import Placement, is_log
from server.changefeed.history import History, SchemaChange, by_id
from server.changefeed.info import ChangefeedInfo
from server.puller.source import Source
from server.rpc.pd import PdClient
from storage.model.errors import UnavailableError
from storage.model.ts import MAX_TS
from storage.tasks import beside

_log = structlog.get_logger(__name__)


class Owner(Changefeeds):
    """The changefeeds that the owner runs: those that `placement` gives to nobody; without one,
    all.
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
            ChangefeedExistsError: the id is taken.
        """
        source = await self._source_of(new)
        async with self._changing:
            await self._make_free(new.id)
            start_ts = await self._protected_start(source, new)
            try:
                feed = await self._made(new, source, start_ts)
            except UnavailableError:
                # The answer of the write was lost: the record may be there, and then needs its
                # history. The creation's safepoint stays until `CheckpointSaver` sweeps it.
                raise
            except Exception:
                await self._safepoints.end_creation(source, new.id)
                raise
            placement = self._placement if is_log(feed.info.source_uri) else None
            if placement is None:
                self.feeds[new.id] = feed
            await self._hand_over(feed)
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
        new = replace(new, ignore_ineligible=True)
        source = await self._source_of(new)
        async with self._changing:
            await self._make_free(new.id)
            try:
                start_ts = await self._protected_start(source, new)
                selection = await new.selection(source, start_ts)
            finally:
                await self._safepoints.end_creation(source, new.id)
                # A log source saved a position for its `now`, which no changefeed will use.
                await self._records.clear(new.id)
        return Checked(start_ts, tuple(map(source.table, selection.tables)), selection.refused)

    async def recorded(self, known: Collection[str]) -> list[Feed]:
        """Changefeeds beside the `known` ones, as their records are; they do not run."""
        records = [each for each in await self._records.load() if each[0].id not in known]
        if not records:
            return []
        jobs = await self._records.load_jobs(time.monotonic())
        audits = await self._records.load_audits()
        feeds = [await self.loaded(info, checkpoint_ts) for info, checkpoint_ts in records]
        for feed in feeds:
            # Else one whose lake job has given up would seem to be well for a moment, and whoever
            # keeps the jobs would start it again.
            feed.job, feed.audit = jobs.get(feed.id), audits.get(feed.id, Audit())
        return feeds

    async def tables_of(self, changefeeds: Collection[str]) -> int:
        """How many tables changefeeds have together, by their records."""
        histories = [History(await self._records.schemas.load(each)) for each in changefeeds]
        return sum(len(history.at(MAX_TS)) for history in histories)

    async def _records_of_mine(self) -> list[tuple[ChangefeedInfo, int]]:
        records = await self._records.load()
        if self._placement is None:
            return records
        return [(info, ts) for info, ts in records if not is_log(info.source_uri)]

    async def _go_on(self) -> None:
        metrics.OWNER.set(1)
        try:
            if self._placement is None:
                await super()._go_on()
            else:
                async with beside(self._placement.run()):
                    await super()._go_on()
        finally:
            metrics.OWNER.set(0)

    async def _made(self, new: NewChangefeed, source: Source, start_ts: int) -> Feed:
        selection = await new.selection(source, start_ts)
        info = new.info(start_ts, selection)
        feed = Feed.of(
            self._factory, info, start_ts, [SchemaChange(start_ts, tables=by_id(selection.tables))]
        )
        await self._records.create(info, selection.tables)
        return feed

    async def _source_of(self, new: NewChangefeed) -> Source:
        """The source of a changefeed whose parameters can be used; raises as `create`."""
        new.records()
        ignores_events = bool(new.event_filters)
        await self._check_audit(
            new.audit_s, new.sink_uri, new.source_uri, ignores_events=ignores_events
        )
        return self._factory.make_source(new.id, new.source_uri)

    async def _protected_start(self, source: Source, new: NewChangefeed) -> int:
        """Where it begins; the history from there on is kept for its creation."""
        now_ts = await source.now()
        start_ts = new.start_ts or now_ts
        check_range(start_ts, new.target_ts, now_ts)
        await self._safepoints.protect_creation(source, new.id, start_ts)
        return start_ts

    async def _make_free(self, changefeed: str) -> None:
        """See that a changefeed of this id can be made here,
        and forget what an earlier one has left: a log source saves its position for `now` next.

        Raises:
            NotOwnerError, ChangefeedExistsError: it cannot.
        """
        self._check_active()
        if changefeed in self.feeds:
            raise ChangefeedExistsError(
                f"changefeed {changefeed} exists already; choose another id or remove it"
            )
        await self._records.clear(changefeed)
