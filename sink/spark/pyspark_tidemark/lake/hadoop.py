"""Files and directories on HDFS and in object stores, by the file systems of Spark's own JVM.

`HadoopFiles` is one directory of small files, as the manifest needs them; `move` and `remove` are
for directories of tables, wherever they are.

Invariant: a file is created exclusively and whole, whatever dies and whoever else creates it. An
object store that writes an object when its stream is closed does so if none is there
(`If-None-Match`); elsewhere the file is written and synced under a name of its own, then renamed by
the name node, which refuses to rename onto another file.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import SparkSession

from pyspark_tidemark import sink_uri
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_classes
from pyspark_tidemark.lake.files import decoded, sync_place
from pyspark_tidemark.sink_uri import RENAMING

CONDITIONAL = "fs.option.create.conditional.overwrite"
"""What file systems say who can create an object if there is none; S3A can from Hadoop 3.4.2 on."""
_EXISTS = ("FileAlreadyExistsException", "RemoteFileChangedException")
_NO_CLASS = ("UnsupportedFileSystemException", "ClassNotFoundException", "NoClassDefFoundError")
_GONE = "java.io.FileNotFoundException"
_ASIDE = "_tidemark-removed-"
"""Begins the name of a directory that is being removed; readers skip names with an underscore."""


class HadoopFiles:
    """One directory; implements `lake.files.Files`."""

    def __init__(self, spark: SparkSession, uri: str) -> None:
        """The directory need not be there.

        Raises:
            SourceError: ErrTargetUnusable, ErrTargetUnavailable.
        """
        self.uri = uri
        gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - PySpark has no call for file systems
        self._classes, self._gateway = java_classes(spark), gateway
        self._conf = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001 - see above
        with explained(uri):
            self._directory = self._classes.org.apache.hadoop.fs.Path(uri)
            self._system = self._directory.getFileSystem(self._conf)
            self._conditional = bool(self._system.hasPathCapability(self._directory, CONDITIONAL))
            scheme = self._directory.toUri().getScheme()
        if not self._conditional and scheme not in sink_uri.RENAMING:
            raise SourceError(
                "ErrTargetUnusable",
                f"this {scheme} file system cannot create a file only if there is none, so two "
                "jobs could write one "
                "lake: s3a can from Hadoop 3.4.2 on, with fs.s3a.create.conditional.enabled",
            )

    def names(self) -> list[str]:
        """See `Files`."""
        with explained(self.uri):
            try:
                statuses = self._system.listStatus(self._directory)
            except Py4JJavaError as err:
                if _class(err) != _GONE:
                    raise
                return []
            names = [str(status.getPath().getName()) for status in statuses]
        return sorted(name for name in names if not name.startswith("."))

    def read(self, name: str) -> str:
        """See `Files`."""
        with explained(self.uri):
            try:
                stream = self._system.open(self._path(name))
            except Py4JJavaError as err:
                if _class(err) != _GONE:
                    raise
                raise FileNotFoundError(f"{self.uri}/{name}") from None
            try:
                return decoded(bytes(stream.readAllBytes()), f"{self.uri}/{name}")
            finally:
                stream.close()

    def create(self, name: str, text: str) -> bool:
        """See `Files`; in an object store that can do so, one request."""
        return self.create_bytes(name, text.encode())

    def create_bytes(self, name: str, content: bytes) -> bool:
        """As `create`."""
        return self._create(name, lambda stream: stream.write(content))

    def upload(self, name: str, local: Path) -> bool:
        """As `create`, with what a file of this machine holds."""
        source = self._classes.java.io.File(str(local.absolute())).toPath()
        return self._create(
            name, lambda stream: self._classes.java.nio.file.Files.copy(source, stream)
        )

    def download(self, name: str, local: Path) -> None:
        """Copy a file to one of this machine."""
        with explained(self.uri):
            target = self._classes.org.apache.hadoop.fs.Path(local.absolute().as_uri())
            self._system.copyToLocalFile(False, self._path(name), target, True)  # noqa: FBT003 - Java's signature

    def _create(self, name: str, write: Callable[[Any], object]) -> bool:
        with explained(self.uri):
            if not self._conditional:
                return self._renamed(name, write)
            try:
                # The object is written, or refused, when its stream is closed.
                stream = self._system.createFile(self._path(name)).must(CONDITIONAL, True).build()  # noqa: FBT003 - Java's signature
                write(stream)
                stream.close()
            except Py4JJavaError as err:
                if not _class(err).endswith(_EXISTS):
                    raise
                return False
            return True

    def remove(self, names: list[str]) -> None:
        """See `Files`; as many in one request as the file system takes."""
        if not names:
            return
        with explained(self.uri):
            bulk = self._system.createBulkDelete(self._directory)
            try:
                size = max(1, int(bulk.pageSize()))
                for at in range(0, len(names), size):
                    page = self._classes.java.util.ArrayList()
                    for name in names[at : at + size]:
                        page.add(self._path(name))
                    bulk.bulkDelete(page)
            finally:
                bulk.close()

    def _renamed(self, name: str, write: Callable[[Any], object]) -> bool:
        staged = self._path(f".staged-{uuid.uuid4()}")
        stream = self._system.create(staged, False)  # noqa: FBT003 - Java's signature: overwrite
        write(stream)
        # On the data nodes' disks before the name is shown: a name must have its content.
        stream.hsync()
        stream.close()
        context = self._classes.org.apache.hadoop.fs.FileContext.getFileContext(
            staged.toUri(), self._conf
        )
        # By FileContext: FileSystem's own rename overwrites a file on some file systems.
        rename = self._classes.org.apache.hadoop.fs.Options.Rename
        options = self._gateway.new_array(rename, 1)  # Java's varargs
        options[0] = rename.NONE
        try:
            context.rename(staged, self._path(name), options)
        except Py4JJavaError as err:
            if not _class(err).endswith(_EXISTS):
                raise
            self._system.delete(staged, False)  # noqa: FBT003 - Java's signature: recursive
            return False
        return True

    def _path(self, name: str) -> Any:
        return self._classes.org.apache.hadoop.fs.Path(self._directory, name)


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Turn what Java throws into SourceErrors.

    Raises:
        SourceError: ErrTargetUnusable, the file system is not known here, or refuses us;
            ErrTargetUnavailable.
    """
    try:
        yield
    except Py4JJavaError as err:
        message = str(err.java_exception.getMessage()).partition("\n")[0]
        kind = _class(err).rpartition(".")[2]
        if any(name in f"{kind} {message}" for name in _NO_CLASS):
            hint = (
                "its jars are missing: --conf spark.jars.packages=org.apache.hadoop:hadoop-aws:… "
                "for s3a"
            )
            raise SourceError(
                "ErrTargetUnusable", f"Spark cannot reach {uri} ({message}); {hint}"
            ) from None
        if kind in ("AccessControlException", "AccessDeniedException"):
            raise SourceError(
                "ErrTargetUnusable", f"this user may not write to {uri}: {message}"
            ) from None
        raise SourceError(
            "ErrTargetUnavailable", f"{uri} fails: {kind}: {message}", retryable=True
        ) from None
    except Py4JError as err:
        raise SourceError("ErrTargetUnavailable", f"{uri} fails: {err}", retryable=True) from None


