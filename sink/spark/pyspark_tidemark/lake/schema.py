"""The schemas of a target's tables: the columns that each mode adds to an upstream's, and the
difference between two schemas as columns to rename, drop, widen and add. Pure.

Columns are compared by id, not by name: the capture gives each column a `tidemark.column_id` that
survives a rename and is never used again, and a target stores it with its own columns
(docs/format/flight.md). So two columns that swap names, or a column that is dropped and added
again, are recognised. No SQL text is read here.

A change can be repeated: steps that are done are not in the difference any more.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from pyspark_tidemark.column_metadata import column_ids
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.format import APPEND, EVOLVE, KEEP, SCD2, UPSERT
from pyspark_tidemark.names import check_names, renaming

ENVELOPE = ("_op", "_commit_ts", "_start_ts", "_seq")
VALID_FROM, VALID_TO, IS_CURRENT = "valid_from_ts", "valid_to_ts", "is_current"
_VERSIONED = (
    pa.field(VALID_FROM, pa.int64()),
    pa.field(VALID_TO, pa.int64()),
    pa.field(IS_CURRENT, pa.bool_()),
)
_VERSION_COLUMNS = tuple(field.name for field in _VERSIONED)
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


def lake_schema(table: TableMeta, mode: str = UPSERT) -> Any:
    """The pyarrow.Schema of a target's table.

    `upsert`: the upstream's columns, then the commit_ts of each row's last change; `soft-delete`:
    the same, of a table that has the column of that mode (`lake.soft_delete`). `append`: the
    envelope, then the columns. `scd2`: the columns, then the commit timestamps between which the
    row looked like that, end exclusive.
    """
    if mode == APPEND:
        return pa.schema(list(table.schema))
    own = [table.schema.field(name) for name in table.schema.names if name not in ENVELOPE]
    return pa.schema([*own, *(_VERSIONED if mode == SCD2 else [table.schema.field("_commit_ts")])])


def lake_columns(table: TableMeta, mode: str = UPSERT) -> list[str]:
    """The names in `lake_schema`."""
    names: list[str] = lake_schema(table, mode).names
    return names


def own_columns(mode: str) -> tuple[str, ...]:
    """The columns of a target's table that are ours; all others are the upstream's."""
    return (*ENVELOPE, *_VERSION_COLUMNS) if mode == SCD2 else ENVELOPE


def lake_key(table: TableMeta, mode: str) -> tuple[str, ...]:
    """The columns that identify a row of the target's table;
    empty where the upstream's table has no key.
    """
    if mode == APPEND:
        return ("_commit_ts", "_start_ts", "_seq")
    return (*table.key, VALID_FROM) if mode == SCD2 and table.key else table.key


def check_key(table: TableMeta, mode: str) -> None:
    """Check that the table has the key that the mode needs to identify its rows.

    Raises:
        SourceError: ErrTableNoKey.
    """
    if mode != APPEND and not table.key:
        raise SourceError(
            "ErrTableNoKey", f"{table.name} has no key to merge by; use --mode append for it"
        )


def check_held(table: TableMeta, mode: str, target: str) -> None:
    """Check that a target of the format `target` takes the names of the table and its columns, and
    that none of them is the name of a column that the mode adds.

    Raises:
        SourceError: ErrNameUnsupported, with the option of `changefeed create` that gives other
            names.
    """
    database, _, name = table.name.partition(".")
    names = lake_columns(table, mode)
    clashing = [column for column in table.schema.names if column.lower() in _VERSION_COLUMNS]
    if mode == SCD2 and clashing:
        raise SourceError(
            "ErrNameUnsupported",
            f"mode scd2 adds the columns {', '.join(_VERSION_COLUMNS)}, and {table.name} has "
            f"{', '.join(clashing)}. {renaming((database, name), clashing, names)}",
        )
    check_names(target, (database, name), names)


@dataclasses.dataclass(frozen=True)
class Policy:
    """How the target handles schema changes and dropped tables."""

    mode: str
    evolution: str = EVOLVE
    on_drop: str = KEEP


@dataclasses.dataclass(frozen=True)
class SchemaChange:
    """The steps from one schema to another, in the order in which they are applied."""

    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    widened: tuple[Any, ...] = ()
    """The pyarrow fields as they become."""
    added: tuple[Any, ...] = ()
    filled: tuple[tuple[str, Any], ...] = ()
    """The added columns whose existing rows hold a value (pyarrow.Scalar) and not null."""
    incompatible: tuple[tuple[Any, Any], ...] = ()
    """(old, new) fields that no widening leads from one to the other."""
    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The ids of the columns after the change, which the target stores; empty if not known."""

    @property
    def old_names(self) -> dict[str, str]:
        """What renamed columns were called before, by their new names."""
        return {new: old for old, new in self.renamed}

    def __bool__(self) -> bool:
        return bool(self.renamed or self.dropped or self.widened or self.added or self.incompatible)

    def __str__(self) -> str:
        parts = [f"{old} becomes {new}" for old, new in self.renamed]
        parts += [f"{name} is dropped" for name in self.dropped]
        parts += [f"{field.name} is widened to {field.type}" for field in self.widened]
        parts += [f"{field.name} {field.type} is added" for field in self.added]
        parts += [f"{old.name} {old.type} becomes {new.type}" for old, new in self.incompatible]
        return ", ".join(parts)

    @property
    def replacing(self) -> "SchemaChange":
        """The same for a table without rows: columns of an incompatible type are dropped, and added
        with the new type.
        """
        olds, news = zip(*self.incompatible, strict=True) if self.incompatible else ((), ())
        new_names = {field.name for field in news}
        return dataclasses.replace(
            self,
            renamed=tuple(pair for pair in self.renamed if pair[1] not in new_names),
            dropped=(*self.dropped, *(field.name for field in olds)),
            added=(*self.added, *news),
            incompatible=(),
        )

    def require_possible(self, table: str) -> None:
        """Check that the change has no incompatible types.

        Raises:
            SourceError: ErrSchemaIncompatible.
        """
        if self.incompatible:
            raise SourceError(
                "ErrSchemaIncompatible",
                f"{table}: {self}; no format widens that: start a new target, or go on with "
                "--schema-evolution ignore, which casts to the old type",
            )


