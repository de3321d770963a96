"""What `changefeed update` changes of a changefeed that exists.

All but a new table filter and a new target_ts is in force at once. A target_ts changes while the
changefeed is stopped: a lake's job that runs would end at the former one.

A filter comes in force at a ts of its own, as a schema change does: `FilterPlan.ts` is the source's
present, and the plan holds the tables that come there. The changefeed runs up to there with the
tables that both filters take. When everything up to there is at the target, the change is written:
readers see tables that come and tables that go, and what the new ones hold is dumped.

Tables that go are no longer read from the moment of the update: one of them may be what keeps the
changefeed from going on.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import structlog
from pyspark_tidemark.flight import FILTER_UPDATE

from server.capture.catalog import all_filters, terms_of
from server.capture.creation import eligible
from server.capture.errors import ChangefeedStateError, ParameterError
from server.capture.feed import Feed
from server.capture.records import Records
from server.changefeed.filter import Filter, TableFilter
from server.changefeed.history import History, SchemaChange, by_id
from server.changefeed.info import ChangefeedInfo, FilterUpdate, check_sink_uri
from server.changefeed.routes import check_taken_over
from server.changefeed.table import TableRecord
from sink.retention import Retention
from storage.model.ts import MAX_TS

_RULES_SHOWN: Final = 1000

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangefeedUpdate:
    """What is to be changed; what is left out stays as it was."""

    sink_uri: str = ""
    """The same place, with another login or other options."""
    on_unclear_ddl: str = ""
    """Of a mysql:// source."""
    audit_s: int | None = None
    retention: Retention | None = None
    reader_ttl_s: int | None = None
    target_ts: int | None = None
    """0: without end."""
    rules: Sequence[str] = ()
    """The new table filter."""
    dumps: bool = True
    """Whether what new tables hold is copied."""

    def check(self) -> None:
        """Refuse what cannot be used, whatever the changefeed.

        Raises:
            ParameterError: nothing is to be changed.
            SinkUriError, FilterRuleError: it is not valid.
        """
        numbers = (self.audit_s, self.retention, self.reader_ttl_s, self.target_ts)
        is_any_given = any(each is not None for each in numbers)
        if not (self.sink_uri or self.on_unclear_ddl or self.rules or is_any_given):
            raise ParameterError(
                "nothing is to be updated: give --filter, --sink-uri, --on-unclear-ddl, --audit, "
                "--retain, --reader-ttl or --target-ts"
            )
        if self.sink_uri:
            check_sink_uri(self.sink_uri)
        TableFilter(self.rules)


@dataclass(frozen=True, slots=True)
class FilterPlan:
    """What a new filter changes at `ts`."""

    ts: int
    rules: tuple[str, ...]
    coming: tuple[TableRecord, ...]
    """Tables that it takes, and that the changefeed does not have."""
    going: tuple[str, ...]
    """Names of tables that it does not take any more."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Tables that it takes, and that cannot be replicated: why, by name; left out."""


async def plan_filter(feed: Feed, rules: Sequence[str]) -> FilterPlan:
    """What `rules` would change now; nothing is kept.

    Raises:
        FilterRuleError, ParameterError: the rules cannot be read, or take no table.
        TableIneligibleError, ColumnRuleError, EventFilterError, MaskError: as at a creation.
        UnavailableError: the source does not answer, or its tables are being changed.
    """
    info = replace(feed.info, rules=tuple(rules), filter_update=None)
    terms = terms_of(info, info.rules)
    here = _in_force(feed.catalog.history)
    ts, records = await feed.source.present([each.whole for each in here.values()])
    matching = [each for each in records if terms.filter.takes(each.schema_name, each.table_name)]
    going = {name for name, each in here.items() if not _takes(terms.filter, each)}
    # Tables that were given by --tables need not be in the source.
    selection = (
        await asyncio.to_thread(eligible, feed.source, matching, terms, list(here.values()))
        if matching or not here.keys() - going
        else None
    )
    coming = () if selection is None else selection.tables
    staying = _staying(here.values(), replace(info, filter_update=_waiting(feed, info.rules, ts)))
    check_taken_over(
        coming,
        [here[name] for name in going],
        "create another changefeed, whose routes give each a name of its own",
    )
    return FilterPlan(
        ts,
        info.rules,
        tuple(each for each in coming if each.name not in staying),
        tuple(sorted(going)),
        {} if selection is None else selection.refused,
    )


