"""Schema changes between two cuts: a barrier applies the DDLs at the ts where the next cut starts.

`CutApplier` (`lake.cut`) calls `Barrier.cross` before each cut: it renames, drops, empties, makes
anew and alters tables of the target, and returns the tables to write the cut to. After a stretch
that was skipped, it calls `Barrier.catch_up` instead, which compares schemas, as it has no DDLs.
`Barrier.fitting` alters a single table whose schema in the target is older.

Invariants:
1. No cut crosses a DDL: when a DDL is applied, everything before it is committed and nothing after
   it is.
2. Each step leaves a table alone whose position is above the DDL, and can be repeated: a crash
   repeats the whole barrier.
3. A table is written to only with the schema that the target has for it.
4. A table is identified by the upstream's table id. A new table under the name of an earlier,
   dropped one begins empty, whatever columns the earlier one had.
5. A table that is merged of shards (`lake.shards`) is one table here. Rows of a dropped or emptied
   shard are removed before a DDL changes the columns; values of the other shards' rows are changed
   after it.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_tidemark.column_metadata import column_ids, scalar, with_column_ids, without_metadata
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed, ChangefeedMeta, Ddl, Known, TableMeta
from pyspark_tidemark.lake.format import (
    APPEND,
    DROP,
    EVOLVE,
    EXCEPTION,
    IGNORE,
    MERGING_MODES,
    ROW_MODES,
    UPSERT,
)
from pyspark_tidemark.lake.manifest import Manifest
from pyspark_tidemark.lake.registry import merging_formats
from pyspark_tidemark.lake.schema import (
    ENVELOPE,
    Policy,
    SchemaChange,
    check_same_columns,
    difference,
    lake_schema,
    own_columns,
)
from pyspark_tidemark.lake.shards import (
    ShardRows,
    merged,
    merged_ddl,
    never_narrower,
    shard_rows,
    vanished,
)
from pyspark_tidemark.lake.soft_delete import MarkedTables
from pyspark_tidemark.lake.target import ShardTarget, StatementTarget, Target, VersionedTarget


@dataclasses.dataclass(frozen=True)
class BarrierResult:
    """The tables above a barrier, and what it did to them."""

    tables: dict[str, TableMeta]
    dropped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    """(old, new) names, in the order of the steps."""
    recreated: tuple[str, ...] = ()
    """Tables that begin empty under a name that another table had."""
    changed: frozenset[str] = frozenset()
    """Tables that the barrier made, emptied, altered or renamed: the record of the next cut names
    them, also without rows.
    """
    emptied: frozenset[str] = frozenset()
    """Truncated tables that still have their rows in the target: applying the next cut removes
    them in the same step.
    """


class Barrier:
    """Applies the DDLs of a changefeed to its target; one call at a time."""

    def __init__(
        self,
        changefeed: Changefeed | MarkedTables,
        target: Target,
        manifest: Manifest,
        policy: Policy,
    ) -> None:
        self._changefeed = changefeed
        self._target = target
        self._manifest = manifest
        self._policy = policy
        self._known: Known | None = None

    def cross(self, ts: int, *, first: bool) -> BarrierResult:
        """Apply the DDLs at `ts`, if there are any; before a lake's `first` cut none is, since its
        tables are made with the schema that they have above `ts`. A topic may be empty because its
        messages have expired: it gets them, unless the changefeed begins there.

        Raises:
            SourceError: ErrSchemaChanged (by policy), ErrSchemaIncompatible, ErrRenameUnsupported.
        """
        now = merged(self._changefeed.describe(ts, known=self._known))
        self._known = Known(ts, now.tables)
        self._check_shards(now)
        ddls = [ddl for ddl in now.ddls if ddl.ts == ts]
        if isinstance(self._target, StatementTarget) and now.start_ts is not None:
            first = first and ts <= now.start_ts
        if first or not ddls:
            return BarrierResult(now.tables)
        crossing = _Crossing.of(ts, ddls, merged(self._changefeed.describe(ts - 1)), now)
        self._require_allowed(crossing.ddls, crossing.before)
        result = self._apply_to_tables(crossing)
        for name in sorted(result.changed):
            self._apply_to_columns(name, crossing, result)
        return result

    def _apply_to_tables(self, crossing: "_Crossing") -> BarrierResult:
        """Rename, drop, empty and make anew whole tables, one DDL after the other."""
        before, now = crossing.before, crossing.now
        dropped: list[str] = []
        renamed: list[tuple[str, str]] = []
        recreated: list[str] = []
        emptied: list[str] = []
        for ddl in crossing.ddls:
            if isinstance(self._target, StatementTarget):
                self._target.write_statement(ddl, before, now)
            # First in each DDL: a new table may take a name that a renamed one gave up.
            renamed += self._rename(ddl, before, now)
            dropped += [name for name in ddl.dropped if self._drop(name, ddl, before)]
            emptied += self._empty(ddl, before, now)
            recreated += self._recreate(ddl, before, now)
        return BarrierResult(
            now.tables,
            tuple(dropped),
            tuple(renamed),
            tuple(recreated),
            crossing.changed,
            frozenset(emptied) - {*recreated},
        )

    def _apply_to_columns(self, name: str, crossing: "_Crossing", result: BarrierResult) -> None:
        """Give a table its columns and key above the DDLs, and change the rows of its shards."""
        table = crossing.now.tables[name]
        old_names = {new: old for old, new in result.renamed}
        before = crossing.before.tables.get(old_names.get(name, name))
        is_emptied = any(name in ddl.truncated for ddl in crossing.ddls)
        steps = crossing.shard_rows.get(name, []) if self._is_below(table, crossing.ts) else []
        # Invariant 5: rows are removed before the columns change, values are changed after it.
        self._change_rows(table, [step for step in steps if step.is_gone])
        # The columns of a recreated table are not those of the one that had its name.
        self.fitting(table, None if name in result.recreated else before, emptied=is_emptied)
        self._change_rows(table, [step for step in steps if not step.is_gone])
        self._rekey(before, table, crossing.ts)

    def catch_up(self, ts: int) -> BarrierResult:
        """Alter the tables after a skipped stretch, which ends at `ts`.

        The DDLs in the stretch are not known, so the schema of each table is compared with the
        changefeed's at `ts`. A table that the changefeed does not have any more stays as it is.

        Raises:
            SourceError: ErrSchemaChanged (by policy), ErrSchemaIncompatible, ErrKeyUnknown.
        """
        now = merged(self._changefeed.describe(ts))
        self._check_shards(now)
        now = _changed_at(now, ts, now.tables)
        self._known = Known(ts, now.tables)
        for table in now.tables.values():
            if table.shards and self._is_below(table, ts) and isinstance(self._target, ShardTarget):
                self._change_rows(table, vanished(table, self._target.shards(table), ts))
            self.fitting(table)
            if self._is_below(table, ts):
                self._target.rekey(table)
        return BarrierResult(now.tables, changed=frozenset(now.tables))

    def fitting(
        self, table: TableMeta, before: TableMeta | None = None, *, emptied: bool = False
    ) -> TableMeta:
        """The table with the schema to write it with; the target's table is altered first, if its
        schema is older.

        `before` is the table right below the DDL that is being applied, which may have `emptied`
        it.

        Raises:
            SourceError: ErrTargetSchema, the target has another schema than the changefeed gave it;
                ErrSchemaUnclear.
        """
        position = self._target.position(table)
        if position is None:
            return table
        actual = self._identified(self._target.schema(table), before)
        if self._policy.evolution != IGNORE and isinstance(self._target, VersionedTarget):
            check_same_columns(table, actual)
        table = never_narrower(table, actual)
        expected = self._target.storable(lake_schema(table, self._policy.mode))
        change = difference(actual, with_column_ids(expected, table.column_ids))
        if not change:
            return table
        if self._policy.evolution == IGNORE:
            self._check_key(table, [name for name in table.key if name not in actual.names])
            return _frozen(table, actual, self._policy.mode)
        # The target is ahead of the DDL, so it had the DDL's schema once (invariant 2).
        if position > table.schema_ts:
            raise SourceError(
                "ErrTargetSchema",
                f"{table.name} exists with another schema than the changefeed's ({change}); "
                "somebody else changed it: "
                "undo that, choose another --target, or use --schema-evolution ignore",
            )
        if change.incompatible and self._policy.mode in ROW_MODES:
            if emptied and self._policy.mode == UPSERT:
                self._target.truncate(table, table.schema_ts)
                change = change.replacing
            elif self._policy.evolution == EVOLVE and self._target.is_empty(table):
                # It has no rows that could need the old types.
                self._target.replace(table, table.schema_ts, change.replacing)
                return table
        self._alter(table, change)
        return table

    def _identified(self, actual: Any, before: TableMeta | None) -> Any:
        """The target's schema with the ids of its columns.

        A target that an older version wrote has no ids: if its columns have the names that the
        table had before the DDL, they get the ids that the table had then.
        """
        if column_ids(actual) or before is None:
            return actual
        ours = {*own_columns(self._policy.mode)}
        same = {*actual.names} - ours == {*before.schema.names} - ours
        return with_column_ids(actual, before.column_ids) if same else actual

    def _alter(self, table: TableMeta, change: SchemaChange) -> None:
        if self._policy.evolution == EXCEPTION:
            raise SourceError(
                "ErrSchemaChanged",
                f"{table.name} has changed: {change}; everything before it is committed; start "
                "again with --schema-evolution evolve or ignore",
            )
        if change.dropped and change.added and not change.ids and not table.shards:
            raise SourceError(
                "ErrSchemaUnclear",
                f"{table.name}: {change}, and the capture does not say whether a column was "
                "renamed, since it is older than this job: upgrade the captures first",
            )
        change.require_possible(table.name)
        added = {field.name for field in change.added} - table.defaults.keys()
        self._check_key(table, [name for name in table.key if name in added])
        self._target.alter(table, self._filling(table, change))

    def _check_key(self, table: TableMeta, unknown: Sequence[str]) -> None:
        """Check that the key identifies the existing rows: `unknown` are the key's columns for
        which they have no values.

        Raises:
            SourceError: ErrKeyUnknown.
        """
        if not unknown or self._policy.mode == APPEND or self._target.is_empty(table):
            return
        raise SourceError(
            "ErrKeyUnknown",
            f"{table.name}: its key is {', '.join(table.key)} now, and what {', '.join(unknown)} "
            "holds in older rows is in no event, so changes of them cannot be applied: start a "
            "new changefeed and target",
        )

    def _filling(self, table: TableMeta, change: SchemaChange) -> SchemaChange:
        """The change with the values that existing rows get in the added columns."""
        # A changelog's rows stay as they were sent.
        if self._policy.mode == APPEND:
            return change
        defaulted = [field for field in change.added if field.name in table.defaults]
        filled = tuple(
            (field.name, scalar(table.defaults[field.name], field.type)) for field in defaulted
        )
        return dataclasses.replace(change, filled=filled)

    def _check_shards(self, described: ChangefeedMeta) -> None:
        """Check that the target can keep merged tables, if there are any.

        Raises:
            SourceError: ErrModeUnsupported.
        """
        table = next((table for table in described.tables.values() if table.shards), None)
        if table is None:
            return
        policy = self._policy
        if not isinstance(self._target, ShardTarget) or policy.mode not in MERGING_MODES:
            raise SourceError(
                "ErrModeUnsupported",
                f"{table.name} is merged of shards, which {merging_formats()} can keep, in "
                f"the modes {', '.join(MERGING_MODES)}: create the changefeed with such a target",
            )
        if policy.evolution == IGNORE:
            raise SourceError(
                "ErrModeUnsupported",
                f"{table.name} is merged of shards, whose columns change one after the other: "
                "start the job without --schema-evolution ignore",
            )

    def _change_rows(self, table: TableMeta, steps: Sequence[ShardRows]) -> None:
        # A changelog's rows stay as they were sent.
        if steps and self._policy.mode in ROW_MODES:
            assert isinstance(self._target, ShardTarget), "_check_shards"
            self._target.change_rows(table, steps)

    def _require_allowed(self, ddls: Sequence[Ddl], before: ChangefeedMeta) -> None:
        if self._policy.evolution != EXCEPTION:
            return
        for ddl in ddls:
            if ddl.is_filter_update:
                continue
            touched = [name for name in ddl.tables if name in before.tables] + list(ddl.dropped)
            touched += [old for old, _ in ddl.renamed]
            if touched:
                raise SourceError(
                    "ErrSchemaChanged",
                    f"{', '.join(touched)} changed at {ddl.ts} ({ddl.query}); everything before "
                    "it is committed; start again with --schema-evolution evolve or ignore",
                )

    def _rename(
        self, ddl: Ddl, before: ChangefeedMeta, now: ChangefeedMeta
    ) -> list[tuple[str, str]]:
        """Give tables their new names, one step after the other; steps that an earlier try of the
        barrier has done are left out.

        Returns the (old, new) names of all steps, in order.
        """
        renamed = [
            (old, new) for old, new in ddl.renamed if old in before.tables and new in now.tables
        ]
        names = _rename_steps(renamed, ddl.ts)
        # Neither description has the temporary names of tables that swap names.
        metas = {**now.tables, **before.tables}
        metas |= {
            new: dataclasses.replace(metas[old], name=new) for old, new in names if new not in metas
        }
        # The steps from here on lead from a temporary name to the new one.
        first_temporary = next(
            (number for number, (old, _) in enumerate(names) if old not in before.tables),
            len(names),
        )
        all_moved = first_temporary < len(names) and self._manifest.moved_at(ddl.ts)

        steps = [(metas[old], metas[new]) for old, new in names]
        # One step may free a name that the next one takes, so a table under a step's old name may
        # be another one already. The last step that looks done (no table of the old name, one of
        # the new) is proof that all steps before it are done. Before anything is renamed, the steps
        # from temporary names look done, too: they count only once the manifest notes that all
        # steps before them are done.
        telling = steps if all_moved else steps[:first_temporary]
        done = max(
            (
                number
                for number, (old, new) in enumerate(telling, 1)
                if not self._has(old) and self._has(new)
            ),
            default=0,
        )
        for number, (old, new) in list(enumerate(steps))[done:]:
            if number == first_temporary:
                self._manifest.note_moved(ddl.ts)
            if self._is_below(old, ddl.ts):
                self._target.rename(old, now.tables.get(new.name, new))
        return names

    def _rekey(self, before: TableMeta | None, table: TableMeta, ts: int) -> None:
        if before is None or not self._is_below(table, ts):
            return
        # A column that gets an incompatible type is made anew in the target, which removes the old
        # column from the target's key.
        retyped = self._policy.evolution == EVOLVE and _retyped_key(before, table)
        if retyped or _key(before) != _key(table):
            self._target.rekey(table)

    def _drop(self, name: str, ddl: Ddl, before: ChangefeedMeta) -> bool:
        if name not in before.tables:
            return False
        # A table that a new table filter leaves out still exists upstream.
        drops = self._policy.on_drop == DROP and not ddl.is_filter_update
        if drops and self._is_below(before.tables[name], ddl.ts):
            self._target.drop(before.tables[name])
        return True

    def _empty(self, ddl: Ddl, before: ChangefeedMeta, now: ChangefeedMeta) -> list[str]:
        """Empty truncated tables; returns those that the next cut empties in its own commit, so
        that no reader sees the table empty in between.
        """
        with_cut = []
        for name in ddl.truncated:
            if name not in now.tables or not self._is_below(now.tables[name], ddl.ts):
                continue
            same_key = name in before.tables and _key(before.tables[name]) == _key(now.tables[name])
            if same_key and self._target.empties_with_cut:
                with_cut.append(name)
            else:
                self._target.truncate(now.tables[name], ddl.ts)
        return with_cut

    def _recreate(self, ddl: Ddl, before: ChangefeedMeta, now: ChangefeedMeta) -> list[str]:
        """Let tables that the DDL made begin empty, also where the target has an earlier table of
        that name; returns the names.
        """
        renamed = {new for _, new in ddl.renamed}
        names = [name for name in ddl.tables if name in now.tables and name not in renamed]
        recreated = [
            name for name in names if _is_another(before.tables.get(name), now.tables[name], ddl)
        ]
        for name in recreated:
            table = now.tables[name]
            if self._is_below(table, ddl.ts):
                expected = self._target.storable(lake_schema(table, self._policy.mode))
                # Column ids count within one table: columns of the earlier one are compared by
                # name.
                actual = without_metadata(self._target.schema(table))
                change = difference(actual, with_column_ids(expected, table.column_ids))
                self._target.replace(table, ddl.ts, change.replacing)
        return recreated

    def _has(self, table: TableMeta) -> bool:
        """Whether the target has a table of that name by this changefeed."""
        try:
            return self._target.position(table) is not None
        except SourceError as err:
            if err.code != "ErrTargetForeign":
                raise
            # In a database a crash may come after the table was renamed and before its row in the
            # table of positions was.
            return False

    def _is_below(self, table: TableMeta, ts: int) -> bool:
        """Whether the target has the table, without changes above `ts`: a DDL at `ts` may be
        applied to it.
        """
        position = self._target.position(table)
        return position is not None and position <= ts


@dataclasses.dataclass(frozen=True)
class _Crossing:
    """The DDLs at one ts, with the changefeed right below and above them. Shards are merged in all
    three.
    """

    ts: int
    ddls: Sequence[Ddl]
    before: ChangefeedMeta
    now: ChangefeedMeta
    shard_rows: Mapping[str, Sequence[ShardRows]]
    """What the DDLs do to the rows of merged tables, by table, in order."""

    @classmethod
    def of(
        cls, ts: int, ddls: Sequence[Ddl], before: ChangefeedMeta, now: ChangefeedMeta
    ) -> "_Crossing":
        """From the DDLs as the changefeed describes them: of shards."""
        steps = _joined(shard_rows(ddl, before.tables, now.tables) for ddl in ddls)
        ddls = [merged_ddl(ddl, before.tables, now.tables) for ddl in ddls]
        now = _changed_at(now, ts, {name for ddl in ddls for name in ddl.tables})
        return cls(ts, ddls, before, now, steps)

    @property
    def changed(self) -> frozenset[str]:
        """Tables above the DDLs that one of them is about."""
        named = {name for ddl in self.ddls for name in (*ddl.tables, *ddl.truncated)}
        return frozenset(named & self.now.tables.keys())


def _joined(parts: Iterable[Mapping[str, Sequence[ShardRows]]]) -> dict[str, list[ShardRows]]:
    """The steps of several DDLs by table, in order."""
    joined: dict[str, list[ShardRows]] = {}
    for part in parts:
        for name, steps in part.items():
            joined.setdefault(name, []).extend(steps)
    return joined


def _changed_at(described: ChangefeedMeta, ts: int, names: Iterable[str]) -> ChangefeedMeta:
    """The changefeed with `schema_ts` = `ts` for those of the tables that are merged. Where a shard
    ends, the merged table changes at `ts` though none of its other shards does.
    """
    changed = {
        name: dataclasses.replace(described.tables[name], schema_ts=ts)
        for name in names
        if name in described.tables and described.tables[name].shards
    }
    if not changed:
        return described
    return dataclasses.replace(described, tables=described.tables | changed)


def _key(table: TableMeta) -> list[tuple[str, int]]:
    """The key's columns by name and id: another column may have taken the name of one."""
    return [(name, table.column_ids.get(name, 0)) for name in table.key]


