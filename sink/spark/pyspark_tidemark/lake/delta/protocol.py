"""What a Delta table asks of its readers and writers: the protocol's versions and features, the
table's properties, and how its columns are mapped. Of a table that exists, whether we know all of
it, and how its files are laid out; of a new one, the actions that make it.

Source: Delta's protocol, "Protocol Evolution" and "Table Features".
"""

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from pyspark_tidemark.column_metadata import COLUMN_ID
from pyspark_tidemark.lake.delta.files import Layout, now_ms
from pyspark_tidemark.lake.delta.partitions import is_possible

VECTORS = "delta.enableDeletionVectors"
MAPPING = {"delta.columnMapping.mode": "name"}
MAX_ID = "delta.columnMapping.maxColumnId"
FIELD_ID, PHYSICAL_NAME = "delta.columnMapping.id", "delta.columnMapping.physicalName"
_UNWRITABLE = frozenset(" ,;{}()\n\t=")
"""Characters that no column's name may have unless the table maps its columns by name."""
_KNOWN_PROPERTIES = {
    VECTORS,
    "delta.checkpointInterval",
    *MAPPING,
    MAX_ID,
    "delta.enableTypeWidening",
    "delta.dataSkippingNumIndexedCols",
    "delta.dataSkippingStatsColumns",
    "delta.deletedFileRetentionDuration",
    "delta.enableExpiredLogCleanup",
    "delta.logRetentionDuration",
}
"""Of those that begin with `delta.`; others are people's own notes, which ask for nothing."""
# Old writer versions imply these features; they demand nothing unless a property or a column says
# so.
_IMPLIED_FEATURES = ["appendOnly", "invariants"]
_KNOWN_FEATURES = {
    *("deletionVectors", "columnMapping", "timestampNtz", "typeWidening", "typeWidening-preview"),
    *_IMPLIED_FEATURES,
}
_FEATURES_SINCE = {
    2: _IMPLIED_FEATURES,
    3: ["checkConstraints"],
    4: ["changeDataFeed", "generatedColumns"],
    5: ["columnMapping"],
    6: ["identityColumns"],
}
"""The features that each writer version without feature lists adds to those of the versions
before it.
"""
_MAPPING_READER = 2
_INVARIANTS = "delta.invariants"


def creation(
    schema: Any,
    ids: Mapping[str, int],
    properties: Mapping[str, str],
    partitions: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The actions that make a table with the columns of `schema` (pyarrow.Schema),
    their identities, and properties; `partitions` are the columns that partition it.
    """
    fields, configuration = from_arrow_schema(schema).jsonValue(), dict(properties)
    is_mapped = needs_mapping(schema.names)
    if is_mapped:
        configuration |= MAPPING | {MAX_ID: str(len(schema))}
    for number, field in enumerate(fields["fields"], 1):
        field["nullable"] = True
        field["metadata"] = {COLUMN_ID.decode(): ids[field["name"]]} if field["name"] in ids else {}
        field["metadata"] |= mapped(number) if is_mapped else {}
    least = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": [],
        "writerFeatures": _IMPLIED_FEATURES,
    }
    features = ["deletionVectors"] if _has_vectors(properties) else []
    if has_times_without_zone(schema):
        features.append("timestampNtz")
    if is_mapped:
        features.append("columnMapping")
    protocol = with_features(least, features)
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(fields),
        "partitionColumns": list(partitions),
        "configuration": configuration,
        "createdTime": now_ms(),
    }
    return [{"protocol": protocol}, {"metaData": metadata}]


def needs_mapping(names: Iterable[str]) -> bool:
    """Whether Delta takes these columns only with column mapping,
    which asks more of a table's readers.
    """
    return any(_UNWRITABLE & set(name) for name in names)


def mapped(number: int) -> dict[str, Any]:
    """What the metadata of a new column says of it in a table with column mapping."""
    # A physical name of its own: files may still have a dropped column under the logical one.
    return {FIELD_ID: number, PHYSICAL_NAME: f"col-{uuid.uuid4()}"}


def with_features(protocol: Mapping[str, Any], features: Iterable[str]) -> Mapping[str, Any]:
    """A protocol that asks readers and writers for `features`, too: as it is if it does so already,
    else one with lists of features.
    """
    added, listed = tuple(features), {**_features_by_version(protocol), **protocol}
    lists = {
        kind: list(dict.fromkeys([*listed[kind], *added]))
        for kind in ("readerFeatures", "writerFeatures")
    }
    if all(set(names) == set(listed[kind]) for kind, names in lists.items()):
        return protocol
    return {**protocol, "minReaderVersion": 3, "minWriterVersion": 7, **lists}


def _features_by_version(protocol: Mapping[str, Any]) -> dict[str, list[str]]:
    """What a protocol without lists asks for by its versions: Delta itself makes tables like that,
    and does without a list that would be empty.
    """
    reader, writer = int(protocol["minReaderVersion"]), int(protocol["minWriterVersion"])
    return {
        "readerFeatures": ["columnMapping"] if reader == _MAPPING_READER else [],
        "writerFeatures": [
            feature
            for version, names in _FEATURES_SINCE.items()
            for feature in names
            if version <= writer
        ],
    }


def has_times_without_zone(fields: Iterable[Any]) -> bool:
    """Whether there is a timestamp without a time zone, which Delta asks a feature for."""
    return any(pa.types.is_timestamp(field.type) and field.type.tz is None for field in fields)


def is_known(metadata: Mapping[str, Any], protocol: Mapping[str, Any]) -> bool:
    """Whether we know all that a table asks of its writers: only Delta may write to any other."""
    properties, features = metadata["configuration"], protocol.get("writerFeatures")
    return (
        properties.get("delta.columnMapping.mode", "name") in ("name", "none")
        and all(
            name in _KNOWN_PROPERTIES
            or name.startswith("delta.feature.")
            or not name.startswith("delta.")
            for name in properties
        )
        and features is not None
        and _KNOWN_FEATURES.issuperset(features)
        and _takes_any_value(metadata)
        and _writes_partitions(metadata)
    )


def _takes_any_value(metadata: Mapping[str, Any]) -> bool:
    """Whether no column is NOT NULL, or has another invariant; what we make has none."""
    fields = json.loads(metadata["schemaString"])["fields"]
    return all(field["nullable"] and _INVARIANTS not in field["metadata"] for field in fields)


def _writes_partitions(metadata: Mapping[str, Any]) -> bool:
    if not metadata["partitionColumns"]:
        return True
    schema = _schema(metadata)
    return all(is_possible(schema.field(name).type) for name in metadata["partitionColumns"])


def _schema(metadata: Mapping[str, Any]) -> Any:
    fields = StructType.fromJson(json.loads(metadata["schemaString"]))
    return to_arrow_schema(fields, timezone="UTC")


def layout_of(metadata: Mapping[str, Any], root: str) -> Layout:
    """How the files of a table in the directory `root` are laid out."""
    fields = json.loads(metadata["schemaString"])
    mapping = {field["name"]: field["metadata"] for field in fields["fields"]}
    physical = {name: details.get(PHYSICAL_NAME, name) for name, details in mapping.items()}
    ids = {name: int(details[FIELD_ID]) for name, details in mapping.items() if FIELD_ID in details}
    return Layout(
        root,
        _schema(metadata),
        physical,
        ids,
        _has_vectors(metadata["configuration"]),
        tuple(metadata["partitionColumns"]),
    )


def _has_vectors(properties: Mapping[str, str]) -> bool:
    return properties.get(VECTORS, "").lower() == "true"
