"""Which columns of its tables a changefeed takes: TiCDC's column selectors. Pure.

    rule     = table '=' column ( ',' column )*    shop.orders=id,name    crm.*=*,!phone,!mail_?
    column   = [ '!' ] name with * and ? | name '->' name by which readers know it

`table` is a rule of a table filter without `!`. The first rule whose table matches decides, and in
it the last column pattern that matches: with `!` the column is left out, as is a column that no
pattern matches. Key columns are always taken. Case does not matter. A rule that matches no table,
or a name that matches no column, is refused at the creation: it would let through what it was meant
to leave out.

Rules decide new columns by their names. The decision stays with a column when the column or its
table is renamed, by the column's identity (`server.changefeed.identity`):

1. A column that was left out stays out under any later name, since rows at the target have no value
   of it. If a rule takes it by its new name, without `*` or `?`, the changefeed stops; so it does
   if the column becomes part of the key.
2. A column that was taken stays, until a rule leaves out its new name.
3. A renamed table without a rule for its new name takes no column that it did not have before.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from server.changefeed.filter import TableFilter, column_pattern, table_and_rest
from server.changefeed.identity import Identity, by_identity, fields
from server.changefeed.table import SourceTable, TableRecord
from sink.mounter import whole_mounter
from storage.model.errors import InvalidError
from storage.tidb.field_type import NULL_DATES, SHOWN_DATES

RULES_MAX: Final = 1024
_WILDCARD: Final = re.compile(r"[*?]")


class ColumnRuleError(InvalidError):
    """A rule about columns cannot be used."""

    code = "ErrColumnRuleInvalid"


@dataclass(frozen=True, slots=True)
class _Pattern:
    text: str
    takes: bool
    matches: re.Pattern[str]
    shown: str = ""
    """The name that readers see, if it is another one."""

    @property
    def is_exact(self) -> bool:
        """Whether it names one column."""
        return not _WILDCARD.search(self.text)


@dataclass(frozen=True, slots=True)
class _Rule:
    text: str
    tables: TableFilter
    columns: tuple[_Pattern, ...]
    """The last one first."""

    def pattern_of(self, column: str) -> _Pattern | None:
        """The pattern that decides about a column."""
        return next((each for each in self.columns if each.matches.fullmatch(column)), None)


@dataclass(frozen=True)
class ColumnRules:
    """The rules of one changefeed; none takes all columns of all tables."""

    texts: Sequence[str] = ()
    zero_dates: str = NULL_DATES
    """The presentation of dates that no calendar has, one of `SHOWN_DATES`."""
    _rules: list[_Rule] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read the rules.

        Raises:
            ColumnRuleError, FilterRuleError: one cannot be read, or there are too many.
        """
        if self.zero_dates not in SHOWN_DATES:
            raise ColumnRuleError(
                f"zero dates {self.zero_dates!r}: they are one of {', '.join(SHOWN_DATES)}"
            )
        if len(self.texts) > RULES_MAX:
            raise ColumnRuleError(
                f"there are at most {RULES_MAX} rules about columns, not {len(self.texts)}"
            )
        object.__setattr__(self, "_rules", [_rule(text) for text in self.texts])

    def of(self, table: SourceTable, before: SourceTable | None = None) -> TableRecord:
        """A table's record, with the columns that are taken of it, and how its dates are shown;
        `before` is the same table as it is in force.

        Raises:
            ColumnRuleError: a column that was left out is asked for.
        """
        rule, record = self._about(table), table.record.showing(self.zero_dates)
        selected = before is not None and before.record.selected is not None
        if rule is None and not selected:
            return record
        decided = {} if before is None else _decided(before, table)
        columns: list[str] = []
        renamed: dict[str, str] = {}
        # By identity: a column that is renamed upstream stays taken, or left out, as it was.
        for identity, column in by_identity(table, before or table).items():
            pattern = None if rule is None else rule.pattern_of(column.name)
            shown = _shown(table, column.name, pattern, decided.get(identity))
            if shown is None:
                continue
            columns.append(column.name)
            if shown != column.name:
                renamed[column.name] = shown
        return record.selecting(columns, renamed)

    def check(self, tables: Sequence[SourceTable], new: Collection[str] | None = None) -> None:
        """See that every rule meets a table, and every name a column of each of its tables that
        are `new`, by name; None: all are.

        Raises:
            ColumnRuleError: with the names there are.
        """
        by_rule = [
            (rule, [table for table in tables if self._about(table) is rule])
            for rule in self._rules
        ]
        for rule, mine in by_rule:
            if not mine:
                raise ColumnRuleError(
                    f"the rule {rule.text!r} about columns decides of no table of the changefeed"
                )
            for table in mine if new is None else (each for each in mine if each.name in new):
                _check_names(rule, table)

    def _about(self, table: SourceTable) -> _Rule | None:
        record = table.record
        rules = (
            rule for rule in self._rules if rule.tables.takes(record.schema_name, record.table_name)
        )
        return next(rules, None)


