"""The event filters of a changefeed: changes that are ignored, as TiCDC's event filters do. Pure.

    [[filter.event-filters]]
    matcher = ["shop.*"]                          # rules of a table filter
    ignore-event = ["delete"]                     # insert, update, delete, all dml; DDL: below
    ignore-sql = ["^drop", "^truncate"]           # regular expressions over the text of DDL
    ignore-insert-value-expr = "status = 'draft'" # see sink.row_filter
    ignore-update-new-value-expr = "…"
    ignore-update-old-value-expr = "…"
    ignore-delete-value-expr = "…"
    ignore-update-only-columns = ["seen_at"]      # an update of nothing else

All event filters that match a table count. A filter that matches no table, and a condition about a
column that is not there, are refused at the creation: they would let through what they were to
leave out.

**DDL.** What changes a table's columns, key or name is never ignored: the rows above it would not
fit. Its names in `ignore-event` are refused, and the changefeed stops at a statement that
`ignore-sql` has matched. What can be ignored: TRUNCATE TABLE of MySQL and MariaDB, whose rows stay
in the target then; DROP, at which the target keeps the table anyway, unless its URI says
`on-drop=drop`, which is refused beside; and what no reader hears of, such as indexes. TiDB's
TRUNCATE makes another table, so it cannot be ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pyspark_tidemark.lake.format import DROP
from pyspark_tidemark.sink_uri import settings_of

from server.changefeed.filter import RULE_CHARACTERS_MAX, Regex, TableFilter
from server.changefeed.source import KINDS, ON_UNCLEAR_DDL, SourceUri, find_kind, scheme_of
from server.changefeed.table import SourceTable, TableRecord
from sink.row_filter import OPERATIONS, Condition, ConditionError, RowFilter
from storage.model.errors import InvalidError

FILTERS_MAX: Final = 256
ALL_DML: Final = "all dml"
TRUNCATE_TABLE: Final = "truncate table"
DROPS: Final = frozenset({"drop table", "drop database", "drop schema"})
WITHOUT_EFFECT: Final = frozenset(
    {
        *("add index", "create index", "drop index", "rename index", "alter index visibility"),
        *("create database", "create schema", "create view", "drop view", "alter ttl info"),
        *("modify table comment", "modify schema charset and collate", "rebase auto id"),
    }
)
"""DDL that changes no row and no column, and may be ignored; if its index was the table's key, the
DDL is carried out all the same.
"""
NOT_IGNORABLE: Final = frozenset(
    {
        *("create table", "rename table", "recover table", "all ddl", "all", "multi schema change"),
        *("add column", "drop column", "modify column", "change column", "rename column"),
        *("set default value", "add primary key", "drop primary key"),
        *("modify table charset and collate", "add table partition", "drop table partition"),
        *("truncate table partition", "exchange table partition", "reorganize table partition"),
    }
)
"""DDL that cannot be ignored: later rows would not fit, or it changes rows without row events."""


class EventFilterError(InvalidError):
    """An event filter cannot be used."""

    code = "ErrEventFilterInvalid"


class DdlNotIgnorableError(InvalidError):
    """A DDL is to be ignored behind which the rows would not fit."""

    code = "ErrDdlNotIgnorable"


_LATER: Final = ("ignore_update_only_columns", "ignore_sql")
"""Members that earlier versions do not have."""


@dataclass(frozen=True, slots=True)
class EventFilter:
    """One of them, as it was given."""

    matcher: tuple[str, ...]
    ignore_event: tuple[str, ...] = ()
    ignore_insert_value_expr: str = ""
    ignore_update_new_value_expr: str = ""
    ignore_update_old_value_expr: str = ""
    ignore_delete_value_expr: str = ""
    ignore_update_only_columns: tuple[str, ...] = ()
    ignore_sql: tuple[str, ...] = ()

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "EventFilter":
        """Read what `to_document` made; raises TypeError, KeyError."""
        lists = {name: tuple(document[name]) for name in ("matcher", "ignore_event")}
        lists |= {name: tuple(document.get(name, ())) for name in _LATER}
        return cls(**{**document, **lists})

    def to_document(self) -> dict[str, Any]:
        """The rules as the API and the metadata have them: by TiCDC's names."""
        document = asdict(self)
        for name in _LATER:
            if not document[name]:
                # Earlier versions do not know it.
                del document[name]
        return document

    @property
    def conditions(self) -> dict[str, str]:
        """Return the conditions that are set, keyed as in `sink.row_filter.CONDITIONS`."""
        given = {
            "insert": self.ignore_insert_value_expr,
            "update_new": self.ignore_update_new_value_expr,
            "update_old": self.ignore_update_old_value_expr,
            "delete": self.ignore_delete_value_expr,
        }
        return {name: text for name, text in given.items() if text}

    @property
    def operations(self) -> frozenset[str]:
        """The operations that are ignored whatever their values are; raises EventFilterError."""
        operations: set[str] = set()
        for event in map(str.lower, self.ignore_event):
            if event == ALL_DML:
                operations |= OPERATIONS.keys()
            elif event in OPERATIONS:
                operations.add(event)
            elif event in NOT_IGNORABLE:
                raise EventFilterError(
                    f"ignore-event {event!r} cannot be had: the rows of the table would not fit "
                    "behind such a DDL, or change in no event. Leave tables out by the filter, and "
                    "columns by column selectors"
                )
            elif event not in (TRUNCATE_TABLE, *DROPS, *WITHOUT_EFFECT):
                raise EventFilterError(
                    f"ignore-event {event!r} is not known: it is one of {', '.join(OPERATIONS)}, "
                    f"{ALL_DML}, {TRUNCATE_TABLE}, {', '.join(sorted(DROPS | WITHOUT_EFFECT))}"
                )
        return frozenset(operations)

    @property
    def ddl_events(self) -> frozenset[str]:
        """The kinds of DDL that are ignored."""
        return frozenset(map(str.lower, self.ignore_event)) - {*OPERATIONS, ALL_DML}

    def matching(self, query: str) -> str | None:
        """The expression of `ignore_sql` that a statement matches; raises EventFilterError."""
        return next((text for text in self.ignore_sql if _statement(text).matches(query)), None)


