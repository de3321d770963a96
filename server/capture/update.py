"""What `changefeed update` changes of an existing changefeed.

Everything is in force at once, except for a new table filter, other terms (columns, masks, event
filters) and a new target_ts. A target_ts can be changed only while the changefeed is stopped: a
running lake job would end at the former one.

A filter comes in force at a ts, as a schema change does: `FilterPlan.ts` is the source's present,
and the plan has the tables that the filter brings there. Up to that ts the changefeed replicates
the tables that both filters take. When everything up to it is at the target, the change is written:
readers see tables that come and tables that go, and the new tables are dumped.

Tables that the new filter leaves out are not read any more from the moment of the update: one of
them may be what has stopped the changefeed.

Other terms come in force at a ts, too, and changes up to it follow the former terms. A table with
other columns or masks begins anew there: its rows at the target are dropped, and it is dumped.
Without dumps it goes on, and the rows at the target stay as they are. With other event filters it
always goes on, as they are about later changes only.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa
import structlog
from pyspark_tidemark.flight import FILTER_UPDATE

from server.capture.creation import eligible
from server.capture.errors import ChangefeedStateError, ParameterError, TargetTsError
from server.capture.feed import Feed
from server.capture.records import Records
from server.changefeed.columns import ColumnRules
from server.changefeed.event_filter import EventFilter, EventFilters, check_ddl, check_rereads
from server.changefeed.filter import Filter, TableFilter
from server.changefeed.history import History, SchemaChange, by_id
from server.changefeed.info import (
    ChangefeedInfo,
    FilterUpdate,
    State,
    TableTerms,
    check_same_sink,
    check_sink_uri,
)
from server.changefeed.masks import MaskRules, check_salted
from server.changefeed.routes import RouteRules, check_merging, check_taken_over
from server.changefeed.salt import Salt
from server.changefeed.source import ON_UNCLEAR_DDL, with_option
from server.changefeed.table import SourceTable, TableRecord
from server.changefeed.terms import all_filters, terms_of
from sink.retention import Retention
from storage.model.ts import MAX_TS

_RULES_SHOWN: Final = 1000
_NAMES_SHOWN: Final = 20

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangefeedUpdate:
    """The changes; None, or an empty value, leaves a setting as it is."""

    sink_uri: str = ""
    """The same place, with another login or other options."""
    on_unclear_ddl: str = ""
    """Of a mysql:// source."""
    audit_s: int | None = None
    retention: Retention | None = None
    reader_ttl_s: int | None = None
    target_ts: int | None = None
    """0: without end."""
    region_threshold: int | None = None
    """As in `NewChangefeed`."""
    rules: Sequence[str] = ()
    """The new table filter."""
    columns: Sequence[str] | None = None
    event_filters: Sequence[EventFilter] | None = None
    masks: Sequence[str] | None = None
    salt_file: str = ""
    """Of masks that hash, as in `NewChangefeed`; empty: that of before."""
    salt: Salt | None = None
    """What `with_salt` has read from there."""
    dumps: bool = True
    """Whether what tables hold is copied that are new, or begin anew."""
    request: str = ""
    """As in `NewChangefeed`."""

    def check(self) -> None:
        """Check what can be checked without the changefeed.

        Raises:
            ParameterError: nothing is to be changed.
            SinkUriError, FilterRuleError: it is not valid.
        """
        numbers = (self.audit_s, self.retention, self.reader_ttl_s, self.target_ts)
        is_any_given = any(each is not None for each in (*numbers, self.region_threshold))
        is_any_given = is_any_given or self.changes_tables
        if not (self.sink_uri or self.on_unclear_ddl or is_any_given):
            raise ParameterError(
                "nothing is to be updated: give --filter, --columns, --mask, --config, --sink-uri, "
                "--on-unclear-ddl, --audit, --retain, --reader-ttl or --target-ts"
            )
        if self.sink_uri:
            check_sink_uri(self.sink_uri)
        TableFilter(self.rules)
        ColumnRules(self.columns or ())
        EventFilters(self.event_filters or ())
        MaskRules(self.masks or ())

    @property
    def changes_tables(self) -> bool:
        """Whether tables may come or go, or may be replicated in another way."""
        terms = (self.columns, self.event_filters, self.masks)
        return bool(self.rules or self.salt_file) or any(each is not None for each in terms)

    async def with_salt(self) -> "ChangefeedUpdate":
        """The same, with the salt of its file, if it names one.

        Raises:
            SaltFileError: it cannot be used.
        """
        if not self.salt_file or self.salt is not None:
            return self
        return replace(self, salt=await asyncio.to_thread(Salt.read, self.salt_file))

    def applied_to(self, info: ChangefeedInfo) -> ChangefeedInfo:
        """The changefeed's record after the update, but for its filter and terms.

        Raises:
            SinkUriError: the sink is another place.
            SourceUriError: the source has no such option, or not with this value.
            RouteRuleError, EventFilterError, MaskError: its rules cannot be followed any more.
        """
        sink_uri = self.sink_uri or info.sink_uri
        check_same_sink(info.sink_uri, sink_uri)
        check_merging(RouteRules(info.routes), sink_uri)
        source_uri = with_option(info.source_uri, ON_UNCLEAR_DDL, self.on_unclear_ddl)
        event_filters = EventFilters(self.terms_after(info).event_filters)
        check_rereads(event_filters, source_uri)
        check_ddl(event_filters, source_uri, sink_uri)
        retention = info.retention if self.retention is None else self.retention
        return replace(
            info,
            sink_uri=sink_uri,
            source_uri=source_uri,
            target_ts=info.target_ts if self.target_ts is None else self.target_ts,
            region_threshold=(
                info.region_threshold if self.region_threshold is None else self.region_threshold
            ),
            audit_s=info.audit_s if self.audit_s is None else self.audit_s,
            retain_s=retention.age_s,
            retain_bytes=retention.size_bytes,
            reader_ttl_s=info.reader_ttl_s if self.reader_ttl_s is None else self.reader_ttl_s,
        )

    def terms_after(self, info: ChangefeedInfo) -> TableTerms:
        """The terms of the changefeed's tables after the update.

        Raises:
            MaskError: a mask hashes, and there is no salt; or there is one, and none does.
        """
        before = info.coming_terms or info.terms
        terms = TableTerms(
            before.columns if self.columns is None else tuple(self.columns),
            before.event_filters if self.event_filters is None else tuple(self.event_filters),
            before.masks if self.masks is None else tuple(self.masks),
            before.salt_file if self.salt is None else self.salt.path,
            before.salt_check if self.salt is None else self.salt.check,
        )
        rules = MaskRules(terms.masks)
        if not (rules.hashes or self.salt_file):
            return replace(terms, salt_file="", salt_check="")
        check_salted(rules, terms.salt_file)
        return terms


