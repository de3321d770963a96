"""Schemas of Delta tables: one commit of the table's metadata renames, drops and adds columns, whatever their names.

Files keep the names that columns had when they came (column mapping), so no row is rewritten. Mapping asks more of
readers, so a table has it from its first rename or drop on, or its first column with a name that files cannot have.
Each column's identity stands in the metadata of its field, so after a crash what is done is seen to be done.
"""

import json
import uuid
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type

from pyspark_tidemark.defaults import COLUMN_ID
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.delta.tables import MAPPING, DeltaTables, identified, needs_mapping
from pyspark_tidemark.lake.literal import with_columns
from pyspark_tidemark.lake.mode import lake_schema
from pyspark_tidemark.lake.predicate import quoted
from pyspark_tidemark.lake.schema import SchemaChange

_WITHOUT_ZONE = {"delta.feature.timestampNtz": "supported"}
_WIDENING = {"delta.enableTypeWidening": "true"}
_MODE, _MAX_ID = "delta.columnMapping.mode", "delta.columnMapping.maxColumnId"
_ID, _PHYSICAL_NAME = "delta.columnMapping.id", "delta.columnMapping.physicalName"


def alter(tables: DeltaTables, name: str, change: SchemaChange) -> None:
    """Make the steps of a change, each a Delta commit; a crash between them leaves less to change the next time."""
    if change.renamed or change.dropped or needs_mapping(field.name for field in change.added):
        _set(tables, name, MAPPING)
    if change.widened:
        _set(tables, name, _WIDENING)
    for field in change.widened:
        old_name = change.old_names.get(field.name, field.name)  # renames come after this
        _alter(tables, name, f"ALTER COLUMN {quoted(old_name)} TYPE {from_arrow_type(field.type).simpleString()}")
    if any(pa.types.is_timestamp(field.type) and field.type.tz is None for field in change.added):
        _set(tables, name, _WITHOUT_ZONE)
    tables.alter(name, lambda metadata: evolved(metadata, change))
    if change.filled:
        _add_filled(tables, name, change)


def evolved(metadata: Mapping[str, Any], change: SchemaChange) -> Mapping[str, Any]:
    """A table's metadata after a change; columns that rows hold a value in are left to who rewrites the rows."""
    new_names = dict(change.renamed)
    schema = json.loads(metadata["schemaString"])
    configuration = dict(metadata["configuration"])
    fields = [
        {**field, "name": new_names.get(field["name"], field["name"])}
        for field in schema["fields"]
        if field["name"] not in change.dropped
    ]
    fields += [_added(field, configuration) for field in change.added if not change.filled]
    schema["fields"] = [_identified(field, change.ids) for field in fields]
    return {**metadata, "schemaString": json.dumps(schema), "configuration": configuration}


def _added(field: Any, configuration: dict[str, str]) -> dict[str, Any]:
    column: dict[str, Any] = {
        "name": field.name,
        "type": from_arrow_type(field.type).jsonValue(),
        "nullable": True,
        "metadata": {},
    }
    if configuration.get(_MODE) == "name":
        number = int(configuration[_MAX_ID]) + 1
        configuration[_MAX_ID] = str(number)
        # A name of its own: files may still have a dropped column under the logical name.
        column["metadata"] = {_ID: number, _PHYSICAL_NAME: f"col-{uuid.uuid4()}"}
    return column


def _identified(field: dict[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    if field["name"] not in ids:
        return field
    return {**field, "metadata": {**field["metadata"], COLUMN_ID.decode(): ids[field["name"]]}}


def empty(tables: DeltaTables, name: str) -> None:
    """Delete all rows, in one commit without a fence: doing it again changes nothing."""
    tables.session(name).sql(f"DELETE FROM {tables.sql_name(name)}")  # noqa: S608 - quoted


def begin_anew(tables: DeltaTables, table: TableMeta) -> None:
    """Another table of this name: no rows, its own columns, in one commit; cuts before it show the earlier versions."""
    schema = lake_schema(table)
    if needs_mapping(schema.names):
        _set(tables, table.name, MAPPING)
    if any(pa.types.is_timestamp(field.type) and field.type.tz is None for field in schema):
        _set(tables, table.name, _WITHOUT_ZONE)
    empty_frame = identified(
        tables.session(table.name).createDataFrame([], from_arrow_schema(schema)), table.column_ids
    )
    writer = empty_frame.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    writer.save(tables.path(table.name))


def end_current(tables: DeltaTables, name: str, ts: int) -> None:
    """End all current versions of an scd2 table at `ts`."""
    tables.session(name).sql(
        f"UPDATE {tables.sql_name(name)} SET valid_to_ts = {ts}, is_current = false WHERE is_current"  # noqa: S608 - quoted
    )


def _add_filled(tables: DeltaTables, name: str, change: SchemaChange) -> None:
    """Columns and what existing rows hold in them, in one commit: after a crash it is either done or all to be done."""
    old = tables.session(name).read.format("delta").load(tables.path(name))
    frame = identified(with_columns(old, change.added, dict(change.filled)), change.ids)
    frame.write.format("delta").mode("overwrite").option("mergeSchema", "true").save(tables.path(name))


def _set(tables: DeltaTables, name: str, settings: Mapping[str, str]) -> None:
    properties = ", ".join(f"'{setting}' = '{value}'" for setting, value in settings.items())
    _alter(tables, name, f"SET TBLPROPERTIES ({properties})")


def _alter(tables: DeltaTables, name: str, clause: str) -> None:
    tables.session(name).sql(f"ALTER TABLE {tables.sql_name(name)} {clause}")
