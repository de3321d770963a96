"""By which columns the rows of a lake's files are sorted, as the option `sort-by` says it. Pure.

    shop.orders=created_at desc,id; shop.*=days(at),bucket(16,id) asc nulls last

Rules and fields are those of `partition-by`, each field with a direction and the place of nulls, as
Spark's `WRITE ORDERED BY` has them for Iceberg: `asc`, unless `desc` is said; nulls are first with
`asc` and last with `desc`, unless something else is said.
"""

import re
from dataclasses import dataclass
from typing import Final

from pyspark_tidemark.lake.partitioning import (
    FIELD,
    PartitionField,
    RuleSyntax,
    field_of,
    of_table,
)


@dataclass(frozen=True)
class SortField:
    """What rows are sorted by: a column, or a transform of one."""

    of: PartitionField
    is_descending: bool = False
    nulls_first: bool = True

    def __str__(self) -> str:
        """As `parse_sort_fields` reads it."""
        direction = "desc" if self.is_descending else "asc"
        return f"{self.of} {direction} nulls {'first' if self.nulls_first else 'last'}"


@dataclass(frozen=True)
class SortRules:
    """Which tables are sorted, and by what."""

    rules: tuple[tuple[str, tuple[SortField, ...]], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "SortRules":
        """Read the option's value; the empty one has no rule.

        Raises:
            ValueError: it is none.
        """
        return cls(_SYNTAX.rules(text))

    def of(self, table: str) -> tuple[SortField, ...]:
        """The fields of a table; none: it is not sorted."""
        return of_table(self.rules, table)


def parse_sort_fields(text: str) -> tuple[SortField, ...]:
    """The fields of one table, between commas.

    Raises:
        ValueError: they are none.
    """
    return _SYNTAX.fields(text)


def sort_rules_fault(text: str) -> str:
    """What the option's value must be, or nothing if it is that."""
    return _SYNTAX.fault(text)


def _sort_field(match: re.Match[str]) -> SortField:
    is_descending = (match["direction"] or "").lower() == "desc"
    nulls = (match["nulls"] or ("last" if is_descending else "first")).lower()
    return SortField(field_of(match), is_descending, nulls == "first")


_SYNTAX: Final = RuleSyntax(
    re.compile(
        rf"{FIELD}(?P<direction>\b(?:asc|desc)\b)?\s*(?:nulls\s+(?P<nulls>first|last)\b)?\s*",
        re.IGNORECASE,
    ),
    _sort_field,
    "rules as in shop.orders=created_at desc,id; shop.*=region asc nulls last",
)
