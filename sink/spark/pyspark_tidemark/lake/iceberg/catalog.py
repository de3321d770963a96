"""Iceberg's Java library, called by py4j: tables by name, commits with the fence, positions.

The fence is the summary property `cdc.cut` of a snapshot: the end_ts up to which the table has its
changes. Every snapshot of ours has it, and `Catalog.position` reads it back; the table property
`tidemark.cut` repeats the newest one. Tables, transactions, snapshots and files are Java's objects.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from pyspark_tidemark.column_metadata import column_ids
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_classes, java_dict, java_int, java_items
from pyspark_tidemark.lake.files import file_system, is_on_disk
from pyspark_tidemark.lake.iceberg.files import Layout, Written
from pyspark_tidemark.lake.iceberg.java_catalog import (
    MultiTableCommit,
    commit_exactly,
    explained,
    is_named,
    java_catalog,
    kind,
    name_and_namespace,
    settle,
)
from pyspark_tidemark.lake.iceberg.java_files import Committed, CutFiles, JavaFiles
from pyspark_tidemark.lake.iceberg.partitions import Partitioning
from pyspark_tidemark.lake.iceberg.row_order import RowOrder
from pyspark_tidemark.lake.iceberg.storage import Storage, storage_of
from pyspark_tidemark.lake.iceberg.types import arrow_schema, field_ids, schema_json
from pyspark_tidemark.lake.ranges import Bounds
from pyspark_tidemark.lake.target import path_part, rolled_back

APP, CUT = "cdc.app", "cdc.cut"
TABLE = "tidemark.table"
"""The table property with the upstream's name: catalogs that ignore case, or change names, must not
take two tables for one.
"""
NEWEST_CUT = "tidemark.cut"
"""The table property with the cut of our newest snapshot, where no snapshot tells it any more."""
COLUMN_IDS = "tidemark.column-ids"
"""The table property with the identities of columns: JSON, by the field ids of the table,
which a rename keeps.
"""
Send: TypeAlias = Callable[[Any, str], int]
"""Makes a transaction visible, or lets it wait for others; gets what to call the catalog, and
returns the id of the snapshot.
"""
_ABSENT = ("NoSuchTableException", "NoSuchNamespaceException")
"""What catalogs say of a table that is not there."""
_EXISTS = "AlreadyExistsException"
_VECTORS_SINCE = 3
PROPERTIES = {
    "format-version": "3",
    # For expiry, the one update that Iceberg commits itself: a commit on top of somebody else's
    # must fail (`java_catalog.commit_exactly`).
    "commit.retry.num-retries": "0",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}


class Catalog:
    """The tables of one changefeed in one catalog, or under one directory."""

    def __init__(
        self, spark: SparkSession, root: str, changefeed: str, *, kind: str = "tidemark"
    ) -> None:
        """`root` is a directory or `catalog://NAME…`;
        tables of another `kind` than the changefeed's own are not taken for these.
        """
        self._classes = java_classes(spark)
        self._gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - PySpark has no call for arrays
        self._int = java_int(spark)
        self._iceberg = self._classes.org.apache.iceberg
        self._lists = self._iceberg.relocated.com.google.common.collect.Lists
        self._java = java_catalog(spark, root)
        self._app = f"{kind}:{changefeed}"
        self.is_named = is_named(root)
        """Whether it is a catalog of its own, which knows where tables lie."""
        self._place = f"the catalog {name_and_namespace(root)[0]}" if self.is_named else root
        self.java_files = JavaFiles(self._classes, self._ints, self._place)
        self._parent = name_and_namespace(root)[1] if self.is_named else ()
        self._identifiers: dict[str, Any] = {}

    def load(self, name: str) -> Any:
        """Iceberg's table object, current; None if there is none.

        Raises:
            SourceError: those of `java_catalog.translated`.
        """
        with explained(self._place):
            try:
                return self._java.loadTable(self.identifier(name))
            except Py4JJavaError as err:
                if kind(err) not in _ABSENT:
                    raise
                return None

    def existing(self, name: str) -> Any:
        """The same of a table that was there, and that may be dropped while it is worked on.

        Raises:
            SourceError: ErrTableNotFound, and those of `load`.
        """
        table = self.load(name)
        if table is None:
            raise SourceError("ErrTableNotFound", f"the table {name} is not there any more")
        return table

    def create(self, name: str, schema: Any, key: Sequence[str]) -> Any:
        """A table without rows, marked as this changefeed's, with the namespaces above it.

        Raises:
            SourceError: ErrTargetRefused, the catalog cannot hold such a name or table, and the
                others of `java_catalog.translated`.
        """
        identifier, parsed, properties = self._new_table(name, schema, key)
        with explained(f"{self._place}: the table {name}"):
            if self.is_named:
                self._create_namespaces(identifier.namespace())
            table = self._java.createTable(
                identifier, parsed, self._iceberg.PartitionSpec.unpartitioned(), properties
            )
        self.settle(table)
        return table

    def begin_new(self, name: str, schema: Any, key: Sequence[str]) -> Any:
        """As `create`, a transaction that makes the table when it is committed, and with it what
        one of the commits below does; None: it is there. In a directory only.

        Raises:
            SourceError: those of `create`.
        """
        identifier, parsed, properties = self._new_table(name, schema, key)
        with explained(f"{self._place}: the table {name}"):
            try:
                return self._java.newCreateTableTransaction(
                    identifier, parsed, self._iceberg.PartitionSpec.unpartitioned(), properties
                )
            except Py4JJavaError as err:
                if kind(err) != _EXISTS:
                    raise
                return None

    def _new_table(self, name: str, schema: Any, key: Sequence[str]) -> tuple[Any, Any, Any]:
        """The identifier, the schema and the properties of a new table."""
        properties = self._classes.java.util.HashMap()
        ids = column_ids(schema)
        recorded = {
            str(number): ids[column]
            for number, column in enumerate(schema.names, 1)
            if column in ids
        }
        for setting, value in (
            PROPERTIES | {APP: self._app, TABLE: name, COLUMN_IDS: json.dumps(recorded)}
        ).items():
            properties.put(setting, value)
        parsed = self._iceberg.SchemaParser.fromJson(schema_json(schema, key))
        return self.identifier(name), parsed, properties

    def _create_namespaces(self, namespace: Any) -> None:
        levels = list(namespace.levels())
        for depth in range(1, len(levels) + 1):
            each = self._iceberg.catalog.Namespace.of(self.strings(levels[:depth]))
            if self._java.namespaceExists(each):
                continue
            # Another driver, or another table's thread, may make it at the same time; catalogs
            # say that in different ways.
            try:
                self._java.createNamespace(each)
            except Py4JJavaError:
                if not self._java.namespaceExists(each):
                    raise

    def drop(self, name: str) -> None:
        """Remove a table with its files, if it is there and ours; in a catalog of its own only.

        Raises:
            SourceError: ErrTargetForeign, and those of `java_catalog.translated`.
        """
        table = self.load(name)
        if table is None:
            return
        self.check_own(table, name)
        with explained(self._place):
            self._java.dropTable(self.identifier(name), True)  # noqa: FBT003 - Java's signature: with its files

    def names(self, database: str) -> list[str]:
        """The tables in a namespace, as the catalog calls them."""
        namespace = self.identifier(f"{database}.x").namespace()
        with explained(self._place):
            if not self._java.namespaceExists(namespace):
                return []
            return sorted(str(each.name()) for each in java_items(self._java.listTables(namespace)))

    def check_own(self, table: Any, name: str) -> None:
        """Check that a table was made by this changefeed, under this name.

        Raises:
            SourceError: ErrTargetForeign, ErrNameUnsupported.
        """
        properties = table.properties()
        if properties.get(APP) != self._app:
            raise SourceError(
                "ErrTargetForeign",
                f"the Iceberg table {name} is there, but not by this changefeed; choose another "
                "--target",
            )
        if properties.get(TABLE) not in (None, name):
            raise SourceError(
                "ErrNameUnsupported",
                f"{self._place} takes the tables {properties.get(TABLE)} and {name} for one: leave "
                "one of them out by --filter",
            )

    def position(self, table: Any, name: str) -> int | None:
        """The cut that the current snapshot holds; None if no cut has been applied yet.

        Raises:
            SourceError: ErrTargetForeign, the table was not made by this changefeed, or somebody
                else has written to it and what was there before is gone; ErrTableRolledBack;
                ErrNameUnsupported.
        """
        cut, recorded = self._shown_cut(table, name), _recorded_cut(table)
        # Properties stay as they are when a table is rolled back to an older snapshot.
        if recorded is not None and (cut is None or cut < recorded):
            raise rolled_back(name, f"Set its current snapshot to one whose {CUT} is {recorded}")
        return cut

    def _shown_cut(self, table: Any, name: str) -> int | None:
        self.check_own(table, name)
        # Only snapshots of ours carry the cut on: behind one of somebody else's it is looked for.
        snapshot = table.currentSnapshot()
        while snapshot is not None:
            cut = snapshot.summary().get(CUT)
            if cut is not None:
                return int(cut)
            parent = snapshot.parentId()
            if parent is None:
                return None
            snapshot = table.snapshot(parent)
            if snapshot is None:
                return _only_recorded(table, name)
        return None

    def newest_cut(self, table: Any) -> set[int]:
        """The snapshots of the cut that the current one holds, rewrites of it included."""
        snapshot_ids: set[int] = set()
        snapshot = table.currentSnapshot()
        cut = snapshot.summary().get(CUT)
        while snapshot is not None and snapshot.summary().get(CUT) == cut:
            snapshot_ids.add(int(snapshot.snapshotId()))
            parent = snapshot.parentId()
            snapshot = None if parent is None else table.snapshot(parent)
        return snapshot_ids

    @staticmethod
    def is_recorded(table: Any, record: tuple[str, str]) -> bool:
        """Whether a table has got already what an option asks for, whatever was changed since."""
        return (table.properties().get(record[0]) or "") == record[1]

    @staticmethod
    def commits(table: Any) -> int:
        """How many snapshots the table has had."""
        return int(table.currentSnapshot().sequenceNumber())

    @staticmethod
    def has_equality_deletes(table: Any) -> bool:
        """Whether equality deletes count in the current snapshot."""
        return int(table.currentSnapshot().summary().get("total-equality-deletes") or 0) > 0

    @staticmethod
    def marked(table: Any) -> set[int]:
        """The snapshots that a branch or a tag names: Iceberg refuses to forget these."""
        return {int(ref.snapshotId()) for ref in java_dict(table.refs()).values()}

    def multi_table_commit(self) -> MultiTableCommit:
        """What commits several tables at once, if this catalog can."""
        return MultiTableCommit(self._classes, self._java)

    def begin(self, table: Any) -> Any:
        """Begin a transaction on a table as it is now, to be ended by one of the commits below.

        Raises:
            SourceError: those of `java_catalog.translated`.
        """
        with explained(self._place):
            return table.newTransaction()

    @contextmanager
    def recorded(self, name: str, table: Any, what: str, record: tuple[str, str]) -> Iterator[Any]:
        """A transaction in which the block changes `what` of a table, as an option asks for; it is
        committed with a record of that, a table property and its value. Nothing may wait for a
        commit of the table.

        Raises:
            SourceError: those of `java_catalog.translated`.
        """
        transaction = self.begin(table)
        with explained(f"{what} of {name}"):
            yield transaction
            transaction.updateProperties().set(*record).commit()
            transaction.commitTransaction()
        self.settle(transaction.table())

    def expire(self, table: Any, snapshot_ids: Sequence[int]) -> None:
        """Forget snapshots, with the files that only they need.

        Raises:
            SourceError: those of `java_catalog.translated`.
        """
        update = table.expireSnapshots()
        for snapshot_id in snapshot_ids:
            update.expireSnapshotId(snapshot_id)
        with explained(self._place):
            update.commit()
        self.settle(table)

    def layout(
        self, table: Any, key: Sequence[str], key_ranges: Sequence[Bounds] | None = None
    ) -> Layout:
        """The layout of a table's files.

        Raises:
            SourceError: ErrTargetUnusable, they lie where they cannot be written;
                ErrPartitionUnsupported.
        """
        schema = self.schema(table)
        ranges = None if key_ranges is None else tuple(key_ranges)
        return Layout(
            self.data_location(table),
            schema.serialize().to_pybytes(),
            tuple(key),
            ranges,
            self.storage(table),
            Partitioning.parse(self.spec_json(table)),
            order=RowOrder.parse(self.sort_order_json(table), schema),
        )

    def spec_json(self, table: Any, spec: Any = None) -> str:
        """A partition spec, by default the current one, as Iceberg's JSON."""
        return str(self._iceberg.PartitionSpecParser.toJson(table.spec() if spec is None else spec))

    def sort_order_json(self, table: Any) -> str:
        """The current sort order as Iceberg's JSON."""
        return str(self._iceberg.SortOrderParser.toJson(table.sortOrder()))

    def storage(self, table: Any) -> Storage:
        """What opens the files of a table.

        Raises:
            SourceError: ErrTargetUnusable, they lie where they cannot be written.
        """
        return storage_of(table, self.data_location(table))

    @staticmethod
    def knows_vectors(table: Any) -> bool:
        """Whether the table's format version has deletion vectors: a catalog's settings may ask for
        version 2, which has not.
        """
        return int(table.operations().current().formatVersion()) >= _VECTORS_SINCE

    @staticmethod
    def data_location(table: Any) -> str:
        """The directory of new files."""
        return str(table.locationProvider().newDataLocation("")).rstrip("/")

    def schema(self, table: Any) -> Any:
        """The current pyarrow.Schema, with field ids."""
        return arrow_schema(self._iceberg.SchemaParser.toJson(table.schema()))

    def column_ids(self, table: Any) -> dict[str, int]:
        """The identities of the current columns, as far as they are recorded."""
        recorded = recorded_as(table, COLUMN_IDS, json.loads) or {}
        fields = field_ids(self.schema(table))
        return {
            name: recorded[str(number)]
            for name, number in fields.items()
            if str(number) in recorded
        }

    def record_column_ids(self, transaction: Any, ids: Mapping[str, int]) -> None:
        """Put the identities of the columns, as they are in a transaction,
        into the same transaction.
        """
        fields = field_ids(self.schema(transaction.table()))
        recorded = {str(fields[name]): number for name, number in ids.items() if name in fields}
        transaction.updateProperties().set(COLUMN_IDS, json.dumps(recorded)).commit()

    def schema_of(self, table: Any, snapshot_id: int) -> Any:
        """The pyarrow.Schema that a snapshot was written with, with field ids."""
        schema = table.schemas().get(table.snapshot(snapshot_id).schemaId())
        return arrow_schema(self._iceberg.SchemaParser.toJson(schema))

    def fields(self, table: Any) -> list[Any]:
        """The columns of all schemas that the table has had (pyarrow fields, with field ids)."""
        texts = [
            self._iceberg.SchemaParser.toJson(each) for each in java_dict(table.schemas()).values()
        ]
        return [field for text in texts for field in arrow_schema(text)]

    def commit(
        self,
        transaction: Any,
        files: CutFiles,
        cut: int,
        send: Send = commit_exactly,
    ) -> Committed:
        """One snapshot with the files, fenced by the cut.

        Raises:
            SourceError: ErrTargetBusy, somebody else has committed since the transaction began.
        """
        delta, table = transaction.newRowDelta(), transaction.table()
        if (before := table.currentSnapshot()) is not None:
            # Else Iceberg takes a vector of an earlier commit for one of somebody else's.
            delta.validateFromSnapshot(before.snapshotId())
        rows = self._data_files(table, files.written)
        for file in rows:
            delta.addRows(file)
        deletes = [file for file in files.written if file.deletes]
        for file in deletes:
            delta.addDeletes(self.java_files.equality_deletes(table, file, files.key))
        masks = list(zip(files.masks, self.java_files.vectors(table, files.masks), strict=True))
        for mask, added in masks:
            delta.addDeletes(added)
            if mask.replaced is not None:
                delta.removeDeletes(mask.replaced)
        for file in files.removed:
            delta.removeDeletes(file)
        self.fenced(transaction, delta, cut, send)
        return Committed(rows, masks, [file.path for file in deletes])

    def replace(
        self, transaction: Any, written: Sequence[Written], cut: int, send: Send = commit_exactly
    ) -> Committed:
        """One snapshot with the files and nothing else, fenced by the cut.

        Raises:
            SourceError: ErrTargetBusy.
        """
        overwrite = transaction.newOverwrite().overwriteByRowFilter(self.always_true)
        rows = self._data_files(transaction.table(), written)
        for file in rows:
            overwrite.addFile(file)
        self.fenced(transaction, overwrite, cut, send)
        return Committed(rows)

    def fenced(self, transaction: Any, update: Any, cut: int, send: Send = commit_exactly) -> None:
        """Commit a transaction and its last update, whose snapshot says which cut the table holds.

        Raises:
            SourceError: ErrTargetBusy.
        """
        self._finish(update, {CUT: str(cut)})
        transaction.updateProperties().set(NEWEST_CUT, str(cut)).commit()
        send(transaction, self._place)
        self.settle(transaction.table())

    def commit_last(
        self, transaction: Any, update: Any, summary: Mapping[str, str], send: Send = commit_exactly
    ) -> int:
        """Commit a transaction and its last update, with properties of its snapshot, by `send`;
        returns the snapshot's id.

        Raises:
            SourceError: ErrTargetBusy, somebody else has committed since the transaction began.
        """
        self._finish(update, summary)
        return send(transaction, self._place)

    def settle(self, table: Any) -> None:
        """What was committed is durable after it, on a disk of this machine."""
        if self.is_named or not is_on_disk(location := str(table.location())):
            return
        snapshot = table.currentSnapshot()
        listed = None if snapshot is None else str(snapshot.manifestListLocation())
        settle(
            Path(file_system(location)[1]),
            None if listed is None else Path(file_system(listed)[1]),
        )

    def _finish(self, update: Any, summary: Mapping[str, str]) -> None:
        """Put an update, and properties of its snapshot, into its transaction."""
        for name, value in ({APP: self._app} | dict(summary)).items():
            update.set(name, value)
        with explained(self._place):
            update.commit()

    def _data_files(self, table: Any, written: Sequence[Written]) -> list[Any]:
        return [self.java_files.data(table, file) for file in written if not file.deletes]

    def files(self, table: Any) -> list[Any]:
        """The data files that the current snapshot shows, with their columns' statistics."""
        return [task.file() for task in self.planned(table.newScan().includeColumnStats())]

    def planned(self, scan: Any) -> list[Any]:
        """The tasks of a scan, one for each data file, with the deletes that apply to it.

        Raises:
            SourceError: those of `java_catalog.translated`.
        """
        with explained(self._place):
            tasks = scan.planFiles()
            try:
                return java_items(self._lists.newArrayList(tasks))
            finally:
                tasks.close()

    def java_type(self, name: str) -> Any:
        """Iceberg's type of that name."""
        return self._iceberg.types.Types.fromPrimitiveString(name)

    def strings(self, parts: Sequence[str]) -> Any:
        """A Java array of strings."""
        array = self._gateway.new_array(self._classes.java.lang.String, len(parts))
        for at, part in enumerate(parts):
            array[at] = part
        return array

    def _ints(self, length: int) -> Any:
        return self._gateway.new_array(self._int, length)

    @property
    def expressions(self) -> Any:
        """Iceberg's class that makes filters and terms."""
        return self._iceberg.expressions.Expressions

    def null_order(self, *, is_first: bool) -> Any:
        """Iceberg's name for the place of nulls in a sort order."""
        orders = self._iceberg.NullOrder
        return orders.NULLS_FIRST if is_first else orders.NULLS_LAST

    @property
    def always_true(self) -> Any:
        """The filter that lets all rows through."""
        return self.expressions.alwaysTrue()

    def identifier(self, name: str) -> Any:
        """Iceberg's name of a table."""
        if name not in self._identifiers:
            database, _, table = name.partition(".")
            parts = self.strings((*self._parent, path_part(database), path_part(table)))
            self._identifiers[name] = self._iceberg.catalog.TableIdentifier.of(parts)
        return self._identifiers[name]


