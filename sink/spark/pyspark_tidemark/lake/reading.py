"""A lake at one cut, for its readers: all tables as they were at the same commit_ts.

    from pyspark_tidemark.lake.reading import as_of_cut
    as_of_cut(spark, "delta:///lake", ts)          # temporary views <database>_<table>
    spark.sql("SELECT … FROM bank_accounts JOIN bank_transfers …")

A table is read at the version that the newest cut with end_ts <= ts names, so tables fit together. Databases show only
their newest cut and cannot be read like this.
"""

from collections.abc import Callable, Sequence

from pyspark.sql import DataFrame, SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cuts import CutRecord, versions_at
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.reader import Snapshot
from pyspark_tidemark.lake.manifest import cuts_in
from pyspark_tidemark.lake.target import TargetUri, table_path
from pyspark_tidemark.lake.targets import cut_files


def as_of_cut(spark: SparkSession, target: str, ts: int | None = None) -> dict[str, DataFrame]:
    """Make a temporary view `<database>_<table>` of each table at the newest cut with end_ts <= `ts` (None: at all).

    Returns the tables by name. A changelog shows the changes up to the cut.

    Raises:
        SourceError: ErrCutNotFound, the lake begins later; ErrCutExpired, a table's version is gone.
    """
    uri = _directory(target)
    cuts = cuts_in(cut_files(uri, lambda: spark))
    tables = {name: table_frame(spark, uri, cuts, name, version) for name, version in _versions(cuts, ts).items()}
    for name, frame in tables.items():
        frame.createOrReplaceTempView(name.replace(".", "_", 1))
    return tables


def version_at(target: str, table: str, ts: int | None = None) -> int:
    """The Delta version, Iceberg snapshot or Parquet cut that shows `table` at the newest cut with end_ts <= `ts`.

    A lake behind Hadoop's file systems is read by the active Spark session.

    Raises:
        SourceError: ErrCutNotFound, ErrTableNotFound.
    """
    versions = _versions(cuts_in(cut_files(_directory(target), SparkSession.active)), ts)
    if table not in versions:
        raise SourceError("ErrTableNotFound", f"at that cut the lake has: {', '.join(sorted(versions)) or 'no table'}")
    return versions[table]


def _directory(target: str) -> TargetUri:
    uri = TargetUri.parse(target)
    if uri.is_database:
        raise SourceError("ErrTargetInvalid", "a database shows only its newest cut; read its tables as they are")
    return uri


def _versions(cuts: list[CutRecord], ts: int | None) -> dict[str, int]:
    return versions_at(cuts, cuts[-1].end_ts if ts is None and cuts else ts or 0)


def table_frame(spark: SparkSession, uri: TargetUri, cuts: Sequence[CutRecord], name: str, version: int) -> DataFrame:
    """A table at a version; where it lies now if it was renamed since.

    Raises:
        SourceError: ErrCutExpired.
    """
    for cut in cuts:
        if any(item.table == name and item.version == version for item in cut.tables):
            later = [pair for found in cuts if found.end_ts > cut.end_ts for pair in found.renamed]
            break
    else:
        later = []
    for old, new in later:
        name = new if name == old else name
    return _READERS[uri.format](spark, uri, cuts[-1].changefeed, name, version)


def _delta(spark: SparkSession, uri: TargetUri, changefeed: str, name: str, version: int) -> DataFrame:  # noqa: ARG001 - a reader's signature
    return spark.read.format("delta").option("versionAsOf", version).load(table_path(uri.path, name))


def _iceberg(spark: SparkSession, uri: TargetUri, changefeed: str, name: str, version: int) -> DataFrame:
    catalog = Catalog(spark, uri.path, changefeed)
    table = catalog.load(name)
    if table is None or table.snapshot(version) is None:
        raise SourceError("ErrCutExpired", f"{name} has no snapshot {version} any more; choose a later ts")
    return Snapshot(spark, catalog, table, version).frame()


def _parquet(spark: SparkSession, uri: TargetUri, changefeed: str, name: str, version: int) -> DataFrame:  # noqa: ARG001 - a reader's signature
    path = table_path(uri.path, name)
    return spark.read.option("mergeSchema", "true").parquet(path).where(f"cut <= {version}").drop("cut")


_READERS: dict[str, Callable[[SparkSession, TargetUri, str, str, int], DataFrame]] = {
    "delta": _delta,
    "iceberg": _iceberg,
    "parquet": _parquet,
}
