"""The tables of one changefeed on this capture, and how schema changes come in force.

The order is: the change is durable in the metadata; readers see it; the changefeed's run opens the
new tables; the source goes on. After a crash before the last step the source brings the change
again, which is then known already and changes nothing.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NoReturn, Protocol, TypeAlias

import structlog
from pyspark_tidemark.flight import FILTER_UPDATE

from server.capture.errors import RenamedIntoFilterError, TableIneligibleError
from server.changefeed.columns import ColumnRuleError
from server.changefeed.event_filter import (
    DdlNotIgnorableError,
    check_conditions,
)
from server.changefeed.filter import AllFilters
from server.changefeed.history import History, SchemaChange, shortened
from server.changefeed.identity import EarlierTables
from server.changefeed.routes import (
    RouteRuleError,
    check_conflicts,
    check_mergeable,
    check_shard_changes,
    check_taken_over,
)
from server.changefeed.table import SourceTable, TableRecord, check_distinct, check_names
from server.changefeed.terms import Terms
from server.puller.source import TableChange
from sink.holds import Holds
from sink.masking import MaskError
from sink.mounter import TableMounter
from sink.row_filter import ConditionError
from sink.versions import Ddl, Version, Versions
from sorter.errors import RangeCleanedError
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import MAX_TS

_UNFOLLOWABLE: Final = (
    ColumnRuleError,
    ConditionError,
    MaskError,
    RouteRuleError,
    TableIneligibleError,
)
"""Errors of a table that the changefeed cannot replicate any more after a DDL."""
_log = structlog.get_logger(__name__)
Save: TypeAlias = Callable[[SchemaChange], Awaitable[None]]
"""Makes a change durable; raises NotOwnerError, UnavailableError."""


class TableReader(Protocol):
    """Makes tables from their records; usually the source."""

    def table(self, record: TableRecord, before: TableRecord | None = None) -> SourceTable:
        """See `Source.table`."""
        ...


class TablesRead:
    """Implements `TableReader` by tables that were read before, because reading a record takes most
    of a millisecond and 9 KB.
    """

    def __init__(self, tables: Iterable[SourceTable], source: TableReader) -> None:
        """Other tables, and those of other records, are read by `source`."""
        # By the identity of the record object: comparing records would compare kilobytes. The
        # tables refer to their records, so no id is used again.
        self._tables = {id(table.record): table for table in tables}
        self._source = source

    def table(self, record: TableRecord, before: TableRecord | None = None) -> SourceTable:
        """See `TableReader.table`."""
        return self._tables.get(id(record)) or self._source.table(record, before)


class Listener(Protocol):
    """What a catalog tells of schema changes: the run of the changefeed."""

    async def changed(self, ddl: Ddl) -> None:
        """Called for a change in force: opens the tables that it brings, and ends those that it
        ends.
        """
        ...

    def resolved(self, ts: int) -> None:
        """Called when all changes up to `ts` are known."""
        ...

    async def wait_delivered(self, ts: int) -> None:
        """Wait until everything up to `ts` is at the target."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """A change that cannot be followed: everything up to `ts` is delivered, then the changefeed
    fails with `error`.
    """

    ts: int
    error: TidemarkError

    @property
    def hint(self) -> str:
        """What is added to the error's message until then."""
        return (
            f". Everything up to {self.ts} is being delivered first: the state stays warning "
            "until the lake job, or another reader, has acknowledged that, and is failed then"
        )


@dataclass(frozen=True, slots=True)
class _ShownTable:
    """Implements `sink.versions.Table`: a table by the name that readers know."""

    name: str
    span: Span
    mounter: TableMounter


