"""What a column is beside its type, told in the field's metadata: its identity, and what older rows hold in it.

`tidemark.column_id` is a decimal number: a column keeps it through renames, moves and changes of type, and no other
column of the table ever has it. Readers compare columns by it.

`tidemark.default` is JSON text of the value as the rows' batches would show it: numbers and text; decimals, dates and
times as text, bytes as base64. Without it such rows show null. docs/format/flight.md.
"""

import base64
import datetime as dt
import json
from decimal import Decimal
from typing import Any, Final, TypeAlias

import pyarrow as pa

DEFAULT: Final = b"tidemark.default"
COLUMN_ID: Final = b"tidemark.column_id"
Plain: TypeAlias = str | int | float
"""A value as JSON has it."""


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
