"""Ranges of a table's keys, and which of them a sample takes. Pure.

Both sides must mean the same rows by a range, and read no others: so a range is one of the key's
first column, where that is an integer, whose order no collation and no client changes. Tables with
other keys are compared whole.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

SLOT_ROWS: Final = 10_000
SLOTS_MIN, SLOTS_MAX = 20, 10_000

Span = tuple[int | None, int | None]
"""A range of keys `[first, second)`; None: unbounded on that side."""


@dataclass(frozen=True, slots=True)
class KeySpans:
    """Some ranges of a table's keys."""

    column: str
    spans: tuple[Span, ...]

    def inside(self, rows: Any) -> Any:
        """Return for each row of a RecordBatch whether it is in one of the spans."""
        column = rows[self.column]
        nothing = pa.array([False] * len(column), pa.bool_())
        return reduce(pc.or_, (_between(column, span) for span in self.spans), nothing)

    def condition(self, quoted: Callable[[str], str]) -> str:
        """The condition in SQL."""
        return " OR ".join(f"({_sql(quoted(self.column), span)})" for span in self.spans) or "1 = 0"

    def each(self) -> list["KeySpans"]:
        """Each range alone."""
        return [KeySpans(self.column, (span,)) for span in self.spans]

    def of(self, value: int) -> Span | None:
        """The range that a value of the column is in."""
        return next((span for span in self.spans if _holds(span, value)), None)

    def document(self) -> dict[str, Any]:
        """Members for JSON."""
        return {"column": self.column, "spans": [list(span) for span in self.spans]}

    @classmethod
    def parse(cls, document: dict[str, Any]) -> "KeySpans":
        """Read what `document` gave."""
        return cls(str(document["column"]), tuple((low, high) for low, high in document["spans"]))


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a lake's table: its rows, and the least and greatest value of its key's first
    column.
    """

    rows: int
    least: int | None = None
    greatest: int | None = None

    def slots(self, most: int = SLOTS_MAX) -> list[Span]:
        """All keys, also those beyond the ends, in ranges that have about `SLOT_ROWS` rows where
        keys are dense.
        """
        if self.least is None or self.greatest is None:
            return [(None, None)]
        count = min(max(-(-self.rows // SLOT_ROWS), SLOTS_MIN), most)
        # The first and the last have no end: the upstream may have keys beyond those of the lake.
        width = self.greatest - self.least + 1
        inner = sorted(
            {self.least + width * number // count for number in range(1, count)} - {self.least}
        )
        return list(itertools.pairwise([None, *inner, None]))


@dataclass(frozen=True, slots=True)
class Sample:
    """The part of each table that is compared: a number of ranges, or a fraction of them."""

    seed: int
    ranges: int = 0
    part: float = 0.0

    def of(self, table: str, slots: Sequence[Span]) -> list[Span]:
        """Some of the ranges, the same ones for the same seed; at least one."""
        count = self.ranges or math.ceil(self.part * len(slots))
        # The name is part of the seed: else tables of one size would all be compared at the same
        # places.
        chance = random.Random(f"{self.seed} {table}")  # noqa: S311 - no secret is made of it
        chosen = chance.sample(range(len(slots)), min(max(count, 1), len(slots)))
        return [slots[number] for number in sorted(chosen)]


def span_column(key: Sequence[str], schema: Any) -> str | None:
    """The column by which a table's keys have ranges; None: they have none."""
    if not key:
        return None
    kind = schema.field(key[0]).type
    whole = pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0)
    return key[0] if whole else None


def _between(column: Any, span: Span) -> Any:
    low, high = (None if end is None else pa.scalar(end, column.type) for end in span)
    checks = [column.is_valid()]
    checks += [pc.greater_equal(column, low)] if low is not None else []
    checks += [pc.less(column, high)] if high is not None else []
    return reduce(pc.and_kleene, checks)


def _sql(column: str, span: Span) -> str:
    low, high = span
    checks = [] if low is None else [f"{column} >= {low}"]
    checks += [] if high is None else [f"{column} < {high}"]
    return " AND ".join(checks) or "1 = 1"


def _holds(span: Span, value: int) -> bool:
    low, high = span
    return (low is None or low <= value) and (high is None or value < high)
