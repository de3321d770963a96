"""Brings schema changes of the log in force: what a statement did to the tables,
as the tracker computes it.

What its tree does not tell is taken from the log behind the statement, or from the catalogue; the
rows of a table that was there before are read again then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import structlog
from pyspark_tidemark.redaction import sql_statement

from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord
from server.puller.mysql.ddl.copies import doubt_of_copy, taken_over
from server.puller.mysql.ddl.definition import Definition, row_key
from server.puller.mysql.ddl.statement import Kind, Statement
from server.puller.mysql.ddl.tracker import Context, Tracked
from server.puller.mysql.ddl.tree import AlterTable, CreateTable, TableName
from server.puller.mysql.listener import LogListener, Reread, TableCopier
from server.puller.mysql.rows import LogRows, TableMapMismatch
from server.puller.mysql.session.errors import RowsMovedError
from server.puller.mysql.tables import (
    CatalogFacts,
    DdlOutcome,
    Effect,
    StatementOutcome,
    Tables,
    changed_alone,
    definition_of_table_map,
    first_column_id,
    has_gh_ost_comment,
    is_incomplete,
    name_of,
    new_id,
    record_of,
    same_keys,
)
from server.puller.mysql.transaction.scanner import FoundDefinition
from server.puller.mysql.transaction.transactions import LoggedStatement
from server.puller.source import Catalog, TableChange
from storage.mysql.schema import Index, Table
from storage.mysql.table_map import TableMap

_SEQUENCE_COLUMN = "next_not_cached_value"
_STATEMENT_SHOWN = 200
_STATEMENT_IN_ERROR = 120
_UNLOGGED = "/* as rows have it */"
_UNLOGGED_COLUMNS = (
    "its columns are others than the statements of the log say (an ALTER under sql_log_bin=0)"
)
_UNLOGGED_ROWS = "no statement of the log made it (sql_log_bin=0)"
_COPY_UNSEEN = "how its copy was made was not seen"
_RELOADED = "another table has taken its place, whose rows were not followed"
_log = structlog.get_logger(__name__)


class DdlChanges:
    """Called on the event loop, in the order of the log."""

    def __init__(
        self,
        tables: Tables,
        rows: LogRows,
        catalog: Catalog,
        listener: LogListener | None = None,
        copying: TableCopier | None = None,
    ) -> None:
        self._tables = tables
        self._rows = rows
        self._catalog = catalog
        self._listener = listener
        self._copying = copying
        self._mismatches: set[tuple[TableName, int]] = set()
        """Those of the last transaction that had any."""
        self._copies: dict[TableName, str] = {}
        """The copies that gh-ost has begun, and why they may not hold what their tables do."""

    def effect_of(self, logged: LoggedStatement) -> Effect:
        """A statement's effect on the changefeed's tables, by name.

        Raises:
            StatementLoggedError, DdlUnknownError: rows would be lost.
        """
        self._note_copy(logged.statement)
        if logged.statement.kind is not Kind.DDL:
            at = f"{logged.file}:{logged.position}"
            self._tables.check(logged.statement, logged.query.sql, at, logged.commit_ts)
            self._tables.check_new(logged, self._catalog.wants)
            return Effect()
        self._rows.ignored -= {action.to or action.name for action in logged.statement.actions}
        by_ghost = has_gh_ost_comment(logged.query.sql)
        return self._tables.effect(logged.statement, self._catalog.wants, by_ghost=by_ghost)

    def _note_copy(self, statement: Statement) -> None:
        """Follow the copies that gh-ost makes, which the changefeed may take at their end only."""
        tree = statement.tree
        if isinstance(tree, CreateTable):
            self._copies.pop(tree.name, None)
            if tree.like is not None and tree.name[1] == f"_{tree.like[1]}_gho":
                self._copies[tree.name] = ""
        elif isinstance(tree, AlterTable) and tree.name in self._copies:
            self._copies[tree.name] = self._copies[tree.name] or doubt_of_copy(tree)
        elif statement.kind is Kind.UNKNOWN:
            named = [name for name in self._copies if name[1].lower() in statement.words]
            self._copies |= dict.fromkeys(named, _COPY_UNSEEN)

    def changed_by_statement(self, logged: LoggedStatement) -> TableName | None:
        """The only table whose rows a statement changes by itself;
        whoever may have triggers asks the catalogue.
        """
        if logged.statement.kind is not Kind.ROWS or not self._tables.by_name:
            return None
        return changed_alone(logged.statement)

    def incomplete(self, effect: Effect) -> list[TableName]:
        """Touched tables whose records do not say enough to follow a statement:
        they were written by an old version.
        """
        touched = [
            (name, self._tables.by_id(table_id)) for name, table_id in effect.touched.items()
        ]
        return [
            name for name, table in touched if table is not None and is_incomplete(table.record)
        ]

    def known(
        self, logged: LoggedStatement, names: Iterable[TableName]
    ) -> Mapping[TableName, FoundDefinition] | None:
        """The tables right behind a statement that was followed before; None: it is new."""
        tables = self._catalog.known(logged.commit_ts)
        if tables is None:
            return None
        return {
            name: FoundDefinition(_recorded(name, tables[dotted].record.whole))
            for name in names
            if (dotted := ".".join(name)) in tables
        }

    def outcome(self, logged: LoggedStatement, effect: Effect, facts: CatalogFacts) -> DdlOutcome:
        """Compute from the statement's tree what the tables it touches are behind it."""
        return StatementOutcome(self._tables, logged, effect, facts).read()

    async def apply(
        self,
        logged: LoggedStatement,
        effect: Effect,
        outcome: DdlOutcome,
        seen: Mapping[TableName, FoundDefinition],
    ) -> None:
        """Bring a statement in force; `seen` are tables that the statement does not tell,
        right behind it.

        Raises:
            TableIneligibleError: a table can no longer be replicated.
            RowsMovedError: rows came, went or changed beside the log, and nobody copies them.
        """
        unclear = self._unclear(effect, outcome) | self._taken_over(logged, effect, outcome, seen)
        unclear = {
            name: why
            for name, why in unclear.items()
            if not self._rows.is_empty(effect.touched[name])
        } | dict.fromkeys(effect.reloaded, _RELOADED)
        brought: list[SourceTable] = []
        for name, table_id in effect.touched.items():
            record = self._record_after(logged, name, table_id, outcome, seen.get(name))
            if record is not None:
                brought += self._taken(name, record, logged.commit_ts)
        keyless = self._keyless(brought)
        # A changelog keeps what rows were: nothing of it has to be read again.
        unclear = {name: why for name, why in unclear.items() if name not in keyless}
        if moved := keyless & {*effect.moved}:
            raise _changes_untold(moved, logged.query.sql)
        taken = set(map(name_of, brought)) - keyless
        effect.filled = [name for name in effect.filled if name in taken]
        foreign = await self._foreign(logged, effect, unclear)
        replaced = [name for name in effect.dropped if name in effect.touched]
        emptied = [
            name for names in (effect.truncated, effect.moved, unclear, replaced) for name in names
        ]
        await self._change(
            TableChange(
                logged.commit_ts,
                logged.query.sql,
                tuple(brought),
                tuple(_dotted((*effect.dropped, *foreign))),
                tuple(_dotted(dict.fromkeys(emptied))),
            ),
            effect.dropped,
        )
        self._note_empty(logged, effect)

    def _keyless(self, brought: Sequence[SourceTable]) -> set[TableName]:
        """The tables without a key behind a statement that brings some."""
        tables = self._tables.by_name | {name_of(table): table for table in brought}
        return {name for name, table in tables.items() if not table.has_key}

    def _note_empty(self, logged: LoggedStatement, effect: Effect) -> None:
        """Which tables have no rows behind the statement,
        so that one which changes values has nothing to change.
        """
        is_created = isinstance(logged.statement.tree, CreateTable)
        created = {name for name, table_id in effect.touched.items() if is_created and table_id < 0}
        now = self._tables.by_name
        moved = {
            table.span.table_id
            for name, table in now.items()
            if effect.names_before.get(name, name) in effect.moved
        }
        self._rows.note_rows(moved | {effect.touched[name] for name in effect.taken_over})
        empty = ({*effect.truncated} | created) - {*effect.filled, *effect.moved}
        self._rows.note_empty(now[name].span.table_id for name in empty & now.keys())

    def _unclear(self, effect: Effect, outcome: DdlOutcome) -> dict[TableName, str]:
        """Tables whose rows must be read again, by their new names, and why."""
        reasons = {
            name: "; ".join(each.unclear) for name, each in outcome.tracked.items() if each.unclear
        }
        return reasons | {
            name: why
            for name, why in outcome.lost.items()
            if name not in effect.taken_over and self._tables.by_id(effect.touched[name])
        }

    def _taken_over(
        self,
        logged: LoggedStatement,
        effect: Effect,
        outcome: DdlOutcome,
        seen: Mapping[TableName, FoundDefinition],
    ) -> dict[TableName, str]:
        reasons: dict[TableName, str] = {}
        for name in effect.taken_over & outcome.lost.keys() & seen.keys():
            source_table = self._tables.by_id(effect.touched[name])
            if source_table is not None:
                before = Table.parse(source_table.record.table_info)
                definition = self._found(seen[name].table, before, None).identified(
                    before, before.free_column_id
                )
                # A TABLE_MAP has no keys but the primary one.
                keys_known = isinstance(seen[name].table, Definition) and seen[name].sure
                context = Context(dialect=logged.dialect)
                table = definition.table(before.id)
                tracked = taken_over(before, table, context, keys_known=keys_known)
                doubt = self._copies.pop(effect.copies.get(name, name), _COPY_UNSEEN)
                unclear = [*tracked.unclear, *([doubt] if doubt else [])]
                reasons |= {name: "; ".join(unclear)} if unclear else {}
        return reasons

    def _record_after(
        self,
        logged: LoggedStatement,
        name: TableName,
        table_id: int,
        outcome: DdlOutcome,
        seen: FoundDefinition | None,
    ) -> TableRecord | None:
        """The new record of a table that a statement touched; None: it stays,
        or is gone before it has any row.
        """
        source_table, tracked = self._tables.by_id(table_id), outcome.tracked.get(name)
        # CREATE OR REPLACE keeps the id of the table it replaces, and no column.
        is_new = source_table is None or isinstance(logged.statement.tree, CreateTable)
        if is_new and seen is not None and _is_sequence(seen.table):
            self._rows.ignored.add(name)
            return None
        # A statement does not say which character set its schema gave it; what was seen does.
        if tracked is not None and not (is_new and seen is not None and seen.sure):
            definition = _definition_of(name, tracked)
            if is_new and seen is not None and isinstance(seen.table, Definition):
                definition = replace(definition, faults=(*tracked.faults, *seen.table.faults))
        elif seen is None:
            if source_table is None:
                return None
            table = Table.parse(source_table.record.table_info)
            definition = Definition(name, table.columns, table.primary_key).identified(
                table, table.free_column_id
            )
        else:
            before = tracked.table if is_new and tracked else None
            if before is None and source_table is not None:
                before = Table.parse(source_table.record.table_info)
            free = before.free_column_id if before else first_column_id(self._tables, name)
            definition = self._found(seen.table, before, None).identified(before, free)
            faults = (*definition.faults, *_faults_of(logged, name, outcome, seen))
            definition = replace(definition, faults=tuple(dict.fromkeys(faults)))
        record = record_of(definition, table_id if source_table else new_id(logged.commit_ts, name))
        return None if source_table is not None and source_table.record.whole == record else record

    def _found(
        self, seen: Definition | TableMap, before: Table | None, other: Definition | None
    ) -> Definition:
        if isinstance(seen, Definition):
            return seen
        definition = definition_of_table_map(
            seen, [*([before] if before else []), *([other] if other else [])]
        )
        if before is None:
            return definition
        return replace(definition, indexes=_kept(before, definition), collation=before.collation)

    async def _foreign(
        self, logged: LoggedStatement, effect: Effect, unclear: Mapping[TableName, str]
    ) -> Sequence[TableName]:
        """Names whose rows would be missing; what is copied anew, read again,
        or copied first, misses none.
        """
        names = {before: name for name, before in effect.names_before.items()}
        moved = {names.get(name, name): "rows move beside the log" for name in effect.moved}
        # A table that the dump is still copying begins anew, and so gets the rows that moved.
        if (
            moved
            and self._copying is not None
            and await self._copying.copies_anew(_dotted(effect.moved))
        ):
            moved = {}
        # New tables are copied whole, with what they held before the changefeed knew them.
        filled = dict.fromkeys(effect.filled, "its rows are in no event")
        if filled and self._copying is not None and await self._copying.copies(_dotted(filled)):
            filled = {}
        if filled and self._copying is None and effect.foreign:
            return effect.foreign
        again = {**unclear, **filled}
        again |= {
            name: "; ".join(filter(None, (why, unclear.get(name)))) for name, why in moved.items()
        }
        ids: dict[TableName, int] = {}
        for name in again:
            table_id = effect.touched.get(name) or self._tables.by_name[name].span.table_id
            ids[name] = table_id if table_id > 0 else new_id(logged.commit_ts, name)
        statement = " ".join(sql_statement(logged.query.sql).split())[:_STATEMENT_SHOWN]
        if again and not (
            await self._read_again(logged.commit_ts, statement, ids, again)
            or await self._copies_anew([effect.names_before.get(name, name) for name in again])
        ):
            at = f"{logged.file}:{logged.position}"
            raise _rows_moved(again, f"{statement[:_STATEMENT_IN_ERROR]!r} at {at}")
        return ()

    async def _read_again(
        self,
        commit_ts: int,
        statement: str,
        ids: Mapping[TableName, int],
        reasons: Mapping[TableName, str],
    ) -> bool:
        """Have the tables of these ids read again, behind `commit_ts`; False: no copier does it."""
        if self._copying is None:
            return False
        tables = {table_id: ".".join(name) for name, table_id in ids.items()}
        shown_reasons = {".".join(name): f"{statement}: {why}" for name, why in reasons.items()}
        return await self._copying.reads_again(Reread(commit_ts, tables, shown_reasons))

    async def apply_mismatch(
        self, mismatch: TableMapMismatch, definitions: Mapping[TableName, Definition]
    ) -> None:
        """Rows came whose tables are others than any statement of the log said; `definitions` are
        what the server says.

        Raises:
            TableIneligibleError: as `apply`.
        """
        self._check_repeated(mismatch)
        commit_ts = mismatch.commit_ts - 1
        brought: list[SourceTable] = []
        emptied: list[TableName] = []
        for name, table_map in mismatch.table_maps.items():
            table = self._mismatched(name, table_map, commit_ts, definitions.get(name))
            if table is None:
                continue
            _log.warning(
                "table changed without a statement in the log",
                table=".".join(name),
                commit_ts=mismatch.commit_ts,
            )
            emptied += await self._reread_mismatch(name, table, commit_ts)
            brought.append(table)
        await self._change(
            TableChange(commit_ts, _UNLOGGED, tuple(brought), truncated=tuple(_dotted(emptied))),
            (),
        )

    def _check_repeated(self, mismatch: TableMapMismatch) -> None:
        """Stop where what was brought in force for a transaction does not fit its rows."""
        names = {(name, mismatch.commit_ts) for name in mismatch.table_maps}
        if again := names & self._mismatches:
            shown = ", ".join(sorted(".".join(name) for name, _ in again))
            raise TableIneligibleError(
                f"{shown}: the rows at {mismatch.commit_ts} have other columns than what is known "
                "of the table right before them. Resume with --overwrite-checkpoint-ts now, then "
                "copy the table by `tidemark cli changefeed dumpstart`"
            )
        self._mismatches = names

    def _mismatched(
        self, name: TableName, table_map: TableMap, commit_ts: int, as_read: Definition | None
    ) -> SourceTable | None:
        """The table that rows show; None: the changefeed does not take it."""
        source_table = self._tables.by_name.get(name)
        if not self._catalog.wants(*name) or (as_read is None and _is_sequence(table_map)):
            self._rows.ignored.add(name)
            return None
        before = Table.parse(source_table.record.table_info) if source_table else None
        definition = self._found(table_map, before, as_read).identified(
            before, before.free_column_id if before else 1
        )
        if as_read is not None:
            faults = dict.fromkeys((*definition.faults, *as_read.faults))
            definition = replace(definition, faults=tuple(faults))
        table_id = source_table.span.table_id if source_table else new_id(commit_ts, name)
        return next(iter(self._taken(name, record_of(definition, table_id), commit_ts)), None)

    async def _reread_mismatch(
        self, name: TableName, table: SourceTable, commit_ts: int
    ) -> Sequence[TableName]:
        """Read a table again that no statement told: nobody knows what its older rows hold now, or
        which there are; its name, if the target has some of them.
        """
        is_new, table_id = name not in self._tables.by_name, table.span.table_id
        if self._copying is None or self._rows.is_empty(table_id) or not table.has_key:
            return ()
        if is_new and await self._copying.copies(_dotted([name])):
            return ()
        why = {name: _UNLOGGED_ROWS if is_new else _UNLOGGED_COLUMNS}
        if not (
            await self._read_again(commit_ts, _UNLOGGED, {name: table_id}, why)
            or await self._copies_anew([name])
        ):
            raise _rows_moved(why, f"a change that no statement of the log tells, at {commit_ts},")
        return () if is_new else (name,)

    async def _copies_anew(self, names: Sequence[TableName]) -> bool:
        """Begin tables anew that a dump is reading, as somebody asked for who resumes after a stop;
        False: one of them is in none, or new.
        """
        followed = self._tables.by_name.keys()
        return (
            self._copying is not None
            and followed >= set(names)
            and await self._copying.copies_anew(_dotted(names))
        )

    def _taken(self, name: TableName, record: TableRecord, commit_ts: int) -> Sequence[SourceTable]:
        table = self._catalog.table(record, commit_ts)
        if table is None:
            self._rows.ignored.add(name)
            return ()
        return (table,)

    async def _change(self, change: TableChange, dropped: Sequence[TableName]) -> None:
        if not (change.tables or change.dropped or change.truncated):
            return
        await self._copy_rekeyed(change.tables)
        await self._catalog.change(change)
        self._tables.apply(change.tables, dropped)
        self._rows.tables_changed()
        self._rows.ignored -= set(map(name_of, change.tables))
        if self._listener is not None:
            self._listener.changed_schema(change)

    async def _copy_rekeyed(self, tables: Sequence[SourceTable]) -> None:
        """Where a key is in another order, the last one that was copied tells nothing of what is
        still to be.
        """
        if self._copying is None:
            return
        for table in tables:
            before = self._tables.by_id(table.span.table_id)
            if before is not None and not same_keys(before, table):
                await self._copying.copies_anew([before.name])


