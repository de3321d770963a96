"""The Delta lake as a target: the mode's way of writing, schemas, and what may wait between cuts.
Its connector reads a table at a version, and repairs rows by one MERGE.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.jvm import java_classes
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.columns import internal, quoted
from pyspark_tidemark.lake.cut_record import Shown
from pyspark_tidemark.lake.cut_tasks import TaskWriter
from pyspark_tidemark.lake.delta import evolution
from pyspark_tidemark.lake.delta.frames import without_null_texts
from pyspark_tidemark.lake.delta.log import position_at
from pyspark_tidemark.lake.delta.maintenance import Maintenance
from pyspark_tidemark.lake.delta.modes import Append, History, Upsert, Writer
from pyspark_tidemark.lake.delta.tables import COMPACTED, DeltaTables, app_id
from pyspark_tidemark.lake.format import APPEND, ROW_MODES, SCD2, SOFT_DELETE, UPSERT
from pyspark_tidemark.lake.hadoop import move, remove
from pyspark_tidemark.lake.manifest import Manifest
from pyspark_tidemark.lake.partitioning import PartitionRules
from pyspark_tidemark.lake.schema import SchemaChange, check_held, check_key
from pyspark_tidemark.lake.shards import ShardRows
from pyspark_tidemark.lake.target import (
    Applied,
    Health,
    LakeConnector,
    Repair,
    Retention,
    StoredTable,
    Target,
    check_replaceable,
    shards_in,
)

_WRITERS: dict[str, Callable[[DeltaTables], Writer]] = {
    UPSERT: Upsert,
    SOFT_DELETE: Upsert,
    APPEND: Append,
    SCD2: History,
}


_NO_CHANGE: Final = (COMPACTED, "OPTIMIZE", "VACUUM START", "VACUUM END")
"""Operations that leave a table's rows as they are."""
_GONE: Final = (
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_NO_COMMITS_FOUND",
    "DELTA_NO_RECREATABLE_HISTORY_FOUND",
    "DELTA_PATH_DOES_NOT_EXIST",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_VERSION_NOT_FOUND",
    "PATH_NOT_FOUND",
)
"""How the conditions of Delta's errors begin where a version, or the whole table, is not there."""
_ADDED: Final = internal("_added")
"""A column that rows to add have, and keys to remove have not."""


