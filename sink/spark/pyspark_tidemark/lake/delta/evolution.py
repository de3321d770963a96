"""Schemas of Delta tables: one commit of the table's metadata renames, widens,
drops and adds columns.

Files keep the names that columns had when they came (column mapping), so no row is rewritten.
Mapping asks more of readers, so a table has it from its first rename or drop on, or its first
column with a name that files cannot have. Each column's identity stands in the metadata of its
field, so after a crash the steps that are done are not made again.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type

from pyspark_tidemark.column_metadata import COLUMN_ID
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.columns import quoted, sql_literal, text_literal, with_columns
from pyspark_tidemark.lake.compaction import MOST_BYTES
from pyspark_tidemark.lake.delta.files import DataFile, all_removed, by_partition, joined
from pyspark_tidemark.lake.delta.frames import identified, partitioned
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.delta.protocol import (
    FIELD_ID,
    MAPPING,
    MAX_ID,
    PHYSICAL_NAME,
    has_times_without_zone,
    mapped,
    needs_mapping,
    with_features,
)
from pyspark_tidemark.lake.delta.tables import Actions, DeltaTables
from pyspark_tidemark.lake.schema import SchemaChange, lake_schema
from pyspark_tidemark.lake.shards import ShardRows
from pyspark_tidemark.lake.soft_delete import mark_all

_WITHOUT_ZONE = {"delta.feature.timestampNtz": "supported"}
_WIDENING = {"delta.enableTypeWidening": "true"}
[_MODE] = MAPPING
_TYPE_CHANGES = "delta.typeChanges"
Field = Mapping[str, Any]
"""A column as the log has it."""


def alter(tables: DeltaTables, name: str, change: SchemaChange) -> None:
    """Change the columns, in one commit.

    Where rows must get a value and are many, Spark adds those columns by a second commit. A crash
    between the two leaves less to change the next time.
    """
    if tables.change(name, lambda listing: _with_rows(listing, change)):
        return
    tables.alter(name, lambda metadata, protocol: evolved(metadata, protocol, change))
    if change.filled:
        _add_filled(tables, name, change)


def evolved(
    metadata: Mapping[str, Any],
    protocol: Mapping[str, Any],
    change: SchemaChange,
    *,
    widens_files: bool = True,
) -> Actions:
    """The actions of a change, if there are any; without the columns that existing rows hold a
    value in, which come with the rewritten rows.

    With `widens_files`, files may have columns as they were before they were widened.
    """
    schema = json.loads(metadata["schemaString"])
    configuration, features = dict(metadata["configuration"]), []
    _check_partitions(metadata["partitionColumns"], change)
    fields = schema["fields"]
    if change.renamed or change.dropped or needs_mapping(field.name for field in change.added):
        fields = _mapped(fields, configuration)
        features.append("columnMapping")
    if change.widened and widens_files:
        configuration |= _WIDENING
        features.append("typeWidening")
    if has_times_without_zone(change.added):
        features.append("timestampNtz")

    new_names = dict(change.renamed)
    fields = [
        {**field, "name": new_names.get(field["name"], field["name"])}
        for field in fields
        if field["name"] not in change.dropped
    ]
    types = {field.name: from_arrow_type(field.type).jsonValue() for field in change.widened}
    fields = [
        _widened(field, types.get(field["name"], field["type"]), recorded=widens_files)
        for field in fields
    ]
    fields += [_added(field, configuration) for field in change.added if not change.filled]
    schema["fields"] = [_identified(field, change.ids) for field in fields]
    partitions = [new_names.get(name, name) for name in metadata["partitionColumns"]]
    changed = {
        **metadata,
        "schemaString": json.dumps(schema),
        "configuration": configuration,
        "partitionColumns": partitions,
    }
    able = with_features(protocol, features)
    return [
        *([] if able == protocol else [{"protocol": able}]),
        *([] if changed == metadata else [{"metaData": changed}]),
    ]


def _with_rows(listing: Listing, change: SchemaChange) -> Actions:
    """The actions of a change and of the rows that it rewrites: with the values of added columns,
    unless the rows are many; and, in a table for readers that know neither deletion vectors nor
    files with narrower columns, with the widened ones. None if no row is rewritten.
    """
    files = list(listing.files.values())
    widens_rows = bool(change.widened) and not listing.layout.vectors
    if not widens_rows and not (change.filled and _size(files) <= MOST_BYTES):
        return []
    actions = evolved(
        listing.metadata,
        listing.protocol,
        dataclasses.replace(change, filled=()),
        widens_files=not widens_rows,
    )
    layout = listing.after(actions).layout
    parts = [
        [file for file in group if file.ended is ended]
        for group in by_partition(files)
        for ended in (False, True)
    ]
    return [*actions, *(action for part in parts for action in joined(layout, part, change.filled))]


def _check_partitions(columns: Sequence[str], change: SchemaChange) -> None:
    """Check that no column goes that partitions the table: its values are nowhere but in the log.

    Raises:
        SourceError: ErrPartitionUnsupported.
    """
    if gone := [name for name in columns if name in change.dropped]:
        raise SourceError(
            "ErrPartitionUnsupported",
            f"the table is partitioned by {', '.join(gone)}, which is to be dropped: start a new "
            "changefeed and target, or use --schema-evolution ignore",
        )


def _size(files: Sequence[DataFile]) -> int:
    return sum(file.size for file in files)


def _mapped(fields: Sequence[Field], configuration: dict[str, str]) -> Sequence[Field]:
    """The columns with column mapping, by the names that files have for them."""
    if configuration.get(_MODE) == "name":
        return fields
    configuration |= MAPPING | {MAX_ID: str(len(fields))}
    return [
        {**field, "metadata": {**field["metadata"], FIELD_ID: number, PHYSICAL_NAME: field["name"]}}
        for number, field in enumerate(fields, 1)
    ]


def _widened(field: Field, kind: Any, *, recorded: bool) -> Field:
    if kind == field["type"]:
        return field
    if not recorded:
        return {**field, "type": kind}
    changes = [
        *field["metadata"].get(_TYPE_CHANGES, []),
        {"fromType": field["type"], "toType": kind},
    ]
    return {**field, "type": kind, "metadata": {**field["metadata"], _TYPE_CHANGES: changes}}


def _added(field: Any, configuration: dict[str, str]) -> Field:
    column: dict[str, Any] = {
        "name": field.name,
        "type": from_arrow_type(field.type).jsonValue(),
        "nullable": True,
        "metadata": {},
    }
    if configuration.get(_MODE) == "name":
        number = int(configuration[MAX_ID]) + 1
        configuration[MAX_ID] = str(number)
        column["metadata"] = mapped(number)
    return column


def _identified(field: Field, ids: Mapping[str, int]) -> Field:
    if field["name"] not in ids:
        return field
    return {**field, "metadata": {**field["metadata"], COLUMN_ID.decode(): ids[field["name"]]}}


def empty(tables: DeltaTables, name: str) -> None:
    """Delete all rows, in one commit without a fence: doing it again changes nothing."""
    tables.sql(name, f"DELETE FROM {tables.sql_name(name)}")  # noqa: S608 - quoted


def mark_deleted(tables: DeltaTables, name: str, ts: int) -> None:
    """Mark all rows of a soft-delete table at `ts`; doing it again changes nothing."""
    tables.sql(name, mark_all(tables.sql_name(name), ts))


def change_rows(
    tables: DeltaTables, table: TableMeta, steps: Sequence[ShardRows], *, soft_delete: bool
) -> None:
    """Change the rows of shards, in one commit for each; doing it again changes nothing."""
    name, stored = table.name, tables.sql_name(table.name)
    for step in steps:
        is_shard = f"{quoted(step.column)} = {text_literal(step.shard)}"
        if step.is_gone and soft_delete:
            tables.sql(name, f"{mark_all(stored, step.ts)} AND {is_shard}")
            continue
        if step.is_gone:
            tables.sql(name, f"DELETE FROM {stored} WHERE {is_shard}")  # noqa: S608 - quoted
            continue
        values = [
            f"{quoted(field.name)} = {sql_literal(value, field.type)}"
            for field, value in step.filled
        ]
        if step.new_name:
            values.append(f"{quoted(step.column)} = {text_literal(step.new_name)}")
        if step.new_name and soft_delete:
            tables.sql(name, _freed_keys(stored, table, step))
        tables.sql(name, f"UPDATE {stored} SET {', '.join(values)} WHERE {is_shard}")  # noqa: S608 - quoted


def _freed_keys(stored: str, table: TableMeta, step: ShardRows) -> str:
    """The statement that removes marked rows of an earlier shard whose keys another one brings as
    it gets that name.
    """
    column, *key = map(quoted, table.key)
    same = " AND ".join(f"t.{name} = s.{name}" for name in key)
    return (
        f"MERGE INTO {stored} t "  # noqa: S608 - quoted
        f"USING (SELECT {', '.join(key)} FROM {stored} WHERE {column} = {text_literal(step.shard)}) s "
        f"ON t.{column} = {text_literal(step.new_name)} AND {same} WHEN MATCHED THEN DELETE"
    )


def begin_anew(tables: DeltaTables, table: TableMeta) -> None:
    """Another table of this name: no rows, its own columns, in one commit;
    cuts before it show the earlier versions.
    """
    name, schema = table.name, lake_schema(table)
    partitions = tables.partitions_anew(name, schema)
    ids = table.column_ids
    if tables.change(name, lambda listing: _begun_anew(listing, schema, ids, partitions)):
        return
    if needs_mapping(schema.names):
        _set(tables, name, MAPPING)
    if has_times_without_zone(schema):
        _set(tables, name, _WITHOUT_ZONE)
    empty_frame = identified(
        tables.session(name).createDataFrame([], from_arrow_schema(schema)), table.column_ids
    )
    writer = partitioned(empty_frame, partitions).mode("overwrite")
    tables.save(name, writer.option("overwriteSchema", "true"))


def _begun_anew(
    listing: Listing, schema: Any, ids: Mapping[str, int], partitions: Sequence[str]
) -> Actions:
    bare = {
        **listing.metadata,
        "schemaString": json.dumps({"type": "struct", "fields": []}),
        "partitionColumns": list(partitions),
    }
    columns = evolved(bare, listing.protocol, SchemaChange(added=tuple(schema), ids=ids))
    return [*all_removed(listing.files.values()), *columns]


def end_current(tables: DeltaTables, name: str, ts: int) -> None:
    """End all current versions of an scd2 table at `ts`."""
    tables.sql(
        name,
        f"UPDATE {tables.sql_name(name)} SET valid_to_ts = {ts}, is_current = false WHERE is_current",  # noqa: S608 - quoted
    )


def _add_filled(tables: DeltaTables, name: str, change: SchemaChange) -> None:
    """Columns and what existing rows hold in them, in one commit:
    after a crash it is either done or all to be done.
    """
    old = tables.session(name).read.format("delta").load(tables.path(name))
    frame = identified(with_columns(old, change.added, dict(change.filled)), change.ids)
    writer = frame.write.format("delta").mode("overwrite").option("mergeSchema", "true")
    tables.save(name, writer)


def _set(tables: DeltaTables, name: str, settings: Mapping[str, str]) -> None:
    properties = ", ".join(f"'{setting}' = '{value}'" for setting, value in settings.items())
    tables.sql(name, f"ALTER TABLE {tables.sql_name(name)} SET TBLPROPERTIES ({properties})")
