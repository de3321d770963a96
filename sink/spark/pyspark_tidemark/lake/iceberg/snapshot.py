"""An Iceberg table at a snapshot, as a Spark DataFrame, without Iceberg's Spark connector.

The scan is planned by Iceberg: which data files a snapshot shows, and which deletion vectors and
equality deletes apply to each. The Parquet files are read by field id, so that renamed columns are
found in old files, too: by Spark itself on disks and HDFS; by tasks with pyarrow where rows are
masked by position, and from S3, as tasks have the catalog's settings and credentials, where Spark's
own file systems would need theirs again.
"""

import dataclasses
from collections.abc import Collection, Sequence
from copy import copy
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pyspark_tidemark.jvm import java_items
from pyspark_tidemark.lake.columns import internal, quoted
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import Origin, Share, rows_of_shares, shares
from pyspark_tidemark.lake.iceberg.partitions import Partition
from pyspark_tidemark.lake.iceberg.shown import equality_key, parted, vector_of
from pyspark_tidemark.lake.iceberg.storage import is_s3
from pyspark_tidemark.lake.iceberg.types import field_ids, with_field_ids

_FILE, _SEQUENCE, _DELETED = map(internal, ("_file", "_sequence", "_deleted"))
_POSITION, _POSITIONS = map(internal, ("_position", "_positions"))
_FILES = StructType([StructField(_FILE, StringType()), StructField(_SEQUENCE, LongType())])
SHARE = StructType(
    [
        StructField("location", StringType()),
        StructField("sequence", LongType()),
        StructField("number", LongType()),
        StructField("of", LongType()),
        StructField(
            "vector",
            StructType(
                [
                    StructField("location", StringType()),
                    StructField("offset", LongType()),
                    StructField("size", LongType()),
                ]
            ),
        ),
    ]
)
"""Of `files.Share`."""
_EVERYTHING = Origin(_SEQUENCE, _FILE, _POSITION)
_BY_ID = "spark.sql.parquet.fieldId.read.enabled"
_VECTORIZED = "spark.sql.parquet.enableVectorizedReader"


