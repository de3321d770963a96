"""The Spark session of the lake job: modest memory, jars and settings of one format, no web UI
unless it is asked for; on loopback if it is local.

What a cluster or a file system needs comes from where Spark and Hadoop look for it: SPARK_CONF_DIR,
HADOOP_CONF_DIR.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jars import default_directory, install, installed, of_stores
from pyspark_tidemark.java import LOG_ERRORS_ONLY, java_options, spark_home
from pyspark_tidemark.jvm import java_classes
from pyspark_tidemark.lake.failure import cause_of
from pyspark_tidemark.lake.registry import FORMATS, find_format

_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
"""Executors on other machines could not reach such a driver,
so only for those in its own process.
"""
_BASE = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Spark's own pattern, and `credential`, as Iceberg's catalogs call theirs.
    "spark.redaction.regex": "(?i)secret|password|passwd|token|credential|access[.-]?key",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    # Plans are over a few thousand rows: to plan again between stages costs more than it saves.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.streaming.stopTimeout": "30s",
    # Spark's default forks `readlink` twenty times a batch on a local disk; nobody else writes to
    # this checkpoint.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A cut is many short jobs, each with code of its own: compiling it lightly halves the first
    # cuts on two cores. But Java then reserves 48 MiB for code, a fifth of its usual, and ends with
    # a VirtualMachineError when they are full.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC",
}
_UI = {
    # It asks nobody for a name, and a job that somebody ended would only be started again.
    "spark.ui.killEnabled": "false",
    # What it remembers lies in the driver's heap, and a lake job makes jobs without end.
    "spark.ui.retainedJobs": "200",
    "spark.ui.retainedStages": "200",
    "spark.ui.retainedTasks": "10000",
    "spark.sql.ui.retainedExecutions": "100",
}
"""Of Spark's web UI, where it is asked for."""
_TRIGGER = "org.apache.spark.sql.execution.streaming.runtime.ProcessingTimeExecutor"
_OWN_CLASSES = {"spark.jars", "spark.jars.packages", "spark.driver.extraClassPath"}
"""Classes of others, such as a file system's, may have to meet ours in one loader: Spark's own."""


def open_session(
    *, master: str, driver_memory: str, directory: Path, lake: str, extra: dict[str, str]
) -> SparkSession:
    """Start the JVM with what the format `lake` needs (empty: with what all formats need whose jars
    are there); what Spark spills goes under `directory`.

    Raises:
        SourceError: ErrTargetInvalid, there is no such format; ErrJavaNotFound; ErrJarsUnavailable;
            ErrSparkStart.
    """
    records = [find_format(lake)] if lake else list(FORMATS.values())
    local = _scratch(directory)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    silence_arrow()
    settings = (
        _BASE
        | (_LOOPBACK if master.startswith("local") else {})
        | {
            "spark.driver.memory": driver_memory,
            "spark.local.dir": str(local),
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
        }
    )
    if extra.get("spark.ui.enabled") == "true":
        settings |= _UI
        if master.startswith("local"):
            # Else it listens on every address of this machine.
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    for record in records:
        settings |= record.session
    jars = _jars(lake)
    if master.startswith("local") and not _OWN_CLASSES & extra.keys():
        settings |= _on_class_path()
        if home := spark_home(default_directory()):
            # A Spark that the user has chosen stays as it is.
            os.environ.setdefault("SPARK_HOME", str(home))
    elif jars:
        extra = extra | {"spark.jars": _with_own(jars, extra)}
    builder = SparkSession.builder.master(master).appName("tidemark")
    for name, value in (settings | extra).items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except (PySparkException, Py4JError, OSError) as err:
        raise SourceError(
            "ErrSparkStart", f"Spark did not start: {cause_of(err)}", retryable=True
        ) from err
    session.sparkContext.setLogLevel("WARN")
    _silence_trigger(session)
    return session


