"""The Iceberg lake as a target: one RowDelta a table and cut."""

import threading
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.fold import fold, fold_frame
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.evolution import add_filled
from pyspark_tidemark.lake.iceberg.files import WRITTEN, Written, rows_by_task, write, written_by_task
from pyspark_tidemark.lake.iceberg.held import Held
from pyspark_tidemark.lake.iceberg.maintenance import Maintenance
from pyspark_tidemark.lake.iceberg.types import storable, type_name
from pyspark_tidemark.lake.mode import APPEND, UPSERT, check_key, lake_schema
from pyspark_tidemark.lake.schema import SchemaChange
from pyspark_tidemark.lake.target import Applied, Health, Kept


class IcebergTarget:
    """The Iceberg tables under one directory, `<root>/<database>/<table>`."""

    def __init__(
        self, spark: SparkSession, root: str, changefeed: str, *, mode: str = UPSERT, compact_every: int = 64
    ) -> None:
        self._spark = spark
        self._mode = mode
        self._catalog = Catalog(spark, root, changefeed)
        self._held = Held(self._catalog)
        self._committing = threading.Lock()
        self._maintenance = Maintenance(spark, self._catalog, self._committing, compact_every)

    def position(self, table: TableMeta) -> int | None:
        """The cut in the current snapshot's summary; None if the table has none.

        Raises:
            SourceError: ErrTargetForeign, ErrTableNoKey.
        """
        check_key(table, self._mode)
        found = self._catalog.load(table.name)
        return None if found is None else self._catalog.position(found, table.name)

    def version(self, table: TableMeta) -> int:
        """The current snapshot's id."""
        return int(self._catalog.load(table.name).currentSnapshot().snapshotId())

    def schema(self, table: TableMeta) -> Any:
        """The current columns."""
        return self._catalog.schema(self._catalog.load(table.name))

    def storable(self, schema: Any) -> Any:
        """With Iceberg's types."""
        return storable(schema)

    def create(self, changes: Changes) -> Applied:
        """Make the table, unless a crash left it without a snapshot, and apply its first cut."""
        name = changes.table.name
        table = self._catalog.load(name)
        if table is None:
            table = self._catalog.create(name, lake_schema(changes.table, self._mode), self._key(changes.table))
        return self._apply(table, changes)

    def apply(self, changes: Changes) -> Applied:
        """Write the files, then commit them; a cut without rows is a snapshot, too, where the table has none yet."""
        return self._apply(self._catalog.load(changes.table.name), changes)

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        """One metadata commit with all steps, then a snapshot with the new schema; added columns with values apart."""
        self._held.forget(table.name)
        update = self._catalog.load(table.name).updateSchema()
        for old, new in change.renamed:
            update.renameColumn(old, new)
        for column in change.dropped:
            update.deleteColumn(column)
        renamed = {new: old for old, new in change.renamed}
        for field in change.widened:
            update.updateColumn(renamed.get(field.name, field.name), self._catalog.java_type(type_name(field.type)))
        for field in () if change.filled else change.added:
            update.addColumn(field.name, self._catalog.java_type(type_name(field.type)))
        with self._committing:
            update.commit()
            found = self._catalog.load(table.name)
            self._catalog.fenced(found.newAppend(), self._catalog.position(found, table.name) or 0)
            if change.filled:
                add_filled(self._spark, self._catalog, table.name, change)

    def truncate(self, table: TableMeta, ts: int) -> None:
        """A snapshot without rows (upsert), or as it is (append)."""
        if self._mode != UPSERT:
            return
        with self._committing:
            found = self._catalog.load(table.name)
            position = self._catalog.position(found, table.name)
            self._catalog.fenced(found.newDelete().deleteFromRowFilter(self._catalog.always_true), position or ts)

    def drop(self, table: TableMeta) -> None:
        """Remove the table and its files."""
        self._catalog.drop(table.name)
        self._held.forget(table.name)
        self._maintenance.forget(table.name)

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Not to be done: an Iceberg table in a Hadoop catalog names its files by their paths.

        Raises:
            SourceError: ErrRenameUnsupported.
        """
        if self._catalog.load(old.name) is not None:
            raise SourceError(
                "ErrRenameUnsupported",
                f"{old.name} was renamed to {new.name}, which Iceberg's Hadoop catalog cannot follow; "
                "start a new changefeed and target",
            )

    def maintain(self, kept: Kept) -> Health | None:
        """Rewrite tables that have many deletes, expire snapshots that no kept cut shows; beside the cuts."""
        return self._maintenance.run(kept)

    def close(self) -> None:
        """Wait for maintenance that is under way."""
        self._maintenance.close()

    def _key(self, table: TableMeta) -> tuple[str, ...]:
        return () if self._mode == APPEND else table.key

    def _apply(self, table: Any, changes: Changes) -> Applied:
        key = self._key(changes.table)
        held = self._held.ranges(changes.table.name, table, key)
        written = self._written(changes, self._catalog.layout(table, key, held))
        if written or table.currentSnapshot() is None:
            self._commit(table, changes, written)
            self._maintenance.committed(changes.table.name, deletes=any(file.deletes for file in written))
        counted = changes.counted(self._spark)
        return Applied(counted.rows, int(table.currentSnapshot().snapshotId()), counted.checksum)

    def _commit(self, table: Any, changes: Changes, written: list[Written]) -> None:
        name = changes.table.name
        with self._committing:
            table.refresh()  # reads no more than names, unless somebody has committed since it was loaded
            position = self._catalog.position(table, name)
            if position is not None and position >= changes.end_ts:
                raise SourceError("ErrTargetBusy", f"another job has applied this cut to {name}", retryable=True)
            key = self._key(changes.table)
            self._held.committed(name, table, key, self._catalog.commit(table, written, key, changes.end_ts))

    def _written(self, changes: Changes, layout: Any) -> list[Written]:
        if not changes.in_arrow:
            frame = changes.frame(self._spark)
            if self._mode == APPEND:
                return self._run(frame, rows_by_task(layout))
            return self._run(fold_frame(frame, changes.table.key), written_by_task(layout))
        if self._mode == APPEND:
            return write(layout, changes.arrow, None)
        folded = fold(changes.arrow, changes.table.key)
        return write(layout, folded.live, folded.known)

    @staticmethod
    def _run(frame: DataFrame, task: Any) -> list[Written]:
        rows = frame.mapInArrow(task, from_arrow_schema(WRITTEN)).collect()
        return [Written(row.path, row.deletes) for row in rows]