def difference(old: Any, new: Any) -> SchemaChange:
    """What leads from the pyarrow.Schema `old` to `new`.

    A column is the same one if both schemas give it the same identity; where one of them gives
    none, if it has the same name.
    """
    old_names = _old_names(old, new)
    pairs = [(old.field(old_names[field.name]), field) for field in new if field.name in old_names]
    changed = [(before, after) for before, after in pairs if before.type != after.type]
    survivors = set(old_names.values())
    return SchemaChange(
        renamed=tuple(
            (before.name, after.name) for before, after in pairs if before.name != after.name
        ),
        dropped=tuple(name for name in old.names if name not in survivors),
        widened=tuple(after for before, after in changed if widens(before.type, after.type)),
        added=tuple(field for field in new if field.name not in old_names),
        incompatible=tuple(
            (before, after) for before, after in changed if not widens(before.type, after.type)
        ),
        ids=column_ids(new),
    )


def check_same_columns(table: TableMeta, actual: Any) -> None:
    """Check that the columns of a target's table, `actual`, are those that it was given: one that
    somebody else dropped and added again has lost its values, and has no identity.

    Raises:
        SourceError: ErrTargetSchema.
    """
    ids = column_ids(actual)
    others = [name for name in actual.names if ids and name in table.column_ids.keys() - ids.keys()]
    if others:
        raise SourceError(
            "ErrTargetSchema",
            f"{table.name} has columns of somebody else's under its own names "
            f"({', '.join(others)}), and what it had there is gone: bring the table back as it was; "
            "else create a new changefeed with a new target, or go on without those values by "
            "--schema-evolution ignore",
        )


def _old_names(old: Any, new: Any) -> dict[str, str]:
    """For each column of `new` that `old` has, what `old` calls it."""
    old_ids, new_ids = column_ids(old), column_ids(new)
    old_name_of = {number: name for name, number in old_ids.items()}
    names = {name: old_name_of[number] for name, number in new_ids.items() if number in old_name_of}
    claimed = set(names.values())
    for name in new.names:
        identified = name in new_ids and name in old_ids
        if name not in names and name in old.names and name not in claimed and not identified:
            names[name] = name
    return names


def widens(old: Any, new: Any) -> bool:
    """Whether every value of the type `old` is one of `new`,
    and all formats know how to get from one to the other.
    """
    if old in _INTEGERS and new in _INTEGERS:
        return bool(new.bit_width > old.bit_width)
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(new.scale == old.scale and new.precision > old.precision)
    return bool(old == pa.float32() and new == pa.float64())


def fitted(rows: Any, schema: Any) -> Any:
    """`rows` (pyarrow.Table) as the columns of `schema`: null where they have none,
    cast where types differ.

    Raises:
        SourceError: ErrSchemaIncompatible, a value does not fit.
    """
    if rows.schema.equals(schema):
        return rows
    try:
        columns = [
            rows[field.name].cast(field.type)
            if field.name in rows.schema.names
            else pa.nulls(len(rows), field.type)
            for field in schema
        ]
    except pa.ArrowInvalid:
        # What Arrow says quotes the value.
        raise SourceError(
            "ErrSchemaIncompatible",
            f"a new value does not fit into the target's type, {_differences(rows, schema)}; "
            "start a new target",
        ) from None
    return pa.Table.from_arrays(columns, schema=schema)


def _differences(rows: Any, schema: Any) -> str:
    """Which columns have other types in `rows` than in `schema`."""
    return ", ".join(
        f"column {field.name}: {rows[field.name].type} into {field.type}"
        for field in schema
        if field.name in rows.schema.names and rows[field.name].type != field.type
    )
