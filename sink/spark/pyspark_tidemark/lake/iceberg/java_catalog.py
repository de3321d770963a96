"""Iceberg's catalogs in the driver's JVM: how they are opened, how a transaction is committed, what
makes a commit durable, and what their exceptions mean.

The catalog is that of a directory, or one that Spark's settings describe.
`catalog://NAME/NAMESPACE…` is the catalog that Spark calls NAME: `spark.sql.catalog.NAME.type`,
`.uri`, `.warehouse` and so on are Iceberg's properties of it. They come from Spark's own files
(SPARK_CONF_DIR) or `--conf`, so no sink URI has them; secrets come from the files only.

Where a REST catalog offers it (`transactions/commit`), all tables of a cut and the manifest's row
are one commit (`MultiTableCommit`): every engine that uses the catalog then sees whole cuts only.

In a directory, Iceberg does not sync its files. The cut's row in the manifest is synced, and what
it shows is acknowledged, so after a power cut the tables would be older than the manifest. Data
files are synced where they are written (`files`), and `settle` syncs Iceberg's own: the table's
metadata, its list of manifests, and the manifests of the newest commit.

Invariant: a commit replaces exactly the metadata that its transaction began with. Nothing is
retried (docs/design/0032-iceberg-catalogs.md).
"""

import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import IllegalArgumentException, UnsupportedOperationException
from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_classes
from pyspark_tidemark.lake.files import RESTORE, sync, sync_place, sync_with_checksum
from pyspark_tidemark.sink_uri import CATALOG_ROOT, RENAMING
from pyspark_tidemark.uri_secrets import masked

_SETTINGS = "spark.sql.catalog."
_HADOOP = "hadoop."
"""Begins the settings of a catalog that are Hadoop's, as for Spark."""
_DISK = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"
"""Hadoop's local file system, but for the processes that that one starts: a `chmod` or two for each
file, and as many for its checksum, made a commit of a table cost fifty of them.
"""
_KINDS = "rest, hive, jdbc, glue, nessie or hadoop"
_REFUSED = ("NotAuthorizedException",)
_REFUSED_BY_S3 = re.compile(r"Service: S3.*Status Code: 403")
_FORBIDDEN = ("ForbiddenException",)
_UNAVAILABLE = (
    "CommitStateUnknownException",
    "ConnectException",
    "RESTException",
    "RuntimeMetaException",
    "S3Exception",
    "SdkClientException",
    "ServiceFailureException",
    "ServiceUnavailableException",
    "SocketTimeoutException",
    "UncheckedSQLException",
    "UnknownHostException",
)
_NO_DRIVER = "No suitable driver"
_NO_CLASS = ("ClassNotFoundException", "NoClassDefFoundError", "NoSuchMethodException")
_NO_FILE_SYSTEM = "UnsupportedFileSystemException"
_NO_BUCKET = "NoSuchBucketException"
_GONE = ("NoSuchFileException", "NotFoundException")
_UNREADABLE = "RuntimeIOException"
_DAMAGED = (
    "ChecksumException",
    "EOFException",
    "InvalidAvroMagicException",
    "JsonEOFException",
    "JsonParseException",
    "MismatchedInputException",
)
"""What has made a file of Iceberg's unreadable, if the file itself has."""
_NO_VERSION = "Metadata file for version"
"""Begins what Iceberg says of a version hint that names a version which is not there."""
_NO_PATH = "InvalidPathException"
_CLOCK_BEHIND = (
    "Expected sorted snapshot log entries",
    "Invalid snapshot timestamp",
    "Invalid update timestamp",
)
"""What Iceberg says of times more than a minute before those that a table has."""
_WRONG = ("BadRequestException", "NoSuchNamespaceException", "ValidationException")
_LOST = "CommitFailedException"
_MULTI_TABLE_CATALOG = "RESTCatalog"
_REFUSALS = (SourceError, Py4JJavaError, IllegalArgumentException, UnsupportedOperationException)
_UUID_CHARACTERS: Final = 36
_GAP: Final = 16
"""Manifests are numbered; those that were merged while the commit was made are gone again."""

_log = logging.getLogger(__name__)


def is_named(root: str) -> bool:
    """Whether a root is `catalog://NAME…`, not a directory."""
    return root.startswith(CATALOG_ROOT)


def name_and_namespace(root: str) -> tuple[str, tuple[str, ...]]:
    """The catalog's name, and the namespace that databases are in."""
    name, *namespace = root.removeprefix(CATALOG_ROOT).split("/")
    return name, tuple(namespace)