def check_open(feed: Feed) -> None:
    """Check that the changefeed has not come to its end.

    Raises:
        ChangefeedStateError: it is finished, or being removed.
    """
    if feed.info.state is State.FINISHED:
        raise ChangefeedStateError(
            f"changefeed {feed.id} is finished: everything up to its target_ts "
            f"{feed.info.target_ts} is at the target; "
            f"create another one from there with --start-ts {feed.info.target_ts}"
        )
    if feed.info.state is State.REMOVED:
        raise ChangefeedStateError(
            f"the removal of changefeed {feed.id} has begun; remove it again to bring it to its end"
        )


async def check_target(feed: Feed, target_ts: int) -> None:
    """Check that the changefeed's target_ts can be changed to this one.

    Raises:
        ChangefeedStateError: it runs, is finished, or is being removed.
        TargetTsError: readers may be beyond the ts already.
    """
    check_open(feed)
    if feed.info.state.is_running:
        raise ChangefeedStateError(
            f"changefeed {feed.id} is {feed.info.state}; pause it before its target_ts is changed"
        )
    now_ts = await feed.source.now() if target_ts else 0
    if 0 < target_ts <= now_ts:
        raise TargetTsError(
            f"target_ts {target_ts} is not after the present {now_ts}: readers may be beyond it"
        )


@dataclass(frozen=True, slots=True)
class FilterPlan:
    """What a new filter, or other terms, would change at `ts`."""

    ts: int
    rules: tuple[str, ...]
    coming: tuple[TableRecord, ...]
    """Tables that it takes and that the changefeed does not have yet."""
    going: tuple[str, ...]
    """Names of tables that it does not take any more."""
    changing: tuple[TableRecord, ...] = ()
    """Tables that stay, with other columns or masks."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Tables that it takes, and that cannot be replicated: why, by name; left out."""


