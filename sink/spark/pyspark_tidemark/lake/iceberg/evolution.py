"""Schemas of Iceberg tables: columns renamed, dropped, widened and added in one commit,
by Iceberg's own field ids.

Columns that existing rows hold a value in come in a second commit, together with the rewritten
rows: version 3 has `initial-default` for it, but Spark's Parquet reader, which reads the files
here, does not know it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.columns import internal, literal, map_in_arrow, quoted, with_columns
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import WRITTEN, Written, rows_by_task
from pyspark_tidemark.lake.iceberg.java_files import CutFiles
from pyspark_tidemark.lake.iceberg.masking import new_masks
from pyspark_tidemark.lake.iceberg.partition_specs import PartitionSpecs
from pyspark_tidemark.lake.iceberg.shown import ShownFiles, no_bounds
from pyspark_tidemark.lake.iceberg.snapshot import Snapshot
from pyspark_tidemark.lake.iceberg.sort_orders import SortOrders
from pyspark_tidemark.lake.iceberg.types import type_name
from pyspark_tidemark.lake.keys import ColumnCache
from pyspark_tidemark.lake.schema import SchemaChange, lake_schema
from pyspark_tidemark.lake.shards import ShardRows
from pyspark_tidemark.lake.soft_delete import all_gone

NO_PARENT = None
"""Of columns of the table itself: without it a dot in a name would mean a field of a struct."""


def evolve(catalog: Catalog, name: str, change: SchemaChange) -> None:
    """Change the columns, record their identities, and make a snapshot with the new schema.

    Nobody else may commit meanwhile.

    Raises:
        SourceError: ErrPartitionUnsupported, a column that partitions the table is to be dropped or
            widened.
    """
    # The snapshot, although it has no files: readers take the schema of a snapshot, so that of the
    # newest one must never be older than the table's.
    transaction = catalog.begin(catalog.load(name))
    position = catalog.position(transaction.table(), name) or 0
    _change_columns(catalog, transaction, name, change)
    if change.added and not change.filled:
        # An update of its own: a name that this change frees is not free within the same update.
        columns = transaction.updateSchema()
        for field in change.added:
            columns.addColumn(NO_PARENT, field.name, catalog.java_type(type_name(field.type)))
        columns.commit()
    catalog.record_column_ids(transaction, change.ids)
    catalog.fenced(transaction, transaction.newAppend(), position)


def _change_columns(catalog: Catalog, transaction: Any, name: str, change: SchemaChange) -> None:
    if not (change.renamed or change.dropped or change.widened):
        return
    partitions = PartitionSpecs(catalog)
    widened = [change.old_names.get(field.name, field.name) for field in change.widened]
    partitions.check_change(transaction.table(), name, widened=widened, dropped=change.dropped)
    SortOrders(catalog).free(transaction, change.dropped)
    update = transaction.updateSchema()
    identifiers = set(transaction.table().schema().identifierFieldNames())
    # Iceberg gives each rename to the identifiers by name, one after the other, and takes a swap
    # back by that.
    update.setIdentifierFields(catalog.strings(()))
    for column in change.dropped:
        update.deleteColumn(column)
    for old, new in change.renamed:
        update.renameColumn(old, new)
    for field in change.widened:
        old_name = change.old_names.get(field.name, field.name)
        update.updateColumn(old_name, catalog.java_type(type_name(field.type)))
    update.commit()
    if identifiers:
        new_names = dict(change.renamed)
        kept = sorted(new_names.get(column, column) for column in identifiers - {*change.dropped})
        transaction.updateSchema().setIdentifierFields(catalog.strings(kept)).commit()


def free_former_key(catalog: Catalog, name: str, key: Sequence[str]) -> None:
    """Let columns that are not in the `key` any more hold nulls, in one commit.

    The table has no identifier fields then: those must be required, and rows may have nulls in a
    column that is new in the key. Nobody else may commit meanwhile.
    """
    transaction = catalog.begin(catalog.load(name))
    stored = transaction.table()
    freed = [
        field.name
        for field in catalog.schema(stored)
        if not field.nullable and field.name not in key
    ]
    if not freed:
        return
    position = catalog.position(stored, name) or 0
    update = transaction.updateSchema()
    update.setIdentifierFields(catalog.strings(()))
    for column in freed:
        update.makeColumnOptional(column)
    update.commit()
    catalog.fenced(transaction, transaction.newAppend(), position)


def add_filled(spark: SparkSession, catalog: Catalog, name: str, change: SchemaChange) -> None:
    """Add the columns and their values in one commit:
    after a crash it is either done or all to be done.

    Nobody else may commit meanwhile.
    """
    table = catalog.load(name)
    transaction = catalog.begin(table)
    old = Snapshot(spark.newSession(), catalog, table, table.currentSnapshot().snapshotId())
    columns = transaction.updateSchema()
    for field in change.added:
        columns.addColumn(NO_PARENT, field.name, catalog.java_type(type_name(field.type)))
    columns.commit()
    catalog.record_column_ids(transaction, change.ids)
    if old.data:
        rows = with_columns(old.frame(), change.added, dict(change.filled))
        operation = _rewritten(catalog, transaction, old, rows)
    else:
        operation = transaction.newAppend()
    catalog.fenced(transaction, operation, catalog.position(transaction.table(), name) or 0)


def mark_deleted(spark: SparkSession, catalog: Catalog, name: str, ts: int) -> None:
    """Mark all rows of a soft-delete table at `ts`, in one commit; doing it again changes nothing.

    Nobody else may commit meanwhile.
    """
    table = catalog.load(name)
    if table.currentSnapshot() is None:
        return
    transaction = catalog.begin(table)
    old = Snapshot(spark.newSession(), catalog, table, table.currentSnapshot().snapshotId())
    if old.data:
        rewrite = _rewritten(catalog, transaction, old, all_gone(old.frame(), ts))
        position = catalog.position(transaction.table(), name)
        catalog.fenced(transaction, rewrite, position or ts)


@dataclass(frozen=True)
class ShardEvolution:
    """Changes the rows of shards. No other commit to the table may come in between."""

    spark: SparkSession
    catalog: Catalog
    soft_delete: bool
    """Rows of a removed shard are marked, not deleted."""

    def change(self, table: TableMeta, steps: Sequence[ShardRows], *, vectors: bool) -> None:
        """Change rows in one commit; doing it again changes nothing.

        With deletion `vectors` the rows of other shards stay where they are; without, files that
        have rows of these shards are written anew.
        """
        stored, name = self.catalog.load(table.name), table.name
        if stored.currentSnapshot() is None:
            return
        transaction, session = self.catalog.begin(stored), self.spark.newSession()
        snapshot = Snapshot(session, self.catalog, stored, stored.currentSnapshot().snapshotId())
        shards = sorted(self._shards_changed(steps))
        column = StructField(table.key[0], StringType())
        keys = session.createDataFrame([(shard,) for shard in shards], StructType([column]))
        places = snapshot.places_of(keys, table.key[:1])
        if not places:
            return
        position = self.catalog.position(transaction.table(), name) or 0
        part = snapshot.only(places)
        rows = part.frame()
        if vectors:
            rows = rows.where(F.col(quoted(table.key[0])).isin(shards))
        for step in steps:
            rows = self._changed(rows, step, table.key)
        if not vectors:
            # Equality deletes stay, as other files have rows that they take out.
            replaced = [*part.data, *part.vectors.values()]
            rewrite = _rewritten(self.catalog, transaction, part, rows, replaced)
            self.catalog.fenced(transaction, rewrite, position)
            return
        written = (
            () if self._removes_all(steps) else _written(self.catalog, transaction.table(), rows)
        )
        shown = ShownFiles(self.catalog, no_bounds).of(name, stored, ())
        masks = new_masks(self.catalog, stored, shown.data, places, ColumnCache(0))
        self.catalog.commit(transaction, CutFiles(written, (), masks), position)

    def _shards_changed(self, steps: Sequence[ShardRows]) -> set[str]:
        # With soft delete the new name's rows, too: an earlier shard of that name may have left
        # marked rows, whose keys the renamed shard brings.
        renamed = {step.new_name for step in steps if step.new_name} if self.soft_delete else set()
        return {step.shard for step in steps} | renamed

    def _removes_all(self, steps: Sequence[ShardRows]) -> bool:
        return not self.soft_delete and all(step.is_gone for step in steps)

    def _changed(self, rows: DataFrame, step: ShardRows, key: Sequence[str]) -> DataFrame:
        is_shard = F.col(quoted(step.column)) == F.lit(step.shard)
        if step.is_gone:
            marks = self.soft_delete
            return all_gone(rows, step.ts, is_shard) if marks else rows.where(~is_shard)
        if step.new_name and self.soft_delete:
            rows = _with_free_keys(rows, step, key)
        values = {field.name: literal(value, field.type) for field, value in step.filled}
        if step.new_name:
            values[step.column] = F.lit(step.new_name)
        columns = [
            F.when(is_shard, values[name].cast(rows.schema[name].dataType))
            .otherwise(F.col(quoted(name)))
            .alias(name)
            if name in values
            else F.col(quoted(name))
            for name in rows.columns
        ]
        return rows.select(*columns)


def _with_free_keys(rows: DataFrame, step: ShardRows, key: Sequence[str]) -> DataFrame:
    """`rows` without those of an earlier shard of the step's new name that have a key of the shard
    that is renamed to it: with soft delete they are marked rows, and one key may have one row only.
    """
    shard = F.col(quoted(step.column))
    names = {name: internal(name) for name in key[1:]}
    brought = [F.col(quoted(name)).alias(other) for name, other in names.items()]
    coming = rows.where(shard == F.lit(step.shard)).select(*brought)
    same = [F.col(quoted(name)) == F.col(quoted(other)) for name, other in names.items()]
    return rows.join(coming, [shard == F.lit(step.new_name), *same], "left_anti")


def _rewritten(
    catalog: Catalog,
    transaction: Any,
    old: Snapshot,
    rows: DataFrame,
    replaced: Sequence[Any] | None = None,
) -> Any:
    """The operation that puts `rows` in the place of all that a snapshot shows, or of the files
    `replaced` (Iceberg's Java); to be committed.
    """
    table, rewrite = transaction.table(), transaction.newRewrite()
    for file in _written(catalog, table, rows):
        rewrite.addFile(catalog.java_files.data(table, file))
    rewrite.validateFromSnapshot(old.id)
    for file in [*old.data, *old.deletes] if replaced is None else replaced:
        rewrite.deleteFile(file)
    return rewrite


def _written(catalog: Catalog, table: Any, rows: DataFrame) -> list[Written]:
    """New data files with these rows."""
    task = rows_by_task(catalog.layout(table, ()))
    written = map_in_arrow(rows, task, from_arrow_schema(WRITTEN)).collect()
    return [Written.parse(row) for row in written]


def begin_anew(catalog: Catalog, table: TableMeta, ts: int) -> None:
    """Another table of this name: no rows, its own columns and key, in one commit.

    The columns have other field ids than before, so that no file of the earlier table can be taken
    for one of this; snapshots of cuts before show it as it was. Nobody else may commit meanwhile.
    """
    transaction = catalog.begin(catalog.load(table.name))
    stored = transaction.table()
    position = catalog.position(stored, table.name) or ts
    partitions = PartitionSpecs(catalog)
    partitions.free(transaction)
    sort_orders = SortOrders(catalog)
    sort_orders.free(transaction, catalog.schema(stored).names)
    earlier = transaction.updateSchema()
    earlier.setIdentifierFields(catalog.strings(()))
    for column in catalog.schema(stored).names:
        earlier.deleteColumn(column)
    earlier.commit()
    own = transaction.updateSchema().allowIncompatibleChanges()
    for field in lake_schema(table):
        add = own.addRequiredColumn if field.name in table.key else own.addColumn
        add(NO_PARENT, field.name, catalog.java_type(type_name(field.type)))
    own.setIdentifierFields(catalog.strings(table.key))
    own.commit()
    partitions.begin_anew(transaction)
    sort_orders.begin_anew(transaction)
    catalog.record_column_ids(transaction, table.column_ids)
    delete = transaction.newDelete().deleteFromRowFilter(catalog.always_true)
    catalog.fenced(transaction, delete, position)
