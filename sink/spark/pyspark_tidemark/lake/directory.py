"""Directories of tables on whatever file system Hadoop knows,
moved and removed by Spark's own JVM.
"""

from typing import Any

from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.sink_uri import RENAMING

_ASIDE = "_tidemark-removed-"
"""Begins the name of a directory that is being removed; readers skip names with an underscore."""


def move(spark: SparkSession, old: str, new: str) -> None:
    """Rename a directory; nothing if it is done already.

    Raises:
        SourceError: ErrRenameUnsupported, the file system cannot do so in one step;
            ErrTargetForeign, there is something else of the new name.
    """
    source, target = _path(spark, old), _path(spark, new)
    system = _system(spark, source)
    if not system.exists(source):
        return
    if system.exists(target):
        raise SourceError(
            "ErrTargetForeign", f"{old} cannot become {new}, which is there already: move that away"
        )
    if not _renames(old):
        scheme = old.partition("://")[0]
        raise SourceError(
            "ErrRenameUnsupported",
            f"{scheme} cannot rename the directory {old} in one step; start a new changefeed and "
            "target",
        )
    system.mkdirs(target.getParent())
    system.rename(source, target)


def remove(spark: SparkSession, path: str) -> None:
    """Remove a directory and what is in it; nothing if it is not there.

    It is put aside first, where that is one step: a death amid the removal must not leave a table
    with half of its log.
    """
    directory = _path(spark, path)
    system = _system(spark, directory)
    if not _renames(path):
        system.delete(directory, True)  # noqa: FBT003 - Java's signature: recursive
        return
    aside = _path(spark, f"{directory.getParent()}/{_ASIDE}{directory.getName()}")
    system.delete(aside, True)  # noqa: FBT003 - what an earlier death has left
    if system.exists(directory):
        system.rename(directory, aside)
        system.delete(aside, True)  # noqa: FBT003 - see above


def _renames(path: str) -> bool:
    """Whether the file system renames a directory in one step."""
    scheme, colon, _ = path.partition("://")
    return not colon or scheme in RENAMING


def _path(spark: SparkSession, path: str) -> Any:
    jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no call for file systems
    return jvm.org.apache.hadoop.fs.Path(path)


def _system(spark: SparkSession, path: Any) -> Any:
    return path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001 - see above
