"""What the rows hold that are older than a column: told in the field's metadata, for readers that add the column.

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
Plain: TypeAlias = str | int | float
"""A value as JSON has it."""


def with_default(field: pa.Field, value: Plain | None) -> pa.Field:
    """The field with the metadata for a value; as it is for None."""
    return field if value is None else field.with_metadata({DEFAULT: json.dumps(value)})


def plain(value: Any) -> Plain | None:
    """What stands for a value that `pa.array` takes."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return f"{value:f}"
    found: Plain | None = value.isoformat() if isinstance(value, dt.date) else value
    return found