def recorded_as(table: Any, name: str, parse: Callable[[str], Any]) -> Any:
    """A property of ours of a table; None: it has none.

    Raises:
        SourceError: ErrTargetForeign, somebody else has changed it.
    """
    text = table.properties().get(name)
    try:
        return None if text is None else parse(text)
    except ValueError:
        raise SourceError(
            "ErrTargetForeign",
            f"{table.name()} has the property {name} = {text[:80]!r}, which no job writes: bring it "
            "back as it was, then start the job again",
        ) from None


def _recorded_cut(table: Any) -> int | None:
    cut: int | None = recorded_as(table, NEWEST_CUT, int)
    return cut


def _only_recorded(table: Any, name: str) -> int:
    """The cut of a table whose newest snapshot is somebody else's, and the ones before it expired,
    or hidden: some catalogs show the newest one only.

    Raises:
        SourceError: ErrTargetForeign, it is not recorded, as by earlier versions.
    """
    recorded = _recorded_cut(table)
    if recorded is None:
        # As if there were no cut, changes would be applied a second time.
        raise SourceError(
            "ErrTargetForeign",
            f"somebody else has written to the Iceberg table {name}, and no snapshot tells any "
            "more which changes it has: roll it back to a snapshot of this changefeed, or start a "
            "new changefeed and target",
        )
    return recorded
