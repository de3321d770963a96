"""What a target's tables look like by mode: equal to the upstream, every change,
or every version of each row. Pure.
"""

from typing import Any

import pyarrow as pa

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.format import APPEND, MODES, SCD2, UPSERT
from pyspark_tidemark.names import check_names, renaming

__all__ = ["APPEND", "ENVELOPE", "IS_CURRENT", "MODES", "SCD2", "UPSERT", "VALID_FROM", "VALID_TO"]
ENVELOPE = ("_op", "_commit_ts", "_start_ts", "_seq")
VALID_FROM, VALID_TO, IS_CURRENT = "valid_from_ts", "valid_to_ts", "is_current"
_VERSIONED = (
    pa.field(VALID_FROM, pa.int64()),
    pa.field(VALID_TO, pa.int64()),
    pa.field(IS_CURRENT, pa.bool_()),
)
_VERSION_COLUMNS = tuple(field.name for field in _VERSIONED)


def lake_schema(table: TableMeta, mode: str = UPSERT) -> Any:
    """The pyarrow.Schema of a target's table.

    `upsert`: the upstream's columns, then the commit_ts of each row's last change. `append`: the
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
    """See that the mode can tell the table's rows apart.

    Raises:
        SourceError: ErrTableNoKey.
    """
    if mode != APPEND and not table.key:
        raise SourceError(
            "ErrTableNoKey", f"{table.name} has no key to merge by; use --mode append for it"
        )


def check_held(table: TableMeta, mode: str, target: str) -> None:
    """See that a target of the format `target` can hold the table under its names,
    beside the columns of the mode.

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
