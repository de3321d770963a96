"""Turns committed events into rows in the sorter, table by table; stops where a table is not the
one that is known.

Runs in a thread, one step after the other; what needs the event loop (a change of the catalog)
comes out of it as a `TableMapMismatch`, and it goes on when that was dealt with. Rows of the
watermark table go to the listener (`watermark_rows`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from server.changefeed.table import SourceTable
from server.puller import metrics
from server.puller.mysql.ddl.tree import TableName
from server.puller.mysql.listener import WATERMARK_TABLE, LogListener
from server.puller.mysql.tables import Tables, is_hidden
from server.puller.mysql.transaction.commits import Commits
from server.puller.source import Rows
from sink.mounter import source_columns
from storage.model.span import Span
from storage.model.system_schemas import WATERMARK_SCHEMA
from storage.mysql.changes import Plan, read_changes, rows_left
from storage.mysql.charset import decode_text
from storage.mysql.event import Events
from storage.mysql.rows import SHAPES_MAX, TableMaps, TableRows
from storage.mysql.schema import INTEGERS, Column, Table
from storage.mysql.table_map import TableMap

_PARTS_MAX = 1 << 20
"""How many start_ts below the commit_ts the parts of one transaction can have."""


@dataclass(frozen=True, slots=True)
class TableMapMismatch:
    """A transaction with rows whose TABLE_MAP has other columns than the table in force, or names
    an unknown table.
    """

    table_maps: Mapping[TableName, TableMap]
    """All such tables of the transaction: the one ts before it has room for one change."""
    commit_ts: int
    """The commit_ts of the first such transaction; the one before it is free."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of transactions of a `Commits`."""

    events: Events
    commit_ts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    part: int

    def before(self, event: int) -> int:
        """How many events the transactions before the one of `event` have."""
        place = int(np.searchsorted(self.ends, event, "right"))
        return int(self.ends[place - 1]) if place else 0

    def through(self, event: int) -> int:
        """How many events the transactions up to and with the one of `event` have."""
        place = int(np.searchsorted(self.ends, event, "right"))
        return int(self.ends[place]) if place < len(self.ends) else len(self.events)

    def cut(self, first: int, last: int) -> "_Run":
        ends = self.ends[(self.ends > first) & (self.ends <= last)] - first
        return _Run(self.events[first:last], self.commit_ts[first:last], ends, self.part)

    @property
    def start_ts(self) -> npt.NDArray[np.uint64] | None:
        """None: the commit_ts less one, which nothing else of that commit_ts can follow."""
        if not self.part:
            return None
        return (self.commit_ts - _PARTS_MAX + min(self.part, _PARTS_MAX - 2)).astype(np.uint64)


