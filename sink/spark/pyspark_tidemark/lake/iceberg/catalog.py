"""Iceberg's Java table library, called by py4j: tables by name,
commits with the fence, positions.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from pyspark_tidemark.defaults import column_ids
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.iceberg.files import Layout, Written
from pyspark_tidemark.lake.iceberg.types import arrow_schema, field_ids, schema_json
from pyspark_tidemark.lake.ranges import Bounds
from pyspark_tidemark.lake.target import path_part

APP, CUT = "cdc.app", "cdc.cut"
COLUMN_IDS = "tidemark.column-ids"
"""The table property with the identities of columns: JSON, by the field ids of the table,
which a rename keeps.
"""
PROPERTIES = {
    "format-version": "3",
    # a commit that lost a race must not be repeated: see the package, invariant 2
    "commit.retry.num-retries": "0",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}


class Catalog:
    """The tables of one changefeed under one warehouse directory."""

    def __init__(self, spark: SparkSession, root: str, changefeed: str) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001 - there is no Python API for what is on the JVM's class path
        self._jvm = jvm
        self._gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - see above
        self._iceberg = jvm.org.apache.iceberg
        self._lists = self._iceberg.relocated.com.google.common.collect.Lists
        settings = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001
        self._java = self._iceberg.hadoop.HadoopCatalog(settings, root)
        self._app = f"tidemark:{changefeed}"

    def load(self, name: str) -> Any:
        """Iceberg's table object, current; None if there is none."""
        try:
            return self._java.loadTable(self._name(name))
        except Py4JJavaError as err:
            if "NoSuchTableException" not in str(err.java_exception):
                raise
            return None

    def create(self, name: str, schema: Any, key: Sequence[str]) -> Any:
        """A table without rows, marked as this changefeed's."""
        properties = self._jvm.java.util.HashMap()
        ids = column_ids(schema)
        recorded = {
            str(number): ids[column]
            for number, column in enumerate(schema.names, 1)
            if column in ids
        }
        for setting, value in (
            PROPERTIES | {APP: self._app, COLUMN_IDS: json.dumps(recorded)}
        ).items():
            properties.put(setting, value)
        parsed = self._iceberg.SchemaParser.fromJson(schema_json(schema, key))
        return self._java.createTable(
            self._name(name), parsed, self._iceberg.PartitionSpec.unpartitioned(), properties
        )

    def position(self, table: Any, name: str) -> int | None:
        """The cut that the current snapshot holds; None if no cut was ever applied.

        Raises:
            SourceError: ErrTargetForeign, the table was not made by this changefeed.
        """
        if table.properties().get(APP) != self._app:
            raise SourceError(
                "ErrTargetForeign",
                f"the Iceberg table {name} is there, but not by this changefeed; choose another "
                "--target",
            )
        snapshot = table.currentSnapshot()
        while snapshot is not None:
            cut = snapshot.summary().get(CUT)
            if cut is not None:
                return int(cut)
            parent = snapshot.parentId()
            snapshot = None if parent is None else table.snapshot(parent)
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

    def layout(
        self, table: Any, key: Sequence[str], key_ranges: Sequence[Bounds] | None = None
    ) -> Layout:
        """What is needed to write files of a table."""
        schema = self.schema(table)
        ranges = None if key_ranges is None else tuple(key_ranges)
        return Layout(
            f"{table.location()}/data", schema.serialize().to_pybytes(), tuple(key), ranges
        )

    def schema(self, table: Any) -> Any:
        """The current pyarrow.Schema, with field ids."""
        return arrow_schema(self._iceberg.SchemaParser.toJson(table.schema()))

    def column_ids(self, table: Any) -> dict[str, int]:
        """The identities of the current columns, as far as they are recorded."""
        recorded = json.loads(table.properties().get(COLUMN_IDS) or "{}")
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

    def has_widened(self, table: Any) -> bool:
        """Whether a column had another type in an earlier schema,
        so that files may hold it as that.
        """
        types: dict[int, str] = {}
        schemas = [
            json.loads(self._iceberg.SchemaParser.toJson(each)) for each in table.schemas().values()
        ]
        fields = [field for schema in schemas for field in schema["fields"]]
        return any(
            types.setdefault(field["id"], field["type"]) != field["type"] for field in fields
        )

    def commit(
        self, table: Any, written: Sequence[Written], key: Sequence[str], cut: int
    ) -> list[Any]:
        """One snapshot with the files, fenced by the cut; returns those with rows,
        as Iceberg names them.

        Raises:
            SourceError: ErrTargetBusy, somebody else has committed in between.
        """
        delta = table.newRowDelta()
        rows = self._data_files(table, written)
        for file in rows:
            delta.addRows(file)
        for file in written:
            if file.deletes:
                delta.addDeletes(self.delete_file(table, file.path, key))
        self.fenced(delta, cut)
        return rows

    def replace(self, table: Any, written: Sequence[Written], cut: int) -> list[Any]:
        """One snapshot with the files and nothing else, fenced by the cut; returns those with rows.

        Raises:
            SourceError: ErrTargetBusy.
        """
        overwrite = table.newOverwrite().overwriteByRowFilter(self.always_true)
        rows = self._data_files(table, written)
        for file in rows:
            overwrite.addFile(file)
        self.fenced(overwrite, cut)
        return rows

    def fenced(self, update: Any, cut: int) -> None:
        """Commit an update whose snapshot says which cut the table holds.

        Raises:
            SourceError: ErrTargetBusy.
        """
        update.set(APP, self._app)
        update.set(CUT, str(cut))
        self._committed(update.commit)

    @staticmethod
    def _committed(commit: Callable[[], None]) -> None:
        try:
            commit()
        except Py4JJavaError as err:
            if "CommitFailedException" not in str(err.java_exception):
                raise
            raise SourceError(
                "ErrTargetBusy",
                f"somebody else writes to this Iceberg table: {err.java_exception}",
                retryable=True,
            ) from None

    def commit_transaction(self, transaction: Any) -> None:
        """Commit all that a transaction has gathered.

        Raises:
            SourceError: ErrTargetBusy, somebody else has committed in between.
        """
        self._committed(transaction.commitTransaction)

    def _data_files(self, table: Any, written: Sequence[Written]) -> list[Any]:
        return [self.data_file(table, file.path) for file in written if not file.deletes]

    def data_file(self, table: Any, path: str) -> Any:
        """A data file as commits name it, with the column statistics of its footer."""
        builder = self._iceberg.DataFiles.builder(table.spec())
        return self._described(table, builder, path).build()

    def delete_file(self, table: Any, path: str, key: Sequence[str]) -> Any:
        """An equality-delete file as commits name it."""
        ids = field_ids(self.schema(table))
        numbers = self._gateway.new_array(self._jvm.int, len(key))
        for at, column in enumerate(key):
            numbers[at] = ids[column]
        builder = self._iceberg.FileMetadata.deleteFileBuilder(table.spec()).ofEqualityDeletes(
            numbers
        )
        return self._described(table, builder, path).build()

    def files(self, table: Any) -> list[Any]:
        """The data files that the current snapshot shows, with their columns' statistics."""
        return [
            task.file() for task in self.listed(table.newScan().includeColumnStats().planFiles())
        ]

    def bounds(self, file: Any, number: int, kind: Any) -> tuple[Any, Any] | None:
        """The lowest and the highest value of a column in a file, or what bounds them;
        None if that is not known.
        """
        low, high = file.lowerBounds(), file.upperBounds()
        if low is None or high is None or low.get(number) is None or high.get(number) is None:
            return None
        ends = [
            self._iceberg.types.Conversions.fromByteBuffer(kind, bound.get(number))
            for bound in (low, high)
        ]
        plain = [str(end.toString()) if hasattr(end, "toString") else end for end in ends]
        return plain[0], plain[1]

    def listed(self, iterable: Any) -> list[Any]:
        """A Java Iterable as a list."""
        try:
            return list(self._lists.newArrayList(iterable))
        finally:
            iterable.close()

    def java_type(self, name: str) -> Any:
        """Iceberg's type of that name."""
        return self._iceberg.types.Types.fromPrimitiveString(name)

    def strings(self, parts: Sequence[str]) -> Any:
        """A Java array of strings."""
        array = self._gateway.new_array(self._jvm.java.lang.String, len(parts))
        for at, part in enumerate(parts):
            array[at] = part
        return array

    @property
    def always_true(self) -> Any:
        """The filter that lets all rows through."""
        return self._iceberg.expressions.Expressions.alwaysTrue()

    def _described(self, table: Any, builder: Any, path: str) -> Any:
        file = table.io().newInputFile(path)
        metrics = self._iceberg.parquet.ParquetUtil.fileMetrics(
            file, self._iceberg.MetricsConfig.forTable(table)
        )
        return builder.withInputFile(file).withFormat("parquet").withMetrics(metrics)

    def _name(self, name: str) -> Any:
        database, _, table = name.partition(".")
        return self._iceberg.catalog.TableIdentifier.of(
            self.strings((path_part(database), path_part(table)))
        )
