"""The settings of `tidemark spark run`, the job's command line made of them, and whether this
machine can run Spark at all.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark_tidemark.lake.format import MODES
from pyspark_tidemark.lake.registry import default_modes
from pyspark_tidemark.sink_uri import FORMS

from server.config import HTTP_ADDRS, ConfigError, setting
from server.rpc.credentials import SecurityConfig
from storage.model.errors import InvalidError

_SECRET_SETTING = re.compile(
    r"(?i)((secret|password|passwd|token|credential|secret[._-]?(access[._-]?)?key)$|account\.key\.)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The settings of the job that `spark run` runs, and of each job of `spark keep`."""

    schema_evolution: str = setting("evolve", "at a DDL: evolve, exception or ignore")
    on_drop: str = setting("keep", "what happens to a dropped table: keep or drop")
    master: str = setting("local[2]", "Spark master")
    driver_memory: str = setting("1g", "JVM heap of a job's driver")
    trigger: str = setting("500 milliseconds", "shortest time between cuts")
    max_rows_per_trigger: int = setting(
        250_000, "rows of one cut at most; a commit_ts is never split"
    )
    idle_cut_seconds: float = setting(
        0.0,
        "while nothing changes, a lake is moved on by a cut without rows so often; 0: 3, and 10 in "
        "catalogs, HDFS and object stores",
    )
    compact_every: int = setting(64, "commits of a table between compactions; 0: no maintenance")
    keep_cuts_hours: float = setting(
        48.0, "how far back readers may go; older files and cuts are removed"
    )
    deletion_vectors: str = setting(
        "on",
        "on: rows that are gone are masked; off: Delta writes files anew, Iceberg writes equality "
        "deletes",
    )
    partition_by: str = setting(
        "",
        "partitions of tables, as 'shop.orders=days(created_at),bucket(16,id); shop.*=region'; the "
        "first rule that fits a table counts; of Delta's tables columns only",
    )
    sort_by: str = setting(
        "",
        "order of the rows in files of Iceberg's tables, as 'shop.orders=created_at desc,id; "
        "shop.*=region asc nulls last'; the first rule that fits a table counts",
    )
    write: str = setting(
        "auto",
        "who reads the rows of a cut and writes their files: spark, tasks only; driver, the driver "
        "up to 256 MiB of a table in a cut; auto, the driver up to 64 MiB or 8 MiB",
    )
    tasks_from_mib: int = setting(
        0,
        "with write=auto, cuts of so many MiB or more are written by tasks, as with spark; 0: none",
    )
    ui_port: int = setting(
        0,
        "port of Spark's web UI, on loopback unless SPARK_LOCAL_IP says otherwise; a Spark whose port "
        "is taken takes the next; 0: none",
    )
    conf: tuple[str, ...] = setting(
        (),
        "a Spark setting of a job's session, NAME=VALUE; may be repeated; secrets belong into "
        "Hadoop's own files, as anybody on the machine sees a process's arguments",
    )
    token_file: str = setting("", "file with the token that captures ask readers for")
    coordinator: str = setting(
        "", "the coordinator's addresses, host:port, by commas; audits of lakes need it"
    )
    audit_rows_per_s: int = setting(
        20_000, "so fast an audit reads the source at most, in rows a second", least=1
    )
    audit_max_lag_s: float = setting(
        60.0, "an audit gives way while its lake is further behind, in seconds", least=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkConfig(JobSettings):
    """Which changefeed is kept in which lake, and by how much of a Spark."""

    endpoint: str = setting(
        "", "Flight addresses of captures, grpc://host:port, separated by commas"
    )
    changefeed: str = setting("", "the changefeed's id")
    target: str = setting("", FORMS)
    mode: str = setting("", f"{', '.join(MODES)}; empty: {default_modes()}")
    checkpoint_dir: str = setting(
        "", "Spark's checkpoint and scratch files; empty: under the target"
    )
    reader: str = setting(
        "",
        "name of a further reader of the changefeed (`changefeed add-reader`): the target is a "
        "lake beside its own, which the captures do not look after",
    )
    until_ts: int = setting(0, "end, with status 0, once the lake is exactly at this TSO; 0: never")
    once: bool = setting(default=False, help_text="do not start the job again when it dies")
    progress_json: str = setting(
        "",
        "file that the lines about each cut are appended to, besides standard output, which has "
        "none about cuts without rows; -: standard output has all lines",
    )
    http_addr: str = setting(HTTP_ADDRS["spark"], "/metrics, /healthz, /readyz")

    def checked(self) -> "SparkConfig":
        """This configuration, but for what is missing; raises ConfigError as `job_command`."""
        check_conf(self.conf)
        return self


def job_command(config: SparkConfig, security: SecurityConfig) -> list[str]:
    """The command of the job's process.

    Raises:
        ConfigError: a setting without which there is nothing to run, a Spark setting without a
            value, or with a secret.
    """
    _check(config)
    flags = {
        "--endpoint": config.endpoint,
        "--changefeed": config.changefeed,
        "--reader": config.reader,
        "--target": config.target,
        "--mode": config.mode,
        "--schema-evolution": config.schema_evolution,
        "--on-drop": config.on_drop,
        "--keep-cuts-hours": str(config.keep_cuts_hours),
        "--token-file": config.token_file,
        "--checkpoint-dir": config.checkpoint_dir,
        "--master": config.master,
        "--driver-memory": config.driver_memory,
        "--trigger": config.trigger,
        "--max-rows-per-trigger": str(config.max_rows_per_trigger),
        "--idle-cut-seconds": str(config.idle_cut_seconds or ""),
        "--until-ts": str(config.until_ts or ""),
        "--compact-every": str(config.compact_every),
        "--deletion-vectors": config.deletion_vectors,
        "--partition-by": config.partition_by,
        "--sort-by": config.sort_by,
        "--write": config.write,
        "--tasks-from-mib": str(config.tasks_from_mib or ""),
        "--ca-path": security.ca_path,
        "--cert-path": security.cert_path,
        "--key-path": security.key_path,
    }
    given = [part for flag, value in flags.items() if value for part in (flag, value)]
    given += _conf_flags(config)
    return [sys.executable, "-m", "pyspark_tidemark.job", "--follow-parent", *given]


def application_command(settings: JobSettings, memory: str, directory: str) -> list[str]:
    """The command of the application that jobs share, with a JVM heap of `memory`."""
    flags = ["--master", settings.master, "--driver-memory", memory, "--directory", directory]
    flags += _conf_flags(settings)
    return [sys.executable, "-m", "pyspark_tidemark.application", *flags]


def _conf_flags(settings: JobSettings) -> list[str]:
    ui = ["spark.ui.enabled=true", f"spark.ui.port={settings.ui_port}"] if settings.ui_port else []
    # What is said by `--conf` comes last, and wins.
    return [f"--conf={text}" for text in (*ui, *settings.conf)]


def _check(config: SparkConfig) -> None:
    """Refuse settings with which no job could run; raises ConfigError as `job_command`."""
    missing = [
        f"--{name}" for name in ("endpoint", "changefeed", "target") if not getattr(config, name)
    ]
    if missing:
        raise ConfigError(f"tidemark spark run needs {', '.join(missing)}")
    check_conf(config.conf)


def check_conf(conf: Sequence[str]) -> None:
    """Refuse a Spark setting without a name or value, or with a secret; raises ConfigError."""
    unnamed = [text for text in conf if not text.partition("=")[0].strip() or "=" not in text]
    if unnamed:
        raise ConfigError(f"--conf is NAME=VALUE, not {', '.join(map(repr, unnamed))}")
    secret = [
        name for name in (text.partition("=")[0] for text in conf) if _SECRET_SETTING.search(name)
    ]
    if secret:
        raise ConfigError(
            f"--conf {secret[0]}: a secret among a process's arguments is seen by everybody on "
            "the machine; write it "
            "into Hadoop's or Spark's own files (HADOOP_CONF_DIR, SPARK_CONF_DIR)"
        )


class JavaMissingError(InvalidError):
    """Spark cannot run on this machine."""

    code = "ErrJavaNotFound"


def require_java(otherwise: str = "") -> None:
    """Refuse early.

    Raises:
        JavaMissingError: there is no Java that Spark can use; `otherwise` says what else the user
            can do.
    """
    from pyspark_tidemark.errors import SourceError
    from pyspark_tidemark.java import check_java

    try:
        check_java()
    except SourceError as err:
        advice = f", {otherwise}" if otherwise else ""
        raise JavaMissingError(f"{err.message}{advice}") from None