def java_catalog(spark: SparkSession, root: str) -> Any:
    """Iceberg's catalog object for the root of a lake.

    Raises:
        SourceError: ErrTargetUnusable, its settings or jars are missing or wrong; ErrCredentials;
            ErrTargetUnavailable.
    """
    if not is_named(root):
        classes = java_classes(spark)
        settings = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - PySpark has no call for it
        conf = without_processes(classes, classes.org.apache.hadoop.conf.Configuration(settings))
        return classes.org.apache.iceberg.hadoop.HadoopCatalog(conf, root)
    name, _ = name_and_namespace(root)
    given = settings_of(spark.conf.getAll, name)
    _check(name, given)
    return _built(spark, name, tuple(sorted(given.items())))


def without_processes(classes: Any, conf: Any) -> Any:
    """Hadoop's settings (Java) by which disks are written without a process for each file, where
    the jar for it is on the class path and nobody has chosen another file system.

    For Iceberg's own files alone: Spark must list directories that are links to others, too.
    """
    if conf.get("fs.file.impl") is not None:
        return conf
    try:
        classes.java.lang.Class.forName(_DISK)
    except Py4JJavaError:
        return conf
    conf.set("fs.file.impl", _DISK)
    # Hadoop's cache knows schemes only: it would give Spark this one, or give us Spark's.
    conf.setBoolean("fs.file.impl.disable.cache", True)  # noqa: FBT003 - Java's signature
    return conf


def settings_of(conf: Mapping[str, str], name: str) -> dict[str, str]:
    """Iceberg's properties of a catalog, from Spark's settings."""
    begin = f"{_SETTINGS}{name}."
    return {
        setting.removeprefix(begin): value
        for setting, value in conf.items()
        if setting.startswith(begin)
    }


def object_store(place: str) -> str:
    """The scheme of a place that is neither on a disk nor on HDFS; empty: it is."""
    system, colon, _ = place.partition("://")
    return system if colon and system not in (*RENAMING, "file") else ""


def _check(name: str, given: Mapping[str, str]) -> None:
    begin = f"{_SETTINGS}{name}"
    if "type" not in given and "catalog-impl" not in given:
        raise SourceError(
            "ErrTargetUnusable",
            f"Spark has no settings of a catalog {name}: set {begin}.type ({_KINDS}), {begin}.uri, "
            f"{begin}.warehouse and what else Iceberg asks for, in spark-defaults.conf of "
            "SPARK_CONF_DIR or by --conf",
        )
    system = object_store(given.get("warehouse", ""))
    if given.get("type") == "hadoop" and system:
        raise SourceError(
            "ErrTargetUnusable",
            f"{begin}.type is hadoop, which commits by renaming, and {system} cannot rename in one "
            "step: two jobs could destroy a table. Take a catalog of another type",
        )


@functools.lru_cache(maxsize=8)
def _built(spark: SparkSession, name: str, given: tuple[tuple[str, str], ...]) -> Any:
    """The catalog's object."""
    # One for each catalog of a process: it has connections, and a token that it renews.
    classes = java_classes(spark)
    properties = classes.java.util.HashMap()
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001 - see `java_catalog`
    for setting, value in given:
        if setting.startswith(_HADOOP):
            hadoop.set(setting.removeprefix(_HADOOP), value)
        else:
            properties.put(setting, value)
    without_processes(classes, hadoop)
    with explained(f"the catalog {name}"):
        return classes.org.apache.iceberg.CatalogUtil.buildIcebergCatalog(name, properties, hadoop)


def commit_exactly(transaction: Any, what: str, send: Callable[[], None] | None = None) -> int:
    """Make the updates of a transaction visible, by `send` if it is given; returns the id of its
    snapshot.

    Raises:
        SourceError: ErrTargetBusy, somebody else has committed since the transaction began; those
            of the catalog `what`.
    """
    operations, changed = transaction.underlyingOps(), transaction.currentMetadata()
    snapshot_id = int(changed.currentSnapshot().snapshotId())
    try:
        # Not `transaction.commitTransaction()`: that reads the table once more, and goes on top of
        # what somebody else has committed since the position was read.
        if send is None:
            operations.commit(transaction.startMetadata(), changed)
        else:
            send()
    except Py4JJavaError as err:
        # The answer may have been lost, whatever the exception says.
        if _is_there(operations, snapshot_id):
            return snapshot_id
        if kind(err) == _LOST:
            raise SourceError(
                "ErrTargetBusy",
                f"somebody else writes to this Iceberg table: {err.java_exception.getMessage()}",
                retryable=True,
            ) from None
        error = translated(err, what)
        if error is None:
            raise
        raise error from None
    return snapshot_id