class Snapshot:
    """What one snapshot of a table shows."""

    def __init__(self, spark: SparkSession, catalog: Catalog, table: Any, snapshot_id: int) -> None:
        self.id = snapshot_id
        self._spark = spark
        self._storage = catalog.storage(table)
        self._schema = catalog.schema_of(table, snapshot_id)
        self._stored = StoredColumns(self._schema, catalog.fields(table))
        self.data: list[Any] = []
        self.vectors: dict[str, Any] = {}
        """The deletion vectors (Iceberg's Java), by the location of the data file."""
        self._equality: dict[str, Any] = {}
        self._masked: list[Any] = []
        self._whole: list[Any] = []
        for task in catalog.planned(table.newScan().useSnapshot(snapshot_id)):
            file, (vectors, equality) = task.file(), parted(java_items(task.deletes()))
            self.data.append(file)
            self.vectors |= {str(file.location()): vector for vector in vectors}
            self._equality |= {str(each.location()): each for each in equality}
            (self._masked if equality else self._whole).append(file)
        catalog.java_files.check_global(table, self._equality.values())
        self._partitions = partial(catalog.java_files.partitions, table)

    @property
    def partitions(self) -> list[Partition]:
        """Those of the data files."""
        return self._partitions(self.data)

    @property
    def equality_deletes(self) -> list[Any]:
        """The files of equality deletes (Iceberg's Java)."""
        return list(self._equality.values())

    @property
    def deletes(self) -> list[Any]:
        """The vectors and the equality deletes (Iceberg's Java)."""
        return [*self.vectors.values(), *self.equality_deletes]

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
        return whole.unionByName(self._named(self._unmasked(ids, Origin(_SEQUENCE)), ids))

    def only(self, locations: Collection[str]) -> "Snapshot":
        """The same, of the data files at these locations alone."""
        part = copy(self)
        for name in ("data", "_masked", "_whole"):
            files = [file for file in getattr(self, name) if str(file.location()) in locations]
            setattr(part, name, files)
        part.vectors = {
            location: vector for location, vector in self.vectors.items() if location in locations
        }
        return part

    def places_of(self, keys: DataFrame, key: Sequence[str]) -> dict[str, Any]:
        """The positions of the rows that have one of `keys`, a frame of the key's columns, by the
        location of their file (sorted NumPy arrays).
        """
        numbered = field_ids(self._schema)
        ids = [numbered[name] for name in key]
        files, origin = [*self._whole, *self._masked], Origin(file=_FILE, position=_POSITION)
        rows = self._read_in_tasks(files, ids, origin).alias("r")
        same = [
            F.col(f"r.{quoted(self._stored.names[number])}") == F.col(f"k.{quoted(name)}")
            for number, name in zip(ids, key, strict=True)
        ]
        return _collected(rows.join(keys.alias("k"), same, "left_semi"))

    def places_deleted(self) -> dict[str, Any]:
        """The same of the rows that equality deletes take out."""
        rows = self._read_in_tasks(self._masked, self._deleted_ids(), _EVERYTHING)
        live = self._unmasked([], _EVERYTHING).select(_FILE, _POSITION)
        return _collected(rows.select(_FILE, _POSITION).exceptAll(live))

    def _deletes_by_key(self) -> dict[tuple[int, ...], list[Any]]:
        deletes: dict[tuple[int, ...], list[Any]] = {}
        for each in self._equality.values():
            deletes.setdefault(tuple(equality_key(each)), []).append(each)
        return deletes

    def _deleted_ids(self) -> list[int]:
        """The columns that equality deletes name."""
        return [*dict.fromkeys(number for key in self._deletes_by_key() for number in key)]

    def _unmasked(self, ids: Sequence[int], origin: Origin) -> DataFrame:
        """The rows of files with equality deletes: those whose key no younger delete names.

        A table that got another key has deletes that name the former one, which may be no column of
        it any more.
        """
        deletes = self._deletes_by_key()
        read_ids = [*dict.fromkeys([*ids, *self._deleted_ids()])]
        rows = (
            self._numbered(self._masked, read_ids)
            if origin == Origin(_SEQUENCE)
            else self._read_in_tasks(self._masked, read_ids, origin)
        )
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
        if self._needs_tasks(files):
            return self._read_in_tasks(files, ids, Origin(_SEQUENCE))
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
        if not self._needs_tasks(files):
            return self._spark.read.schema(schema).parquet(*[file.location() for file in files])
        # Spark itself reads what it can: files with a vector are few of many.
        in_tasks = [file for file in files if self._needs_tasks([file])]
        others = [file for file in files if not self._needs_tasks([file])]
        rows = self._read_in_tasks(in_tasks, ids, Origin())
        return rows.unionByName(self._read(others, ids)) if others else rows

    def _needs_tasks(self, files: Sequence[Any]) -> bool:
        """Whether Spark's own reader cannot read these files: they are in S3, or rows of them are
        masked by position.
        """
        return _in_s3(files) or any(str(file.location()) in self.vectors for file in files)

    def _read_in_tasks(self, files: Sequence[Any], ids: Sequence[int], origin: Origin) -> DataFrame:
        """The same by pyarrow, without the rows that vectors mask, with the columns of `origin`."""
        parts = [share for file in files for share in self.shares(file)]
        schema = StructType(self._stored.schema(ids).fields)
        for name, kind in (
            (origin.sequence, LongType()),
            (origin.file, StringType()),
            (origin.position, LongType()),
        ):
            schema = schema.add(name, kind) if name else schema
        given = self._spark.createDataFrame([dataclasses.astuple(part) for part in parts], SHARE)
        task = rows_of_shares(self._storage, self._stored.fields(ids), origin)
        return given.repartition(max(1, len(parts))).mapInArrow(task, schema)

    def shares(self, file: Any) -> list[Share]:
        """A data file as parts for tasks."""
        return shares(self.whole_share(file), int(file.fileSizeInBytes()))

    def whole_share(self, file: Any) -> Share:
        """A data file as one part."""
        location = str(file.location())
        vector = self.vectors.get(location)
        vector = None if vector is None else vector_of(vector)
        return Share(location, int(file.dataSequenceNumber()), 0, 1, vector)

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


def _collected(rows: DataFrame) -> dict[str, Any]:
    """Positions by file."""
    grouped = rows.groupBy(_FILE).agg(F.sort_array(F.collect_list(_POSITION)).alias(_POSITIONS))
    table = grouped.toArrow()
    return {
        str(file): positions.values.to_numpy()
        for file, positions in zip(table[_FILE].to_pylist(), table[_POSITIONS], strict=True)
    }


def _id(field: Any) -> int:
    return field_ids([field])[field.name]


def _basename(location: str) -> str:
    return location.rpartition("/")[2]


def _in_s3(files: Sequence[Any]) -> bool:
    return bool(files) and is_s3(str(files[0].location()))
