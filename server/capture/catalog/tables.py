"""The tables that a new changefeed begins with: those given,
and those its filter finds in the source.

None is skipped silently.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from server.capture.catalog.catalog import Terms
from server.capture.errors import ParameterError, TableIneligibleError
from server.changefeed.table import SourceTable, TableRecord, check_distinct, check_names
from server.puller.source import Source

_NAMED = 20


@dataclass(frozen=True, slots=True)
class Chosen:
    """`refused` are the tables that match, but cannot be replicated: why, by name."""

    tables: tuple[TableRecord, ...]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of those that cannot be replicated, in order."""
        return tuple(sorted(self.refused))


async def chosen_tables(
    source: Source,
    terms: Terms,
    ts: int,
    given: Sequence[TableRecord] = (),
    *,
    before: Sequence[TableRecord] = (),
) -> Chosen:
    """The tables in `source` as of `ts` that the changefeed's filter takes, and those given, which
    take the place of those of the same name in the source.

    `before` are the changefeed's tables so far, whose identities go on.

    Raises:
        ParameterError: there is none, or one twice.
        TableIneligibleError: some cannot be replicated, by name.
        ColumnRuleError: a rule about columns is about nothing there is.
    """
    names = {table.name for table in given}
    matching = [
        table
        for table in await source.snapshot(ts, before)
        if terms.filter.takes(table.schema_name, table.table_name) and table.name not in names
    ]
    return eligible(source, (*given, *matching), terms)


def eligible(source: Source, records: Sequence[TableRecord], terms: Terms) -> Chosen:
    """Those that can be replicated to the changefeed's target, with the columns that it takes of
    them; the filter is not asked.

    Raises as `chosen_tables`.
    """
    tables: list[SourceTable] = []
    refused: dict[str, str] = {}
    for record in records:
        try:
            table = source.table(record)
            check_names(source.table(terms.columns.of(table)), terms.target)
            tables.append(table)
        except TableIneligibleError as err:
            refused[record.name] = err.message
    if refused and not terms.ignore_ineligible:
        shown = "; ".join(list(refused.values())[:_NAMED])
        more = f"; and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
        raise TableIneligibleError(
            f"{shown}{more}. Leave them out by --filter, or by --ignore-ineligible-table"
        )
    if refused and not tables:
        shown = "; ".join(list(refused.values())[:_NAMED])
        raise ParameterError(f"no table that the filter takes can be replicated: {shown}")
    _check_each_once(tables, terms.target)
    terms.columns.check(tables)
    return Chosen(tuple(map(terms.columns.of, tables)), refused)


def _check_each_once(tables: Sequence[SourceTable], target: str) -> None:
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
    check_distinct(tables, target)