def _class(err: Any) -> str:
    return str(err.java_exception.getClass().getName())


def move(spark: SparkSession, old: str, new: str) -> None:
    """Rename a directory; nothing if it is done already.

    Raises:
        SourceError: ErrRenameUnsupported, the file system cannot do so in one step;
            ErrTargetForeign, there is something else of the new name.
    """
    source, target = _hadoop_path(spark, old), _hadoop_path(spark, new)
    system = _system(spark, source)
    if not system.exists(source):
        sync_place(new)  # perhaps by a job that died right behind it
        return
    if system.exists(target):
        raise SourceError(
            "ErrTargetForeign", f"{old} cannot become {new}, which is there already: move that away"
        )
    if not _renames_at_once(old):
        scheme = old.partition("://")[0]
        raise SourceError(
            "ErrRenameUnsupported",
            f"{scheme} cannot rename the directory {old} in one step; start a new changefeed and "
            "target",
        )
    system.mkdirs(target.getParent())
    _rename(system, source, target)
    for path in (new, old):
        sync_place(path)


def remove(spark: SparkSession, path: str) -> None:
    """Remove a directory and what is in it; nothing if it is not there."""
    directory = _hadoop_path(spark, path)
    system = _system(spark, directory)
    if not _renames_at_once(path):
        system.delete(directory, True)  # noqa: FBT003 - Java's signature: recursive
        return
    # Put aside first, in one step: a death amid the removal must not leave a table with half of its
    # log, which readers would take for the table.
    aside = _hadoop_path(spark, f"{directory.getParent()}/{_ASIDE}{directory.getName()}")
    system.delete(aside, True)  # noqa: FBT003 - what an earlier death has left
    if system.exists(directory):
        _rename(system, directory, aside)
        system.delete(aside, True)  # noqa: FBT003 - see above
    sync_place(path)


def _rename(system: Any, old: Any, new: Any) -> None:
    """Rename a directory; a file system may say no without an exception.

    Raises:
        SourceError: ErrTargetUnavailable.
    """
    if not system.rename(old, new):
        raise SourceError(
            "ErrTargetUnavailable",
            f"{old.toString()} cannot be renamed to {new.toString()}: the file system refuses, and "
            "does not say why",
            retryable=True,
        )


def _renames_at_once(path: str) -> bool:
    """Whether the file system renames a directory in one step."""
    scheme, colon, _ = path.partition("://")
    return not colon or scheme in RENAMING


def _hadoop_path(spark: SparkSession, path: str) -> Any:
    return java_classes(spark).org.apache.hadoop.fs.Path(path)


def _system(spark: SparkSession, path: Any) -> Any:
    return path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001 - see above
