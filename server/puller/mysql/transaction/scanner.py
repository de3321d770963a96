"""What tables are right behind a place in the log,
even if we read it late and the server's catalogue is further.

The catalogue is true for a place if nothing between that place and now is about the table. So the
log is read ahead, on a connection of its own, from the place to the present: the first TABLE_MAP of
a table tells its columns; a table that is not met keeps what the catalogue says. A DDL that is met
only moves names: no row is between the place and it, so any columns do until it is reached. What is
met later, while the catalogue was being read, is looked at again.

What was read ahead is kept (`LogIndex`), so that many statements that ask, one behind the other,
read the rest of the log once and not each of them: a migration that makes a thousand tables does so
while the changefeed is behind, too.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from server.puller.mysql.ddl.definition import Definition
from server.puller.mysql.ddl.statement import (
    Action,
    Kind,
    Statement,
    Verb,
    dialect_of,
    statement_of,
)
from server.puller.mysql.ddl.tokens import Dialect, NotUnderstoodError, tokens_of
from server.puller.mysql.ddl.tree import Harmless, TableName
from server.puller.mysql.log.stream import LogPlace, open_stream
from server.puller.mysql.session.catalogue import read_definitions
from server.puller.mysql.session.connection import Session, log_in_to
from server.puller.mysql.session.options import MySqlOptions
from storage.mysql.compressed import expanded
from storage.mysql.control import MariaGtid, Query, Rotate
from storage.mysql.event import HEADER_BYTES, Events, EventType
from storage.mysql.table_map import ID_BYTES, TableMap

_TAKE_S = 10.0
_IS_SEEN = np.isin(
    np.arange(256),
    [
        EventType.TABLE_MAP,
        EventType.QUERY,
        EventType.MARIADB_GTID,
        EventType.FORMAT_DESCRIPTION,
        EventType.ROTATE,
    ],
)
# the server's id for tools that read once: it evicts nobody
_ANONYMOUS_READER = 0
_FORGET_MIN: Final = 4096
"""How many entries of an index that are behind the reader are worth to be dropped at once."""


Place: TypeAlias = tuple[str, int]
"""A file of a server's log, and an offset in it."""


@dataclass(frozen=True, slots=True)
class TableSearch:
    """A table at a place of the log, as far as what was read behind it tells."""

    name: TableName
    now: TableName
    """The name that it has where it was met, or where what was read ends."""
    table_map: bytes | None = None
    """The body of its first TABLE_MAP."""
    gone: bool = False
    altered: bool = False
    """Whether another DDL came before what was found: it tells of the table behind that."""

    @property
    def is_open(self) -> bool:
        """Whether it was not met: the catalogue tells, if the log has no more."""
        return self.table_map is None and not self.gone


@dataclass(frozen=True, slots=True)
class FoundDefinition:
    """A table's definition that was found; not `sure`: behind another DDL of the table."""

    table: Definition | TableMap
    sure: bool = True
    faults: tuple[str, ...] = ()
    """Why it cannot be replicated, as the catalogue says by now: a TABLE_MAP does not tell."""


