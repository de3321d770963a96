"""Arrow batches as the text that databases load: CSV for COPY, literals for INSERT. Pure,
column by column.
"""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def as_csv(batch: Any) -> bytes:
    """For `COPY … (FORMAT csv)`: null is an empty field without quotes,
    binary is hexadecimal digits after a mark.
    """
    columns = [_csv_column(column) for column in batch.columns]
    out = io.BytesIO()
    table = pa.Table.from_arrays(columns, names=batch.schema.names)
    csv.write_csv(table, out, csv.WriteOptions(include_header=False))
    return out.getvalue()


def as_values(batch: Any, most_bytes: int) -> list[str]:
    """For `INSERT … VALUES`: texts `(literal, …),…` of many rows and about `most_bytes` each,
    at least one row.

    They are for a session whose strings know backslash escapes.
    """
    if not len(batch):
        return []
    columns = [pc.fill_null(_literals(column), "NULL") for column in batch.columns]
    joined = pc.binary_join_element_wise(*columns, ",")
    rows = pc.binary_join_element_wise("(", joined, ")", "")
    part = np.cumsum(pc.binary_length(rows).to_numpy()) // most_bytes
    starts = np.flatnonzero(np.diff(part, prepend=-1)).astype(np.int32)
    parts = pa.ListArray.from_arrays(pa.array(np.append(starts, len(rows)), pa.int32()), rows)
    texts: list[str] = pc.binary_join(parts, ",").to_pylist()
    return texts


def as_quoted(value: Any) -> str:
    """One value (pyarrow.Scalar) as a string literal of standard SQL,
    which PostgreSQL reads as any type.
    """
    text: str = _csv_column(pa.array([value.as_py()], value.type)).cast(pa.string())[0].as_py()
    return "'" + text.replace("'", "''") + "'"


def _csv_column(column: Any) -> Any:
    if pa.types.is_binary(column.type):
        return pc.binary_join_element_wise("\\x", hexadecimal(column), "")
    return column.cast(pa.string()) if pa.types.is_decimal(column.type) else column


def _literals(column: Any) -> Any:
    kind = column.type
    if pa.types.is_binary(kind):
        return pc.binary_join_element_wise("x'", hexadecimal(column), "'", "")
    if pa.types.is_boolean(kind):
        return column.cast(pa.int8()).cast(pa.string())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.string())
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us"))
    text = pc.replace_substring(column.cast(pa.string()), "\\", "\\\\")
    return pc.binary_join_element_wise("'", pc.replace_substring(text, "'", "\\'"), "'", "")


def hexadecimal(column: Any) -> Any:
    """A binary column as strings of two digits a byte."""
    column = pa.concat_arrays([column]) if column.offset else column
    offsets = np.frombuffer(column.buffers()[1], np.int32)[: len(column) + 1]
    raw = column.buffers()[2]
    data = np.frombuffer(raw, np.uint8)[: offsets[-1]] if raw is not None else np.empty(0, np.uint8)
    digits = np.empty(2 * len(data), np.uint8)
    digits[0::2], digits[1::2] = _DIGITS[data >> 4], _DIGITS[data & 15]
    doubled = pa.py_buffer((offsets * 2).astype(np.int32).tobytes())
    buffers = [column.buffers()[0], doubled, pa.py_buffer(digits.tobytes())]
    return pa.Array.from_buffers(pa.string(), len(column), buffers, null_count=column.null_count)
