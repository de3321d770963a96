"""The target and the manifest that a URI and the job's arguments ask for."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.changelog import ChangelogTarget
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.manifest import FileManifest, Manifest
from pyspark_tidemark.lake.target import Target


@contextmanager
def opened_manifest(arguments: Arguments) -> Iterator[Manifest]:
    """The cuts of the target, and the right to write to it, for the block."""
    with FileManifest.opened(arguments.target.path, arguments.changefeed) as manifest:
        yield manifest


def open_target(arguments: Arguments, spark: SparkSession) -> Target:
    """The tables."""
    root, changefeed, mode = arguments.target.path, arguments.changefeed, arguments.mode
    if arguments.target.format == "delta":
        return DeltaTarget(spark, root, changefeed, mode=mode, compact_every=arguments.compact_every)
    if arguments.target.format == "iceberg":
        return IcebergTarget(spark, root, changefeed, mode=mode, compact_every=arguments.compact_every)
    return ChangelogTarget(spark, root)
