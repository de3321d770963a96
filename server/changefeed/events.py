"""Which changes of its tables a changefeed ignores: TiCDC's event filters. Pure.

    [[filter.event-filters]]
    matcher = ["shop.*"]                          # rules of a table filter
    ignore-event = ["delete"]                     # insert, update, delete, all dml
    ignore-insert-value-expr = "status = 'draft'" # see sink.condition
    ignore-update-new-value-expr = "…"
    ignore-update-old-value-expr = "…"
    ignore-delete-value-expr = "…"

All filters that match a table count. A filter that matches no table, and a condition about a column
that is not there, are refused at the creation: they would let through what they were to leave out.
Schema changes are always carried out: the rows above them would not fit otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from server.changefeed.filter import TableFilter
from server.changefeed.source import ON_UNCLEAR_DDL, SourceUri, find_kind
from server.changefeed.table import SourceTable, TableRecord
from sink.condition import Condition, ConditionError
from sink.row_filter import OPERATIONS, RowFilter
from storage.model.errors import InvalidError

FILTERS_MAX: Final = 256
ALL_DML: Final = "all dml"
_DDL: Final = (
    "schema changes are always carried out, as the rows above them would not fit otherwise"
)


class EventFilterError(InvalidError):
    """An event filter cannot be used."""

    code = "ErrEventFilterInvalid"


@dataclass(frozen=True, slots=True)
class EventFilter:
    """One of them, as it was given."""

    matcher: tuple[str, ...]
    ignore_event: tuple[str, ...] = ()
    ignore_insert_value_expr: str = ""
    ignore_update_new_value_expr: str = ""
    ignore_update_old_value_expr: str = ""
    ignore_delete_value_expr: str = ""

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "EventFilter":
        """Read what `to_document` made; raises TypeError, KeyError."""
        lists = {name: tuple(document[name]) for name in ("matcher", "ignore_event")}
        return cls(**{**document, **lists})

    def to_document(self) -> dict[str, Any]:
        """As the API and the metadata have it: TiCDC's names."""
        return asdict(self)

    @property
    def conditions(self) -> dict[str, str]:
        """Those that are given, by `sink.row_filter.CONDITIONS`."""
        given = {
            "insert": self.ignore_insert_value_expr,
            "update_new": self.ignore_update_new_value_expr,
            "update_old": self.ignore_update_old_value_expr,
            "delete": self.ignore_delete_value_expr,
        }
        return {name: text for name, text in given.items() if text}

    @property
    def operations(self) -> frozenset[str]:
        """What is ignored whatever its values are; raises EventFilterError."""
        operations: set[str] = set()
        for event in map(str.lower, self.ignore_event):
            if event == ALL_DML:
                operations |= OPERATIONS.keys()
            elif event in OPERATIONS:
                operations.add(event)
            else:
                raise EventFilterError(
                    f"ignore-event {event!r} cannot be had: it is one of {', '.join(OPERATIONS)} "
                    f"and {ALL_DML}; {_DDL}"
                )
        return frozenset(operations)


@dataclass(frozen=True)
class EventFilters:
    """Those of one changefeed."""

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
            if not (each.operations or each.conditions):
                raise EventFilterError(
                    f"the event filter of {', '.join(each.matcher)} ignores nothing: give "
                    "ignore-event, or a condition"
                )
            for text in each.conditions.values():
                Condition(text)
        object.__setattr__(self, "_tables", [TableFilter(each.matcher) for each in self.filters])

    @property
    def keeps_deleted(self) -> bool:
        """Whether the target may keep rows that the source has deleted."""
        return any(
            "delete" in each.operations or each.ignore_delete_value_expr for each in self.filters
        )

    def of(self, record: TableRecord) -> TableRecord:
        """A table's record, with what is ignored of it."""
        mine = self._about(record)
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
        return record.ignoring(RowFilter(operations, conditions))

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

    def _about(self, record: TableRecord) -> list[EventFilter]:
        return [
            each
            for each, taking in zip(self.filters, self._tables, strict=True)
            if taking.takes(record.schema_name, record.table_name)
        ]


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


NO_EVENT_FILTERS: Final = EventFilters()


def check_conditions(table: SourceTable) -> None:
    """See that a table has the columns that its conditions ask for; raises ConditionError."""
    row_filter = table.record.ignored
    if row_filter is None:
        return
    try:
        row_filter.check(table.mounter)
    except ConditionError as err:
        raise ConditionError(f"{table.name}, by an event filter: {err.message}") from None
