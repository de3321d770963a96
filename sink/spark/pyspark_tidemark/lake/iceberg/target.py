"""The Iceberg lake as a target: a cut is one RowDelta for each table, committed alone or, if the
catalog can commit several tables at once, with those of all tables. Rows that are deleted or
updated are masked by deletion vectors, which need a reader of format version 3; or, without
vectors, deleted by key (equality deletes), which costs a writer the same in a table of any size.
The connector reads a table at a snapshot, and repairs rows by one commit.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pyspark_tidemark.column_metadata import with_column_ids
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.jvm import java_items
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.cut_record import Shown
from pyspark_tidemark.lake.cut_tasks import TaskWriter
from pyspark_tidemark.lake.files import file_system, is_on_disk
from pyspark_tidemark.lake.format import APPEND, ROW_MODES, SOFT_DELETE, UPSERT
from pyspark_tidemark.lake.hadoop import remove
from pyspark_tidemark.lake.iceberg.catalog import CUT, Catalog, Send
from pyspark_tidemark.lake.iceberg.cut_writer import CutWriter
from pyspark_tidemark.lake.iceberg.evolution import (
    ShardEvolution,
    add_filled,
    begin_anew,
    evolve,
    free_former_key,
    mark_deleted,
)
from pyspark_tidemark.lake.iceberg.files import (
    Layout,
    Written,
    write,
)
from pyspark_tidemark.lake.iceberg.java_catalog import (
    MultiTableCommit,
    PendingTable,
    commit_exactly,
)
from pyspark_tidemark.lake.iceberg.java_files import CutFiles
from pyspark_tidemark.lake.iceberg.maintenance import Maintenance
from pyspark_tidemark.lake.iceberg.manifest import CatalogManifest
from pyspark_tidemark.lake.iceberg.masking import CutMasks, Masking
from pyspark_tidemark.lake.iceberg.partition_specs import PartitionSpecs
from pyspark_tidemark.lake.iceberg.shown import ShownFiles
from pyspark_tidemark.lake.iceberg.snapshot import Snapshot
from pyspark_tidemark.lake.iceberg.sort_orders import SortOrders, check_order
from pyspark_tidemark.lake.iceberg.table_keys import Inserted, KeyRanges
from pyspark_tidemark.lake.iceberg.task_writers import ChangesWriter, UpsertWriter
from pyspark_tidemark.lake.iceberg.types import storable
from pyspark_tidemark.lake.iceberg.vectors import Mask
from pyspark_tidemark.lake.manifest import Manifest
from pyspark_tidemark.lake.partition_columns import check_fields
from pyspark_tidemark.lake.partitioning import PartitionRules
from pyspark_tidemark.lake.schema import (
    SchemaChange,
    check_key,
    check_same_columns,
    lake_columns,
    lake_schema,
)
from pyspark_tidemark.lake.shards import ShardRows
from pyspark_tidemark.lake.sorting import SortRules
from pyspark_tidemark.lake.target import (
    Applied,
    Health,
    LakeConnector,
    Repair,
    Retention,
    StoredTable,
    Target,
    removed,
    rolled_back,
    shards_in,
    table_path,
)

_NO_CHANGE: Final = "replace"
"""The operation that leaves a table's rows as they are."""


