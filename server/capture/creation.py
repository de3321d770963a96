"""A changefeed that is to be created: its parameters, its record, and the tables it begins with.

`NewChangefeed` holds the parameters as the API takes them. Its tables are those given with it, and
those that its filter finds in the source (`select_tables`). A table that cannot be replicated is
never skipped silently: it refuses the creation, or is reported as ignored.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pyspark_tidemark.sink_uri import format_of

from gcsafepoint.explain.explanation import time_of
from server.capture.audit import check_audit
from server.capture.errors import (
    ParameterError,
    StartTsInFutureError,
    TableIneligibleError,
    TargetTsError,
)
from server.capture.runner import utc_now
from server.changefeed.columns import ColumnRules
from server.changefeed.event_filter import (
    EventFilter,
    EventFilters,
    check_conditions,
    check_ddl,
    check_rereads,
)
from server.changefeed.filter import TableFilter, exact_rules, filter_of
from server.changefeed.identity import EarlierTables, check_not_renamed
from server.changefeed.info import ChangefeedInfo, check_id, check_sink_uri, keeps_changes
from server.changefeed.masks import MaskRules, check_salted
from server.changefeed.routes import RouteRules, check_conflicts, check_mergeable, check_merging
from server.changefeed.salt import Salt
from server.changefeed.source import takes_keyless
from server.changefeed.table import SourceTable, TableRecord, check_distinct, check_names
from server.changefeed.terms import Terms
from server.puller.source import Source
from sink.retention import NOTHING_RETAINED, Retention
from storage.tidb.document import read_document
from storage.tidb.field_type import NULL_DATES

NOT_TAKEN_MAX: Final = 100
_REFUSED_SHOWN = 20


@dataclass(frozen=True, slots=True)
class TableSelection:
    """The tables that a new changefeed takes."""

    read: tuple[SourceTable, ...]
    """The tables, as the source reads their records."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Tables that match but cannot be replicated: the reason, by name."""
    not_taken: tuple[tuple[str, str], ...] = ()
    """Schema and table names of tables that the filter does not take, at most `NOT_TAKEN_MAX`."""

    @property
    def tables(self) -> tuple[TableRecord, ...]:
        """Their records."""
        return tuple(table.record for table in self.read)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of those that cannot be replicated, in order."""
        return tuple(sorted(self.refused))


@dataclass(frozen=True, slots=True)
class Checked:
    """What a changefeed would replicate from `start_ts` on; see `TableSelection`."""

    start_ts: int
    tables: tuple[SourceTable, ...]
    refused: Mapping[str, str]
    not_taken: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChangefeed:
    """The parameters of a changefeed. `start_ts` 0 means now, `target_ts` 0 no end; `tables` are
    pairs of schema name and table_info JSON, `rules` are a table filter.
    """

    id: str
    sink_uri: str
    source_uri: str = ""
    start_ts: int = 0
    target_ts: int = 0
    tables: Sequence[tuple[str, str]] = ()
    rules: Sequence[str] = ()
    columns: Sequence[str] = ()
    """Rules about columns, `server.changefeed.columns`."""
    event_filters: Sequence[EventFilter] = ()
    masks: Sequence[str] = ()
    """Rules about masks, `server.changefeed.masks`."""
    routes: Sequence[str] = ()
    """Names in the target, `server.changefeed.routes`."""
    salt_file: str = ""
    """Of those that hash: a path on every capture."""
    salt: Salt | None = None
    """What `with_salt` has read from there."""
    zero_dates: str = NULL_DATES
    """How dates that no calendar has are shown, one of `SHOWN_DATES`."""
    ignore_ineligible: bool = False
    audit_s: int = 0
    """The seconds in which an audit compares the whole lake with the source once; 0: no audit."""
    retention: Retention = NOTHING_RETAINED
    """How much acknowledged history is kept."""
    region_threshold: int = 0
    """Tables of the cluster with so many regions are split over captures; 0: none is."""
    reader_ttl_s: int = 0
    """For how long a silent reader that has a name is held for; 0: the default."""
    request: str = ""
    """What tells the request from others (`server.capture.changefeeds`); empty: it is not
    repeated.
    """

    def records(self) -> tuple[TableRecord, ...]:
        """Check everything that needs neither source nor salt; returns the given tables' records.

        Raises:
            InvalidError: a parameter cannot be used; its subclass says which.
        """
        check_id(self.id)
        check_sink_uri(self.sink_uri)
        check_audit(self.audit_s, self.sink_uri, ignores_events=bool(self.event_filters))
        TableFilter(self.rules)
        ColumnRules(self.columns, self.zero_dates)
        self.mask_rules()
        check_merging(RouteRules(self.routes), self.sink_uri)
        check_rereads(EventFilters(self.event_filters), self.source_uri)
        check_ddl(EventFilters(self.event_filters), self.source_uri, self.sink_uri)
        if takes_keyless(self.source_uri) and not keeps_changes(self.sink_uri):
            raise ParameterError(
                "--force-replicate takes tables without a key, of which only changes are known, and "
                "the target has to keep them: write ?mode=append into the sink URI"
            )
        if not (self.tables or self.rules):
            raise ParameterError(
                "a changefeed needs tables: name them by --filter, or give their schemas by "
                "--tables"
            )
        return tuple(
            TableRecord(schema_name, read_document(text)) for schema_name, text in self.tables
        )

    async def with_salt(self) -> "NewChangefeed":
        """The same, with the salt of its file. The file is read here alone, and by a thread: it may
        be on a disk that others share.

        Raises:
            SaltFileError: it cannot be used.
        """
        if not self.salt_file:
            return self
        return replace(self, salt=await asyncio.to_thread(Salt.read, self.salt_file))

    def mask_rules(self) -> MaskRules:
        """The rules about masks, with the salt if it was read.

        Raises:
            MaskError: they cannot be used.
        """
        check_salted(MaskRules(self.masks), self.salt_file)
        return MaskRules(self.masks, self.salt)

    async def selection(self, source: Source, start_ts: int) -> TableSelection:
        """Select the tables as of `start_ts`, once the salt was read; raises as `select_tables`."""
        given = self.records()
        terms = Terms(
            self.id,
            filter_of(self.source_uri, self.rules),
            self.ignore_ineligible,
            ColumnRules(self.columns, self.zero_dates),
            format_of(self.sink_uri),
            EventFilters(self.event_filters),
            self.mask_rules(),
            RouteRules(self.routes),
        )
        if not self.rules:
            return await asyncio.to_thread(eligible, source, given, terms)
        return await select_tables(source, terms, start_ts, given)

    def info(self, start_ts: int, selection: TableSelection) -> ChangefeedInfo:
        """Make the record of the new changefeed."""
        # From here on the filter alone says what the changefeed takes. Tables that were given get
        # rules of their own, or their next DDL would be that of a foreign table.
        given = {table.name: (table.schema_name, table.table_name) for table in self.records()}
        taken = [given[table.name] for table in selection.tables if table.name in given]
        salt = self.salt
        return ChangefeedInfo(
            id=self.id,
            sink_uri=self.sink_uri,
            source_uri=self.source_uri,
            start_ts=start_ts,
            target_ts=self.target_ts,
            create_time=utc_now(),
            rules=(*self.rules, *exact_rules(taken)),
            columns=tuple(self.columns),
            event_filters=tuple(self.event_filters),
            masks=tuple(self.masks),
            routes=tuple(self.routes),
            salt_file="" if salt is None else salt.path,
            salt_check="" if salt is None else salt.check,
            zero_dates=self.zero_dates,
            from_snapshot=bool(self.rules),
            ignore_ineligible=self.ignore_ineligible,
            ignored=selection.ignored,
            audit_s=self.audit_s,
            retain_s=self.retention.age_s,
            retain_bytes=self.retention.size_bytes,
            reader_ttl_s=self.reader_ttl_s,
            region_threshold=self.region_threshold,
        )


def check_range(start_ts: int, target_ts: int, now_ts: int) -> None:
    """Check the range of a changefeed.

    Raises:
        StartTsInFutureError: it starts after the present.
        TargetTsError: it ends before it starts.
    """
    if start_ts > now_ts:
        raise StartTsInFutureError(
            f"the start {start_ts} is after the present {now_ts}; see `tidemark cli tso query`"
        )
    if target_ts and target_ts <= start_ts:
        raise TargetTsError(f"target_ts {target_ts} is not after the start {start_ts}")


async def select_tables(
    source: Source,
    terms: Terms,
    ts: int,
    given: Sequence[TableRecord] = (),
    *,
    before: Sequence[TableRecord] = (),
) -> TableSelection:
    """The tables in `source` as of `ts` that the changefeed's filter takes, and those given, which
    take the place of those of the same name in the source.

    `before` are the changefeed's tables so far: their identities go on, and what was taken and
    masked of their columns.

    Raises:
        ParameterError: there is none, or one twice.
        TableIneligibleError: some cannot be replicated, by name.
        ColumnRuleError, EventFilterError, MaskError: a rule is about nothing there is.
        ConditionError: a table has no column that the condition of an event filter asks for.
    """
    names = {table.name for table in given}
    matching: list[TableRecord] = []
    not_taken: list[tuple[str, str]] = []
    for table in await source.snapshot(ts, [each.whole for each in before]):
        if not terms.filter.takes(table.schema_name, table.table_name):
            not_taken.append((table.schema_name, table.table_name))
        elif table.name not in names:
            matching.append(table)
    if not (given or matching):
        names_there = [f"{schema}.{name}" for schema, name in not_taken]
        raise ParameterError(
            f"the filter takes none of the source's tables of {time_of(ts) or ts}{_others(names_there)}"
        )
    selection = await asyncio.to_thread(eligible, source, (*given, *matching), terms, before)
    return replace(selection, not_taken=tuple(not_taken[:NOT_TAKEN_MAX]))


def _others(names: Sequence[str]) -> str:
    if not names:
        return (
            ", as it shows none at all: `tidemark cli source check --source-uri …` says what its "
            "user may see. Without --source-uri, the source is the cluster that the capture belongs "
            "to"
        )
    return f"; there are {_first_ones(sorted(names), ', ')}"


def _first_ones(texts: Sequence[str], separator: str) -> str:
    """Some of the texts, and how many more there are."""
    shown, others = texts[:_REFUSED_SHOWN], len(texts) - _REFUSED_SHOWN
    return separator.join([*shown, *([f"and {others} more"] if others > 0 else [])])


def eligible(
    source: Source,
    records: Sequence[TableRecord],
    terms: Terms,
    before: Sequence[TableRecord] = (),
) -> TableSelection:
    """The tables that can be replicated to the changefeed's target, with the columns that it takes
    of them; whatever its filter. `before` as of `select_tables`.

    Raises as `select_tables`.
    """
    earlier = EarlierTables(map(source.table, before))
    gone = [each for each in earlier.gone(records) if terms.takes(each.record)]
    tables: list[SourceTable] = []
    read: list[SourceTable] = []
    refused: dict[str, str] = {}
    for record in records:
        try:
            # Names are checked of what is taken: a rule about columns may leave out, or rename,
            # the column that the target could not hold.
            # Dates as readers are shown them: rules about masks look at types and defaults.
            dated = record.showing(terms.columns.zero_dates)
            table = source.table(dated)
            same = earlier.same(table)
            ruled = terms.of(table, same)
            if same is None:
                check_not_renamed(table, ruled, gone)
            taken = table if ruled is dated else source.table(ruled)
            check_names(taken, terms.target)
            check_conditions(taken)
            tables.append(table)
            read.append(taken)
        except TableIneligibleError as err:
            refused[record.name] = err.message
    if refused and not terms.ignore_ineligible:
        shown = _first_ones(list(refused.values()), "; ")
        raise TableIneligibleError(
            f"{shown}. Leave them out by --filter, or by --ignore-ineligible-table"
        )
    if refused and not tables:
        shown = "; ".join(list(refused.values())[:_REFUSED_SHOWN])
        raise ParameterError(f"no table that the filter takes can be replicated: {shown}")
    _check_each_once(tables)
    check_distinct(read, terms.target)
    check_conflicts(read)
    check_mergeable(read)
    terms.routes.check(tables)
    # Names are those of now, while what was decided of columns follows them: a table that goes on
    # may have no column any more that a rule names.
    new = {each.name for each in tables if earlier.same(each) is None}
    terms.columns.check(tables, None if terms.columns_change else new)
    terms.events.check(tables)
    terms.masks.check(tables, None if terms.masks_change else new)
    return TableSelection(tuple(read), refused)


def _check_each_once(tables: Sequence[SourceTable]) -> None:
    if not tables:
        raise ParameterError(
            "a changefeed needs at least one table: none is given, or the filter takes none"
        )
    twice = [key for key, count in Counter(table.name for table in tables).items() if count > 1]
    twice += [
        f"id {key}"
        for key, count in Counter(table.span.table_id for table in tables).items()
        if count > 1
    ]
    if twice:
        raise ParameterError(f"tables given twice: {', '.join(twice)}")
