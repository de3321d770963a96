"""An Iceberg table at a snapshot, as a Spark DataFrame, without Iceberg's Spark connector.

The scan is planned by Iceberg: which data files a snapshot shows, and which equality deletes apply
to each. The Parquet files are read by field id, so that renamed columns are found in old files,
too: by Spark itself on disks and HDFS, and from S3 by tasks with pyarrow, which have the catalog's
settings and credentials, where Spark's own file systems would need theirs again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pyspark_tidemark.jvm import java_items
from pyspark_tidemark.lake.columns import internal, quoted
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import rows_of_shares, shares
from pyspark_tidemark.lake.iceberg.storage import is_s3
from pyspark_tidemark.lake.iceberg.types import field_ids, with_field_ids

_FILE, _SEQUENCE, _DELETED = map(internal, ("_file", "_sequence", "_deleted"))
_FILES = StructType([StructField(_FILE, StringType()), StructField(_SEQUENCE, LongType())])
_SHARES = StructType(
    [
        StructField("location", StringType()),
        StructField("sequence", LongType()),
        StructField("number", LongType()),
        StructField("of", LongType()),
    ]
)
"""Of `files.Share`."""
_BY_ID = "spark.sql.parquet.fieldId.read.enabled"
_VECTORIZED = "spark.sql.parquet.enableVectorizedReader"


class Snapshot:
    """What one snapshot of a table shows."""

    def __init__(self, spark: SparkSession, catalog: Catalog, table: Any, snapshot_id: int) -> None:
        self._spark = spark
        self._storage = catalog.storage(table)
        self._schema = catalog.schema_of(table, snapshot_id)
        self._stored = StoredColumns(self._schema, catalog.fields(table))
        tasks = catalog.planned(table.newScan().useSnapshot(snapshot_id))
        self.data = [task.file() for task in tasks]
        self._masked = [task.file() for task in tasks if len(task.deletes())]
        self._whole = [task.file() for task in tasks if not len(task.deletes())]
        by_location = {
            delete.location(): delete for task in tasks for delete in java_items(task.deletes())
        }
        self.deletes = list(by_location.values())

    def frame(self) -> DataFrame:
        """The rows."""
        self._spark.conf.set(_BY_ID, "true")
        if self._stored.widened:
            # Spark's vectorized reader fails on a dictionary of ints in a file from before its
            # column became long.
            self._spark.conf.set(_VECTORIZED, "false")
        ids = [*field_ids(self._schema).values()]
        whole = self._named(self._read(self._whole, ids), ids)
        if not self._masked:
            return whole
        return whole.unionByName(self._named(self._unmasked(ids), ids))

    def _unmasked(self, ids: Sequence[int]) -> DataFrame:
        """The rows of files with deletes: those whose key no younger delete names.

        A table that got another key has deletes that name the former one, which may be no column of
        it any more.
        """
        deletes: dict[tuple[int, ...], list[Any]] = {}
        for delete in self.deletes:
            key = tuple(sorted(map(int, java_items(delete.equalityFieldIds()))))
            deletes.setdefault(key, []).append(delete)
        wanted = dict.fromkeys([*ids, *(number for key in deletes for number in key)])
        rows = self._numbered(self._masked, [*wanted])
        # A delete applies to the files that are older than it (Iceberg's specification, "Scan
        # Planning"), so the newest one of each key decides.
        for key, files in deletes.items():
            names = [quoted(self._stored.names[number]) for number in key]
            last = (
                self._numbered(files, key)
                .groupBy(*map(F.col, names))
                .agg(F.max(quoted(_SEQUENCE)).alias(_DELETED))
            )
            same = [F.col(f"r.{name}").eqNullSafe(F.col(f"d.{name}")) for name in names]
            older = F.col(f"r.{quoted(_SEQUENCE)}") < F.col(f"d.{quoted(_DELETED)}")
            rows = rows.alias("r").join(last.alias("d"), [*same, older], "left_anti")
        return rows

    def _numbered(self, files: Sequence[Any], ids: Sequence[int]) -> DataFrame:
        """Rows with the sequence number of their file."""
        if _in_s3(files):
            return self._read_in_tasks(files, ids, _SEQUENCE)
        # Spark's metadata of a row has the name of its file; our names are unique (`files`).
        numbers = [(_basename(file.location()), int(file.dataSequenceNumber())) for file in files]
        sequences = F.broadcast(self._spark.createDataFrame(numbers, _FILES))
        rows = self._read(files, ids).withColumn(_FILE, F.col("_metadata.file_name"))
        return rows.join(sequences, _FILE).drop(_FILE)

    def _read(self, files: Sequence[Any], ids: Sequence[int]) -> DataFrame:
        """The columns of these ids, under the names of `StoredColumns`."""
        schema = self._stored.schema(ids)
        if not files:
            return self._spark.createDataFrame([], schema)
        if _in_s3(files):
            return self._read_in_tasks(files, ids)
        return self._spark.read.schema(schema).parquet(*[file.location() for file in files])

    def _read_in_tasks(
        self, files: Sequence[Any], ids: Sequence[int], sequence: str = ""
    ) -> DataFrame:
        """The same by pyarrow, with the files' sequence numbers under the name `sequence`."""
        parts = [
            share
            for file in files
            for share in shares(
                str(file.location()), int(file.dataSequenceNumber()), int(file.fileSizeInBytes())
            )
        ]
        schema = StructType(self._stored.schema(ids).fields)
        if sequence:
            schema = schema.add(sequence, LongType())
        given = self._spark.createDataFrame([dataclasses.astuple(part) for part in parts], _SHARES)
        task = rows_of_shares(self._storage, self._stored.fields(ids), sequence)
        return given.repartition(len(parts)).mapInArrow(task, schema)

    def _named(self, rows: DataFrame, ids: Sequence[int]) -> DataFrame:
        """The columns under their own names."""
        own = {number: name for name, number in field_ids(self._schema).items()}
        return rows.select(
            *[F.col(quoted(self._stored.names[number])).alias(own[number]) for number in ids]
        )