async def plan_filter(feed: Feed, update: ChangefeedUpdate) -> FilterPlan:
    """Find out what another filter or other terms would change now; changes nothing.

    Raises:
        FilterRuleError, ParameterError: the rules cannot be read, or take no table; or a table
            cannot go on without being dumped.
        TableIneligibleError, ColumnRuleError, EventFilterError, MaskError: as at a creation.
        UnavailableError: the source does not answer, or its tables are being changed.
    """
    rules = tuple(update.rules) or feed.info.rules
    info = replace(feed.info, rules=rules, filter_update=None)
    info = info.with_terms(update.terms_after(feed.info))
    terms = terms_of(info, info.rules, feed.info.terms)
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
    changing: tuple[TableRecord, ...] = ()
    if info.terms != feed.info.terms:
        _check_found(staying - {each.name for each in records})
        kept = [each for each in coming if each.name in staying]
        changing = tuple(each for each in kept if not each.is_taken_as(here[each.name]))
    for each in () if update.dumps else changing:
        _check_goes_on(feed.source.table(here[each.name]), feed.source.table(each))
    return FilterPlan(
        ts,
        info.rules,
        tuple(each for each in coming if each.name not in staying),
        tuple(sorted(going)),
        changing,
        {} if selection is None else selection.refused,
    )


def _check_found(missing: Collection[str]) -> None:
    if missing:
        raise ParameterError(
            f"{', '.join(sorted(missing)[:_NAMES_SHOWN])}: given by --tables, and not found in the "
            "source, so that nothing else can be taken of them; create another changefeed"
        )


def _check_goes_on(before: SourceTable, table: SourceTable) -> None:
    """Check that the rows at the target, which stay as they are, still fit to the table, given
    before and after the update.

    Raises:
        ParameterError: they do not.
    """
    old, new = before.mounter.schema, table.mounter.schema
    retyped = [
        name for name in new.names if name in old.names and _type(old, name) != _type(new, name)
    ]
    masks = [
        {name: each.record.masked.get(name) for name in each.mounter.key_columns}
        for each in (before, table)
    ]
    if not retyped and masks[0] == masks[1]:
        return
    columns = retyped or [name for name in masks[1] if masks[0].get(name) != masks[1][name]]
    raise ParameterError(
        f"{table.name}: {', '.join(columns)} would be shown otherwise than rows that are at the "
        "target already, which then do not fit: leave out --no-dump, so that the table begins anew"
    )


def _type(schema: pa.Schema, name: str) -> pa.DataType:
    return schema.field(name).type