def _definition_of(name: TableName, tracked: Tracked) -> Definition:
    table = tracked.table
    return Definition(
        name, table.columns, table.primary_key, "", tracked.faults, table.indexes, table.collation,
        table.free_column_id,
    )  # fmt: skip


def _faults_of(
    logged: LoggedStatement, name: TableName, outcome: DdlOutcome, seen: FoundDefinition
) -> tuple[str, ...]:
    """Why a table cannot be replicated, beside what the columns tell that were found.

    What a statement does not make itself may have what no event shows: a foreign key that changes
    rows, or system versioning. There the catalogue counts, which may be further.
    """
    if name in outcome.tracked:
        return outcome.tracked[name].faults
    tree = logged.statement.tree
    makes = isinstance(tree, CreateTable) and tree.like is None
    return outcome.faults.get(name, ()) + (() if makes else seen.faults)


def _recorded(name: TableName, record: TableRecord) -> Definition:
    return _definition_of(name, Tracked(Table.parse(record.table_info)))


def _kept(before: Table, definition: Definition) -> tuple[Index, ...] | None:
    """The keys of a table whose columns a TABLE_MAP gives anew: those whose columns remain."""
    names = {column.name for column in definition.columns}
    kept = tuple(
        index for index in before.indexes or () if names.issuperset(filter(None, index.columns))
    )
    return (
        kept
        if before.indexes is not None and row_key(definition.columns, kept) == definition.key
        else None
    )