def _is_there(operations: Any, snapshot_id: int) -> bool:
    try:
        return operations.refresh().snapshot(snapshot_id) is not None
    except Py4JJavaError:
        return False


@dataclass(frozen=True)
class PendingTable:
    """A table's uncommitted transaction; `done` is called once it is committed."""

    identifier: Any
    transaction: Any
    done: Callable[[], None]


class MultiTableCommit:
    """The commit of all tables of a cut, with the manifest; thread-safe.

    The tables' transactions are added here, their files written, until the manifest's commit sends
    all of them in one request. It is atomic: the request has, for each table, the metadata that its
    transaction began with, and the catalog refuses all if one of them has changed.
    """

    def __init__(self, classes: Any, java_catalog: Any) -> None:
        self.is_offered = str(java_catalog.getClass().getSimpleName()) == _MULTI_TABLE_CATALOG
        """Whether the catalog can commit several tables at once; certain after `first`."""
        self._classes = classes
        self._java = java_catalog
        self._lock = threading.Lock()
        self._waiting: list[PendingTable] = []

    def add(self, table: PendingTable) -> int:
        """Add a table to the next `commit`; returns the id of its snapshot."""
        with self._lock:
            self._waiting.append(table)
        return int(table.transaction.currentMetadata().currentSnapshot().snapshotId())

    def first(self, identifier: Any, transaction: Any, what: str) -> int:
        """Commit one transaction as a multi-table commit, to find out whether the catalog can, else
        by itself. Returns the id of its snapshot.

        Raises:
            SourceError: those of `java_catalog.commit_exactly`.
        """
        if self.is_offered:
            try:
                return self._commit([identifier], [transaction], what)
            except _REFUSALS as err:
                if isinstance(err, SourceError) and err.code == "ErrTargetBusy":
                    raise
                self.is_offered = False
                _log.warning("%s commits each table of a cut by itself: %s", what, err)
        return commit_exactly(transaction, what)

    def commit(self, identifier: Any, transaction: Any, what: str) -> int:
        """Commit a transaction and all that were added at once; returns the id of its snapshot.

        Raises:
            SourceError: those of `java_catalog.commit_exactly`.
        """
        with self._lock:
            tables, self._waiting = self._waiting, []
        if not tables:
            return commit_exactly(transaction, what)
        snapshot_id = self._commit(
            [identifier, *(table.identifier for table in tables)],
            [transaction, *(table.transaction for table in tables)],
            what,
        )
        for table in tables:
            table.done()
        return snapshot_id

    def _commit(self, identifiers: Sequence[Any], transactions: Sequence[Any], what: str) -> int:
        commits = self._classes.java.util.ArrayList()
        for identifier, transaction in zip(identifiers, transactions, strict=True):
            commits.add(
                self._classes.org.apache.iceberg.catalog.TableCommit.create(
                    identifier, transaction.startMetadata(), transaction.currentMetadata()
                )
            )
        # All or nothing: if the first snapshot is there, all are.
        return commit_exactly(transactions[0], what, lambda: self._java.commitTransaction(commits))


def settle(table: Path, manifest_list: Path | None) -> None:
    """Make the newest version of the table in a directory durable; `manifest_list` is that of its
    newest snapshot, if it has one.
    """
    metadata = table / "metadata"
    hint = metadata / "version-hint.text"
    files = [hint, _newest(metadata, hint)]
    if manifest_list is not None:
        files += [manifest_list, *_manifests(manifest_list)]
    for path in files:
        sync_with_checksum(path)
    # A new table's directories have new names, too: its own, and its database's.
    for directory in (metadata, table / "data", table):
        with suppress(FileNotFoundError):  # no rows yet
            sync(directory)
    sync_place(str(table))


def _newest(metadata: Path, hint: Path) -> Path:
    """The metadata of the newest version; the hint may be missing, as Iceberg looks then, too."""
    with suppress(FileNotFoundError, ValueError):
        hinted = metadata / f"v{int(hint.read_text(encoding='utf-8'))}.metadata.json"
        if hinted.exists():
            return hinted
    # With another compression a name is `vN.gz.metadata.json`.
    return max(metadata.glob("v*.metadata.json"), key=lambda path: int(path.name[1:].split(".")[0]))


