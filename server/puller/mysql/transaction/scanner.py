"""What tables are right behind a place in the log,
even if we read it late and the server's catalogue is further.

The catalogue is true for a place if nothing between that place and now is about the table. So the
log is read ahead, on a connection of its own, from the place to the present: the first TABLE_MAP of
a table tells its columns; a table that is not met keeps what the catalogue says. A DDL that is met
only moves names: no row is between the place and it, so any columns do until it is reached. What is
met later, while the catalogue was being read, is looked at again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from server.puller.mysql.ddl.definition import Definition
from server.puller.mysql.ddl.statement import Kind, Statement, Verb, dialect_of, statement_of
from server.puller.mysql.ddl.tokens import Dialect
from server.puller.mysql.ddl.tree import TableName
from server.puller.mysql.log.stream import LogPlace, open_stream
from server.puller.mysql.session.catalogue import read_definitions
from server.puller.mysql.session.connection import Session, log_in_to
from server.puller.mysql.session.options import MySqlOptions
from storage.mysql.compressed import expanded
from storage.mysql.control import MariaGtid, Query, Rotate
from storage.mysql.event import Events, EventType
from storage.mysql.table_map import TableMap

_TAKE_S = 10.0
_IS_SEEN = np.isin(
    np.arange(256),
    [EventType.TABLE_MAP, EventType.QUERY, EventType.MARIADB_GTID, EventType.FORMAT_DESCRIPTION],
)
# the server's id for tools that read once: it evicts nobody
_ANONYMOUS_READER = 0


Place: TypeAlias = tuple[str, int]
"""A file of a server's log, and an offset in it."""


@dataclass(slots=True)
class TableSearch:
    """A table whose definition is looked for, under the name it has at the place reached."""

    name: TableName
    table_map: TableMap | None = None
    gone: bool = False
    altered: bool = False
    """Whether another DDL came before what was found: it tells of the table behind that."""


@dataclass(frozen=True, slots=True)
class FoundDefinition:
    """A table's definition that was found; not `sure`: behind another DDL of the table."""

    table: Definition | TableMap
    sure: bool = True


@dataclass(slots=True)
class LogSearch:
    """Looks for definitions of tables in the events behind a place of the log. Pure."""

    dialect: Dialect
    searches: dict[TableName, TableSearch]
    """The searches that go on, by the names that their tables have at the place reached."""
    done: list[TableSearch] = field(default_factory=list)
    met: bool = False
    """Whether an event about one of the tables came since this was last set to False."""
    passes: bool = False
    """Whether the statement that comes changes nothing:
    it is a phase of an ALTER that is not its end.
    """

    def see(self, events: Events, *, mariadb: bool) -> None:
        """Take the next events of the log."""
        types = events.types
        for event_number in np.flatnonzero(_IS_SEEN[types]).tolist():
            if types[event_number] == EventType.TABLE_MAP:
                self._see_table(TableMap.parse(events.body(event_number), mariadb=mariadb))
            elif types[event_number] == EventType.MARIADB_GTID:
                self.passes = MariaGtid.parse(
                    events.header(event_number), events.body(event_number)
                ).changes_nothing
            elif types[event_number] == EventType.FORMAT_DESCRIPTION:
                self.dialect = dialect_of(events.body(event_number), self.dialect)
            elif not self.passes:
                self._see_statement(
                    statement_of(Query.parse(events.body(event_number)), self.dialect)
                )

    def _see_table(self, table_map: TableMap) -> None:
        search = self.searches.pop((table_map.schema, table_map.table), None)
        if search is not None:
            search.table_map, self.met = table_map, True
            self.done.append(search)

    def _see_statement(self, statement: Statement) -> None:
        if statement.kind is not Kind.DDL:
            return
        for action in statement.actions:
            names = [action.name]
            if action.verb is Verb.SCHEMA_DROPPED:
                names = [name for name in self.searches if name[0] == action.name[0]]
            for name in names:
                search = self.searches.get(name)
                if search is None:
                    continue
                self.met = True
                if action.verb in (Verb.DROPPED, Verb.SCHEMA_DROPPED):
                    search.gone = True
                    self.done.append(self.searches.pop(name))
                elif action.verb is Verb.RENAMED and action.to is not None:
                    self.searches[action.to] = self.searches.pop(name)
                elif action.verb is Verb.ALTERED:
                    search.altered = True


def definitions_behind(
    session: Session,
    options: MySqlOptions,
    names: Sequence[TableName],
    place: Place,
    *,
    fold_case: bool,
) -> dict[TableName, FoundDefinition]:
    """The tables of these names right behind a place in the log of the session's server;
    without those that are gone.

    Raises:
        MySqlUnavailableError, LogPurgedError, …: the server or its log cannot be read.
    """
    look = LogSearch(Dialect(fold_case=fold_case), {name: TableSearch(name) for name in names})
    while True:
        end = log_end(session)
        look.met = False
        if look.searches and end != place:
            for events in _between(session, options, place, end):
                look.see(events, mariadb=session.flavor.is_mariadb)
                if not look.searches:
                    break
        definitions = read_definitions(session, list(look.searches))
        again = log_end(session)
        place = end
        if again == end or not look.searches or not _touched(session, options, look, end, again):
            return _answer(look, definitions)


def _touched(
    session: Session, options: MySqlOptions, look: LogSearch, begin: Place, end: Place
) -> bool:
    """Whether the log went on about one of the tables while the catalogue was read."""
    probe = LogSearch(look.dialect, {name: TableSearch(name) for name in look.searches})
    for events in _between(session, options, begin, end):
        probe.see(events, mariadb=session.flavor.is_mariadb)
    return probe.met


def _answer(
    look: LogSearch, definitions: dict[TableName, Definition]
) -> dict[TableName, FoundDefinition]:
    """Each table under the name that it has at the place:
    it may have been found under another one.
    """
    answer = {}
    for search in look.done:
        if search.table_map is not None and not search.gone:
            schema, table = search.name
            answer[search.name] = FoundDefinition(
                replace(search.table_map, schema=schema, table=table), not search.altered
            )
    for name, search in look.searches.items():
        if name in definitions:
            answer[search.name] = FoundDefinition(
                replace(definitions[name], name=search.name), not search.altered
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


def _between(session: Session, options: MySqlOptions, begin: Place, end: Place) -> Iterator[Events]:
    """The events of the log from one place to another, compressed ones expanded;
    perhaps some more.
    """
    reader = log_in_to(session.address, options)
    stream = open_stream(reader, LogPlace("", *begin), options, _ANONYMOUS_READER, follow=False)
    file = begin[0]
    try:
        while not stream.ended:
            for events in stream.take(_TAKE_S):
                yield from expanded(events)
                for event_number in events.of(EventType.ROTATE).tolist():
                    file = Rotate.parse(events.body(event_number)).file
                if not is_before((file, int(events.next_positions[-1])), end):
                    return
    finally:
        stream.close()