ALL_COLUMNS: Final = ColumnRules()


@dataclass(frozen=True, slots=True)
class _Decided:
    """The decision about one column."""

    name: str
    takes: bool
    shown: str
    was_key: bool


def _decided(before: SourceTable, table: SourceTable) -> Mapping[Identity, _Decided]:
    record, keys = before.record, whole_mounter(before.mounter).key_columns
    return {
        identity: _Decided(
            column.name,
            record.selected is None or column.name in record.selected,
            record.renamed.get(column.name, ""),
            column.name in keys,
        )
        for identity, column in by_identity(before, table).items()
    }


def _shown(
    table: SourceTable, name: str, pattern: _Pattern | None, decided: _Decided | None
) -> str | None:
    """Return the name of a column that readers see; None: it is left out."""
    takes = pattern is not None and pattern.takes
    shown = (pattern.shown if pattern is not None else "") or name
    if decided is None:
        return shown if takes else None
    if not decided.takes:
        _check_left_out(table, name, pattern, decided)
        return None
    if pattern is None:
        return decided.shown or name
    return (pattern.shown or decided.shown or name) if takes else None


def _check_left_out(
    table: SourceTable, name: str, pattern: _Pattern | None, decided: _Decided
) -> None:
    """See that nobody asks for a column that was left out."""
    if decided.was_key:
        return  # It is taken as long as it is one.
    if name in whole_mounter(table.mounter).key_columns:
        raise ColumnRuleError(
            f"{table.name}: the column {name} is left out, and would tell rows apart now"
        )
    if pattern is not None and pattern.takes and pattern.is_exact:
        raise ColumnRuleError(
            f"{table.name}: the column {name} was left out so far, as {decided.name}, so rows at "
            "the target have no value of it; a rule about columns takes it by its name of now"
        )


def _check_names(rule: _Rule, table: SourceTable) -> None:
    columns = _columns(table)
    for each in rule.columns:
        if each.is_exact and not any(map(each.matches.fullmatch, columns)):
            raise ColumnRuleError(
                f"the rule {rule.text!r}: {table.name} has no column {each.text!r}; it has "
                f"{', '.join(columns)}"
            )
    left_out = [
        column
        for column in table.mounter.key_columns
        if any(_names(each, column) for each in rule.columns)
    ]
    if left_out:
        raise ColumnRuleError(
            f"the rule {rule.text!r} leaves out {', '.join(left_out)} of {table.name}, which tell "
            "its rows apart; the key is always taken"
        )


def _names(pattern: _Pattern, column: str) -> bool:
    """Whether the rule names just this column and leaves it out."""
    return not pattern.takes and pattern.is_exact and bool(pattern.matches.fullmatch(column))


def _columns(table: SourceTable) -> list[str]:
    return list(fields(table))


def _rule(text: str) -> _Rule:
    parts = table_and_rest(text)
    names = [part.strip() for part in parts[1].split(",")] if parts else []
    if parts is None or not all(name.removeprefix("!") for name in names):
        raise ColumnRuleError(
            f"the rule {text!r} about columns is not of the form "
            "SCHEMA.TABLE=COLUMN,!COLUMN,COLUMN->NAME,…"
        )
    return _Rule(text, TableFilter((parts[0],)), tuple(map(_pattern, reversed(names))))


def _pattern(text: str) -> _Pattern:
    taken, arrow, shown = (part.strip() for part in text.partition("->"))
    name = taken.removeprefix("!")
    if arrow and (not shown or not name or taken.startswith("!") or _WILDCARD.search(name)):
        raise ColumnRuleError(
            f"{text!r} in a rule about columns: COLUMN->NAME names one column, and gives it a name"
        )
    return _Pattern(name, not taken.startswith("!"), column_pattern(name), shown)