@dataclass(frozen=True, slots=True)
class _ShownChange:
    """Implements `sink.versions.Change`: what a DDL did, by the names that readers know."""

    commit_ts: int
    query: str
    tables: tuple[_ShownTable, ...]
    dropped: tuple[str, ...]
    truncated: tuple[str, ...]

    @classmethod
    def of(
        cls,
        change: TableChange,
        target: Callable[[str], str | None],
        *,
        tells_statements: bool = False,
    ) -> "_ShownChange":
        """`target` maps a source table's name to the name that readers know; None: the table is not
        replicated.

        If readers execute statements, the statement of a routed table is left out: it has the
        source's names, and would alter other tables at the target.
        """
        after = {table.name: table.target_name for table in change.tables}
        truncated = (after.get(name) or target(name) for name in change.truncated)
        touched = (*after, *change.dropped, *change.truncated)
        is_routed = any((after.get(name) or target(name) or name) != name for name in touched)
        is_statement = not change.query.startswith(FILTER_UPDATE)
        return cls(
            change.commit_ts,
            "" if tells_statements and is_routed and is_statement else change.query,
            tuple(map(_shown, change.tables)),
            tuple(filter(None, map(target, change.dropped))),
            tuple(filter(None, truncated)),
        )


def _shown(table: SourceTable) -> _ShownTable:
    return _ShownTable(table.target_name, table.span, table.mounter)


