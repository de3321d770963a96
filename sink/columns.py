"""What mounters of all sources have in common: the columns that say what happened to a row,
and the fields' metadata.

A field's metadata tells what a column is beside its type. `tidemark.column_id` is a decimal number:
a column keeps it through renames, moves and changes of type, and no other column of the table ever
has it. Readers compare columns by it. `tidemark.default` is what rows hold that were written before
the column was added: JSON text of the value as the rows' batches would show it; numbers and text;
decimals, dates and times as text, bytes as base64. Without it such rows show null. See
docs/format/flight.md.
"""

import base64
import datetime as dt
import json
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.model.errors import CorruptError, KeyValueError
from storage.model.event import DELETE, INSERT, UPDATE

META_FIELDS: Final = (
    pa.field("_op", pa.string()),
    pa.field("_commit_ts", pa.int64()),
    pa.field("_start_ts", pa.int64()),
    pa.field("_seq", pa.int64()),
)
_SHOWN_CHARACTERS: Final = 500
_OP_NAMES = pa.array(
    [{DELETE: "delete", UPDATE: "update", INSERT: "insert"}.get(op) for op in range(INSERT + 1)]
)
DEFAULT: Final = b"tidemark.default"
COLUMN_ID: Final = b"tidemark.column_id"
Plain: TypeAlias = str | int | float
"""A value as JSON has it."""


def row_values(raw: pa.RecordBatch) -> pa.Array:
    """What each change of a batch of RAW_SCHEMA tells of its row: the new value,
    or a delete's old one.

    Raises:
        CorruptError: an insert or update has no new value.
    """
    deletes = pc.equal(raw["op"], pa.scalar(DELETE, pa.uint8()))
    if pc.any(pc.and_not(raw["value"].is_null(), deletes)).as_py():
        raise CorruptError(
            "an insert or update without a row; a puller must give each change its value"
        )
    return (
        pc.if_else(deletes, raw["old_value"], raw["value"])
        if pc.any(deletes).as_py()
        else raw["value"]
    )


def check_dates(
    table: str, key: Mapping[str, pa.Array], dates: Collection[str], has_key: pa.Array
) -> None:
    """See that no date of a key, in its columns by name, became null;
    `has_key` are the rows of which there is a key.

    Raises:
        KeyValueError: such rows would be one row at the reader.
    """
    for name in dates:
        unknown = pc.and_(key[name].is_null(), has_key)
        if pc.any(unknown, min_count=0).as_py():
            raise KeyValueError(
                f"a row of {table}{_others(key, name, pc.index(unknown, True).as_py())} has a "
                f"date in its key column {name} that no calendar has, such as 0000-00-00; as null "
                "it would be one row with others like it. Create the changefeed anew, with a new "
                "target and --zero-dates key-text (all DATE, DATETIME and TIMESTAMP columns of "
                "keys are text then), or correct such rows at the source and create it anew with "
                "a dump"
            )


def inexact(
    table: str, key: Mapping[str, pa.Array], name: str, row: int, reason: str
) -> KeyValueError:
    """A key column has a value in a row that readers are shown as another one."""
    return KeyValueError(
        f"a row of {table}{_others(key, name, row)} has {reason} in its key column {name}: it "
        "would be one row with others. Correct it, or the column's type or character set, at the "
        "source, and create the changefeed anew with a dump; or leave the table out"
    )


def _others(key: Mapping[str, pa.Array], name: str, row: int) -> str:
    """A row by the values of its key but for one column."""
    values = ", ".join(
        f"{other} = {column[row].as_py()!r}" for other, column in key.items() if other != name
    )
    return f" ({values[:_SHOWN_CHARACTERS]})" if values else ""


def meta_columns(raw: pa.RecordBatch) -> list[pa.Array]:
    """The columns of `META_FIELDS`, of a batch of RAW_SCHEMA."""
    commit_ts, start_ts = (
        np.asarray(raw[name]).astype(np.int64) for name in ("commit_ts", "start_ts")
    )
    ops = _OP_NAMES.take(raw["op"].cast(pa.int64()))
    return [ops, pa.array(commit_ts), pa.array(start_ts), pa.array(_seq(commit_ts, start_ts))]


def _seq(
    commit_ts: npt.NDArray[np.int64], start_ts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Each row's number within its transaction."""
    rows = np.arange(len(commit_ts), dtype=np.int64)
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (commit_ts[1:] != commit_ts[:-1]) | (start_ts[1:] != start_ts[:-1])
    return rows - np.maximum.accumulate(np.where(begins, rows, 0))


def with_default(field: pa.Field, value: Plain | None) -> pa.Field:
    """The field with the metadata for a value; as it is for None."""
    return field if value is None else _with(field, DEFAULT, json.dumps(value))


def with_column_id(field: pa.Field, number: int) -> pa.Field:
    """The field with the identity of its column; as it is for 0, which is none."""
    return _with(field, COLUMN_ID, str(number)) if number else field


def _with(field: pa.Field, key: bytes, value: str) -> pa.Field:
    return field.with_metadata({**(field.metadata or {}), key: value.encode()})


def plain(value: Any) -> Plain | None:
    """What stands for a value that `pa.array` takes."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return f"{value:f}"
    found: Plain | None = value.isoformat() if isinstance(value, dt.date) else value
    return found