def _statement(text: str) -> Regex:
    if len(text) > RULE_CHARACTERS_MAX:
        raise EventFilterError(
            f"ignore-sql has at most {RULE_CHARACTERS_MAX} characters, not {len(text)}"
        )
    try:
        return Regex.of(text)
    except ValueError as err:
        raise EventFilterError(f"ignore-sql {text!r} cannot be read: {err}") from None


@dataclass(frozen=True)
class EventFilters:
    """The event filters of one changefeed."""

    filters: Sequence[EventFilter] = ()
    _tables: list[TableFilter] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read them.

        Raises:
            EventFilterError, FilterRuleError, ConditionError: one cannot be used.
        """
        if len(self.filters) > FILTERS_MAX:
            raise EventFilterError(
                f"there are at most {FILTERS_MAX} event filters, not {len(self.filters)}"
            )
        for each in self.filters:
            if not each.matcher:
                raise EventFilterError("an event filter needs a matcher: which tables it is about")
            given = (each.operations, each.conditions, each.ignore_update_only_columns)
            if not any((*given, each.ddl_events, each.ignore_sql)):
                raise EventFilterError(
                    f"the event filter of {', '.join(each.matcher)} ignores nothing: give "
                    "ignore-event, ignore-sql, ignore-update-only-columns, or a condition"
                )
            for text in each.ignore_sql:
                _statement(text)
            for text in each.conditions.values():
                Condition(text)
        object.__setattr__(self, "_tables", [TableFilter(each.matcher) for each in self.filters])

    @property
    def keeps_deleted(self) -> bool:
        """Whether the target may keep rows that the source has deleted."""
        return self.ignores_ddl or any(
            "delete" in each.operations or each.ignore_delete_value_expr for each in self.filters
        )

    @property
    def ignores_ddl(self) -> bool:
        """Whether the rules may ignore a DDL that changes a table's rows."""
        return any(TRUNCATE_TABLE in each.ddl_events or each.ignore_sql for each in self.filters)

    def ignored_truncate(self, record: TableRecord, query: str) -> str | None:
        """Why a TRUNCATE of a table is ignored; None: it is not."""
        for each in self.about(record):
            if TRUNCATE_TABLE in each.ddl_events:
                return f"ignore-event {TRUNCATE_TABLE!r}"
        return self.ignored_statement(record, query)

    def ignored_statement(self, record: TableRecord, query: str) -> str | None:
        """The rule that ignores a statement for a table; None: no rule does."""
        texts = (each.matching(query) for each in self.about(record))
        text = next((text for text in texts if text is not None), None)
        return None if text is None else f"ignore-sql {text!r}"

    def of(self, record: TableRecord) -> TableRecord:
        """A table's record, with what is ignored of it."""
        mine = self.about(record)
        if not mine:
            return record
        texts: dict[str, list[str]] = {}
        for each in mine:
            for name, text in each.conditions.items():
                texts.setdefault(name, []).append(text)
        conditions = {
            name: Condition(" OR ".join(f"({text})" for text in given))
            for name, given in texts.items()
        }
        operations = frozenset[str]().union(*(each.operations for each in mine))
        only_columns = tuple(
            frozenset(map(str.lower, each.ignore_update_only_columns))
            for each in mine
            if each.ignore_update_only_columns
        )
        return record.ignoring(RowFilter(operations, conditions, only_columns))

    def check(self, tables: Sequence[SourceTable]) -> None:
        """See that each of them matches a table.

        Raises:
            EventFilterError: it does not.
        """
        for each, taking in zip(self.filters, self._tables, strict=True):
            if not any(
                taking.takes(table.record.schema_name, table.record.table_name) for table in tables
            ):
                raise EventFilterError(
                    f"the event filter of {', '.join(each.matcher)} matches no table of the "
                    "changefeed"
                )

    def about(self, record: TableRecord) -> list[EventFilter]:
        """Return the filters that match a table."""
        return [
            each
            for each, taking in zip(self.filters, self._tables, strict=True)
            if taking.takes(record.schema_name, record.table_name)
        ]