class FilterUpdates:
    """Brings new filters in force, step by step. To be called under the lock of changes.

    Each step is durable when it returns. An interrupted step is taken again, with the same outcome.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    async def planned(
        self,
        feed: Feed,
        info: ChangefeedInfo,
        update: ChangefeedUpdate,
        offered_ts: int,
    ) -> ChangefeedInfo:
        """Choose the ts at which the update of a stopped changefeed comes in force, above
        `offered_ts`, which readers may have reached. Writes the record with it and the tables that
        come, and sets the feed's record, which it returns.

        Raises as `server.capture.update.plan_filter`, and ChangefeedStateError.
        """
        plan = await plan_filter(feed, update)
        # At the ts of an abandoned update, tables of that one are recorded, too.
        given_up_ts = info.filter_update.ts if info.filter_update is not None else 0
        if plan.ts <= max(offered_ts, feed.checkpoint_ts, given_up_ts):
            raise ChangefeedStateError(
                f"the changefeed is at {max(offered_ts, given_up_ts)} already, and its source's present is "
                f"{plan.ts}: its log has times ahead of the clock. Try again in a while"
            )
        before, terms = info.filter_update, update.terms_after(feed.info)
        info = replace(
            info,
            rules=plan.rules,
            from_snapshot=True,
            ignored=tuple(sorted(plan.refused)),
            filter_update=_waiting(feed, plan.rules, plan.ts, dumps=update.dumps),
            coming_terms=None if terms == feed.info.terms else terms,
        )
        # The record's tables must exist at every moment: the new tables are written before it, and
        # the old ones deleted after it.
        schemas = self._records.schemas
        tables = by_id((*plan.coming, *plan.changing))
        await schemas.write_tables(feed.id, SchemaChange(plan.ts, tables=tables))
        await self._records.change(info, update.request)
        # At once: if the next step has no answer, or the owner is stopped within it, the record
        # that is in memory is written again. One that still named the former ts would name tables
        # that are gone, and the new tables would never come.
        feed.info, feed.info_saved = info, True
        if before is not None:
            await schemas.delete_tables(feed.id, before.ts)
        return info

    async def next_step(self, feed: Feed) -> tuple[ChangefeedInfo, list[SchemaChange]]:
        """Stop a changefeed whose new filter is due, and take the next step; returns its record and
        history after that.
        """
        update = feed.info.filter_update
        assert update is not None, "it is due"
        offered_ts = feed.processor.resolved_ts
        await feed.stop()
        changes = list(feed.catalog.history)
        if feed.checkpoint_ts < update.ts:
            # No cut can end there, since tables are read again: plan the update for a later ts.
            info = replace(feed.info, filter_update=replace(update, is_planned=False))
            await self._records.save({}, {feed.id: info})
        elif update.is_planned and feed.catalog.history.last_ts < update.ts:
            info = replace(feed.info, filter_update=None).with_terms(feed.info.coming_terms)
            changes.append(await self._change_filter(feed, info, update))
        else:
            # The ts could not be used, or a DDL above it is known already.
            again = ChangefeedUpdate(rules=feed.info.rules, dumps=update.dumps)
            info = await self.planned(feed, feed.info, again, offered_ts)
        return info, changes

    async def _change_filter(
        self, feed: Feed, info: ChangefeedInfo, update: FilterUpdate
    ) -> SchemaChange:
        """Write the dump's job for the new tables, then the change that brings the new filter in
        force; everything up to its ts is at the target. Durable.
        """
        coming = await self._records.schemas.load_tables(feed.id, update.ts)
        change = _change(feed.info, feed.catalog.history, coming)
        going_on = _in_force(feed.catalog.history).keys() - {*change.truncated, *change.dropped}
        new = [feed.source.table(each) for each in change.tables if each.name not in going_on]
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
    """The pending update of a changefeed whose new filter comes in force at `ts`."""
    info, pending = feed.info, feed.info.filter_update
    if pending is None:
        before: tuple[tuple[str, ...], ...] = (info.rules,)
    elif pending.excludes:
        # Tables that the pending filter leaves out are not delivered since its update, although it
        # never came in force.
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
    """The schema change that brings the new filter in force; `coming` are its plan's tables."""
    update = info.filter_update
    assert update is not None, "a filter is coming in force"
    here = _in_force(history)
    staying = _staying(here.values(), info)
    # With other terms the tables that stay come, too, of which something else is taken.
    kept = {each.name for each in coming} & staying if info.coming_terms is not None else set()
    new = by_id(each for each in coming if each.name not in staying - kept)
    names = {each.name for each in new}
    going_on = {
        each.name
        for each in new
        if each.name in kept
        and (not update.dumps or each.is_taken_as(here[each.name], apart_from_events=True))
    }
    rules = " ".join(info.rules)
    shown = rules if len(rules) <= _RULES_SHOWN else f"{rules[:_RULES_SHOWN]} …"
    return SchemaChange(
        update.ts,
        f"{FILTER_UPDATE} {shown.replace('*/', '* /')} */",
        new,
        tuple(sorted(here.keys() - staying - names)),
        # Tables that come again as other tables, or with other columns: their rows must go.
        tuple(sorted((names & here.keys()) - going_on)),
    )


def _in_force(history: History) -> dict[str, TableRecord]:
    return {name: record for name, (_, record) in history.at(MAX_TS).items()}


def _staying(tables: Iterable[TableRecord], info: ChangefeedInfo) -> set[str]:
    """The names of the tables that every filter of the pending update takes."""
    every = all_filters(info)
    return {each.name for each in tables if _takes(every, each)}


def _takes(tables: Filter, record: TableRecord) -> bool:
    return tables.takes(record.schema_name, record.table_name)
