"""A lake at one cut, for its readers: all tables as they were at the same commit_ts.

    from pyspark_tidemark.lake.reading import as_of_cut
    as_of_cut(spark, "delta:///lake", ts)          # temporary views <database>_<table>
    spark.sql("SELECT … FROM bank_accounts JOIN bank_transfers …")

A table is read at the version that the newest cut with end_ts <= ts names, so tables fit together.
Databases show only their newest cut and cannot be read like this.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyarrow.fs import FileSelector
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.changelog import CUT, SINCE, timestamps
from pyspark_tidemark.lake.cuts import CutRecord, renamed_since, versions_at
from pyspark_tidemark.lake.files import LocalFiles
from pyspark_tidemark.lake.hadoop import HadoopFiles
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import file_system
from pyspark_tidemark.lake.iceberg.reader import Snapshot
from pyspark_tidemark.lake.manifest import cuts_in
from pyspark_tidemark.lake.target import table_path
from pyspark_tidemark.lake.targets import cut_files
from pyspark_tidemark.sink_uri import SinkUri


def as_of_cut(spark: SparkSession, target: str, ts: int | None = None) -> dict[str, DataFrame]:
    """Make a temporary view `<database>_<table>` of each table at the newest cut with end_ts <=
    `ts` (None: at all).

    Returns the tables by name. A changelog shows the changes up to the cut.

    Raises:
        SourceError: ErrCutNotFound, the lake begins later; ErrCutExpired, a table's version is
            gone.
    """
    uri = _directory(target)
    cuts = cuts_in(cut_files(uri, lambda: spark))
    at_ts = _newest_ts(cuts, ts)
    tables = {name: table_frame(spark, uri, cuts, name, at_ts) for name in versions_at(cuts, at_ts)}
    for name, frame in tables.items():
        frame.createOrReplaceTempView(name.replace(".", "_", 1))
    return tables


def version_at(target: str, table: str, ts: int | None = None) -> int:
    """The Delta version, Iceberg snapshot or Parquet cut that shows `table` at the newest cut with
    end_ts <= `ts`.

    A lake behind Hadoop's file systems is read by the active Spark session.

    Raises:
        SourceError: ErrCutNotFound, ErrTableNotFound.
    """
    cuts = cuts_in(cut_files(_directory(target), SparkSession.active))
    versions = versions_at(cuts, _newest_ts(cuts, ts))
    if table not in versions:
        raise SourceError(
            "ErrTableNotFound",
            f"at that cut the lake has: {', '.join(sorted(versions)) or 'no table'}",
        )
    return versions[table]


def _directory(target: str) -> SinkUri:
    uri = SinkUri.parse(target)
    if uri.is_database:
        raise SourceError(
            "ErrTargetInvalid", "a database shows only its newest cut; read its tables as they are"
        )
    return uri


def _newest_ts(cuts: list[CutRecord], ts: int | None) -> int:
    """`ts`, or the end of the newest cut."""
    return cuts[-1].end_ts if ts is None and cuts else ts or 0


def table_frame(
    spark: SparkSession, uri: SinkUri, cuts: Sequence[CutRecord], name: str, ts: int
) -> DataFrame:
    """The table called `name` at the newest cut with end_ts <= `ts`;
    read where it lies now if it was renamed since.

    Raises:
        SourceError: ErrCutNotFound; ErrCutExpired.
    """
    version = versions_at(cuts, ts)[name]
    return _READERS[uri.format](
        spark, uri, cuts[-1].changefeed, renamed_since(cuts, name, ts), version
    )


def _delta(
    spark: SparkSession,
    uri: SinkUri,
    changefeed: str,  # noqa: ARG001 - a reader's signature
    name: str,
    version: int,
) -> DataFrame:
    return (
        spark.read.format("delta").option("versionAsOf", version).load(table_path(uri.path, name))
    )


def _iceberg(
    spark: SparkSession, uri: SinkUri, changefeed: str, name: str, version: int
) -> DataFrame:
    catalog = Catalog(spark, uri.path, changefeed)
    table = catalog.load(name)
    if table is None or table.snapshot(version) is None:
        raise SourceError(
            "ErrCutExpired", f"{name} has no snapshot {version} any more; choose a later ts"
        )
    return Snapshot(spark, catalog, table, version).frame()


def _parquet(
    spark: SparkSession,
    uri: SinkUri,
    changefeed: str,  # noqa: ARG001 - a reader's signature
    name: str,
    version: int,
) -> DataFrame:
    path = table_path(uri.path, name)
    names = (HadoopFiles(spark, path) if uri.is_remote else LocalFiles(Path(path))).names()
    marks = timestamps(names, SINCE)
    since = max((ts for ts in marks if ts < version), default=-1)
    chosen = [ts for ts in timestamps(names, CUT) if since < ts <= version]
    parts = [f"{path}/{CUT}{ts}" for ts in chosen] if marks else [path]
    try:
        frame = spark.read.option("mergeSchema", "true").option("basePath", path).parquet(*parts)
    except (PySparkException, Py4JJavaError) as err:
        if "CANNOT_MERGE" not in str(err):
            raise
        frame = spark.read.schema(_widest(path, chosen)).option("basePath", path).parquet(*parts)
    return frame.where(f"cut <= {version}").drop("cut")


def _widest(path: str, chosen: Sequence[int]) -> StructType:
    """All columns of some cuts of a changelog, with types that hold what all have:
    Spark merges equal types only.

    Raises:
        SourceError: ErrSchemaIncompatible.
    """
    system, root = file_system(path)
    files = [file.path for file in system.get_file_info(FileSelector(root, recursive=True))]
    cuts = {f"{CUT}{ts}" for ts in chosen}
    parts = [path for path in files if Path(path).parent.name in cuts and path.endswith(".parquet")]
    schemas = [pq.read_schema(part, filesystem=system).remove_metadata() for part in parts]
    try:
        widest = pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as err:
        raise SourceError(
            "ErrSchemaIncompatible",
            f"a column of {path} has types in different cuts that do not fit together ({err}); "
            f"read the directories {CUT}… by themselves",
        ) from None
    return StructType([*from_arrow_schema(widest), StructField("cut", LongType())])


_READERS: dict[str, Callable[[SparkSession, SinkUri, str, str, int], DataFrame]] = {
    "delta": _delta,
    "iceberg": _iceberg,
    "parquet": _parquet,
}