class IcebergTarget:
    """The Iceberg tables of one catalog, or under one directory, `<root>/<database>/<table>`."""

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
        sorting: SortRules | None = None,
    ) -> None:
        """Without `deletion_vectors`, and in tables of format version 2, equality deletes say which
        rows are gone.
        """
        self._partitions = partitions or PartitionRules()
        self._sorting = sorting or SortRules()
        self._spark = spark
        self._root = root
        self._mode = mode
        self._catalog = Catalog(spark, root, changefeed)
        self._partition_specs = PartitionSpecs(self._catalog)
        self._sort_orders = SortOrders(self._catalog)
        self._key_ranges = KeyRanges(self._catalog)
        self._shown = ShownFiles(self._catalog, self._key_ranges.bounds_of)
        soft_delete = mode == SOFT_DELETE
        self._inserted = Inserted(self._catalog, self._shown, soft_delete=soft_delete)
        self._masking = Masking(self._catalog, self._shown) if deletion_vectors else None
        self._writer = CutWriter(spark, self._catalog, mode, self._inserted, self._masking)
        self._cuts: dict[str, int] = {}
        """The cut that each table had when it was last looked at, or got from here."""
        self._schemas: dict[str, bytes] = {}
        """The columns that each table had when it was written last (`Layout.schema`)."""
        self.multi_table_commit: MultiTableCommit | None = None
        """Collects the tables' transactions for the manifest's commit; None: each commits alone."""
        self._committing = threading.Lock()
        self._waiting = threading.Lock()
        self._is_waiting = False
        self._maintenance = Maintenance(
            spark, self._catalog, self._committing, compact_every, vectors=deletion_vectors
        )

    @property
    def empties_with_cut(self) -> bool:
        """True in mode upsert: old rows go and new ones come in one snapshot."""
        return self._mode == UPSERT

    def position(self, table: TableMeta) -> int | None:
        """The cut in the current snapshot's summary; None if the table has none.

        Raises:
            SourceError: ErrTargetForeign, ErrTableNoKey.
        """
        check_key(table, self._mode)
        stored = self._catalog.load(table.name)
        if stored is None:
            return None
        # A job that died has perhaps committed it, and not yet made it durable.
        self._catalog.settle(stored)
        position = self._position(stored, table.name)
        # Only here, where nothing of the table waits for a commit.
        self._laid_out(table.name, stored)
        return position

    def check_continues(self, table: TableMeta, shown: Shown) -> None:
        """The current snapshot must come from the one that the cut names; see `VersionedTarget`.

        Where somebody else has expired that one, the current one must tell a cut that is not older.
        """
        stored = self._catalog.existing(table.name)
        snapshot = stored.currentSnapshot()
        while snapshot is not None and int(snapshot.snapshotId()) != shown.version:
            parent = snapshot.parentId()
            snapshot = None if parent is None else stored.snapshot(parent)
        if snapshot is not None:
            return
        is_older = (self._position(stored, table.name) or 0) < shown.since_ts
        # A catalog may hide all snapshots but the current one.
        is_hidden = self._catalog.is_named and len(java_items(stored.snapshots())) == 1
        if stored.snapshot(shown.version) is not None or (is_older and not is_hidden):
            raise rolled_back(
                table.name, f"Set its current snapshot to {shown.version} or one that follows it"
            )

    def _position(self, stored: Any, name: str) -> int | None:
        """The cut that a table has, which never goes back.

        Raises:
            SourceError: ErrTableRolledBack, and those of `Catalog.position`.
        """
        position = self._catalog.position(stored, name)
        if (position or 0) < self._cuts.get(name, 0):
            raise rolled_back(
                name, f"Set its current snapshot to one whose {CUT} is {self._cuts[name]}"
            )
        if position is not None:
            self._cuts[name] = position
        return position

    def version(self, table: TableMeta) -> int:
        """The current snapshot's id."""
        return int(self._catalog.load(table.name).currentSnapshot().snapshotId())

    def schema(self, table: TableMeta) -> Any:
        """The current columns, with their identities."""
        stored = self._catalog.load(table.name)
        return with_column_ids(self._catalog.schema(stored), self._catalog.column_ids(stored))

    def storable(self, schema: Any) -> Any:
        """With Iceberg's types."""
        return storable(schema)

    def create(self, changes: Changes) -> Applied:
        """Make the table and apply its first cut: by one commit, where that can be."""
        begun = None if changes.by_tasks is not None else self._begun(changes.table)
        if begun is None:
            return self._apply(self._made(changes.table), changes)
        return self._apply(begun.table(), changes, begun)

    def _begun(self, of: TableMeta) -> Any:
        """A transaction that makes a table, for its first cut; None: it is there, as a crash may
        have left it without a snapshot, or it is made step by step.
        """
        if self._catalog.is_named or self._partitions.of(of.name) or self._sorting.of(of.name):
            return None
        return self._catalog.begin_new(of.name, self._new_schema(of), self._key(of))

    def _made(self, of: TableMeta) -> Any:
        # A crash may have left the table without a snapshot.
        table = self._catalog.load(of.name)
        if table is not None:
            return table
        schema = self._new_schema(of)
        check_fields(of.name, self._partitions.of(of.name), schema)
        check_order(of.name, self._sorting.of(of.name), schema)
        return self._laid_out(of.name, self._catalog.create(of.name, schema, self._key(of)))

    def _new_schema(self, of: TableMeta) -> Any:
        return with_column_ids(lake_schema(of, self._mode), of.column_ids)

    def _laid_out(self, name: str, table: Any) -> Any:
        """The table with the partition spec and the sort order that are asked for: made without
        one, it always has an unpartitioned spec, too, for deletes that count in all partitions.
        """
        table = self._partition_specs.follow(name, table, self._partitions.of(name))
        return self._sort_orders.follow(name, table, self._sorting.of(name))

    def apply(self, changes: Changes) -> Applied:
        """Write the files, then commit them; also without rows, if the table has no snapshot yet
        or is emptied.

        Raises:
            SourceError: ErrTableRemoved, ErrTableRolledBack, ErrTargetSchema, ErrTargetBusy.
        """
        table = self._catalog.load(changes.table.name)
        if table is None:
            raise removed(changes.table.name)
        return self._apply(table, changes)

    def task_writer(self, changes: Changes, *, is_new: bool) -> TaskWriter | None:
        """See `TaskTarget`; a new table is made before it has rows."""
        name = changes.table.name
        table = self._made(changes.table) if is_new else self._catalog.existing(name)
        layout = self._catalog.layout(table, self._key(changes.table))
        self._check_columns(changes.table, table, layout)
        if is_on_disk(layout.data):
            file_system(layout.data)[0].create_dir(file_system(layout.data)[1], recursive=True)
        if self._mode == APPEND:
            return ChangesWriter(layout)
        return UpsertWriter(layout) if changes.in_one_task else None

    def alter(self, table: TableMeta, change: SchemaChange) -> None:
        """One commit with all steps and a snapshot that has the new schema;
        added columns with values in another.
        """
        self._forget(table.name)
        with self._committing:
            evolve(self._catalog, table.name, change)
            if change.filled:
                add_filled(self._spark, self._catalog, table.name, change)

    def rekey(self, table: TableMeta) -> None:
        """Drop what is remembered of the files by the old key, whose columns take nulls again;
        deletes name their own.
        """
        self._forget(table.name)
        if self._mode in ROW_MODES:
            with self._committing:
                free_former_key(self._catalog, table.name, table.key)

    def is_empty(self, table: TableMeta) -> bool:
        """Read from the current snapshot."""
        frame = self._frame(table)
        return frame is None or bool(frame.isEmpty())

    def shards(self, table: TableMeta) -> set[str]:
        """Read from the current snapshot."""
        frame = self._frame(table)
        return set() if frame is None else shards_in(frame, table)

    def change_rows(self, table: TableMeta, steps: Sequence[ShardRows]) -> None:
        """One snapshot with all steps, if they change rows."""
        self._forget(table.name)
        existing = self._catalog.existing(table.name)
        vectors = self._masking is not None and self._catalog.knows_vectors(existing)
        soft_delete = self._mode == SOFT_DELETE
        with self._committing:
            evolution = ShardEvolution(self._spark, self._catalog, soft_delete)
            evolution.change(table, steps, vectors=vectors)

    def _frame(self, table: TableMeta) -> DataFrame | None:
        """The rows of the current snapshot; None: there is none."""
        stored = self._catalog.load(table.name)
        snapshot = stored.currentSnapshot()
        if snapshot is None:
            return None
        session = self._spark.newSession()
        return Snapshot(session, self._catalog, stored, snapshot.snapshotId()).frame()

    def truncate(self, table: TableMeta, ts: int) -> None:
        """A snapshot without rows (upsert), with all of them marked (soft-delete), or as it is
        (append).
        """
        if self._mode == SOFT_DELETE:
            self._forget(table.name)
            with self._committing:
                mark_deleted(self._spark, self._catalog, table.name, ts)
        if self._mode != UPSERT:
            return
        with self._committing:
            transaction = self._catalog.begin(self._catalog.load(table.name))
            position = self._catalog.position(transaction.table(), table.name)
            delete = transaction.newDelete().deleteFromRowFilter(self._catalog.always_true)
            self._catalog.fenced(transaction, delete, position or ts)

    def replace(self, table: TableMeta, ts: int, change: SchemaChange) -> None:
        """A snapshot without rows, and the new columns (upsert, soft-delete), else only the columns
        (append).
        """
        if self._mode not in ROW_MODES:
            self.alter(table, change)
            return
        self._forget(table.name)
        with self._committing:
            begin_anew(self._catalog, table, ts)

    def drop(self, table: TableMeta) -> None:
        """Remove the table with its files: from its catalog, or its directory."""
        with self._committing:
            if self._catalog.is_named:
                self._catalog.drop(table.name)
            else:
                remove(self._spark, table_path(self._root, table.name))
        self._forget(table.name)
        self._cuts.pop(table.name, None)
        self._maintenance.forget(table.name)

    def rename(self, old: TableMeta, new: TableMeta) -> None:
        """Refuse: an Iceberg table under a directory names its files by their paths,
        and of catalogs not all can rename.

        Raises:
            SourceError: ErrRenameUnsupported.
        """
        if self._catalog.load(old.name) is not None:
            raise SourceError(
                "ErrRenameUnsupported",
                f"{old.name} was renamed to {new.name}, which Iceberg tables cannot follow "
                "here; start a new changefeed and target",
            )

    def maintain(self, kept: Retention) -> Health | None:
        """Rewrite tables that have many deletes, expire snapshots that no kept cut shows;
        beside the cuts.
        """
        return self._maintenance.run(kept)

    def close(self) -> None:
        """Wait for the maintenance that is running."""
        self._end_cut()
        self._maintenance.close()

    def _forget(self, name: str) -> None:
        """Drop what is remembered of a table's files: it is another table, or has another key."""
        self._key_ranges.forget(name)
        self._shown.forget(name)
        self._inserted.forget(name)
        self._schemas.pop(name, None)

    def _key(self, table: TableMeta) -> tuple[str, ...]:
        return () if self._mode == APPEND else table.key

    def _apply(self, table: Any, changes: Changes, begun: Any = None) -> Applied:
        """Apply a cut to a table, which is made by the transaction that is `begun`, or there."""
        key = self._key(changes.table)
        key_ranges = self._key_ranges.ranges(changes.table.name, table, key)
        layout = self._catalog.layout(table, key, key_ranges)
        self._check_columns(changes.table, table, layout)
        written, masks, replaced = self._writer.written(table, changes, layout)
        if written or masks.vectors or changes.emptied or table.currentSnapshot() is None:
            table = self._commit((table, begun), changes, written, masks)
            deletes = bool(masks.vectors) or any(file.deletes for file in written)
            self._maintenance.committed(changes.table.name, table, deletes=deletes)
        counted = changes.counted(self._spark)
        return Applied(
            counted.rows, int(table.currentSnapshot().snapshotId()), counted.checksum, replaced
        )

    def _check_columns(self, table: TableMeta, stored: Any, layout: Layout) -> None:
        """Check that nobody else has changed the columns since the cut before.

        Raises:
            SourceError: ErrTargetSchema.
        """
        there, ours = ({*names} for names in (layout.arrow.names, lake_columns(table, self._mode)))
        if there != ours:
            raise SourceError(
                "ErrTargetSchema",
                f"{table.name} has other columns than the changefeed's "
                f"({', '.join(sorted(there ^ ours))}); somebody else changed it: undo that, choose "
                "another --target, or use --schema-evolution ignore",
            )
        if self._schemas.get(table.name, layout.schema) != layout.schema:
            ids = self._catalog.column_ids(stored)
            check_same_columns(table, with_column_ids(layout.arrow, ids))
        self._schemas[table.name] = layout.schema

    def _commit(
        self, of: tuple[Any, Any], changes: Changes, written: list[Written], masks: CutMasks
    ) -> Any:
        """Commit the files to a table, by the transaction that makes it, if one is begun, or let
        them wait for the cut's commit; returns the table with them.
        """
        (table, begun), name, key = of, changes.table.name, self._key(changes.table)
        with self._cut_commits():
            # Read from what the transaction begins with: a commit between our look at the position
            # and this one makes ours fail (`java_catalog.commit_exactly`), or is seen here.
            transaction = self._catalog.begin(table) if begun is None else begun
            position = self._position(transaction.table(), name)
            # Beyond the start is also a shorter or a longer cut, whose changes would come twice.
            if position is not None and position > changes.start_ts:
                raise SourceError(
                    "ErrTargetBusy",
                    f"another job has applied changes of this cut to {name}",
                    retryable=True,
                )
            send = self._send(name, changes.end_ts)
            if changes.emptied:
                self._forget(name)
                made = self._catalog.replace(transaction, written, changes.end_ts, send)
            else:
                # The table as the transaction begins with it: files may have been rewritten.
                files = CutFiles(written, key, masks.current(table))
                made = self._catalog.commit(transaction, files, changes.end_ts, send)
            shown = transaction.table()
            if masks.keys_written is not None and len(made.rows) == 1 and self._masking is not None:
                self._masking.written(table, str(made.rows[0].location()), masks.keys_written)
            self._key_ranges.committed(name, shown, key, made.rows)
            self._shown.committed(name, shown, key, made)
            return shown

    def _send(self, name: str, cut: int) -> Send:
        """What commits a table's transaction, and remembers its cut once it is committed."""
        multi, identifier = self.multi_table_commit, self._catalog.identifier(name)
        if multi is None:

            def commit(transaction: Any, what: str) -> int:
                snapshot_id = commit_exactly(transaction, what)
                self._cuts[name] = cut
                return snapshot_id

            return commit

        def committed() -> None:
            self._cuts[name] = cut
            self._end_cut()

        return lambda transaction, _: multi.add(PendingTable(identifier, transaction, committed))

    @contextmanager
    def _cut_commits(self) -> Iterator[None]:
        """The lock of commits: for the block, or, with a multi-table commit, until that is done."""
        if self.multi_table_commit is None:
            with self._committing:
                yield
            return
        with self._waiting:
            if not self._is_waiting:
                # A rewrite that came between would make the commit of the whole cut fail.
                self._committing.acquire()
                self._is_waiting = True
        yield

    def _end_cut(self) -> None:
        """Let others commit again: the cut is visible, or the job ends."""
        with self._waiting:
            if self._is_waiting:
                self._is_waiting = False
                self._committing.release()


