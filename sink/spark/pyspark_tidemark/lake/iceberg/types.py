"""Iceberg's schemas as JSON, from and to Arrow; columns are known by field ids, in files, too.

Pure.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

_NAMES = {
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp",
    pa.timestamp("us", tz="UTC"): "timestamptz",
}
# of those with one name the last: int is int32
_TYPES = {name: kind for kind, name in _NAMES.items()}
_FIELD_ID = b"PARQUET:field_id"


def type_name(kind: Any) -> str:
    """Iceberg's name of an Arrow type."""
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    return _NAMES[kind]


def schema_json(schema: Any, key: Sequence[str]) -> str:
    """A new table's schema: field ids from 1, the key's columns required and its identifier."""
    ids = {name: number for number, name in enumerate(schema.names, 1)}
    fields = [
        {
            "id": ids[field.name],
            "name": field.name,
            "required": field.name in key,
            "type": type_name(field.type),
        }
        for field in schema
    ]
    identifier = [ids[name] for name in key]
    return json.dumps(
        {"type": "struct", "schema-id": 0, "identifier-field-ids": identifier, "fields": fields}
    )


def storable(schema: Any) -> Any:
    """With Iceberg's types: its smallest integer has 32 bits."""
    return pa.schema([pa.field(field.name, _arrow_type(type_name(field.type))) for field in schema])


def arrow_schema(text: str) -> Any:
    """The pyarrow.Schema of Iceberg's JSON, with field ids as Parquet files carry them."""
    return pa.schema(
        [
            pa.field(
                field["name"],
                _arrow_type(field["type"]),
                nullable=not field["required"],
                metadata={_FIELD_ID: str(field["id"]).encode()},
            )
            for field in json.loads(text)["fields"]
        ]
    )


def field_ids(schema: Any) -> Mapping[str, int]:
    """The ids in a schema of `arrow_schema`."""
    return {field.name: int(field.metadata[_FIELD_ID]) for field in schema}


def with_field_ids(schema: Any, ids: Mapping[str, int]) -> Any:
    """A schema whose columns carry their ids, as those of `arrow_schema` do."""
    return pa.schema(
        [field.with_metadata({_FIELD_ID: str(ids[field.name]).encode()}) for field in schema]
    )


def key_fields(schema: Any, key: Sequence[str]) -> Any:
    """The columns of a key as files have them (pyarrow.Schema), nulls allowed: what was no key yet
    may have some.
    """
    return pa.schema([schema.field(name).with_nullable(nullable=True) for name in key])


def _arrow_type(name: str) -> Any:
    if name.startswith("decimal("):
        precision, scale = name.removeprefix("decimal(").removesuffix(")").split(",")
        return pa.decimal128(int(precision), int(scale))
    return _TYPES[name]
