"""Directories of tables on whatever file system Hadoop knows, moved and removed by Spark's own JVM."""

from typing import Any

from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.target import RENAMING


def move(spark: SparkSession, old: str, new: str) -> None:
    """Rename a directory; nothing if it is done already.

    Raises:
        SourceError: ErrRenameUnsupported, the file system cannot do so in one step.
    """
    source, target = _path(spark, old), _path(spark, new)
    system = _system(spark, source)
    if system.exists(source) and not system.exists(target):
        scheme, colon, _ = old.partition("://")
        if colon and scheme not in RENAMING:
            raise SourceError(
                "ErrRenameUnsupported",
                f"{scheme} cannot rename the directory {old} in one step; start a new changefeed and target",
            )
        system.mkdirs(target.getParent())
        system.rename(source, target)


def remove(spark: SparkSession, path: str) -> None:
    """Remove a directory and what is in it; nothing if it is not there."""
    found = _path(spark, path)
    _system(spark, found).delete(found, True)  # noqa: FBT003 - Java's signature: recursive


def _path(spark: SparkSession, path: str) -> Any:
    jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no call for file systems
    return jvm.org.apache.hadoop.fs.Path(path)


def _system(spark: SparkSession, path: Any) -> Any:
    return path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001 - see above
