"""By which columns tables of a lake are partitioned, as the option `partition-by` says it. Pure.

    shop.orders=days(created_at),bucket(16,id); shop.*=region

Rules stand between semicolons; the first one whose name fits a table counts, where `*` stands for
any characters. Fields are written as Spark's DDL writes Iceberg's: a column, or a transform of one.
A column of another name than letters, digits and _ stands between backquotes.
"""

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Generic, TypeVar

IDENTITY, BUCKET, TRUNCATE = "identity", "bucket", "truncate"
YEARS, MONTHS, DAYS, HOURS = "years", "months", "days", "hours"
_SPELLINGS: Final = {
    **{name: name for name in (IDENTITY, BUCKET, TRUNCATE, YEARS, MONTHS, DAYS, HOURS)},
    **{name.removesuffix("s"): name for name in (YEARS, MONTHS, DAYS, HOURS)},
}
_WITH_WIDTH: Final = (BUCKET, TRUNCATE)
_COLUMN: Final = r"`(?:[^`]|``)+`|[^\s`(),;=]+"
FIELD: Final = (
    rf"\s*(?:(?P<transform>[A-Za-z]+)\s*\(\s*(?:(?P<width>[0-9]{{1,9}})\s*,)?\s*(?P<of>{_COLUMN})\s*\)"
    rf"|(?P<column>{_COLUMN}))\s*"
)
"""A pattern of one field, for `field_of`."""
_TABLE: Final = re.compile(r"\s*(?P<name>[^\s=;,()`]+\.[^\s=;,()`]+)\s*=")
_FIELDS_MAX: Final = 16
_Field = TypeVar("_Field", bound=Hashable)


@dataclass(frozen=True)
class PartitionField:
    """A transform of a column."""

    transform: str
    column: str
    width: int = 0
    """Of buckets how many, of `truncate` how long; 0: the transform has none."""

    def __str__(self) -> str:
        """As `parse_fields` reads it."""
        column = "`" + self.column.replace("`", "``") + "`"
        if self.transform == IDENTITY:
            return column
        return f"{self.transform}({f'{self.width}, ' if self.width else ''}{column})"


@dataclass(frozen=True)
class RuleSyntax(Generic[_Field]):
    """How rules are written that give tables their fields."""

    field: re.Pattern[str]
    made: Callable[[re.Match[str]], _Field]
    """Makes a field of what the pattern matches.

    Raises:
        ValueError: it is none.
    """
    advice: str
    """What such rules are."""

    def rules(self, text: str) -> tuple[tuple[str, tuple[_Field, ...]], ...]:
        """The tables' names, and the fields of each.

        Raises:
            ValueError: there is something else.
        """
        rules, at = [], 0
        while text[at:].strip():
            table = _TABLE.match(text, at)
            if table is None:
                raise ValueError(f"{self.advice}, not {text[at : at + 80]!r}")
            fields, at = self._fields(text, table.end())
            rules.append((table["name"], fields))
        return tuple(rules)

    def fields(self, text: str) -> tuple[_Field, ...]:
        """The fields of one table, between commas.

        Raises:
            ValueError: they are none.
        """
        return self._fields(text, 0)[0] if text else ()

    def fault(self, text: str) -> str:
        """What the rules must be, or nothing if they are that."""
        try:
            self.rules(text)
        except ValueError as err:
            return str(err).partition(", not ")[0]
        return ""

    def _fields(self, text: str, at: int) -> tuple[tuple[_Field, ...], int]:
        """The fields from a place on, up to a semicolon or the end; and the place behind it."""
        fields: list[_Field] = []
        while True:
            match = self.field.match(text, at)
            if match is None:
                raise ValueError(f"{self.advice}, not {text[at : at + 80]!r}")
            fields.append(self.made(match))
            at = match.end()
            mark, at = text[at : at + 1], at + 1
            if mark == ",":
                continue
            if mark not in ("", ";"):
                raise ValueError(f"{self.advice}, not {text[at - 1 : at + 79]!r}")
            if len(set(fields)) < len(fields) or len(fields) > _FIELDS_MAX:
                raise ValueError(
                    f"{self.advice}, each field once and at most {_FIELDS_MAX}, not {text!r}"
                )
            return tuple(fields), at


def of_table(rules: tuple[tuple[str, tuple[_Field, ...]], ...], table: str) -> tuple[_Field, ...]:
    """The fields that the first rule gives which fits a table; none: no rule does."""
    return next((fields for name, fields in rules if fnmatchcase(table, name)), ())


@dataclass(frozen=True)
class PartitionRules:
    """Which tables are partitioned, and by what."""

    rules: tuple[tuple[str, tuple[PartitionField, ...]], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "PartitionRules":
        """Read the option's value; the empty one has no rule.

        Raises:
            ValueError: it is none.
        """
        return cls(_SYNTAX.rules(text))

    def of(self, table: str) -> tuple[PartitionField, ...]:
        """The fields of a table; none: it is not partitioned."""
        return of_table(self.rules, table)

    def has_only_columns(self) -> bool:
        """Whether all fields are columns as they are."""
        return all(field.transform == IDENTITY for _, fields in self.rules for field in fields)


def parse_fields(text: str) -> tuple[PartitionField, ...]:
    """The fields of one table, between commas.

    Raises:
        ValueError: they are none.
    """
    return _SYNTAX.fields(text)


def rules_fault(text: str) -> str:
    """What the option's value must be, or nothing if it is that."""
    return _SYNTAX.fault(text)


def field_of(match: re.Match[str]) -> PartitionField:
    """The field that `FIELD` matches.

    Raises:
        ValueError: there is no such transform.
    """
    if match["column"]:
        return PartitionField(IDENTITY, _unquoted(match["column"]))
    transform = _SPELLINGS.get(match["transform"].lower())
    width = int(match["width"] or 0)
    if transform is None or bool(width) != (transform in _WITH_WIDTH):
        raise ValueError(
            "fields of a column, years(column), months(column), days(column), hours(column), "
            f"bucket(N,column) and truncate(N,column), not {match[0].strip()!r}"
        )
    return PartitionField(transform, _unquoted(match["of"]), width)


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


_SYNTAX: Final = RuleSyntax(
    re.compile(FIELD),
    field_of,
    "rules as in shop.orders=days(created_at),bucket(16,id); shop.*=region",
)
