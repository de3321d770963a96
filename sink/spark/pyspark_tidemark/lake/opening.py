"""The target and the manifest that a URI and the job's arguments ask for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.lake.databases.database import Database
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest
from pyspark_tidemark.lake.databases.target import DatabaseTarget
from pyspark_tidemark.lake.fencing import CLAIMS, check_idle
from pyspark_tidemark.lake.files import LocalFiles
from pyspark_tidemark.lake.format import IGNORE
from pyspark_tidemark.lake.hadoop import HadoopFiles
from pyspark_tidemark.lake.iceberg.manifest import CatalogManifest, cuts_in_catalog
from pyspark_tidemark.lake.kafka.manifest import KafkaManifest
from pyspark_tidemark.lake.kafka.target import KafkaTarget
from pyspark_tidemark.lake.manifest import DIRECTORY, FileManifest, Manifest, cuts_in
from pyspark_tidemark.lake.registry import find_format
from pyspark_tidemark.lake.target import Target, no_reading, open_connector
from pyspark_tidemark.sink_uri import SinkUri


@contextmanager
def opened_manifest(arguments: Arguments, spark: Callable[[], SparkSession]) -> Iterator[Manifest]:
    """The cuts of the target, and the right to write to it, for the block;
    `spark` is called where that needs Hadoop, a catalog or Kafka.
    """
    if arguments.target.is_topic:
        check_evolution(arguments)
        with KafkaManifest.opened(spark(), arguments.target, arguments.changefeed) as markers:
            yield markers
        return
    if arguments.target.is_database:
        with DatabaseManifest.opened(database(arguments.target), arguments.changefeed) as rows:
            yield rows
        return
    with opened_lake(
        arguments.target, arguments.changefeed, spark, mode=arguments.mode
    ) as manifest:
        yield manifest


@contextmanager
def opened_lake(
    target: SinkUri,
    changefeed: str,
    spark: Callable[[], SparkSession],
    *,
    mode: str | None = None,
    idle_s: float = 0.0,
) -> Iterator[FileManifest | CatalogManifest]:
    """The manifest of a lake in files or in a catalog, and the right to write it, for the block.

    Behind Hadoop, and in a catalog, the right is taken from whoever has it, after `idle_s` in which
    nobody used it.

    Raises:
        SourceError: ErrTargetBusy, and those of `FileManifest` and `CatalogManifest`.
    """
    if target.is_catalog:
        with CatalogManifest.opened(
            spark(), target.path, changefeed, mode=mode, idle_s=idle_s
        ) as rows:
            yield rows
        return
    if target.is_remote:
        cuts = HadoopFiles(spark(), f"{target.path}/{DIRECTORY}")
        claims = HadoopFiles(spark(), f"{target.path}/{DIRECTORY}/{CLAIMS}")
        check_idle(claims, idle_s)
        yield FileManifest.taken(cuts, claims, changefeed, target.path, mode=mode)
        return
    with FileManifest.opened(target.path, changefeed) as manifest:
        yield manifest


def kept_cuts(
    target: SinkUri, changefeed: str, spark: Callable[[], SparkSession]
) -> list[CutRecord]:
    """The cuts of a lake in files or in a catalog, for readers.

    `changefeed` chooses one of those in a catalog; empty: the catalog has only one.

    Raises:
        SourceError: ErrManifestCorrupt, and those of the place.
    """
    if target.is_topic:
        raise no_reading(target.format)
    if target.is_catalog:
        return cuts_in_catalog(spark(), target.path, changefeed)
    if target.is_remote:
        return cuts_in(HadoopFiles(spark(), f"{target.path}/{DIRECTORY}"))
    return cuts_in(LocalFiles(Path(target.path) / DIRECTORY))


def open_target(arguments: Arguments, spark: SparkSession, manifest: Manifest) -> Target:
    """The tables of a lake whose manifest is open."""
    if isinstance(manifest, KafkaManifest):
        return KafkaTarget(manifest)
    if arguments.target.is_database:
        return DatabaseTarget(database(arguments.target), arguments.changefeed, mode=arguments.mode)
    return open_connector(arguments.target.format).open_target(arguments, spark, manifest)


def check_evolution(arguments: Arguments) -> None:
    """Check that a topic is not asked to keep columns that a table has lost.

    Raises:
        SourceError: ErrModeUnsupported.
    """
    if arguments.policy.evolution == IGNORE:
        raise SourceError(
            "ErrModeUnsupported",
            "a topic cannot do --schema-evolution ignore: its messages have the columns of their "
            "row; it can do evolve and exception",
        )


def database(uri: SinkUri) -> Database:
    """The database of a URI; its driver is a package that the other targets do not need.

    Raises:
        SourceError: ErrDriverMissing.
    """
    try:
        driver: Callable[[SinkUri], Database] = find_format(uri.format).implementation()
    except ImportError as err:
        raise SourceError(
            "ErrDriverMissing", f"a {uri.format} target needs {err.name}: pip install {err.name}"
        ) from None
    return driver(uri)
