"""Iceberg lakes: opened for the job, read at a snapshot, repaired by one commit."""

from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.files import file_system
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import write
from pyspark_tidemark.lake.iceberg.snapshot import Snapshot
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.target import LakeConnector, Repair, StoredTable, Target

_NO_CHANGE: Final = "replace"
"""The operation that leaves a table's rows as they are."""


class IcebergConnector(LakeConnector):
    """Implements `LakeConnector`; a version is a snapshot's id."""

    def open_target(self, arguments: Arguments, spark: SparkSession) -> Target:
        """See `LakeConnector`."""
        if not arguments.target.is_catalog:
            check_reachable(arguments.target.path)
        return IcebergTarget(
            spark,
            arguments.target.path,
            arguments.changefeed,
            mode=arguments.mode,
            compact_every=arguments.compact_every,
        )

    def read(self, spark: SparkSession, table: StoredTable, version: int) -> DataFrame:
        """See `LakeConnector`."""
        catalog = _catalog(spark, table)
        stored = catalog.load(table.name)
        if stored is None or stored.snapshot(version) is None:
            raise SourceError(
                "ErrCutExpired",
                f"{table.name} has no snapshot {version} any more; choose a later ts",
            )
        return Snapshot(spark, catalog, stored, version).frame()

    def changes_after(self, spark: SparkSession, table: StoredTable, version: int) -> str:
        """See `LakeConnector`."""
        stored = _catalog(spark, table).load(table.name)
        snapshot, changed = stored.currentSnapshot(), []
        while snapshot is not None and int(snapshot.snapshotId()) != version:
            changed += [snapshot.operation()] if snapshot.operation() != _NO_CHANGE else []
            parent = snapshot.parentId()
            snapshot = None if parent is None else stored.snapshot(parent)
        return ", ".join(changed)

    def repair(self, spark: SparkSession, table: StoredTable, repair: Repair) -> int:
        """See `LakeConnector`."""
        catalog = _catalog(spark, table)
        stored = catalog.load(table.name)
        # Deletes of keys apply to older files only, so the rows that come with them stay.
        transaction = catalog.begin(stored)
        written = write(catalog.layout(stored, repair.key), repair.rows, repair.gone)
        position = catalog.position(stored, table.name) or repair.ts
        catalog.commit(transaction, written, repair.key, position)
        return int(catalog.load(table.name).currentSnapshot().snapshotId())


def check_reachable(root: str) -> None:
    """See that pyarrow can write where Iceberg's files go: tasks have no Java.

    Raises:
        SourceError: ErrTargetUnusable.
    """
    try:
        file_system(root)
    except (OSError, pa.ArrowException) as err:
        said = str(err).partition("\n")[0]
        raise SourceError(
            "ErrTargetUnusable",
            f"pyarrow cannot reach {root} ({said}); Iceberg's files are written by it: for HDFS "
            "it needs libhdfs, by "
            "HADOOP_HOME or ARROW_LIBHDFS_DIR, and CLASSPATH, on the driver and the executors",
        ) from None


def _catalog(spark: SparkSession, table: StoredTable) -> Catalog:
    return Catalog(spark, table.uri.path, table.changefeed)