def _manifests(manifest_list: Path) -> Iterator[Path]:
    """The manifests that were written with a list: `snap-ID-ATTEMPT-UUID.avro` and
    `UUID-mNUMBER.avro`.
    """
    commit, missing = manifest_list.stem[-_UUID_CHARACTERS:], 0
    for number in count():
        path = manifest_list.with_name(f"{commit}-m{number}.avro")
        missing = 0 if path.exists() else missing + 1
        if missing > _GAP:
            return
        if not missing:
            yield path


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what a catalog throws into a SourceError, where it is known what that means.

    Raises:
        SourceError: see `translated`.
    """
    try:
        yield
    except Py4JJavaError as err:
        error = translated(err, what)
        if error is None:
            raise
        raise error from None
    except (IllegalArgumentException, UnsupportedOperationException) as err:
        raise _refused(what, _without_secrets(str(err))) from None


def translated(err: Any, what: str) -> SourceError | None:
    """ErrCredentials, ErrTargetUnusable, ErrTargetRefused, ErrLakeDamaged, or ErrTargetUnavailable,
    which a new try may mend; None: the exception is none of a catalog's.
    """
    # The causes, too: catalogs wrap what their HTTP client or JDBC driver threw.
    kinds = _kinds(err.java_exception)
    message = _without_secrets(str(err.java_exception.getMessage()).partition("\n")[0])
    if kinds & {*_REFUSED}:
        return SourceError(
            "ErrCredentials",
            f"{what} refuses the credentials in its settings ({_SETTINGS}…): {message}",
        )
    if _REFUSED_BY_S3.search(message):
        return SourceError("ErrCredentials", f"S3 does not allow this to {what}: {message}")
    if kinds & {*_FORBIDDEN}:
        return SourceError("ErrTargetUnusable", f"{what} does not allow this: {message}")
    if _NO_BUCKET in kinds:
        return SourceError(
            "ErrTargetUnusable", f"{what} names a bucket that is not there: {message}"
        )
    if _NO_FILE_SYSTEM in kinds or "awssdk" in message or "S3FileIO" in message:
        return SourceError(
            "ErrTargetUnusable",
            f"{what} has its files in an object store that Spark cannot reach ({message}): for S3 "
            "fetch Iceberg's jar once, `python -m pyspark_tidemark.jars iceberg-s3`",
        )
    if kinds & {*_NO_CLASS} or _NO_DRIVER in str(err):
        return SourceError(
            "ErrTargetUnusable",
            f"{what} needs jars that Spark does not have ({message}): name them by --conf "
            "spark.jars.packages=… or spark.driver.extraClassPath",
        )
    if error := _of_files(what, kinds, message):
        return error
    if kinds & {*_UNAVAILABLE}:
        return SourceError("ErrTargetUnavailable", f"{what} fails: {message}", retryable=True)
    if kinds & {*_WRONG} or any(said in message for said in _CLOCK_BEHIND):
        return _refused(what, message)
    return None


def _of_files(what: str, kinds: set[str], message: str) -> SourceError | None:
    """The error for files of a table that are damaged, gone, or cannot be named."""
    is_gone, is_cut_off = kinds & {*_GONE}, _UNREADABLE in kinds and kinds & {*_DAMAGED}
    if is_gone or is_cut_off or message.startswith(_NO_VERSION):
        return SourceError(
            "ErrLakeDamaged",
            f"{what} has a table that cannot be read: {message}. The newest v….metadata.json, if "
            "its writer died before it was whole, and a version-hint.text that is wrong can be "
            f"removed; else {RESTORE}",
            # Somebody may have expired the snapshot since the table was looked at.
            retryable=bool(is_gone),
        )
    if _NO_PATH in kinds:
        return SourceError(
            "ErrTargetUnusable",
            f"{what} has a table or a path whose name the job's locale cannot write ({message}): "
            "start the job with LC_ALL=C.UTF-8",
        )
    return None


def _refused(what: str, message: str) -> SourceError:
    if any(said in message for said in _CLOCK_BEHIND):
        return SourceError(
            "ErrTargetRefused",
            f"{what} has a table whose newest snapshot is later than it is by this machine's "
            f"clock, and Iceberg puts none before it ({message}): correct the clock; if it is "
            "right, and was ahead before, wait until it is as late again",
            retryable=True,
        )
    return SourceError("ErrTargetRefused", f"{what} refuses: {message}")


def kind(err: Any) -> str:
    """The simple name of the class of a Java exception."""
    return str(err.java_exception.getClass().getSimpleName())


def _kinds(thrown: Any) -> set[str]:
    """The simple names of the classes of an exception and what caused it."""
    names: set[str] = set()
    while thrown is not None:
        names.add(str(thrown.getClass().getSimpleName()))
        thrown = thrown.getCause()
    return names


def _without_secrets(message: str) -> str:
    return re.sub(r"\S+://\S+", lambda uri: masked(uri[0]), message)
