"""The target and the manifest that a URI and the job's arguments ask for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.changelog import ChangelogTarget
from pyspark_tidemark.lake.claims import DIRECTORY as CLAIMS
from pyspark_tidemark.lake.claims import check_idle
from pyspark_tidemark.lake.databases.database import Database
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest
from pyspark_tidemark.lake.databases.target import DatabaseTarget
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.files import Files, LocalFiles
from pyspark_tidemark.lake.hadoop import HadoopFiles
from pyspark_tidemark.lake.iceberg.files import file_system
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.manifest import DIRECTORY, FileManifest, Manifest
from pyspark_tidemark.lake.remote_changelog import RemoteChangelog
from pyspark_tidemark.lake.target import Target
from pyspark_tidemark.sink_uri import SinkUri


@contextmanager
def opened_manifest(arguments: Arguments, spark: Callable[[], SparkSession]) -> Iterator[Manifest]:
    """The cuts of the target, and the right to write to it, for the block;
    `spark` is asked where that needs Hadoop.
    """
    if arguments.target.is_database:
        with DatabaseManifest.opened(database(arguments.target), arguments.changefeed) as rows:
            yield rows
        return
    with opened_files(
        arguments.target, arguments.changefeed, spark, mode=arguments.mode
    ) as manifest:
        yield manifest


@contextmanager
def opened_files(
    target: SinkUri,
    changefeed: str,
    spark: Callable[[], SparkSession],
    *,
    mode: str | None = None,
    idle_s: float = 0.0,
) -> Iterator[FileManifest]:
    """The manifest of a lake in files, and the right to write it, for the block.

    Behind Hadoop the right is taken from whoever has it, after `idle_s` in which nobody used it.

    Raises:
        SourceError: ErrTargetBusy, and those of `FileManifest`.
    """
    if target.is_remote:
        cuts = HadoopFiles(spark(), f"{target.path}/{DIRECTORY}")
        claims = HadoopFiles(spark(), f"{target.path}/{DIRECTORY}/{CLAIMS}")
        check_idle(claims, idle_s)
        yield FileManifest.taken(cuts, claims, changefeed, target.path, mode=mode)
        return
    with FileManifest.opened(target.path, changefeed) as manifest:
        yield manifest


def cut_files(target: SinkUri, spark: Callable[[], SparkSession]) -> Files:
    """The manifest's files, for readers."""
    if target.is_remote:
        return HadoopFiles(spark(), f"{target.path}/{DIRECTORY}")
    return LocalFiles(Path(target.path) / DIRECTORY)


def open_target(arguments: Arguments, spark: SparkSession) -> Target:
    """The tables."""
    root, changefeed, mode = arguments.target.path, arguments.changefeed, arguments.mode
    if arguments.target.format == "delta":
        return DeltaTarget(
            spark, root, changefeed, mode=mode, compact_every=arguments.compact_every
        )
    if arguments.target.format == "iceberg":
        check_reachable(root)
        return IcebergTarget(
            spark, root, changefeed, mode=mode, compact_every=arguments.compact_every
        )
    if arguments.target.is_database:
        return DatabaseTarget(database(arguments.target), changefeed, mode=mode)
    assert arguments.target.format == "parquet", f"no target writes {arguments.target.format}"
    if arguments.target.is_remote:
        return RemoteChangelog(spark, root, arguments.checkpoint_dir)
    return ChangelogTarget(spark, root)


def check_reachable(root: str) -> None:
    """See that pyarrow can write where Iceberg's files go: tasks have no Java.

    Raises:
        SourceError: ErrTargetUnusable.
    """
    try:
        file_system(root)
    except (OSError, pa.ArrowException) as err:
        said = str(err).partition("\n")[0]
        raise SourceError(
            "ErrTargetUnusable",
            f"pyarrow cannot reach {root} ({said}); Iceberg's files are written by it: for HDFS "
            "it needs libhdfs, by "
            "HADOOP_HOME or ARROW_LIBHDFS_DIR, and CLASSPATH, on the driver and the executors",
        ) from None


def database(uri: SinkUri) -> Database:
    """The database of a URI; its driver is a package that the other targets do not need.

    Raises:
        SourceError: ErrDriverMissing.
    """
    try:
        if uri.format == "postgresql":
            from pyspark_tidemark.lake.databases.postgres import Postgres

            return Postgres(uri)
        from pyspark_tidemark.lake.databases.mysql import MySql

        return MySql(uri)
    except ImportError as err:
        raise SourceError(
            "ErrDriverMissing", f"a {uri.format} target needs {err.name}: pip install {err.name}"
        ) from None