class LogRows:
    """Adds the rows above `start_ts` of the tables in force; every call in the order of the log."""

    def __init__(
        self, tables: Tables, start_ts: int, rows: Rows, listener: LogListener | None = None
    ) -> None:
        self.ignored: set[TableName] = set()
        """Tables the changefeed does not take."""
        self._tables = tables
        self._start_ts = start_ts
        self._rows = rows
        self._maps = TableMaps(mariadb=True)
        self._listener = listener
        self._plans: dict[tuple[int, int], tuple[TableMap, Plan | None]] = {}
        """By the table's id and that of the object, which is kept: no other one gets its id."""
        self._empty: set[int] = set()

    def note_empty(self, table_ids: Iterable[int]) -> None:
        """These tables have no rows where the log is now: they were just created, or truncated."""
        self._empty.update(table_ids)

    def note_rows(self, table_ids: Iterable[int]) -> None:
        """These tables may have rows now that no event brought."""
        self._empty.difference_update(table_ids)

    def is_empty(self, table_id: int) -> bool:
        """Whether the table was seen to begin empty, and no row of it since:
        a DDL changes no values then.
        """
        return table_id in self._empty

    def connected(self, *, mariadb: bool) -> None:
        """Forget what the server has said about its tables: another connection has begun, perhaps
        to another server.
        """
        self._maps = TableMaps(mariadb=mariadb)
        self.tables_changed()

    def log_begins(self) -> None:
        """Forget the numbers by which row events name their tables: from here on the server gives
        them out anew.
        """
        self._maps.clear()
        self.tables_changed()

    def tables_changed(self) -> None:
        """Drop what was prepared for the former tables: a schema change is in force."""
        self._plans.clear()

    def add(self, commits: Commits) -> Iterator[TableMapMismatch]:
        """Add the rows of these transactions.

        Before a `TableMapMismatch` is yielded, the rows of all transactions before it are added.

        Raises:
            RowImageError, EventUnsupportedError, CorruptError: the rows cannot be read.
        """
        first = int(np.searchsorted(commits.commit_ts, self._start_ts, "right"))
        rest = _Run(commits.events, commits.commit_ts, commits.ends, commits.part).cut(
            first, len(commits.events)
        )
        while len(rest.events):
            groups = self._maps.group(rest.events)
            mismatched = self._mismatched(groups)
            watermark = self._watermark(groups)
            if mismatched and (
                watermark is None or mismatched[0].numbers[0] < watermark.numbers[0]
            ):
                event = int(mismatched[0].numbers[0])
                cut, end = rest.before(event), rest.through(event)
                self._add_all(rest.cut(0, cut))
                # Of two TABLE_MAPs of a table the first one is behind what nobody told.
                maps = {
                    _name(group.table): group.table
                    for group in reversed(mismatched)
                    if group.numbers[0] < end
                }
                yield TableMapMismatch(maps, int(rest.commit_ts[event]))
            elif watermark is not None:
                cut = rest.through(int(watermark.numbers[0]))
                self._pass_watermark(rest.cut(0, cut))
            else:
                self._add_groups(rest, groups)
                return
            rest = rest.cut(cut, len(rest.events))

    def _add_all(self, part: _Run) -> None:
        if len(part.events):
            self._add_groups(part, self._maps.group(part.events))

    def _add_groups(self, part: _Run, groups: Sequence[TableRows]) -> None:
        commit_ts = part.commit_ts.astype(np.uint64)
        for group in groups:
            table = self._tables.by_name.get(_name(group.table))
            plan = self._plan(table, group.table) if table is not None else None
            if table is None or plan is None:
                continue
            changes = read_changes(part.events, group, plan, commit_ts, part.start_ts)
            self._rows.add(table.span, changes.batch)
            self._empty.discard(table.span.table_id)
            metrics.ROWS.inc(changes.batch.num_rows)
            if self._listener is not None:
                self._listener.changed(table.span, changes.keys)

    def _pass_watermark(self, part: _Run) -> None:
        """Add the rows of `part`, then give its last transaction's watermarks to the listener, and
        add what that returns.
        """
        self._add_all(part)
        if self._listener is None:
            return
        groups = self._maps.group(part.events)
        for group in filter(_is_watermark, groups):
            for values, event in watermark_rows(part.events, group):
                self._put(self._listener.watermark(values, int(part.commit_ts[event])))

    def _put(self, batches: Sequence[tuple[Span, pa.RecordBatch]]) -> None:
        for span, batch in batches:
            self._rows.add(span, batch)

    def _mismatched(self, groups: Sequence[TableRows]) -> Sequence[TableRows]:
        """The rows whose table has other columns in its TABLE_MAP than are known, or is not known,
        in the order of the log.
        """
        mismatched = [group for group in groups if not self._is_known(group.table)]
        return sorted(mismatched, key=lambda group: int(group.numbers[0]))

    def _is_known(self, table_map: TableMap) -> bool:
        name = _name(table_map)
        if name in self.ignored or name[0] == WATERMARK_SCHEMA:
            return True
        table = self._tables.by_name.get(name)
        return table is not None and self._plan(table, table_map) is not None

    def _plan(self, table: SourceTable, table_map: TableMap) -> Plan | None:
        """How rows of this shape are read; None: the table has other columns."""
        key = (table.span.table_id, id(table_map))
        if table_map.refusal:
            return None
        if key not in self._plans:
            if len(self._plans) >= SHAPES_MAX:
                self._plans.clear()
            record = Table.parse(table.record.table_info)
            own, behind = (
                table_map.columns[: len(record.columns)],
                table_map.columns[len(record.columns) :],
            )
            fits = record.columns == own and all(map(is_hidden, behind))
            read = source_columns(table.mounter)
            self._plans[key] = table_map, Plan.of(record, behind, read) if fits else None
        return self._plans[key][1]

    def _watermark(self, groups: Sequence[TableRows]) -> TableRows | None:
        if self._listener is None:
            return None
        return next(filter(_is_watermark, groups), None)


def _is_watermark(group: TableRows) -> bool:
    return (group.table.schema, group.table.table) == (WATERMARK_SCHEMA, WATERMARK_TABLE)


def _name(table_map: TableMap) -> TableName:
    return table_map.schema, table_map.table


def watermark_rows(events: Events, rows: TableRows) -> Iterator[tuple[Mapping[str, object], int]]:
    """Each written row, its texts and integers as such, and the number of its event.

    Raises:
        RowImageError, CorruptError: they cannot be read.
    """
    plan = Plan.of(rows.table.to_table(1))
    for cells, event in rows_left(events, rows, plan):
        columns = zip(plan.table.columns, cells, strict=True)
        yield {column.name: _value(column, cell) for column, cell in columns}, event


def _value(column: Column, cell: bytes | None) -> str | int | bytes | None:
    if cell is None:
        return None
    if column.type in INTEGERS:
        return int.from_bytes(cell, "little", signed=not column.unsigned)
    return decode_text(column.charset, cell) if column.is_text else cell