class FilterUpdates:
    """Brings new filters in force, step by step; called while nobody else changes the changefeed.

    Each step is durable when it returns. One that is interrupted is taken again, with the same
    outcome.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    async def planned(
        self,
        feed: Feed,
        info: ChangefeedInfo,
        rules: Sequence[str],
        offered_ts: int,
        *,
        dumps: bool,
    ) -> ChangefeedInfo:
        """Choose where the new filter of a stopped changefeed comes in force: above `offered_ts`,
        up to which readers may be. Its record with that, which is written, and is the feed's, as
        are the tables that come.

        Raises as `server.capture.update.plan_filter`, and ChangefeedStateError.
        """
        plan = await plan_filter(feed, rules)
        if plan.ts <= max(offered_ts, feed.checkpoint_ts):
            raise ChangefeedStateError(
                f"the changefeed is at {offered_ts} already, and its source's present is "
                f"{plan.ts}: its log has times ahead of the clock. Try again in a while"
            )
        before = info.filter_update
        info = replace(
            info,
            rules=plan.rules,
            from_snapshot=True,
            ignored=tuple(sorted(plan.refused)),
            filter_update=_waiting(feed, plan.rules, plan.ts, dumps=dumps),
        )
        # What the record names is there at every moment: the new tables go before it, the old ones
        # after it.
        schemas = self._records.schemas
        await schemas.write_tables(feed.id, SchemaChange(plan.ts, tables=by_id(plan.coming)))
        await self._records.save({}, {feed.id: info})
        # At once: if the next step has no answer, or the owner is stopped within it, the record
        # that is in memory is written again. One that still named the former ts would name tables
        # that are gone, and the new tables would never come.
        feed.info, feed.info_saved = info, True
        if before is not None:
            await schemas.delete_tables(feed.id, before.ts)
        return info

    async def next_step(self, feed: Feed) -> tuple[ChangefeedInfo, list[SchemaChange]]:
        """Stop a changefeed whose new filter is due, and take the next step towards it; its record
        and history after that.
        """
        update = feed.info.filter_update
        assert update is not None, "it is due"
        offered_ts = feed.processor.resolved_ts
        await feed.stop()
        changes = list(feed.catalog.history)
        if feed.checkpoint_ts < update.ts:
            # Tables are read again there: on to where they are complete.
            info = replace(feed.info, filter_update=replace(update, is_planned=False))
            await self._records.save({}, {feed.id: info})
        elif update.is_planned and feed.catalog.history.last_ts < update.ts:
            info = replace(feed.info, filter_update=None)
            changes.append(await self._change_filter(feed, info, update))
        else:
            # Tables were read again there, or a DDL above it is known already.
            info = await self.planned(
                feed, feed.info, feed.info.rules, offered_ts, dumps=update.dumps
            )
        return info, changes

    async def _change_filter(
        self, feed: Feed, info: ChangefeedInfo, update: FilterUpdate
    ) -> SchemaChange:
        """Everything up to the new filter's ts is at the target: write the change that brings it
        in force, after what is to be dumped for it. Durable.
        """
        coming = await self._records.schemas.load_tables(feed.id, update.ts)
        change = _change(feed.info, feed.catalog.history, coming)
        new = [feed.source.table(record) for record in change.tables]
        keyed = {table.span.table_id: table.name for table in new if table.has_key}
        # A job without tables would dump all that there are.
        if update.dumps and keyed:
            await self._records.dump_also(feed.id, keyed)
        await self._records.change_filter(info, change)
        _log.info(
            "new filter in force",
            changefeed=feed.id,
            ts=update.ts,
            coming=len(change.tables),
            going=len(change.dropped),
        )
        return change


def _waiting(feed: Feed, rules: tuple[str, ...], ts: int, *, dumps: bool = True) -> FilterUpdate:
    """What a changefeed waits for that gets another filter, to come in force at `ts`."""
    info, pending = feed.info, feed.info.filter_update
    if pending is None:
        before: tuple[tuple[str, ...], ...] = (info.rules,)
    elif pending.excludes:
        # What a filter left out was not delivered since, though that filter never came in force.
        before = tuple(dict.fromkeys((*pending.before, info.rules)))
    else:
        before = pending.before
    update = FilterUpdate(before, ts, dumps=dumps)
    here = (record for _, record in feed.catalog.history.at(feed.checkpoint_ts).values())
    excludes = bool(_staying(here, replace(info, rules=rules, filter_update=update)))
    if pending is not None and pending.excludes and not excludes:
        raise ChangefeedStateError(
            "the filter before this one is not in force yet, and no table would be replicated until "
            "both are: wait until `changefeed query` shows no filter_update, then update again"
        )
    return replace(update, excludes=excludes)


def _change(info: ChangefeedInfo, history: History, coming: Sequence[TableRecord]) -> SchemaChange:
    """The schema change that brings the new filter in force, where `coming` were found to come."""
    update = info.filter_update
    assert update is not None, "a filter is coming in force"
    here = _in_force(history)
    staying = _staying(here.values(), info)
    new = by_id(each for each in coming if each.name not in staying)
    names = {each.name for each in new}
    rules = " ".join(info.rules)
    shown = rules if len(rules) <= _RULES_SHOWN else f"{rules[:_RULES_SHOWN]} …"
    return SchemaChange(
        update.ts,
        f"{FILTER_UPDATE} {shown.replace('*/', '* /')} */",
        new,
        tuple(sorted(here.keys() - staying - names)),
        # They come again, as others: the rows that they had are to go.
        tuple(sorted(names & here.keys())),
    )


def _in_force(history: History) -> dict[str, TableRecord]:
    return {name: record for name, (_, record) in history.at(MAX_TS).items()}


def _staying(tables: Iterable[TableRecord], info: ChangefeedInfo) -> set[str]:
    """Those that were replicated all the time, and still are, by name."""
    every = all_filters(info)
    return {each.name for each in tables if _takes(every, each)}


def _takes(tables: Filter, record: TableRecord) -> bool:
    return tables.takes(record.schema_name, record.table_name)
