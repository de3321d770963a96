"""The settings of `tidemark spark run`, the job's command line made of them, and whether this
machine can run Spark at all.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.format import MODES
from pyspark_tidemark.lake.registry import default_modes
from pyspark_tidemark.sink_settings import HELP
from pyspark_tidemark.sink_uri import FORMS, SinkUri

from server.config import HTTP_ADDRS, ConfigError, load, setting
from server.rpc.credentials import SecurityConfig
from storage.model.errors import InvalidError

_SECRET_SETTING = re.compile(
    r"(?i)((secret|password|passwd|token|credential|secret[._-]?(access[._-]?)?key)$|account\.key\.)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The settings of the job that `spark run` runs, and of each job of `spark keep`."""

    schema_evolution: str = setting("evolve", HELP["schema-evolution"])
    on_drop: str = setting("keep", HELP["on-drop"])
    master: str = setting("local[2]", HELP["master"])
    driver_memory: str = setting("1g", HELP["driver-memory"])
    trigger: str = setting("500 milliseconds", HELP["trigger"])
    max_rows_per_trigger: int = setting(250_000, HELP["max-rows-per-trigger"])
    idle_cut_seconds: float = setting(0.0, HELP["idle-cut-seconds"])
    compact_every: int = setting(64, HELP["compact-every"])
    keep_cuts_hours: float = setting(48.0, HELP["keep-cuts-hours"])
    deletion_vectors: str = setting("on", HELP["deletion-vectors"])
    partition_by: str = setting("", HELP["partition-by"])
    sort_by: str = setting("", HELP["sort-by"])
    write: str = setting("auto", HELP["write"])
    tasks_from_mib: int = setting(0, HELP["tasks-from-mib"])
    ui_port: int = setting(
        0,
        "port of Spark's web UI, on loopback unless SPARK_LOCAL_IP says otherwise; if it is taken, "
        "the next free one; 0: no UI",
    )
    conf: tuple[str, ...] = setting((), HELP["conf"])
    token_file: str = setting("", HELP["token-file"])
    coordinator: str = setting(
        "", "coordinators (or PDs), host:port[,host:port…]; only audits of lakes need them"
    )
    audit_rows_per_s: int = setting(
        20_000, "most rows a second that an audit reads from the source", least=1
    )
    audit_max_lag_s: float = setting(
        60.0, "an audit waits while its lake is more seconds behind the source than this", least=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkConfig(JobSettings):
    """Which changefeed is kept in which lake, and by how much of a Spark."""

    endpoint: str = setting("", HELP["endpoint"])
    changefeed: str = setting("", HELP["changefeed"])
    target: str = setting("", FORMS)
    mode: str = setting("", f"{', '.join(MODES)}; empty: {default_modes()}")
    checkpoint_dir: str = setting("", HELP["checkpoint-dir"])
    reader: str = setting("", HELP["reader"])
    until_ts: int = setting(0, f"{HELP['until-ts']}; 0: never")
    once: bool = setting(default=False, help_text="do not start the job again when it dies")
    progress_json: str = setting(
        "",
        "file to which a line about each cut is appended; standard output shows those of cuts with "
        "rows, too, and with - those of all cuts",
    )
    http_addr: str = setting(HTTP_ADDRS["spark"], "/metrics, /healthz, /readyz")

    def checked(self) -> "SparkConfig":
        """This configuration, but for what is missing; raises ConfigError as `job_command`."""
        check_conf(self.conf)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepConfig(JobSettings):
    """Where the changefeeds are, and how much of a Spark each lake job gets."""

    capture: str = setting("127.0.0.1:8300", "a capture's gRPC address, host:port")
    checkpoint_dir: str = setting(
        "./data/checkpoints",
        "Spark's checkpoints, one directory a changefeed; it is removed with its changefeed",
    )
    job: tuple[str, ...] = setting(
        (),
        "an option of `spark run` for the job of one changefeed, CHANGEFEED:NAME=VALUE such as "
        "orders:compact-every=16; may be repeated",
    )
    share_spark: bool = setting(
        default=True,
        help_text="the jobs share one Spark application, and its JVM; --no-share-spark: each job "
        "has its own",
    )
    application_memory: str = setting("2g", "JVM heap of the application that the jobs share")
    http_addr: str = setting(HTTP_ADDRS["spark-keep"], "/metrics, /healthz, /readyz")

    def checked(self) -> "KeepConfig":
        """This configuration; raises ConfigError as `job_config` and `job_command`."""
        check_conf(self.conf)
        for name in {_option(text)[0] for text in self.job}:
            job_command(job_config(self, name, "delta:///", "grpc://"), SecurityConfig())
        return self


_OWN = tuple(
    field.name.replace("_", "-")
    for field in fields(SparkConfig)
    if field.name not in ("endpoint", "changefeed", "target", "once", "progress_json", "http_addr")
)


def job_config(config: KeepConfig, changefeed: str, target: str, endpoint: str) -> SparkConfig:
    """The settings of the job of one changefeed.

    Raises:
        ConfigError: an option of `--job` is unknown, or its value cannot be used.
    """
    options: dict[str, Any] = {}
    for text in config.job:
        name, key, value = _option(text)
        if name == changefeed and key == "conf":
            options[key] = [*options.get(key, config.conf), value]
        elif name == changefeed:
            options[key] = value
    of_uri, place = _settings_of(target)
    # What is said of one changefeed wins over what is said of all; of the two who say it, whoever
    # operates the jobs (`--job`) over whoever created the changefeed (its sink URI).
    own = {key.replace("-", "_"): value for key, value in (of_uri | options).items()}
    settings = {field.name: getattr(config, field.name) for field in fields(JobSettings)} | {
        "endpoint": endpoint,
        "changefeed": changefeed,
        "target": place,
        "checkpoint_dir": str(Path(config.checkpoint_dir) / changefeed),
    }
    settings |= own
    return load(SparkConfig, "spark", document={}, environ={}, flags=settings)


def _settings_of(target: str) -> tuple[dict[str, str], str]:
    """How a lake is kept, as its URI says, and the URI without that."""
    try:
        uri = SinkUri.parse(target)
    except SourceError:
        # As a record of an earlier version may have: the job itself refuses it, by name, and only
        # its changefeed fails.
        return {}, target
    return uri.settings, str(uri.without_settings())


def _option(text: str) -> tuple[str, str, str]:
    name, colon, rest = text.partition(":")
    key, equals, value = rest.partition("=")
    if not (name and colon and equals):
        raise ConfigError(f"--job is CHANGEFEED:NAME=VALUE, not {text!r}")
    if key not in _OWN:
        raise ConfigError(f"--job {text}: {key!r} is not one of {', '.join(_OWN)}")
    return name, key, value


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
    from pyspark_tidemark.java import check_java

    try:
        check_java()
    except SourceError as err:
        advice = f", {otherwise}" if otherwise else ""
        raise JavaMissingError(f"{err.message}{advice}") from None