class FeedCatalog:
    """Implements `server.puller.source.Catalog`; its tables are those in force from `start_ts` on,
    and a DDL at it.

    `versions` are what readers see, by the target's names of tables; all else has the source's.
    """

    def __init__(
        self, terms: Terms, source: TableReader, history: History, start_ts: int, save: Save
    ) -> None:
        """Raises InvalidError, TableIneligibleError: a table of the history cannot be read."""
        self.listener: Listener | None = None
        self.holds = Holds()
        """See `Catalog.holds`; of the run that is under way."""
        self.refusal: Refusal | None = None
        """Set while everything before a change that cannot be followed is being delivered."""
        self.history = history
        self._terms = terms
        self._source = source
        self._save = save
        self._tables: dict[tuple[str, int], SourceTable] = {}
        """By the name in the target, and the DDL that gave the schema."""
        self._routed: dict[str, str] = {}
        """The names of tables in the target that are not the source's. Routes are about names
        alone, so one of the source always has the same one.
        """
        self.left_out = frozenset(
            ".".join(table.target)
            for change in history
            for table in change.tables
            if not self._stays(table)
        )
        """By their names in the target: tables that a filter leaves out which is coming."""
        self._replicated = history
        """Without the tables that are left out."""
        if self.left_out:
            self._replicated = History(
                replace(change, tables=tuple(filter(self._stays, change.tables)))
                for change in history
            )
        known_ts = self._replicated.known_from(start_ts)
        at_start = self._replicated.at(known_ts)
        began = [self._read(table, ts) for ts, table in at_start.values()]
        schema_ts = {".".join(table.target): ts for ts, table in at_start.values()}
        self.versions = Versions(known_ts, map(_shown, began), schema_ts)
        for change in self._replicated.after(known_ts):
            tables = tuple(self._read(table, change.commit_ts) for table in change.tables)
            taken = TableChange(
                change.commit_ts, change.query, tables, change.dropped, change.truncated
            )
            self.versions.change(self._shown_change(taken))

    @property
    def tables(self) -> tuple[SourceTable, ...]:
        """The tables in force after all schema changes that are known."""
        return self.at(self._newest_ts)

    def read(self) -> tuple[SourceTable, ...]:
        """Every table that was read of a record, in all versions that are kept."""
        return tuple(self._tables.values())

    def at(self, ts: int) -> tuple[SourceTable, ...]:
        """The tables in force for rows above `ts`; raises RangeCleanedError."""
        return tuple(map(self.of, self.versions.at(ts)))

    def of(self, version: Version) -> SourceTable:
        """The table of a version."""
        return self._tables[version.name, version.from_ts]

    def record(self, version: Version) -> TableRecord:
        """The record of a version's table, for other threads.

        Raises:
            RangeCleanedError: the version was forgotten a moment ago.
        """
        table = self._tables.get((version.name, version.from_ts))
        if table is None:
            raise RangeCleanedError(
                f"{version.name} as of {version.from_ts} is not known any more; begin at the "
                "checkpoint_ts"
            )
        return table.record

    def named(self, name: str) -> Version | None:
        """The table in force that has this name in the source, as readers see it."""
        tables = (each for each in self.tables if each.name == name)
        return next((self.versions.of_span(each.span, MAX_TS - 1) for each in tables), None)

    def source_names(self, names: Sequence[str], ts: int) -> tuple[str, ...]:
        """The source's names of tables that readers know by these, right above or below `ts`."""
        versions = [
            self.versions.version(name, ts) or self.versions.version(name, ts - 1) for name in names
        ]
        return tuple(self.of(version).name for version in versions if version is not None)

    def wants(self, schema_name: str, table_name: str) -> bool:
        """See `Catalog.wants`."""
        return self._terms.filter.takes(schema_name, table_name)

    def wants_any_of(self, schema_name: str) -> bool:
        """See `Catalog.wants_any_of`."""
        return self._terms.filter.may_take_of(schema_name)

    def table(self, record: TableRecord, commit_ts: int | None = None) -> SourceTable | None:
        """See `Catalog.table`."""
        if not self.wants(record.schema_name, record.table_name):
            return None
        if commit_ts is not None and commit_ts <= self._newest_ts:
            return next((each for each in self.at(commit_ts) if each.name == record.name), None)
        try:
            # Dates as readers are shown them: rules about masks look at types and defaults.
            shown = record.showing(self._terms.columns.zero_dates)
            whole = self._source.table(shown, self._before(record))
            same = EarlierTables(self.tables).same(whole)
            table = self._source.table(self._terms.of(whole, same))
            check_names(table, self._terms.target)
            check_conditions(table)
        except _UNFOLLOWABLE as err:
            if record.name in self._in_force():
                raise TableIneligibleError(
                    f"{err.message}: its rows after this DDL could not be replicated. Undo the "
                    "DDL, then resume with --overwrite-checkpoint-ts now and copy the tables by "
                    "`tidemark cli changefeed dumpstart`, as all changes until then are skipped; "
                    "or leave the table out by `tidemark cli changefeed update "
                    f"-c {self._terms.changefeed} --filter`, and resume"
                ) from err
            if not isinstance(err, TableIneligibleError) or not self._terms.ignore_ineligible:
                raise
            _log.warning(
                "table left out",
                changefeed=self._terms.changefeed,
                table=record.name,
                error=err.message,
            )
            return None
        return table

    def known(self, commit_ts: int) -> dict[str, SourceTable] | None:
        """See `Catalog.known`."""
        if commit_ts > self._newest_ts:
            return None
        return {table.name: table for table in self.at(commit_ts)}

    def _stays(self, record: TableRecord) -> bool:
        """Whether a table of the history is replicated: one that a new filter leaves out is not,
        already before the new filter is in force; it may be what cannot be replicated.
        """
        coming = isinstance(self._terms.filter, AllFilters)
        return not coming or self.wants(record.schema_name, record.table_name)

    def _before(self, record: TableRecord) -> TableRecord | None:
        """The version of the same table that is in force."""
        table_id = record.former_id
        records = (table.record for table in self.tables)
        return next((each for each in records if each.table_info.get("id") == table_id), None)

    async def change(self, change: TableChange) -> None:
        """See `Catalog.change`."""
        # A log that is read again from the checkpoint brings its changes again. Those up to the
        # newest known one are in the history, or did not concern this changefeed.
        if change.commit_ts <= self._newest_ts:
            return
        taken = self._concerning(self._without_ignored(change))
        taken = replace(taken, query=shortened(taken.query))
        if not (taken.tables or taken.dropped or taken.truncated):
            return
        stored = SchemaChange(
            taken.commit_ts,
            taken.query,
            tuple(each.record for each in taken.tables),
            taken.dropped,
            taken.truncated,
        )
        # Durable before readers see it: otherwise, after a crash, a reader would have applied a
        # change that the capture does not know, and they would disagree about the rows above it.
        await self._save(stored)
        self.history.append(stored)
        if self._replicated is not self.history:
            self._replicated.append(stored)
        shown = self._shown_change(taken)
        for table in taken.tables:
            self._add(table, taken.commit_ts)
        ddl = self.versions.change(shown)
        assert ddl is not None, "a change that concerns a table of ours"
        _log.info(
            "schema changed",
            changefeed=self._terms.changefeed,
            commit_ts=ddl.ts,
            tables=len(ddl.names),
        )
        if self.listener is not None:
            await self.listener.changed(ddl)

    async def refuse(self, ts: int, error: TidemarkError) -> NoReturn:
        """See `Catalog.refuse`. While tables are read again, delivery ends at the DDL since which
        cuts wait for them.
        """
        # While tables are read again, cuts end at the DDL that started it. The log goes no further
        # than this refusal, so those tables are never complete: that DDL is where delivery ends.
        ts = self.holds.acknowledged(ts)
        if self.listener is not None:
            _log.warning(
                "schema change refused, everything before it is delivered first",
                changefeed=self._terms.changefeed,
                delivered_ts=ts,
                code=error.code,
                error=error.message,
            )
            self.refusal = Refusal(ts, error)
            try:
                self.listener.resolved(ts)
                await self.listener.wait_delivered(ts)
            finally:
                self.refusal = None
        raise error

    def adopt(self, table: SourceTable, from_ts: int) -> Version:
        """Take a table that is in force since `from_ts` and comes from another capture."""
        self._add(table, from_ts)
        return self.versions.adopt(_shown(table), from_ts)

    def release(self, span: Span) -> None:
        """Forget a table that another capture has now."""
        self.versions.release(span)

    def resolve(self, ts: int) -> None:
        """See `Catalog.resolve`."""
        if self.listener is not None:
            self.listener.resolved(ts)

    def forget(self, checkpoint_ts: int) -> None:
        """Drop the versions that no reader at or above the checkpoint asks for."""
        self.holds.drop_below(checkpoint_ts)
        # A reader that has acknowledged up to a DDL's ts has yet to apply that DDL, for which it
        # compares the tables right below it and right above: so the ts before the checkpoint stays.
        if not self.versions.drop_below(self._replicated.needed_from(checkpoint_ts) - 1):
            return  # as nearly always, and there may be a hundred thousand tables
        kept_ts = self.versions.start_ts - 1
        kept_versions = {
            (version.name, version.from_ts)
            for each in self.versions.spans(kept_ts)
            for version in each
        }
        for key in self._tables.keys() - kept_versions:
            del self._tables[key]

    def _without_ignored(self, change: TableChange) -> TableChange:
        """The change without the parts that event filters ignore.

        Raises:
            DdlNotIgnorableError: a filter would ignore a part that cannot be ignored.
        """
        events = self._terms.events
        if not events.ignores_ddl:
            return change
        before = {each.name: each for each in self.tables}
        made = {each.name for each in change.tables}
        for table in change.tables:
            rule = events.ignored_statement(table.record, change.query)
            taken = self.wants(table.record.schema_name, table.record.table_name)
            if rule and taken and not _reads_alike(before.get(table.name), table):
                raise _not_ignorable(change, table.name, rule, "makes it, or changes its columns")
        truncated = []
        for name in change.truncated:
            # CREATE OR REPLACE makes another table: its rows do not fit to those of the former one,
            # so its truncation is never ignored.
            rule = (
                events.ignored_truncate(before[name].record, change.query)
                if name in before and name not in made
                else None
            )
            if rule is None:
                truncated.append(name)
                continue
            _log.warning(
                "rows of a truncated table stay in the target",
                changefeed=self._terms.changefeed,
                table=name,
                commit_ts=change.commit_ts,
                reason=rule,
            )
        return replace(change, truncated=tuple(truncated))

    def _concerning(self, change: TableChange) -> TableChange:
        """The part of a change that concerns the changefeed."""
        before = self._in_force()
        taken = [
            each
            for each in change.tables
            if self.wants(each.record.schema_name, each.record.table_name)
        ]
        tables = tuple(sorted(taken, key=lambda table: table.span.table_id))
        self._check_renamed(change, tables, before)
        names = {table.name for table in tables}
        dropped = tuple(name for name in change.dropped if name in before and name not in names)
        staying = [table for table in self.tables if table.name not in dropped]
        check_distinct((*staying, *tables), self._terms.target)
        check_conflicts(
            (*staying, *tables),
            "leave one out by `tidemark cli changefeed update "
            f"-c {self._terms.changefeed} --filter`, and resume",
        )
        self._check_taken_over(tables)
        self._check_shards(tables, staying)
        return replace(
            change,
            tables=tables,
            dropped=dropped,
            truncated=tuple(name for name in change.truncated if name in before or name in names),
        )

    def _check_taken_over(self, tables: Sequence[SourceTable]) -> None:
        """Raises TableRouteConflictError: a table that ends with this DDL leaves its rows."""
        spans = {table.span for table in tables}
        check_taken_over(
            (table.record for table in tables),
            (each.record for each in self.tables if each.span not in spans),
            "resume with --overwrite-checkpoint-ts now, and copy the tables by `tidemark cli "
            "changefeed dumpstart`; or create another changefeed, whose routes give each a name of "
            "its own",
        )

    def _check_shards(self, tables: Sequence[SourceTable], staying: Sequence[SourceTable]) -> None:
        """Raises TableRouteConflictError: the target could not merge its shards behind this DDL."""
        now = {table.name: table for table in (*staying, *tables)}
        if not any(table.record.shard for table in (*tables, *staying)):
            return
        advice = (
            "undo the DDL, then resume with --overwrite-checkpoint-ts now and copy the tables by "
            "`tidemark cli changefeed dumpstart`; or leave one out by `tidemark cli changefeed "
            f"update -c {self._terms.changefeed} --filter`, and resume"
        )
        old = {table.span: table for table in self.tables}
        pairs = [(old[table.span], table) for table in tables if table.span in old]
        check_shard_changes(pairs, self._in_force(), advice)
        check_mergeable(now.values(), advice)

    def _check_renamed(
        self, change: TableChange, tables: Sequence[SourceTable], before: set[str]
    ) -> None:
        """Refuse a rename of a table that was not replicated: the target does not have its rows.

        Raises:
            RenamedIntoFilterError: the change has such a rename.
        """
        foreign = [name for name in change.dropped if name not in before]
        new = [table.name for table in tables if table.name not in before]
        spans = {version.span for version in self.versions.at(self._newest_ts)}
        brought = [table.name for table in tables if table.name in new and table.span not in spans]
        if foreign and brought:
            raise RenamedIntoFilterError(
                f"{change.query!r} at {change.commit_ts} makes {', '.join(brought)}, which the "
                f"filter takes, of a table that it did not take as {', '.join(foreign)}: its "
                "earlier rows are not at the target. Resume with --overwrite-checkpoint-ts "
                f"{change.commit_ts}, which is after it, and copy them by `tidemark cli "
                "changefeed dumpstart`; or create another changefeed, whose filter leaves it out"
            )

    def _in_force(self) -> set[str]:
        return {table.name for table in self.tables}

    def _shown_change(self, change: TableChange) -> _ShownChange:
        tells_statements = self._terms.tells_statements
        return _ShownChange.of(change, self._target, tells_statements=tells_statements)

    def _target(self, name: str) -> str | None:
        """The name that readers know of a table in force, by the source's; None: a table that has
        another name in the source has it.
        """
        if name in self._routed:
            return self._routed[name]
        version = self.versions.version(name, MAX_TS - 1)
        return name if version is None or self.of(version).name == name else None

    @property
    def _newest_ts(self) -> int:
        return max(self.history.last_ts, self.versions.start_ts)

    def _read(self, record: TableRecord, ts: int) -> SourceTable:
        table = self._source.table(record)
        self._add(table, ts)
        return table

    def _add(self, table: SourceTable, from_ts: int) -> None:
        self._tables[table.target_name, from_ts] = table
        if table.target_name != table.name:
            self._routed[table.name] = table.target_name


def _reads_alike(before: SourceTable | None, table: SourceTable) -> bool:
    """Whether readers cannot tell the two versions of a table apart."""
    if before is None or (before.name, before.span) != (table.name, table.span):
        return False
    one, other = before.mounter, table.mounter
    same_columns: bool = one.schema.equals(other.schema, check_metadata=True)
    return same_columns and one.key_columns == other.key_columns


def _not_ignorable(change: TableChange, name: str, rule: str, why: str) -> DdlNotIgnorableError:
    return DdlNotIgnorableError(
        f"{shortened(change.query)!r} at {change.commit_ts} is to be ignored for {name}, by {rule} "
        f"of an event filter, but {why}: rows behind it would not fit. Undo it, or create another "
        "changefeed, whose filters do not match it or leave the table out"
    )