class DeltaTarget:
    """The Delta tables under one directory, `<root>/<database>/<table>`."""

    names_are_paths = True

    def __init__(  # noqa: PLR0913 - the settings of a lake, by name
        self,
        spark: SparkSession,
        root: str,
        changefeed: str,
        *,
        mode: str = UPSERT,
        compact_every: int = 64,
        deletion_vectors: bool = True,
        partitions: PartitionRules | None = None,
    ) -> None:
        """`deletion_vectors` and `partitions` are for tables that are made; others go on as they
        are.
        """
        self._spark = spark
        self._tables = DeltaTables(
            spark,
            root,
            changefeed,
            soft_delete=mode == SOFT_DELETE,
            deletion_vectors=deletion_vectors,
            partition_rules=partitions,
        )
        self._mode = mode
        self._writer = _WRITERS[mode](self._tables)
        self._maintenance = Maintenance(self._tables, compact_every)

    @property
    def empties_with_cut(self) -> bool:
        """True in mode upsert: old rows go and new ones come in one version."""
        return self._mode == UPSERT

    def position(self, table: TableMeta) -> int | None:
        """The end_ts up to which `table` is applied; None if it does not exist yet.

        Raises:
            SourceError: ErrTargetForeign, the table was not written by this changefeed;
                ErrTableNoKey; ErrNameUnsupported; ErrPartitionUnsupported, the option
                `partition-by` says otherwise than the table.
        """
        check_key(table, self._mode)
        check_held(table, self._mode, "delta")
        position = self._tables.position(table.name)
        if position is not None:
            self._tables.check_partitions(table.name)
        return position

    def check_continues(self, table: TableMeta, shown: Shown) -> None:
        """By versions, and by what those after it say of themselves; see `VersionedTarget`."""
        self._tables.check_continues(table.name, shown.version)

    def version(self, table: TableMeta) -> int:
        """The newest Delta version."""
        return self._tables.version(table.name)

    def schema(self, table: TableMeta) -> Any:
        """The columns of the newest version."""
        return self._tables.schema(table.name)

    def storable(self, schema: Any) -> Any:
        """The format keeps all types of the captures."""
        return schema

    def create(self, changes: Changes) -> Applied:
        """Apply the first cut of a table; what tasks have made of it has only to be committed."""
        if changes.by_tasks is not None:
            self._tables.create_made(changes)
            return self._applied(changes, grown=True)
        return self._applied(changes, grown=self._writer.create(changes))

    def apply(self, changes: Changes) -> Applied:
        """Apply one cut to a table."""
        return self._applied(changes, grown=self._writer.apply(changes))

    def task_writer(self, changes: Changes, *, is_new: bool) -> TaskWriter | None:
        """See `TaskTarget`: the mode's."""
        return self._writer.task_writer(changes, is_new=is_new)

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        """Change the columns."""
        evolution.alter(self._tables, table.name, change)

    def rekey(self, table: TableMeta) -> None:
        """Nothing: a Delta table knows no key."""

    def is_empty(self, table: TableMeta) -> bool:
        """Read from the newest version."""
        session = self._tables.session(table.name)
        return bool(session.read.format("delta").load(self._tables.path(table.name)).isEmpty())

    def truncate(self, table: TableMeta, ts: int) -> None:
        """Without rows (upsert), all of them marked (soft-delete), all versions ended (scd2), or as
        it is (append).
        """
        if self._mode == UPSERT:
            evolution.empty(self._tables, table.name)
        elif self._mode == SOFT_DELETE:
            evolution.mark_deleted(self._tables, table.name, ts)
        elif self._mode == SCD2:
            evolution.end_current(self._tables, table.name, ts)

    def shards(self, table: TableMeta) -> set[str]:
        """Read from the newest version."""
        frame = self._tables.session(table.name).read.format("delta")
        return shards_in(frame.load(self._tables.path(table.name)), table)

    def change_rows(self, table: TableMeta, steps: Sequence[ShardRows]) -> None:
        """One version for each step that changes rows."""
        soft_delete = self._mode == SOFT_DELETE
        evolution.change_rows(self._tables, table, steps, soft_delete=soft_delete)

    def replace(self, table: TableMeta, ts: int, change: SchemaChange) -> None:
        """One version without rows and with the new columns (upsert, soft-delete), else as
        `truncate`, then the columns.
        """
        if self._mode in ROW_MODES:
            evolution.begin_anew(self._tables, table)
        else:
            self.truncate(table, ts)
            evolution.alter(self._tables, table.name, change)

    def drop(self, table: TableMeta) -> None:
        """Remove the table's directory."""
        self._tables.settle()
        remove(self._spark, self._tables.path(table.name))
        self._forget(table.name)

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Rename the table's directory: Delta's paths are relative to it;
        a kept table of the new name is removed.
        """
        if self._tables.version(old.name) >= 0:
            if self.position(new) is not None:
                check_replaceable(self._mode, new.name)
                self.drop(new)
            self._tables.add_name(old.name, new.name)
        self._tables.settle()
        move(self._spark, self._tables.path(old.name), self._tables.path(new.name))
        self._forget(old.name)
        self._forget(new.name)

    def maintain(self, kept: Retention) -> Health | None:
        """Compact, and remove files that no kept cut needs: Delta goes by time, not by version."""
        return self._maintenance.run(kept)

    def close(self) -> None:
        """Wait for the last checkpoint of a log."""
        self._tables.settle()

    def _forget(self, name: str) -> None:
        """A directory is gone: neither we nor Delta's cache of logs may know it any more."""
        self._tables.forget(name)
        self._tables.inserted.forget(name)
        self._maintenance.forget(name)

    def _applied(self, changes: Changes, *, grown: bool) -> Applied:
        name = changes.table.name
        version = self._tables.version(name)
        self._maintenance.committed(name, version, grown=grown)
        counted = changes.counted(self._spark)
        return Applied(
            counted.rows,
            version,
            counted.checksum,
            self._tables.inserted.replaced(name),
        )


