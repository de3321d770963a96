"""What the metadata of an Arrow field says of its column: the column's identity, and the value of
rows that are older than the column. Pure.

Captures send both (docs/format/flight.md); targets keep the identities with their own columns.
"""

import base64
import datetime as dt
import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

COLUMN_ID = b"tidemark.column_id"
"""The identity of a column, unique in its table and never used again: a decimal number."""
_DEFAULT = b"tidemark.default"


def defaults_of(schema: Any) -> Mapping[str, Any]:
    """The values by column, as JSON has them, of those columns that have one."""
    texts = {field.name: (field.metadata or {}).get(_DEFAULT) for field in schema}
    return {name: json.loads(text) for name, text in texts.items() if text is not None}


def column_ids(schema: Any) -> dict[str, int]:
    """The identities in a schema, by column; columns without one are left out."""
    texts = {field.name: (field.metadata or {}).get(COLUMN_ID) for field in schema}
    return {name: int(text) for name, text in texts.items() if text is not None}


def with_column_ids(schema: Any, ids: Mapping[str, int]) -> Any:
    """The schema with these identities in the metadata of its fields, and no other metadata."""
    return pa.schema(
        [
            field.with_metadata({COLUMN_ID: str(ids[field.name])})
            if field.name in ids
            else field.remove_metadata()
            for field in schema
        ]
    )


def without_metadata(schema: Any) -> Any:
    """The schema with names and types only, as Spark and the targets compare it."""
    return pa.schema([field.remove_metadata() for field in schema])


def scalar(value: Any, kind: Any) -> Any:
    """The pyarrow.Scalar of the type `kind` for a value of `defaults_of`."""
    if pa.types.is_binary(kind):
        value = base64.b64decode(value)
    elif pa.types.is_decimal(kind):
        value = Decimal(value)
    elif pa.types.is_date(kind):
        value = dt.date.fromisoformat(value)
    elif pa.types.is_timestamp(kind):
        value = dt.datetime.fromisoformat(value)
    return pa.scalar(value, kind)