class LogIndex:
    """An index of what the log says of tables from `begin` to `end`: each DDL, and the first
    TABLE_MAP of a table behind each DDL of it. Pure.
    """

    def __init__(self, place: Place, dialect: Dialect) -> None:
        self.begin = place
        self.end = place
        self._dialect = dialect
        self._orders: list[tuple[int, int]] = []
        """Where each entry stands, ascending."""
        self._entries: list[Action | bytes | None] = []
        """A DDL's action; the body of a TABLE_MAP; None: triggers may have ended."""
        self._by_name: dict[TableName, list[int]] = defaultdict(list)
        """The entries of each table by their number; of schemas that are dropped without one."""
        self._endings: list[int] = []
        """The entries that are None."""
        self._mapped: set[TableName] = set()
        """Tables with a TABLE_MAP since their last DDL."""
        self._mapped_ids: set[int] = set()
        """The server's numbers of tables since the last DDL of any."""
        self._passes = False
        """Whether the statement that comes changes nothing:
        it is a phase of an ALTER that is not its end.
        """

    def see(self, events: Events) -> None:
        """Take the next events of the log, without compressed ones."""
        types, positions = events.types, events.next_positions
        first = 0
        for number in np.flatnonzero(_IS_SEEN[types]).tolist():
            kind = types[number]
            if positions[number]:
                self.end = self.end[0], int(positions[number])
            if kind == EventType.ROTATE:
                rotate = Rotate.parse(events.body(number))
                self.end, first = (rotate.file, rotate.position), number + 1
            else:
                self._see(events, number, kind)
        # Those that were made for this reader only have no place.
        real = positions[first:][positions[first:] > 0]
        if len(real):
            self.end = self.end[0], int(real[-1])

    def _see(self, events: Events, number: int, kind: int) -> None:
        if kind == EventType.TABLE_MAP:
            at = events.begin[number : number + 1] + HEADER_BYTES
            table_id = int(events.data.number(at, ID_BYTES)[0])
            if table_id not in self._mapped_ids:
                self._mapped_ids.add(table_id)
                # MariaDB 11.8 gives events within a transaction no places.
                has_place = bool(events.next_positions[number])
                self.see_table(events.body(number), behind=int(not has_place))
        elif kind == EventType.MARIADB_GTID:
            gtid = MariaGtid.parse(events.header(number), events.body(number))
            self._passes = gtid.changes_nothing
        elif kind == EventType.FORMAT_DESCRIPTION:
            self._dialect = dialect_of(events.body(number), self._dialect)
            self._mapped_ids.clear()
        elif not self._passes:
            query = Query.parse(events.body(number))
            self.see_statement(statement_of(query, self._dialect), query.sql)

    def see_table(self, body: bytes, *, behind: int = 0) -> None:
        """Take the body of a TABLE_MAP at `end`, or `behind` what stands there."""
        name = TableMap.names(body)
        if name not in self._mapped:
            self._mapped.add(name)
            self._put(body, name, behind=behind)

    def see_statement(self, statement: Statement, sql: str) -> None:
        """Take a statement at `end`."""
        if statement.kind is not Kind.DDL:
            if _may_end_triggers(statement, sql):
                self._endings.append(len(self._entries))
                self._put(None)
            return
        self._mapped_ids.clear()
        for action in statement.actions:
            names = [action.name] if action.to is None else [action.name, action.to]
            if action.verb is Verb.SCHEMA_DROPPED:
                schema = action.name[0]
                self._mapped = {name for name in self._mapped if name[0] != schema}
            self._mapped.difference_update(names)
            self._put(action, *names)

    def _put(self, entry: Action | bytes | None, *names: TableName, behind: int = 0) -> None:
        for name in names:
            self._by_name[name].append(len(self._entries))
        file, position = _order(self.end)
        self._orders.append((file, position + behind))
        self._entries.append(entry)

    def search(self, name: TableName, place: Place) -> TableSearch:
        """Look for a table that has this name at `place`, right behind a DDL of it."""
        search = TableSearch(name, name)
        at = bisect_right(self._orders, _order(place))
        while search.is_open and (number := self._next(search.now, at)) is not None:
            at, entry = number + 1, self._entries[number]
            if isinstance(entry, bytes):
                search = replace(search, table_map=entry)
            elif entry is not None:
                search = _behind(search, entry)
        return search

    def _next(self, name: TableName, at: int) -> int | None:
        """The first entry of a table, or of its schema, from the entry `at` on."""
        entries: list[int] = []
        for numbers in (self._by_name.get(name, ()), self._by_name.get((name[0], ""), ())):
            place = bisect_right(numbers, at - 1)
            entries += numbers[place : place + 1]
        return min(entries, default=None)

    def is_known_alone(self, name: TableName, place: Place) -> bool:
        """Whether a table had at `place` no other triggers, and was no view, than at `end`."""
        at = bisect_right(self._orders, _order(place))
        ends = bool(self._endings) and self._endings[-1] >= at
        return not ends and self._made_behind(name, at)

    def _made_behind(self, name: TableName, at: int) -> bool:
        while (number := self._next(name, at)) is not None:
            at, entry = number + 1, self._entries[number]
            if isinstance(entry, Action) and entry.verb not in (Verb.ALTERED, Verb.TRUNCATED):
                return False
        return True

    def without(self, place: Place) -> "LogIndex":
        """The same without what is before `place`, if that is much."""
        first = bisect_right(self._orders, _order(place))
        if first < max(_FORGET_MIN, len(self._entries) // 2):
            return self
        rest = LogIndex(place, self._dialect)
        rest.end, rest._passes = self.end, self._passes
        rest._mapped, rest._mapped_ids = self._mapped, self._mapped_ids
        rest._orders, rest._entries = self._orders[first:], self._entries[first:]
        rest._endings = [number - first for number in self._endings if number >= first]
        for name, numbers in self._by_name.items():
            if kept := [number - first for number in numbers if number >= first]:
                rest._by_name[name] = kept
        return rest


def _behind(search: TableSearch, action: Action) -> TableSearch:
    """The search behind an action of its table, or of its schema."""
    if action.verb is Verb.SCHEMA_DROPPED:
        return replace(search, gone=True)
    if action.name != search.now:
        return search  # another table gets this name, when it is free
    if action.verb is Verb.DROPPED:
        return replace(search, gone=True)
    if action.verb is Verb.RENAMED and action.to is not None:
        return replace(search, now=action.to)
    return replace(search, altered=search.altered or action.verb is Verb.ALTERED)


def _may_end_triggers(statement: Statement, sql: str) -> bool:
    """Whether a table may have had a trigger before a statement that it has not behind it."""
    if statement.kind is Kind.UNKNOWN:
        return "trigger" in statement.words
    if statement.tree != Harmless("trigger"):
        return False
    try:
        words = [token.text.upper() for token in tokens_of(sql, Dialect())[:2]]
    except NotUnderstoodError:
        return True
    return words[:1] != ["CREATE"] or words[1:] == ["OR"]


class LogAhead:
    """Reads the log of one server ahead, each part once; used by one thread at a time."""

    def __init__(self, options: MySqlOptions, *, fold_case: bool) -> None:
        self._options = options
        self._dialect = Dialect(fold_case=fold_case)
        self._index = LogIndex(("", 0), self._dialect)

    def definitions(
        self, session: Session, names: Sequence[TableName], place: Place
    ) -> dict[TableName, FoundDefinition]:
        """The tables of these names right behind a DDL of them that ends at a place of the log of
        the session's server; without those that are gone.

        Raises:
            MySqlUnavailableError, LogPurgedError, …: the server or its log cannot be read.
        """
        self._go_to(place)
        while True:
            end = log_end(session)
            searches = self._searched(session, names, place, end)
            definitions = read_definitions(
                session, [each.now for each in searches if not each.gone]
            )
            again = log_end(session)
            if again == end or not any(each.is_open for each in searches):
                break
            # The log may have gone on about one of them while the catalogue was read.
            if self._searched(session, names, place, again) == searches:
                break
        return _answer(searches, definitions, mariadb=session.flavor.is_mariadb)

    def changed_alone(self, session: Session, name: TableName, place: Place) -> bool:
        """Whether the catalogue, asked before, tells of a table's triggers at a place.

        Raises as `definitions`.
        """
        self._go_to(place)
        for _ in self._read(session, log_end(session)):
            pass
        return self._index.is_known_alone(name, place)

    def _go_to(self, place: Place) -> None:
        if is_before(place, self._index.begin) or is_before(self._index.end, place):
            self._index = LogIndex(place, self._dialect)
        self._index = self._index.without(place)

    def _searched(
        self, session: Session, names: Sequence[TableName], place: Place, end: Place
    ) -> list[TableSearch]:
        """Read on until all tables are met, or to `end`."""
        searches = [self._index.search(name, place) for name in names]
        reading = self._read(session, end)
        while any(each.is_open for each in searches) and next(reading, False):
            searches = [self._index.search(name, place) for name in names]
        reading.close()
        return searches

    def _read(self, session: Session, end: Place) -> Generator[bool, None, None]:
        """Read on to `end`, perhaps some more; yields behind each part."""
        index = self._index
        if not is_before(index.end, end):
            return
        reader = log_in_to(session.address, self._options)
        place = LogPlace("", *index.end)
        stream = open_stream(reader, place, self._options, _ANONYMOUS_READER, follow=False)
        try:
            while not stream.ended:
                for arrived in stream.take(_TAKE_S):
                    for events in expanded(arrived):
                        index.see(events)
                yield True
                if not is_before(index.end, end):
                    return
        finally:
            stream.close()


def _answer(
    searches: Sequence[TableSearch], definitions: dict[TableName, Definition], *, mariadb: bool
) -> dict[TableName, FoundDefinition]:
    """Each table under the name that it has at the place:
    it may have been found under another one.
    """
    answer = {}
    for search in searches:
        definition = definitions.get(search.now)
        if search.gone:
            continue
        if search.table_map is not None:
            schema, table = search.name
            table_map = TableMap.parse(search.table_map, mariadb=mariadb)
            answer[search.name] = FoundDefinition(
                replace(table_map, schema=schema, table=table),
                not search.altered,
                definition.faults if definition is not None else (),
            )
        elif definition is not None:
            answer[search.name] = FoundDefinition(
                replace(definition, name=search.name), not search.altered
            )
    return answer


def log_end(session: Session) -> Place:
    """File and offset at which the server's log ends now."""
    statement = "SHOW MASTER STATUS"
    if not session.flavor.is_mariadb and session.flavor.number >= (8, 4):
        statement = "SHOW BINARY LOG STATUS"
    rows = session.execute(statement)
    return (str(rows[0][0]), int(rows[0][1])) if rows else ("", 0)


def is_before(place: Place, other: Place) -> bool:
    """Whether a place in a server's log is before another one."""
    return _order(place) < _order(other)


def _order(place: Place) -> tuple[int, int]:
    number = place[0].rpartition(".")[2]
    return (int(number) if number.isdecimal() else 0), place[1]
