"""An Iceberg table at a snapshot, as a Spark DataFrame, without Iceberg's Spark connector.

The scan is planned by Iceberg: which data files a snapshot shows, and which equality deletes apply
to each. Spark reads the Parquet files, by field id, so that renamed columns are found in old files,
too.
"""

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pyspark_tidemark.lake.columns import quoted
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.types import field_ids

_FILES = StructType([StructField("_file", StringType()), StructField("_sequence", LongType())])
_BY_ID = "spark.sql.parquet.fieldId.read.enabled"
_VECTORIZED = "spark.sql.parquet.enableVectorizedReader"


class Snapshot:
    """What one snapshot of a table shows."""

    def __init__(self, spark: SparkSession, catalog: Catalog, table: Any, snapshot_id: int) -> None:
        self._spark = spark
        self._schema = catalog.schema_of(table, snapshot_id)
        self._widened = catalog.has_widened(table)
        tasks = catalog.listed(table.newScan().useSnapshot(snapshot_id).planFiles())
        self.data = [task.file() for task in tasks]
        self._masked = [task.file() for task in tasks if len(task.deletes())]
        self._whole = [task.file() for task in tasks if not len(task.deletes())]
        by_location = {delete.location(): delete for task in tasks for delete in task.deletes()}
        self.deletes = list(by_location.values())

    def frame(self) -> DataFrame:
        """The rows."""
        schema = spark_schema(self._schema)
        self._spark.conf.set(_BY_ID, "true")
        if self._widened:
            # Spark's vectorized reader fails on a dictionary of ints in a file from before its
            # column became long.
            self._spark.conf.set(_VECTORIZED, "false")
        whole = (
            self._read(self._whole, schema)
            if self._whole
            else self._spark.createDataFrame([], schema)
        )
        if not self._masked:
            return whole
        return whole.unionByName(self._unmasked(schema))

    def _unmasked(self, schema: StructType) -> DataFrame:
        """The rows of files with deletes: those whose key no younger delete names."""
        # A delete applies to the files that are older than it (Iceberg's specification, "Scan
        # Planning"), so the newest one of each key decides.
        names = {number: name for name, number in field_ids(self._schema).items()}
        key = [names[number] for number in self.deletes[0].equalityFieldIds()]
        deleted = self._numbered(self.deletes, StructType([schema[name] for name in key]))
        last = deleted.groupBy(*[F.col(quoted(name)) for name in key]).agg(
            F.max("_sequence").alias("_deleted")
        )
        rows = self._numbered(self._masked, schema).alias("r")
        same = [F.col(f"r.{quoted(name)}").eqNullSafe(F.col(f"d.{quoted(name)}")) for name in key]
        kept = rows.join(
            last.alias("d"), [*same, F.col("r._sequence") < F.col("d._deleted")], "left_anti"
        )
        return kept.select(*[F.col(quoted(name)) for name in schema.names])

    def _numbered(self, files: Sequence[Any], schema: StructType) -> DataFrame:
        """Rows with the sequence number of their file."""
        # Spark's metadata of a row has the name of its file; our names are unique (`files`).
        numbers = [(_basename(file.location()), int(file.dataSequenceNumber())) for file in files]
        sequences = F.broadcast(self._spark.createDataFrame(numbers, _FILES))
        rows = self._read(files, schema).withColumn("_file", F.col("_metadata.file_name"))
        return rows.join(sequences, "_file").drop("_file")

    def _read(self, files: Sequence[Any], schema: StructType) -> DataFrame:
        return self._spark.read.schema(schema).parquet(*[file.location() for file in files])


def spark_schema(schema: Any) -> StructType:
    """Spark's schema, with the field ids that it looks for in Parquet files."""
    ids = field_ids(schema)
    return StructType(
        [
            StructField(
                field.name,
                from_arrow_type(field.type),
                nullable=True,
                metadata={"parquet.field.id": ids[field.name]},
            )
            for field in schema
        ]
    )


def _basename(location: str) -> str:
    return location.rpartition("/")[2]