NO_EVENT_FILTERS: Final = EventFilters()


def check_rereads(filters: EventFilters, source_uri: str) -> None:
    """See that no table is read again whose deleted rows the target is to keep.

    Raises:
        EventFilterError: it would be emptied first.
    """
    if not filters.keeps_deleted:
        return
    uri = SourceUri.parse(source_uri)
    rereads = ON_UNCLEAR_DDL in find_kind(uri.scheme).flags
    if rereads and uri.options.get(ON_UNCLEAR_DDL) != "stop":
        raise EventFilterError(
            "an event filter that ignores deletes needs --on-unclear-ddl stop: a table that is "
            "read again by itself is emptied first, and with it what was to be kept"
        )


def check_ddl(filters: EventFilters, source_uri: str, sink_uri: str) -> None:
    """See that DDL can be ignored which is to be.

    Raises:
        EventFilterError: the source's TRUNCATE makes another table, or the target would carry out
            a DROP.
    """
    kind = KINDS.get(scheme_of(source_uri))
    from_mysql = kind is not None and ON_UNCLEAR_DDL in kind.flags
    if any(TRUNCATE_TABLE in each.ddl_events for each in filters.filters) and not from_mysql:
        raise EventFilterError(
            f"ignore-event {TRUNCATE_TABLE!r}: a table of TiDB is another one after TRUNCATE, whose "
            "rows cannot follow those of the former; of MySQL and MariaDB it can be ignored"
        )
    drops = any(each.ddl_events & DROPS or each.ignore_sql for each in filters.filters)
    if drops and settings_of(sink_uri).get("on-drop") == DROP:
        raise EventFilterError(
            "an event filter ignores DROP TABLE, or may by ignore-sql, and the sink URI says "
            "on-drop=drop: leave one of them out"
        )


def check_conditions(table: SourceTable) -> None:
    """See that a table has the columns that its conditions ask for; raises ConditionError."""
    row_filter = table.record.ignored
    if row_filter is None:
        return
    try:
        row_filter.check(table.mounter)
    except ConditionError as err:
        raise ConditionError(f"{table.name}, by an event filter: {err.message}") from None