def _scratch(directory: Path) -> Path:
    """The directory for what Spark spills, without what Sparks that were killed have left there.

    Each process that uses it has a lock on it until it ends, and only where nobody has one is
    anything removed.
    """
    local = directory / "local"
    local.mkdir(parents=True, exist_ok=True)
    lock = os.open(local / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # a file system without locks
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in local.glob("[!.]*"):
                shutil.rmtree(left, ignore_errors=True)
        fcntl.flock(lock, fcntl.LOCK_SH)
    return local


def silence_arrow() -> None:
    """Keep Arrow's warning out of the log that buffers which came over Flight are not aligned: it
    takes them anyway, and would say so ten times a cut.
    """
    os.environ.setdefault("ACERO_ALIGNMENT_HANDLING", "ignore")


def errors_only(directory: Path) -> dict[str, str]:
    """Settings by which Spark's driver logs errors only, from its first line on."""
    properties = directory / "log4j2.properties"
    directory.mkdir(parents=True, exist_ok=True)
    properties.write_text(LOG_ERRORS_ONLY, encoding="utf-8")
    options = "spark.driver.extraJavaOptions"
    return {options: f"{_BASE[options]} -Dlog4j2.configurationFile={properties.as_uri()}"}


def _silence_trigger(session: SparkSession) -> None:
    """Spark warns of each cut that takes longer than the trigger's interval, also of idle ones."""
    log4j = java_classes(session).org.apache.logging.log4j
    with suppress(Py4JError):  # a user's Spark may log by another library
        log4j.core.config.Configurator.setLevel(_TRIGGER, log4j.Level.ERROR)


def trigger_s(session: SparkSession, interval: str) -> float:
    """The seconds of an interval that Spark takes for a trigger."""
    trigger = java_classes(session).org.apache.spark.sql.streaming.Trigger.ProcessingTime(interval)
    return int(trigger.intervalMs()) / 1000


def _jars(lake: str) -> list[Path]:
    directory = default_directory()
    if not lake:
        return installed(directory)
    jars = install(directory, lake) if find_format(lake).jars is not None else []
    return [*jars, *of_stores(directory, lake)]


def _on_class_path() -> dict[str, str]:
    """All jars on the class path of the one JVM, where a class archive can hold their classes."""
    # Those of all formats, whichever is used: an archive fits one class path only.
    jars = installed(default_directory())
    if not jars:
        return {}
    return {
        "spark.driver.extraClassPath": ":".join(map(str, jars)),
        "spark.driver.defaultJavaOptions": java_options(default_directory(), jars),
    }


def _with_own(jars: Sequence[Path], extra: dict[str, str]) -> str:
    """The jars, and those of the user's own settings."""
    own = extra.get("spark.jars", "").split(",")
    return ",".join(dict.fromkeys([*map(str, jars), *filter(None, own)]))


class SparkThreads(ThreadPoolExecutor):
    """A pool of threads that may call Spark, Delta and Iceberg;
    no other threads but Spark's own may.

    Py4J gives each Python thread a JVM thread of its own, and the active session belongs to the JVM
    thread. PySpark sets it in the thread that makes the session, Spark in the thread that runs
    `foreachBatch`. Elsewhere there is none until a call like `createDataFrame` happens to set one,
    and Delta's log fails with DELTA_SPARK_SESSION_NOT_SET where it needs one: when it reads a
    checkpoint of the log.
    """

    def __init__(self, spark: SparkSession, workers: int, name: str) -> None:
        """`name` begins the names of the threads."""
        super().__init__(workers, thread_name_prefix=name, initializer=_activate, initargs=(spark,))


def _activate(spark: SparkSession) -> None:
    """Make `spark` the active session of the calling thread."""
    sessions = java_classes(spark).org.apache.spark.sql.classic.SparkSession
    sessions.setActiveSession(spark._jsparkSession)  # noqa: SLF001 - PySpark sets it in its own threads only