def _retyped_key(before: TableMeta, table: TableMeta) -> bool:
    """Whether a column of the key changed to a type that is not wider than its old one."""
    change = difference(_columns_of_key(before), _columns_of_key(table))
    return bool(change.incompatible)


def _columns_of_key(table: TableMeta) -> Any:
    own = pa.schema([table.schema.field(name) for name in table.key])
    return with_column_ids(own, table.column_ids)


def _is_another(before: TableMeta | None, table: TableMeta, ddl: Ddl) -> bool:
    """Whether a DDL made `table`; `before` is the table of that name right below the DDL."""
    if before is None:
        return True
    if 0 in (before.table_id, table.table_id) or before.table_id == table.table_id:
        return False
    # TRUNCATE gives a table of TiDB another id, and keeps its columns; CREATE OR REPLACE brings
    # columns of its own.
    new_columns = before.column_ids and set(before.column_ids.values()).isdisjoint(
        table.column_ids.values()
    )
    return bool(new_columns) or table.name not in ddl.truncated


def _rename_steps(renamed: Sequence[tuple[str, str]], ts: int) -> list[tuple[str, str]]:
    """The renames of a DDL at `ts` as (old, new) steps, in an order in which each new name is free.

    Where tables swap names, one of them is renamed to a temporary name first; the steps from
    temporary names to the new ones come last.
    """
    remaining, steps = list(renamed), list[tuple[str, str]]()
    from_temporary: list[tuple[str, str]] = []
    while remaining:
        taken = {old for old, _ in remaining}
        free = next((pair for pair in remaining if pair[1] not in taken), None)
        if free is not None:
            remaining.remove(free)
            steps.append(free)
            continue
        old, new = remaining.pop(0)
        temporary = f"{old.partition('.')[0]}.tidemark_moved_{len(from_temporary)}_{ts}"
        steps.append((old, temporary))
        from_temporary.append((temporary, new))
    return steps + from_temporary


def _frozen(table: TableMeta, actual: Any, mode: str) -> TableMeta:
    """The table with the columns and types of the target: with `--schema-evolution ignore` others
    are not written.
    """
    envelope = [table.schema.field(name) for name in ENVELOPE]
    own = [field for field in actual if field.name not in own_columns(mode)]
    plain = [pa.field(field.name, field.type) for field in own]
    return dataclasses.replace(table, schema=pa.schema([*envelope, *plain]))