class StoredColumns:
    """By which names columns are read from files.

    Spark finds a column in a file by its id, but a condition on it is compared with the file's
    statistics by name, and some types are looked up by name. So a column whose name was that of
    another one in an earlier schema is read under a name that no file has.
    """

    def __init__(self, schema: Any, earlier: Sequence[Any]) -> None:
        fields = [*earlier, *schema]
        self._types = {_id(field): field.type for field in fields}
        self.widened = any(self._types[_id(field)] != field.type for field in fields)
        """Whether a column had another type in an earlier schema: files may hold it as that."""
        ids_of: dict[str, set[int]] = {}
        for field in fields:
            ids_of.setdefault(field.name.lower(), set()).add(_id(field))
        own = {_id(field): field.name for field in fields}
        self.names = {
            number: name if len(ids_of[name.lower()]) == 1 else internal(f"{number} {name}")
            for number, name in own.items()
        }

    def fields(self, ids: Sequence[int]) -> Any:
        """The same as a pyarrow.Schema with field ids."""
        plain = pa.schema([(self.names[number], self._types[number]) for number in ids])
        return with_field_ids(plain, {self.names[number]: number for number in ids})

    def schema(self, ids: Sequence[int]) -> StructType:
        """Spark's schema, with the field ids that it looks for in Parquet files."""
        return StructType(
            [
                StructField(
                    self.names[number],
                    from_arrow_type(self._types[number]),
                    nullable=True,
                    metadata={"parquet.field.id": number},
                )
                for number in ids
            ]
        )


def _id(field: Any) -> int:
    return field_ids([field])[field.name]


def _basename(location: str) -> str:
    return location.rpartition("/")[2]


def _in_s3(files: Sequence[Any]) -> bool:
    return bool(files) and is_s3(str(files[0].location()))
