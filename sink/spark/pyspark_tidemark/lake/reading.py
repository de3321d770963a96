"""A lake at one cut, for its readers: all tables as they were at the same commit_ts.

    from pyspark_tidemark.lake.reading import as_of_cut
    as_of_cut(spark, "delta:///lake", ts)          # temporary views <database>_<table>
    spark.sql("SELECT … FROM bank_accounts JOIN bank_transfers …")

A table is read at the version that the newest cut with end_ts <= ts names, so tables fit together.
Databases show only their newest cut and cannot be read like this.
"""

from collections import Counter
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.columns import quoted
from pyspark_tidemark.lake.cut_record import CutRecord, renamed_since, versions_at
from pyspark_tidemark.lake.opening import kept_cuts
from pyspark_tidemark.lake.target import StoredTable, no_reading, open_connector
from pyspark_tidemark.sink_uri import SinkUri


def as_of_cut(
    spark: SparkSession, target: str, ts: int | None = None, changefeed: str = ""
) -> dict[str, DataFrame]:
    """Make a temporary view `<database>_<table>` of each table at the newest cut with end_ts <=
    `ts` (None: at all); no view where two tables would share it, but for case.

    Returns the tables by name. A changelog shows the changes up to the cut. A catalog with the
    tables of several changefeeds needs `changefeed`.

    Raises:
        SourceError: ErrCutNotFound, the lake begins later; ErrCutExpired, a table's version is
            gone.
    """
    uri = _directory(target)
    cuts = kept_cuts(uri, changefeed, lambda: spark)
    at_ts = _newest_ts(cuts, ts)
    tables = _frames(spark, uri, cuts, at_ts)
    views = {name: name.replace(".", "_", 1) for name in tables}
    sharing = Counter(view.lower() for view in views.values())
    for name, frame in tables.items():
        if sharing[views[name].lower()] == 1:
            frame.createOrReplaceTempView(quoted(views[name]))
        else:
            spark.catalog.dropTempView(views[name])
    return tables


def version_at(target: str, table: str, ts: int | None = None, changefeed: str = "") -> int:
    """The Delta version, Iceberg snapshot or Parquet cut that shows `table` at the newest cut with
    end_ts <= `ts`.

    A lake behind Hadoop's file systems, or in a catalog, is read by the active Spark session;
    `changefeed` as for `as_of_cut`.

    Raises:
        SourceError: ErrCutNotFound, ErrTableNotFound.
    """
    cuts = kept_cuts(_directory(target), changefeed, SparkSession.active)
    versions = versions_at(cuts, _newest_ts(cuts, ts))
    if table not in versions:
        raise SourceError(
            "ErrTableNotFound",
            f"at that cut the lake has: {', '.join(sorted(versions)) or 'no table'}",
        )
    return versions[table]


def _directory(target: str) -> SinkUri:
    uri = SinkUri.parse(target)
    if uri.is_topic:
        raise no_reading(uri.format)
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
    return _frames(spark, uri, cuts, ts, [name])[name]


def _frames(
    spark: SparkSession,
    uri: SinkUri,
    cuts: Sequence[CutRecord],
    ts: int,
    names: Sequence[str] | None = None,
) -> dict[str, DataFrame]:
    """Tables at a cut: those of the names, or all."""
    versions = versions_at(cuts, ts)
    # Looked through for each table, and an old lake has many cuts and few renames.
    renaming = [cut for cut in cuts if cut.renamed]
    connector, frames = open_connector(uri.format), {}
    for name in versions if names is None else names:
        table = StoredTable(uri, cuts[-1].changefeed, renamed_since(renaming, name, ts), ts)
        frames[name] = connector.read(spark, table, versions[name])
    return frames
