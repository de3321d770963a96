"""What older rows hold in a column that was added with a default: read from the metadata of its field. Pure."""

import base64
import datetime as dt
import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

_DEFAULT = b"tidemark.default"


def defaults_of(schema: Any) -> Mapping[str, Any]:
    """The values by column, as JSON has them, of those columns that have one."""
    told = {field.name: (field.metadata or {}).get(_DEFAULT) for field in schema}
    return {name: json.loads(text) for name, text in told.items() if text is not None}


def without_defaults(schema: Any) -> Any:
    """The schema with types only, as Spark and the targets compare it."""
    return pa.schema([field.remove_metadata() for field in schema])


def scalar(value: Any, found: Any) -> Any:
    """The pyarrow.Scalar of the type `found` that `value` stands for."""
    if pa.types.is_binary(found):
        value = base64.b64decode(value)
    elif pa.types.is_decimal(found):
        value = Decimal(value)
    elif pa.types.is_date(found):
        value = dt.date.fromisoformat(value)
    elif pa.types.is_timestamp(found):
        value = dt.datetime.fromisoformat(value)
    return pa.scalar(value, found)
