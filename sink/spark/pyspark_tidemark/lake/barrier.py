"""Schema changes between two cuts: the target follows the DDLs at exactly the ts where a cut starts.

Invariants:
1. No cut crosses a DDL, so at its ts everything before it is committed and nothing after it is.
2. A step is made only to a table that is not ahead of the DDL, and can be made again: a crash repeats the barrier.
3. A table is written to only with the schema that the target has for it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pyspark_tidemark.defaults import scalar
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed, ChangefeedMeta, Ddl, Known, TableMeta
from pyspark_tidemark.lake.mode import APPEND, ENVELOPE, lake_schema
from pyspark_tidemark.lake.schema import SchemaChange, difference
from pyspark_tidemark.lake.target import Target

EXCEPTION, EVOLVE, IGNORE = "exception", "evolve", "ignore"
EVOLUTIONS = (EVOLVE, EXCEPTION, IGNORE)
KEEP, DROP = "keep", "drop"


@dataclasses.dataclass(frozen=True)
class Policy:
    """What the target does about schema changes and dropped tables."""

    mode: str
    evolution: str = EVOLVE
    on_drop: str = KEEP


@dataclasses.dataclass(frozen=True)
class Crossed:
    """The tables above a barrier, and what ended or got another name at it."""

    tables: dict[str, TableMeta]
    dropped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    changed: frozenset[str] = frozenset()
    """Tables that the barrier made, emptied, altered or renamed: the next cut names them, also without rows."""


class Barrier:
    """Brings a target over the DDLs of its changefeed."""

    def __init__(self, changefeed: Changefeed, target: Target, policy: Policy) -> None:
        self._changefeed = changefeed
        self._target = target
        self._policy = policy
        self._known: Known | None = None

    def cross(self, ts: int, *, first: bool) -> Crossed:
        """Follow the DDLs at `ts`, if there are any; a lake's first cut has nothing to follow.

        Raises:
            SourceError: ErrSchemaChanged (by policy), ErrSchemaIncompatible, ErrRenameUnsupported.
        """
        now = self._changefeed.describe(ts, known=self._known)
        self._known = Known(ts, now.tables)
        ddls = [ddl for ddl in now.ddls if ddl.ts == ts]
        if first or not ddls:
            return Crossed(now.tables)
        before = self._changefeed.describe(ts - 1)
        self._require_allowed(ddls, before)
        dropped: list[str] = []
        renamed: list[tuple[str, str]] = []
        for ddl in ddls:
            renamed += self._rename(ddl, before, now)
            dropped += [name for name in ddl.dropped if self._drop(name, before, ts)]
            self._empty(ddl, before, now)
        changed = {name for ddl in ddls for name in (*ddl.tables, *ddl.truncated)} & now.tables.keys()
        for name in sorted(changed):
            self.fitting(now.tables[name], tuple(ddl.query for ddl in ddls))
        return Crossed(now.tables, tuple(dropped), tuple(renamed), frozenset(changed))

    def fitting(self, table: TableMeta, queries: tuple[str, ...] = ()) -> TableMeta:
        """`table` as the target can be written to; altered before, where it has not yet the table's newest schema.

        Raises:
            SourceError: ErrTargetSchema, the target has another schema than the changefeed gave it.
        """
        position = self._target.position(table)
        if position is None:
            return table
        actual = self._target.schema(table)
        wanted = self._target.storable(lake_schema(table, self._policy.mode))
        change = difference(actual, wanted, queries)
        if not change:
            return table
        if self._policy.evolution == IGNORE:
            return _frozen(table, actual)
        if position > table.schema_ts:
            raise SourceError(
                "ErrTargetSchema",
                f"{table.name} exists with another schema than the changefeed's ({change}); somebody else changed it: "
                "undo that, choose another --target, or use --schema-evolution ignore",
            )
        self._alter(table, change)
        return table

    def _alter(self, table: TableMeta, change: SchemaChange) -> None:
        if self._policy.evolution == EXCEPTION:
            raise SourceError(
                "ErrSchemaChanged",
                f"{table.name} has changed: {change}; everything before it is committed; start again with "
                "--schema-evolution evolve or ignore",
            )
        change.require_possible(table.name)
        self._target.alter(table, self._filling(table, change))

    def _filling(self, table: TableMeta, change: SchemaChange) -> SchemaChange:
        """With the values of rows that are older than the added columns; a changelog's rows are of their own time."""
        if self._policy.mode == APPEND:
            return change
        told = [field for field in change.added if field.name in table.defaults]
        filled = tuple((field.name, scalar(table.defaults[field.name], field.type)) for field in told)
        return dataclasses.replace(change, filled=filled)

    def _require_allowed(self, ddls: Sequence[Ddl], before: ChangefeedMeta) -> None:
        if self._policy.evolution != EXCEPTION:
            return
        for ddl in ddls:
            touched = [name for name in ddl.tables if name in before.tables] + list(ddl.dropped)
            touched += [old for old, _ in ddl.renamed]
            if touched:
                raise SourceError(
                    "ErrSchemaChanged",
                    f"{', '.join(touched)} changed at {ddl.ts} ({ddl.query}); everything before it is committed; start "
                    "again with --schema-evolution evolve or ignore",
                )

    def _rename(self, ddl: Ddl, before: ChangefeedMeta, now: ChangefeedMeta) -> Sequence[tuple[str, str]]:
        olds, news = {old for old, _ in ddl.renamed}, [new for _, new in ddl.renamed]
        for new in news:
            if new in olds and new not in {old for old, _ in ddl.renamed[: news.index(new)]}:
                raise SourceError(
                    "ErrRenameUnsupported", f"{ddl.query!r} swaps names; start a new changefeed and target"
                )
        for old, new in ddl.renamed:
            if old in before.tables and new in now.tables and self._behind(before.tables[old], ddl.ts):
                self._target.rename(before.tables[old], now.tables[new])
        return ddl.renamed

    def _drop(self, name: str, before: ChangefeedMeta, ts: int) -> bool:
        if name not in before.tables:
            return False
        if self._policy.on_drop == DROP and self._behind(before.tables[name], ts):
            self._target.drop(before.tables[name])
        return True

    def _empty(self, ddl: Ddl, before: ChangefeedMeta, now: ChangefeedMeta) -> None:
        """Truncated tables, and new ones whose name an earlier, dropped one had."""
        new = {new for _, new in ddl.renamed}
        again = [name for name in ddl.tables if name not in before.tables and name not in new]
        for name in (*ddl.truncated, *again):
            if name in now.tables and self._behind(now.tables[name], ddl.ts):
                self._target.truncate(now.tables[name], ddl.ts)

    def _behind(self, table: TableMeta, ts: int) -> bool:
        position = self._target.position(table)
        return position is not None and position <= ts


def _frozen(table: TableMeta, actual: Any) -> TableMeta:
    """The table with the columns and types that the target has of it."""
    envelope = [table.schema.field(name) for name in ENVELOPE]
    own = [field for field in actual if field.name not in (*ENVELOPE, "valid_from_ts", "valid_to_ts", "is_current")]
    plain = [pa.field(field.name, field.type) for field in own]
    return dataclasses.replace(table, schema=pa.schema([*envelope, *plain]))
