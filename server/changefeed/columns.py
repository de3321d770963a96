"""Which columns of its tables a changefeed takes: TiCDC's column selectors. Pure.

    rule     = table '=' column ( ',' column )*    shop.orders=id,name    crm.*=*,!phone,!mail_?
    column   = [ '!' ] name with * and ? | name '->' name by which readers know it

`table` is a rule of a table filter without `!`. The first rule whose table matches decides, and of
its columns the last that matches: `!` leaves it out, and what none matches is left out, too. The
key is always in. Case does not matter. A table that is renamed keeps what was taken of it, unless a
rule is about its new name. A rule that meets no table, or a name that meets no column, is refused
at the creation: it would let through what it was to leave out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from server.changefeed.filter import TableFilter
from server.changefeed.table import SourceTable, TableRecord
from server.changefeed.table_rule import column_pattern, parts_of
from sink.mounter import META_FIELDS, whole_mounter
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
    """The name by which readers know it, if it is another one."""


@dataclass(frozen=True, slots=True)
class _Rule:
    text: str
    tables: TableFilter
    columns: tuple[_Pattern, ...]
    """The last one first."""

    def pattern_of(self, column: str) -> _Pattern | None:
        """The one that decides of a column."""
        return next((each for each in self.columns if each.matches.fullmatch(column)), None)


@dataclass(frozen=True)
class ColumnRules:
    """The rules of one changefeed; none takes all columns of all tables."""

    texts: Sequence[str] = ()
    zero_dates: str = NULL_DATES
    """How dates that no calendar has are shown, one of `SHOWN_DATES`."""
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

    def of(self, table: SourceTable) -> TableRecord:
        """A table's record, with the columns that are taken of it, and how its dates are shown."""
        rule, record = self._about(table), table.record.showing(self.zero_dates)
        if rule is None:
            return record
        columns: list[str] = []
        renamed: dict[str, str] = {}
        for column in _columns(table):
            pattern = rule.pattern_of(column)
            if pattern is None or not pattern.takes:
                continue
            columns.append(column)
            if pattern.shown:
                renamed[column] = pattern.shown
        return record.selecting(columns, renamed)

    def check(self, tables: Sequence[SourceTable]) -> None:
        """See that every rule meets a table, and every name a column of each of its tables.

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
            for table in mine:
                _check_names(rule, table)

    def _about(self, table: SourceTable) -> _Rule | None:
        record = table.record
        rules = (
            rule for rule in self._rules if rule.tables.takes(record.schema_name, record.table_name)
        )
        return next(rules, None)


ALL_COLUMNS: Final = ColumnRules()


def _check_names(rule: _Rule, table: SourceTable) -> None:
    columns = _columns(table)
    for each in rule.columns:
        if not _WILDCARD.search(each.text) and not any(map(each.matches.fullmatch, columns)):
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
    """Whether it leaves out just this column, by its name."""
    return (
        not pattern.takes
        and not _WILDCARD.search(pattern.text)
        and bool(pattern.matches.fullmatch(column))
    )


def _columns(table: SourceTable) -> list[str]:
    return list(whole_mounter(table.mounter).schema.names[len(META_FIELDS) :])


def _rule(text: str) -> _Rule:
    parts = parts_of(text)
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
