"""Iceberg's own catalogs, in the driver's JVM: that of a directory, or one that Spark's settings
describe; commits that go exactly on top of what was read; and what catalogs throw.

`catalog://NAME/NAMESPACE…` is what Spark calls NAME: `spark.sql.catalog.NAME.type`, `.uri`,
`.warehouse` and so on are Iceberg's properties of it. They come from Spark's own files
(SPARK_CONF_DIR) or `--conf`, so no sink URI holds them; secrets come from the files only.

Invariant: a commit replaces exactly the metadata that its transaction began with. Nothing is tried
twice (docs/design/0032-iceberg-catalogs.md).
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import IllegalArgumentException, UnsupportedOperationException
from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_classes
from pyspark_tidemark.sink_uri import CATALOG_ROOT, RENAMING, masked

_SETTINGS = "spark.sql.catalog."
_HADOOP = "hadoop."
"""Begins the settings of a catalog that are Hadoop's, as for Spark."""
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
_WRONG = ("BadRequestException", "NoSuchNamespaceException", "ValidationException")


_LOST = "CommitFailedException"


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
        settings = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - PySpark has no call for it
        return java_classes(spark).org.apache.iceberg.hadoop.HadoopCatalog(settings, root)
    name, _ = name_and_namespace(root)
    given = settings_of(spark.conf.getAll, name)
    _check(name, given)
    return _built(spark, name, tuple(sorted(given.items())))


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
        raise SourceError(
            "ErrTargetRefused", f"{what} refuses: {_without_secrets(str(err))}"
        ) from None


def translated(err: Any, what: str) -> SourceError | None:
    """ErrCredentials, ErrTargetUnusable, ErrTargetRefused, or ErrTargetUnavailable,
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
    if kinds & {*_UNAVAILABLE}:
        return SourceError("ErrTargetUnavailable", f"{what} fails: {message}", retryable=True)
    if kinds & {*_WRONG}:
        return SourceError("ErrTargetRefused", f"{what} refuses: {message}")
    return None


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
