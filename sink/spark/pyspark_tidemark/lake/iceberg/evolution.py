"""Columns that existing rows hold a value in: added to an Iceberg table together with its rewritten rows.

Version 3 has `initial-default` for it, but Spark's Parquet reader, which reads the files here, does not know it.
"""

from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import WRITTEN, rows_by_task
from pyspark_tidemark.lake.iceberg.reader import Snapshot
from pyspark_tidemark.lake.iceberg.types import type_name
from pyspark_tidemark.lake.literal import with_columns
from pyspark_tidemark.lake.schema import SchemaChange


def add_filled(spark: SparkSession, catalog: Catalog, name: str, change: SchemaChange) -> None:
    """Add the columns and their values in one commit: after a crash it is either done or all to be done.

    Nobody else may commit meanwhile.
    """
    table = catalog.load(name)
    start = table.currentSnapshot().snapshotId()
    old = Snapshot(spark.newSession(), catalog, table, start)
    transaction = table.newTransaction()
    columns = transaction.updateSchema()
    for field in change.added:
        columns.addColumn(field.name, catalog.java_type(type_name(field.type)))
    columns.commit()
    changed = transaction.table()
    rewrite = transaction.newRewrite() if old.data else transaction.newAppend()
    if old.data:
        rows = with_columns(old.frame(), change.added, dict(change.filled))
        task = rows_by_task(catalog.layout(changed, ()))
        for row in rows.mapInArrow(task, from_arrow_schema(WRITTEN)).collect():
            rewrite.addFile(catalog.data_file(changed, row.path))
        rewrite.validateFromSnapshot(start)
        for file in (*old.data, *old.deletes):
            rewrite.deleteFile(file)
    catalog.fenced(rewrite, catalog.position(table, name) or 0)
    transaction.commitTransaction()