class IcebergConnector(LakeConnector):
    """Implements `LakeConnector`; a version is a snapshot's id."""

    def open_target(self, arguments: Arguments, spark: SparkSession, manifest: Manifest) -> Target:
        """See `LakeConnector`."""
        if not arguments.target.is_catalog:
            check_reachable(arguments.target.path)
        target = IcebergTarget(
            spark,
            arguments.target.path,
            arguments.changefeed,
            mode=arguments.mode,
            compact_every=arguments.compact_every,
            deletion_vectors=arguments.deletion_vectors,
            partitions=arguments.partitions,
            sorting=arguments.sorting,
        )
        target.multi_table_commit = (
            manifest.multi_table_commit if isinstance(manifest, CatalogManifest) else None
        )
        return target

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
        transaction, masks = catalog.begin(stored), list[Mask]()
        layout = catalog.layout(stored, repair.key)
        if catalog.knows_vectors(stored):
            shown = ShownFiles(catalog, KeyRanges(catalog).bounds_of)
            masks = Masking(catalog, shown).masks(table.name, stored, repair.gone)
            written = write(layout, repair.rows)
        else:
            # Deletes of keys apply to older files only, so the rows that come with them stay.
            written = write(layout, repair.rows, repair.gone)
        position = catalog.position(stored, table.name) or repair.ts
        catalog.commit(transaction, CutFiles(written, repair.key, masks), position)
        return int(catalog.load(table.name).currentSnapshot().snapshotId())


def check_reachable(root: str) -> None:
    """Check that pyarrow can write where Iceberg's files go: tasks have no Java.

    Raises:
        SourceError: ErrTargetUnusable.
    """
    try:
        file_system(root)
    except (OSError, pa.ArrowException) as err:
        cause = str(err).partition("\n")[0]
        raise SourceError(
            "ErrTargetUnusable",
            f"pyarrow cannot reach {root} ({cause}); Iceberg's files are written by it: for HDFS "
            "it needs libhdfs, by "
            "HADOOP_HOME or ARROW_LIBHDFS_DIR, and CLASSPATH, on the driver and the executors",
        ) from None


def _catalog(spark: SparkSession, table: StoredTable) -> Catalog:
    return Catalog(spark, table.uri.path, table.changefeed)
