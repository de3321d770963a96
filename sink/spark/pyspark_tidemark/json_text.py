"""Rows as JSON text, column by column: no Python object is made for a row. Pure.

| Arrow type | JSON |
|---|---|
| integers, decimals, floats | a number with all its digits; null for NaN and infinities |
| strings (and MySQL's TIME, JSON, ENUM, SET) | a string |
| date; timestamp without, with zone | "2026-01-02"; "2026-01-02T03:04:05.678901", with Z |
| binary (and BIT) | a string, base64 |

Spark's `from_json` reads each of them back into the type it came from.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_CONTROLS = [chr(code) for code in range(0x20)]
_DIGITS = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8
)
_PAD = ord("=")
_INSTANT = pa.timestamp("us", "UTC")
FIRST_US, END_US = -62_135_596_800_000_000, 253_402_300_800_000_000
"""Of the years 1 to 9999."""


def objects(
    names: Sequence[str],
    columns: Sequence[Any],
    values_of: Callable[[Any], Any] | None = None,
) -> Any:
    """One JSON object a row, with a member for each of `names`; a null value is `null`.

    At least one column. `values_of` makes the JSON values of a column; None: `values` does.
    """
    values_of = values if values_of is None else values_of
    parts: list[Any] = []
    for name, column in zip(names, columns, strict=True):
        parts += [
            ("," if parts else "{") + json.dumps(name, ensure_ascii=False) + ":",
            values_of(column),
        ]
    return pc.binary_join_element_wise(
        *parts, "}", "", null_handling="replace", null_replacement="null"
    )


def values(column: Any) -> Any:
    """One JSON value a row; null where the column is null."""
    kind = column.type
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_finite(column), column, None).cast(pa.string())
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.string())
    if pa.types.is_boolean(kind):
        return column.cast(pa.string())
    if pa.types.is_timestamp(kind):
        return quoted(pc.replace_substring(time_texts(column), " ", "T", max_replacements=1))
    if pa.types.is_binary(kind):
        return quoted(base64(column))
    return quoted(escaped(column.cast(pa.string())))


def time_texts(column: Any) -> Any:
    """Timestamps as text, as Arrow's cast gives it: `2026-01-02 03:04:05.678901`, in UTC with Z."""
    if column.type != _INSTANT or not _has_plain_years(column):
        return column.cast(pa.string())
    # The cast itself asks a time zone about each value, which takes twenty times as long.
    plain = column.cast(pa.timestamp("us")).cast(pa.string())
    return pc.binary_join_element_wise(plain, "Z", "")


def _has_plain_years(instants: Any) -> bool:
    """Whether all are in years of four digits, or null."""
    ends = pc.min_max(instants.cast(pa.int64()))
    low, high = ends["min"].as_py(), ends["max"].as_py()
    return low is None or bool(low >= FIRST_US and high < END_US)


def escaped(texts: Any) -> Any:
    """The inside of JSON strings."""
    for plain, escape in (("\\", "\\\\"), ('"', '\\"')):
        texts = pc.replace_substring(texts, plain, escape)
    if pc.any(pc.match_substring_regex(texts, "[\\x00-\\x1f]")).as_py():
        for control in _CONTROLS:
            texts = pc.replace_substring(texts, control, json.dumps(control)[1:-1])
    return texts


def base64(data: Any) -> Any:
    """RFC 4648 with padding, of a binary array."""
    cells = pc.fill_null(data, b"")
    offsets = np.frombuffer(cells.buffers()[1], np.int32)[
        cells.offset : cells.offset + len(cells) + 1
    ].astype(np.int64)
    lengths = np.diff(offsets)
    groups = (lengths + 2) // 3
    ends = np.concatenate([[0], np.cumsum(groups)])
    padded = np.zeros(3 * ends[-1], np.uint8)
    if offsets[-1] > offsets[0]:
        places = np.arange(offsets[0], offsets[-1]) + np.repeat(
            3 * ends[:-1] - offsets[:-1], lengths
        )
        padded[places] = np.frombuffer(cells.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    first, second, third = padded.reshape(-1, 3).T
    sextets = [first >> 2, first << 4 & 48 | second >> 4, second << 2 & 60 | third >> 6, third & 63]
    text = _DIGITS[np.stack(sextets, axis=1)].reshape(-1)
    text[4 * ends[1:][lengths % 3 > 0] - 1] = _PAD
    text[4 * ends[1:][lengths % 3 == 1] - 2] = _PAD
    encoded = pa.StringArray.from_buffers(
        len(cells), pa.py_buffer((4 * ends).astype(np.int32)), pa.py_buffer(text)
    )
    return pc.if_else(data.is_valid(), encoded, None)


def quoted(texts: Any) -> Any:
    """JSON strings of what is escaped already; null stays null."""
    return pc.binary_join_element_wise('"', texts, '"', "", null_handling="emit_null")