class DeltaConnector(LakeConnector):
    """Implements `LakeConnector`; a version is Delta's."""

    def open_target(self, arguments: Arguments, spark: SparkSession, manifest: Manifest) -> Target:
        """See `LakeConnector`."""
        del manifest
        return DeltaTarget(
            spark,
            arguments.target.path,
            arguments.changefeed,
            mode=arguments.mode,
            compact_every=arguments.compact_every,
            deletion_vectors=arguments.deletion_vectors,
            partitions=arguments.partitions,
        )

    def read(self, spark: SparkSession, table: StoredTable, version: int) -> DataFrame:
        """See `LakeConnector`."""
        reader = spark.read.format("delta").option("versionAsOf", version)
        try:
            frame = reader.load(table.path)
        except AnalysisException as err:
            if not str(err.getCondition()).startswith(_GONE):
                raise
            raise SourceError(
                "ErrCutExpired",
                f"{table.name} has no version {version} any more; choose a later ts",
            ) from None
        if table.ts is not None:
            _check_same(spark, table, version)
        return frame

    def changes_after(self, spark: SparkSession, table: StoredTable, version: int) -> str:
        """See `LakeConnector`."""
        history = spark.sql(f"DESCRIBE HISTORY {_sql_name(table)}")
        commits = history.where(f"version > {version}").collect()
        return ", ".join(row.operation for row in commits if row.operation not in _NO_CHANGE)

    def repair(self, spark: SparkSession, table: StoredTable, repair: Repair) -> int:
        """Remove and add by one MERGE.

        A key to remove matches by its columns under other names; a row to add has none of these,
        so it matches nothing and is inserted.
        """
        old = {name: internal(f"_old_{name}") for name in repair.key}
        removed = _frame(spark, repair.gone).select(
            *[F.col(quoted(name)).alias(old[name]) for name in repair.key]
        )
        rows = repair.rows
        there = _sql_name(table)
        partitions = spark.sql(f"DESCRIBE DETAIL {there}").collect()[0].partitionColumns
        added = without_null_texts(_frame(spark, rows), partitions)
        added = added.withColumn(_ADDED, F.expr("true"))
        changes = added.unionByName(removed, allowMissingColumns=True)
        changes.createOrReplaceTempView("tidemark_repair")

        same = " AND ".join(f"t.{quoted(name)} = s.{quoted(old[name])}" for name in repair.key)
        columns = [quoted(name) for name in rows.schema.names]
        spark.sql(
            f"MERGE INTO {there} t USING tidemark_repair s ON {same} WHEN MATCHED THEN DELETE "  # noqa: S608 - quoted names
            f"WHEN NOT MATCHED AND s.{quoted(_ADDED)} THEN INSERT ({', '.join(columns)}) "
            f"VALUES ({', '.join(f's.{column}' for column in columns)})"
        )
        return int(spark.sql(f"DESCRIBE HISTORY {there} LIMIT 1").collect()[0].version)


def _check_same(spark: SparkSession, table: StoredTable, version: int) -> None:
    """Check that a version is not one of a later table of the name, whose log began anew."""
    classes = java_classes(spark)
    log = classes.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, table.path)  # noqa: SLF001 - Delta has no Python call for a table's transactions
    position = position_at(log, classes, app_id(table.changefeed), version)
    if table.ts is not None and position is not None and position > table.ts:
        raise SourceError(
            "ErrCutExpired",
            f"{table.name} was dropped above {table.ts}, and another table has its name now; "
            f"choose a ts from {position} on",
        )


def _sql_name(table: StoredTable) -> str:
    return f"delta.{quoted(table.path)}"


def _frame(spark: SparkSession, rows: Any) -> DataFrame:
    # With the schema given: Spark would take times without a zone for times of its own zone.
    return spark.createDataFrame(rows, from_arrow_schema(rows.schema))