def _dotted(names: Iterable[TableName]) -> list[str]:
    return list(map(".".join, names))


def _is_sequence(table: Definition | TableMap) -> bool:
    """Whether this is a sequence of MariaDB, no table: its one row is in the log as well."""
    return bool(table.columns) and table.columns[0].name == _SEQUENCE_COLUMN


def _changes_untold(names: Iterable[TableName], statement: str) -> RowsMovedError:
    shown = ", ".join(sorted(".".join(name) for name in names))
    return RowsMovedError(
        f"{sql_statement(statement)[:_STATEMENT_IN_ERROR]!r} moves rows of {shown} beside the log, and without a "
        "key the table cannot be read again: give it a key, or leave it out by --filter, and "
        "create the changefeed anew"
    )


def _rows_moved(reasons: Mapping[TableName, str], what: str) -> RowsMovedError:
    names = {".".join(name): why for name, why in reasons.items()}
    shown = ", ".join(f"{name} ({why})" for name, why in sorted(names.items()))
    table_flags = " ".join(f"--table {name}" for name in sorted(names))
    return RowsMovedError(
        f"{what} brings, "
        f"takes or changes rows that are in no event of the log: {shown}. Ask for them by "
        f"`tidemark cli changefeed dumpstart {table_flags}` (dumprestart, if a dump is under way), then "
        "resume the changefeed: what the target has of them is emptied there, and filled by the "
        "dump"
    )
