"""The tables of a changefeed at a place in the log: what a DDL does to them, by name. Pure.

Invariants:
1. A table keeps its id, and so its span, through ALTER, RENAME and TRUNCATE; a new one gets an id that depends on its
   name and the commit_ts of its DDL only, so that reading the log again gives the same.
2. Where one statement moves a table out of the changefeed's names and another table into its place, as gh-ost and
   pt-online-schema-change end, the name keeps its id: it is the same table with other columns.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from server.puller.mysql.definition import Definition
from server.puller.mysql.errors import DdlUnknownError, StatementLoggedError
from server.puller.mysql.statement import Action, Kind, Statement, TableName, Verb
from server.puller.table import SourceTable, TableRecord
from storage.mysql.schema import Column, Table
from storage.mysql.table_map import TableMap
from storage.mysql.types import INTEGERS, STRINGS, Type

_NEW: Final = -1
_ID_BITS = 48
Wants = Callable[[str, str], bool]


@dataclass(slots=True)
class Effect:
    """What a statement does: `touched` tables by their new names, with their ids, -1 for new ones.

    Of `moved` tables rows came or went without row events; `filled` ones are new, and had rows before: where they were
    not taken by the names they had then, these are the `foreign` ones.
    """

    touched: dict[TableName, int] = field(default_factory=dict)
    dropped: list[TableName] = field(default_factory=list)
    truncated: list[TableName] = field(default_factory=list)
    moved: list[TableName] = field(default_factory=list)
    filled: list[TableName] = field(default_factory=list)
    foreign: list[TableName] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.touched or self.dropped or self.truncated or self.moved)


class Tables:
    """Those in force."""

    def __init__(self, tables: Iterable[SourceTable]) -> None:
        self.by_name: dict[TableName, SourceTable] = {name_of(table): table for table in tables}

    def by_id(self, table_id: int) -> SourceTable | None:
        """One of them, whatever its name."""
        return next((table for table in self.by_name.values() if table.span.table_id == table_id), None)

    def effect(self, statement: Statement, wants: Wants) -> Effect:
        """What a DDL does to them."""
        moves = _Moves({name: table.span.table_id for name, table in self.by_name.items()}, wants)
        for action in statement.actions:
            moves.apply(action)
        return moves.ended()

    def check(self, statement: Statement, sql: str, at: str) -> None:
        """Refuse a statement that may change rows of ours, or that is not understood and may change a table of ours.

        Raises:
            StatementLoggedError, DdlUnknownError: with the statement's beginning, and where it stands in the log.
        """
        mine = {table.lower() for _, table in self.by_name}
        head = sql.split(None, 1)[0].lower() if sql.strip() else ""
        text = sql.lower()
        odd = {name for name in mine if not re.fullmatch(r"[\w$]+", name)}  # these are no words
        seen = sorted(mine & statement.words | {name for name in odd if name in text})
        if statement.kind is Kind.ROWS and mine and (seen or head in ("call", "do", "select", "load")):
            raise StatementLoggedError(
                f"the log has a change of rows as a statement ({_short(sql)!r} at {at}), so its rows are not known: "
                "set binlog_format=ROW on the server and in all sessions, then create the changefeed anew with a dump"
            )
        if statement.kind is Kind.UNKNOWN and seen:
            raise DdlUnknownError(
                f"{_short(sql)!r} at {at} may change {', '.join(seen)}, and is not understood: if it does not, resume "
                "the changefeed after it with --overwrite-checkpoint-ts; else create it anew with a dump"
            )

    def apply(self, tables: Iterable[SourceTable], dropped: Iterable[TableName]) -> None:
        """A change is in force."""
        for name in dropped:
            self.by_name.pop(name, None)
        brought = {table.span.table_id: name_of(table) for table in tables}
        for name, table in list(self.by_name.items()):
            if brought.get(table.span.table_id, name) != name:
                del self.by_name[name]  # it was renamed
        self.by_name |= {name_of(table): table for table in tables}


class _Moves:
    """Ids by name while the actions of one statement go by."""

    def __init__(self, ids: dict[TableName, int], wants: Wants) -> None:
        self._before = dict(ids)
        self._now = ids
        self._hidden: dict[TableName, int] = {}
        """Tables that have names the changefeed does not take."""
        self._effect = Effect()
        self._wants = wants

    def apply(self, action: Action) -> None:
        name, now = action.name, self._now
        if action.verb is Verb.SCHEMA_DROPPED:
            for each in [each for each in now if each[0] == name[0]]:
                self._drop(each)
        elif action.verb is Verb.DROPPED:
            self._drop(name)
        elif action.verb is Verb.RENAMED and action.to is not None:
            self._rename(name, action.to)
        elif action.verb is Verb.TRUNCATED:
            if name in now:
                self._effect.truncated.append(name)
        elif action.verb is Verb.ROWS_MOVED:
            if name in now and name not in self._effect.moved:
                self._effect.moved.append(name)
        elif action.verb is Verb.FILLED:
            if self._wants(*name):
                self._effect.touched[name] = now.setdefault(name, _NEW)
                self._effect.filled.append(name)
        elif name in now or self._wants(*name):  # created or altered
            self._effect.touched[name] = now.setdefault(name, _NEW)

    def ended(self) -> Effect:
        effect, before = self._effect, self._before
        hidden = {self._name_before(table_id) for table_id in self._hidden.values()}
        for name, table_id in self._now.items():
            if table_id == _NEW and name in hidden:  # another table took its place
                effect.touched[name] = before[name]
        gone = [name for name in before if name not in self._now and name not in effect.dropped]
        effect.dropped += gone
        effect.moved = [name for name in effect.moved if name in self._now]
        effect.filled = [name for name in effect.filled if effect.touched.get(name) == _NEW]
        if not any(table_id == _NEW for table_id in effect.touched.values()):
            effect.foreign.clear()
        return effect

    def _drop(self, name: TableName) -> None:
        if self._now.pop(name, None) is not None:
            self._effect.touched.pop(name, None)
            if name in self._before:
                self._effect.dropped.append(name)
        self._hidden.pop(name, None)

    def _rename(self, old: TableName, new: TableName) -> None:
        table_id = self._now.pop(old, None)
        self._effect.touched.pop(old, None)
        if table_id is None:
            table_id = self._hidden.pop(old, None)
        if not self._wants(*new):
            if table_id is not None:
                self._hidden[new] = table_id
            return
        if table_id is None:
            self._effect.foreign.append(old)
            self._effect.filled.append(new)
        self._now[new] = self._effect.touched[new] = _NEW if table_id is None else table_id

    def _name_before(self, table_id: int) -> TableName | None:
        return next((name for name, each in self._before.items() if each == table_id), None)


def name_of(table: SourceTable) -> TableName:
    """Schema and table."""
    return table.record.schema_name, table.record.table_name


def same_keys(one: SourceTable, other: SourceTable) -> bool:
    """Whether both versions of a table have the same columns as their key, with values in the same order."""
    mine, its = (Table.parse(each.record.table_info) for each in (one, other))
    return _ordered_by(mine) == _ordered_by(its)


def _ordered_by(table: Table) -> Sequence[tuple[str, Column | Type | int]]:
    return [(column.name, _order(column)) for column in map(table.columns.__getitem__, table.key_places)]


def _order(column: Column) -> Column | Type | int:
    """What is equal of two columns whose values are in the same order; of texts the collation."""
    if column.type in INTEGERS:
        return Type.LONGLONG
    return column.collation if column.type in STRINGS else column


def new_id(commit_ts: int, name: TableName) -> int:
    """Of a table that a DDL at `commit_ts` brings; above the ids of a snapshot, which are small, and below 2^53."""
    digest = hashlib.blake2b(f"{commit_ts} {name[0]}\0{name[1]}".encode(), digest_size=_ID_BITS // 8).digest()
    return int.from_bytes(digest, "big") | 1 << _ID_BITS


def record_of(definition: Definition, table_id: int) -> TableRecord:
    """The record of a table; what makes it ineligible is noted in it."""
    doc = definition.table(table_id).to_doc()
    if definition.faults:
        doc["ineligible"] = "; ".join(definition.faults)
    return TableRecord(definition.name[0], doc)


def told_by_log(told: TableMap, known: Sequence[Table | Definition]) -> Definition:
    """A definition as a TABLE_MAP event has it; where that has no primary key, the key is that of the `known` ones."""
    places = {column.name: column for column in told.columns}
    keys = [told.primary_key, *(each.key if isinstance(each, Definition) else each.primary_key for each in known)]
    usable = (key for key in keys if key and all(name in places and not places[name].nullable for name in key))
    return Definition((told.schema, told.table), told.columns, next(usable, ()))


def _short(sql: str) -> str:
    return " ".join(sql.split())[:120]
