"""Brings schema changes of the log in force: what a statement did, with the columns that were true behind it."""

from collections.abc import Collection, Mapping, Sequence

import structlog

from server.puller.mysql.cascade import cascades_in
from server.puller.mysql.definition import Definition
from server.puller.mysql.errors import RowsMovedError
from server.puller.mysql.held import with_held
from server.puller.mysql.listener import Copying, LogListener
from server.puller.mysql.rows import LogRows, Untold
from server.puller.mysql.statement import Kind, TableName
from server.puller.mysql.tables import Effect, Tables, name_of, new_id, record_of, same_keys, told_by_log
from server.puller.mysql.transactions import Stated
from server.puller.source import Catalog, TableChange
from server.puller.table import SourceTable, TableRecord
from storage.mysql.schema import Table
from storage.mysql.table_map import TableMap

_SEQUENCE_COLUMN = "next_not_cached_value"
_log = structlog.get_logger(__name__)
Found = Definition | TableMap


class DdlChanges:
    """Called on the event loop, in the order of the log."""

    def __init__(
        self,
        tables: Tables,
        rows: LogRows,
        catalog: Catalog,
        listener: LogListener | None = None,
        copying: Copying | None = None,
    ) -> None:
        self._tables = tables
        self._rows = rows
        self._catalog = catalog
        self._listener = listener
        self._copying = copying

    def effect_of(self, stated: Stated) -> Effect:
        """What a statement does to the changefeed's tables.

        Raises:
            StatementLoggedError, DdlUnknownError: rows would be lost.
        """
        if stated.statement.kind is not Kind.DDL:
            self._tables.check(stated.statement, stated.query.sql, f"{stated.file}:{stated.position}")
            return Effect()
        self._rows.ignored -= {action.to or action.name for action in stated.statement.actions}
        return self._tables.effect(stated.statement, self._catalog.wants)

    async def apply(self, stated: Stated, effect: Effect, found: Mapping[TableName, Found]) -> None:
        """Bring a statement in force; `found` are the tables right behind it.

        Raises:
            TableIneligibleError: a table can no longer be replicated.
            RowsMovedError: rows came or went beside the log, and nobody copies them.
        """
        foreign = await self._foreign(stated, effect)
        brought: list[SourceTable] = []
        for name, table_id in effect.touched.items():
            record = self._record(name, table_id, found.get(name), stated.commit_ts, query=stated.query.sql)
            if record is not None:
                brought += self._taken(name, record)
        await self._change(
            TableChange(
                stated.commit_ts,
                stated.query.sql,
                tuple(brought),
                tuple(map(".".join, (*effect.dropped, *foreign))),
                tuple(map(".".join, dict.fromkeys((*effect.truncated, *effect.moved)))),
            ),
            effect.dropped,
        )

    async def _foreign(self, stated: Stated, effect: Effect) -> Sequence[TableName]:
        """Names whose rows would be missing; what is copied anew, or for the first time, misses none."""
        moved, filled = (frozenset(map(".".join, names)) for names in (effect.moved, effect.filled))
        if moved and not (self._copying is not None and await self._copying.copies_anew(moved)):
            raise _rows_moved(moved, stated)
        if not filled or (self._copying is not None and await self._copying.copies(filled)):
            return ()
        if self._copying is not None or not effect.foreign:
            raise _rows_moved(filled, stated)
        return effect.foreign

    async def apply_untold(self, untold: Untold, found: Definition | None) -> None:
        """Rows came whose table is another one than any statement of the log said; `found` is what the server says.

        Raises:
            TableIneligibleError: as `apply`.
        """
        name, told = untold.name, untold.told
        known = self._tables.by_name.get(name)
        if not self._catalog.wants(*name) or (found is None and told.columns[0].name == _SEQUENCE_COLUMN):
            self._rows.ignored.add(name)
            return
        if not told.is_full:
            told.to_table(0)  # raises RowMetadataError
        table_id = known.span.table_id if known else -1
        record = self._record(name, table_id, told, untold.commit_ts - 1, other=found)
        assert record is not None, "the log has told of it"
        brought = self._taken(name, record)
        if not brought:
            return
        _log.warning("table changed without a statement in the log", table=".".join(name), commit_ts=untold.commit_ts)
        await self._change(TableChange(untold.commit_ts - 1, "/* as rows have it */", tuple(brought)), ())

    def _record(
        self,
        name: TableName,
        table_id: int,
        found: Found | None,
        commit_ts: int,
        *,
        query: str = "",
        other: Definition | None = None,
    ) -> TableRecord | None:
        """The new record of a table; None where nothing changes, or the table is gone before it has any row."""
        known = self._tables.by_id(table_id)
        if found is None and known is None:
            return None
        if isinstance(found, TableMap):
            keys = [Table.parse(known.record.table_info)] if known else []
            found = told_by_log(found, [*keys, *([other] if other else [])])
        if found is None:
            assert known is not None
            table = Table.parse(known.record.table_info)
            found = Definition(name, table.columns, table.primary_key)
        columns = (
            with_held(found.columns, Table.parse(known.record.table_info).columns, query) if known else found.columns
        )
        faults = found.faults or cascades_in(query)
        definition = Definition(name, columns, found.key, found.engine, faults)
        record = record_of(definition, table_id if known else new_id(commit_ts, name))
        return None if known is not None and known.record.whole == record else record

    def _taken(self, name: TableName, record: TableRecord) -> Sequence[SourceTable]:
        table = self._catalog.table(record)
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
        """Where a key is in another order, the last one that was copied tells nothing of what is still to be."""
        if self._copying is None:
            return
        for table in tables:
            before = self._tables.by_id(table.span.table_id)
            if before is not None and not same_keys(before, table):
                await self._copying.copies_anew([before.name])


def _rows_moved(names: Collection[str], stated: Stated) -> RowsMovedError:
    shown, asked = ", ".join(sorted(names)), " ".join(f"--table {name}" for name in sorted(names))
    return RowsMovedError(
        f"{' '.join(stated.query.sql.split())[:120]!r} at {stated.file}:{stated.position} brings or takes rows of "
        f"{shown} that are in no event of the log. Ask for them by `tidemark cli changefeed dumpstart {asked}` "
        "(dumprestart, if a dump is under way), then resume the changefeed: what the target has of them is emptied "
        "there, and filled by the dump"
    )
