"""Where a changefeed's rows go, as a URI; captures, lake jobs and `verify` read it here,
and nowhere else.

    delta:///path  iceberg:///path  parquet:///path           a directory of the lake job's machine
    delta+hdfs://authority/path  parquet+s3a://bucket/path …  one that Hadoop reaches
    iceberg+catalog://name  iceberg+catalog://name/namespace  a catalog, as Spark's settings call it
    postgresql://user@host:port/db  mysql://user@host:port/db a database
    kafka://host:port,host:port/topic?protocol=canal-json     a topic
    flight://  none://  blackhole://                          no lake job: readers take the rows

A lake's URI may carry how the lake is kept, `?mode=append&keep-cuts-hours=72` (`sink_settings`).

A sink URI is stored, logged and shown, so it never holds a secret, only where the secret is:
`password-file=/path`, or `password-env=NAME`. Text that is no valid sink URI, as in a record of an
earlier version, is shown by `redacted`.
"""

import dataclasses
import difflib
import re
import unicodedata
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.format import COLUMNS, MODES, SPARK
from pyspark_tidemark.lake.kafka import settings as kafka
from pyspark_tidemark.lake.partitioning import PartitionRules
from pyspark_tidemark.lake.registry import FORMATS, find_format
from pyspark_tidemark.lake.sorting import SortRules
from pyspark_tidemark.sink_settings import SETTINGS, faults
from pyspark_tidemark.uri_secrets import (
    SCHEME,
    SECRET_VARIABLE,
    check_reference,
    masked,
    secret_option,
)

READERS = ("flight", "none", "blackhole")
"""Sinks without a lake job."""
SYSTEMS = ("hdfs", "viewfs", "s3a")
"""Hadoop's file systems that can hold a lake, by scheme: see `lake.hadoop`."""
RENAMING = ("hdfs", "viewfs")
"""Those whose rename is one step that fails if there is a file of the new name."""
CATALOG_ROOT = "catalog://"
"""Begins the `path` of a lake in a catalog."""
_CATALOGS = tuple(name for name, record in FORMATS.items() if record.has_catalogs)
_IN_CATALOG = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
"""A catalog's name, and the namespaces above the databases."""
_CATALOG_TYPES = ("rest", "hive", "jdbc", "glue", "nessie", "hadoop")
"""What users may try as a scheme; it is a setting of the catalog."""
_DIRECTORIES = tuple(name for name, record in FORMATS.items() if record.is_directory)
_DATABASES = tuple(name for name, record in FORMATS.items() if record.is_database)
_TOPICS = tuple(name for name, record in FORMATS.items() if record.is_topic)
FORMS = (
    "FORMAT:///path or FORMAT+SCHEME://authority/path, with a FORMAT of "
    f"{', '.join(_DIRECTORIES)} and a SCHEME of {', '.join(SYSTEMS)}; "
    f"{' or '.join(f'{name}+catalog://NAME' for name in _CATALOGS)}; "
    f"{' or '.join(f'{name}://user@host:port/db' for name in _DATABASES)}; "
    f"{' or '.join(f'{name}://host:port/topic?protocol=…' for name in _TOPICS)}; "
    "flight:// for readers of your own"
)
_BY_REFERENCE = (
    "a sink URI holds no password, as it is stored and shown: write the password into a file "
    "that only the lake job's user may read, and name it with the option password-file=/path, or "
    f"set an environment variable of the job and name that with password-env={SECRET_VARIABLE}…"
)
_DATABASE_OPTIONS = ("password-file", "password-env", "ca-path")
_ELSEWHERE = (
    "credentials and settings of a file system are Hadoop's: --conf spark.hadoop.fs.…, or its own "
    "files; those of a catalog are Spark's: spark.sql.catalog.NAME.…"
)
_CHARACTERS_MAX = 2048
_SYSTEM_DIRECTORIES = (
    *(
        "/bin",
        "/boot",
        "/dev",
        "/etc",
        "/lib",
        "/lib32",
        "/lib64",
        "/libx32",
        "/proc",
        "/run",
        "/sbin",
        "/sys",
        "/usr",
    ),
    *(
        "/var/cache",
        "/var/lib/dpkg",
        "/var/lib/systemd",
        "/var/log",
        "/var/mail",
        "/var/run",
        "/var/spool",
    ),
)
_TOP = ("/", "/home", "/mnt", "/opt", "/root", "/srv", "/tmp", "/var", "/var/lib", "/var/tmp")  # noqa: S108 - refused
_NEAREST = {
    "file": "delta:///path",
    "hdfs": "delta+hdfs://authority/path",
    "viewfs": "delta+viewfs://authority/path",
    "s3": "delta+s3a://bucket/path",
    "s3a": "delta+s3a://bucket/path",
    "s3n": "delta+s3a://bucket/path",
    "jdbc": " or ".join(f"{name}://user@host/db" for name in _DATABASES),
    **{alias: f"{name}://user@host/db" for name in _DATABASES for alias in FORMATS[name].aliases},
    "http": "flight://, and a reader of your own",
    "https": "flight://, and a reader of your own",
}


Options = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class SinkUri:
    """A valid sink URI in its parts; none of them is a secret, so its `repr` shows none."""

    format: str
    path: str
    """A directory of this machine; with a scheme, one that Hadoop reaches; the name of a database
    or a topic.
    """
    host: str = ""
    """A database's; of a topic all brokers, `host:port` with commas between."""
    port: int = 0
    user: str = ""
    options: Options = ()

    @classmethod
    def parse(cls, text: str) -> "SinkUri":
        """Read a URI; no message of an error repeats a secret.

        Raises:
            SourceError: ErrTargetInvalid.
        """
        _check_text(text)
        try:
            parts = urlsplit(text)
            if secret_option(text) is not None:
                raise _invalid(_BY_REFERENCE)
            lake_format, plus, _ = parts.scheme.partition("+")
            if plus:
                return cls._remote(parts)
            _check_login(parts)
            if parts.scheme in _DATABASES:
                return cls._database(parts)
            if parts.scheme in _TOPICS:
                return cls._topic(parts)
        except ValueError:  # a port that is none, brackets that do not match
            raise _invalid(f"the sink URI {masked(text)!r} cannot be read; it is {FORMS}") from None
        if lake_format in READERS and not parts.path.strip("/") and not parts.netloc:
            if parts.query:
                raise _invalid(f"{lake_format}:// has no options, as no lake job writes there")
            return cls(lake_format, "")
        if lake_format not in _DIRECTORIES:
            raise _invalid(_unknown_scheme(text, parts))
        return cls._local(parts)

    @classmethod
    def _local(cls, parts: SplitResult) -> "SinkUri":
        path = re.sub(r"/+", "/", parts.path)
        if parts.netloc or not path.startswith("/"):
            absolute = f"{parts.scheme}:///{parts.netloc.rpartition('@')[2]}{parts.path}"
            raise _invalid(f"a directory needs its whole path, such as {masked(absolute)}")
        _check_path(path)
        return cls(parts.scheme, path.rstrip("/") or "/", options=_options(parts))

    @classmethod
    def _remote(cls, parts: SplitResult) -> "SinkUri":
        lake_format, _, system = parts.scheme.partition("+")
        if parts.username is not None or parts.fragment:
            raise _invalid(_ELSEWHERE)
        if lake_format in _CATALOGS and system in ("catalog", *_CATALOG_TYPES):
            return cls._in_catalog(parts)
        if (
            lake_format not in _DIRECTORIES
            or system not in SYSTEMS
            or not parts.path.startswith("/")
        ):
            hints = {
                "file": f"; a directory of this machine is {lake_format}:///path",
                "catalog": f"; catalogs are for {', '.join(_CATALOGS)}",
                "s3": "; S3 is s3a",
                "s3n": "; S3 is s3a",
            }
            raise _invalid(
                "a sink on another file system is FORMAT+SCHEME://…: "
                f"{FORMS}{hints.get(system, '')}"
            )
        if parts.netloc.endswith(":") or parts.port == 0:
            raise _invalid(f"{parts.scheme}:// has no port after its colon")
        if system == "s3a" and (not parts.netloc or ":" in parts.netloc):
            raise _invalid(f"{parts.scheme}:// needs a bucket: {parts.scheme}://bucket/path")
        if FORMATS[lake_format].needs_rename and system not in RENAMING:
            others = " or ".join(
                f"{name}+{system}://" for name in _DIRECTORIES if not FORMATS[name].needs_rename
            )
            raise _invalid(
                f"{FORMATS[lake_format].title} commits to directories by renaming, which {system} "
                "cannot do in one step, so two jobs could destroy a table: keep its tables in a "
                f"catalog ({lake_format}+catalog://NAME), or take {others}",
            )
        _check_path(parts.path)
        path = f"{system}://{parts.netloc}{parts.path.rstrip('/') or '/'}"
        return cls(lake_format, path, options=_options(parts, advice=f". {_ELSEWHERE}"))

    @classmethod
    def _in_catalog(cls, parts: SplitResult) -> "SinkUri":
        lake_format, _, system = parts.scheme.partition("+")
        name = f"{parts.netloc}{parts.path.rstrip('/')}"
        if system != "catalog" or not _IN_CATALOG.fullmatch(name):
            raise _invalid(
                f"a catalog is {lake_format}+catalog://NAME or {lake_format}+catalog://NAME/NAMESPACE: "
                "the NAME that Spark's settings give it, of letters, digits, _ and -, as in "
                f"spark.sql.catalog.NAME.type={'rest' if system == 'catalog' else system}",
            )
        options = _options(parts, advice=f". {_ELSEWHERE}")
        return cls(lake_format, f"{CATALOG_ROOT}{name}", options=options)

    @classmethod
    def _database(cls, parts: SplitResult) -> "SinkUri":
        name = parts.path.strip("/")
        if not parts.hostname or not parts.username or not name or "/" in name:
            raise _invalid(
                f"a database target is {parts.scheme}://user@host:port/database?"
                "password-file=/path&ca-path=/path (both optional; "
                f"password-env={SECRET_VARIABLE}… instead of a file)",
            )
        options = _options(parts, _DATABASE_OPTIONS)
        check_reference(dict(options))
        port = parts.port or FORMATS[parts.scheme].port
        return cls(parts.scheme, name, parts.hostname, port, parts.username, options)

    @classmethod
    def _topic(cls, parts: SplitResult) -> "SinkUri":
        if "@" in parts.netloc:
            raise _invalid(
                "who logs in to Kafka is sasl-user=NAME&sasl-mechanism=scram-sha-512&"
                "password-file=/path"
            )
        hosts, name = kafka.addresses(parts.netloc), parts.path.strip("/")
        if not hosts:
            raise _invalid(
                f"{parts.scheme}:// needs its brokers, host:port and with commas between, as in "
                f"{parts.scheme}://kafka1:9092,kafka2:9092/topic?protocol=canal-json"
            )
        if fault := kafka.topic_fault(name):
            raise _invalid(fault)
        if wrong := kafka.option_faults(dict(parse_qsl(parts.query, keep_blank_values=True))):
            raise _invalid(f"options of the sink URI: {'; '.join(wrong)}")
        options = _options(parts, tuple(kafka.OPTIONS), settings=kafka.SHARED)
        if fault := kafka.login_fault(hosts, dict(options)):
            raise _invalid(fault)
        check_reference(dict(options))
        return cls(parts.scheme, name, hosts, options=options)

    def __str__(self) -> str:
        """The URI again, in one form for each place; parsing it gives an equal one."""
        if self.format in READERS:
            return f"{self.format}://"
        options = "&".join(f"{name}={_quoted(value)}" for name, value in self.options)
        query = f"?{options}" if options else ""
        if self.is_database:
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"{self.format}://{self.user}@{host}:{self.port}/{self.path}{query}"
        if self.is_topic:
            return f"{self.format}://{self.host}/{self.path}{query}"
        return f"{self.format}{'+' if self.has_place else '://'}{self.path}{query}"

    def check_directory(self) -> None:
        """Refuse a directory of this machine that is the system's:
        whoever may make a changefeed would write there.

        Raises:
            SourceError: ErrTargetInvalid.
        """
        if self.is_database or self.is_topic or self.has_place or not self.is_lake:
            return
        system = any(
            self.path == each or self.path.startswith(f"{each}/") for each in _SYSTEM_DIRECTORIES
        )
        if system or self.path in _TOP:
            raise _invalid(
                f"{self.path} belongs to the system; give the lake a directory of its own, such as "
                f"{self.format}:///lake/NAME or {self.format}:///var/lib/tidemark/NAME"
            )

    @property
    def is_lake(self) -> bool:
        """Whether a lake job keeps it."""
        return self.format in FORMATS

    @property
    def is_database(self) -> bool:
        """Whether it is a database."""
        return self.format in _DATABASES

    @property
    def is_topic(self) -> bool:
        """Whether it is a topic of a log."""
        return self.format in _TOPICS

    @property
    def has_place(self) -> bool:
        """Whether the path says who has the lake, Hadoop or a catalog; else it is a path of this
        machine, or a database's.
        """
        return "://" in self.path

    @property
    def is_remote(self) -> bool:
        """Whether it is a directory that Hadoop reaches."""
        return self.has_place and not self.is_catalog

    @property
    def is_catalog(self) -> bool:
        """Whether its tables are in a catalog, which knows where they lie."""
        return self.path.startswith(CATALOG_ROOT)

    @property
    def place(self) -> tuple[str, str, str, int]:
        """Its identity among sinks; how to log in there is no part of it."""
        return self.format, self.path, self.host, self.port

    def option(self, name: str) -> str:
        """The option's value; empty if it is not given."""
        return dict(self.options).get(name, "")

    @property
    def settings(self) -> dict[str, str]:
        """How its lake is kept, as far as the URI says: options of `spark run`, by name."""
        return {name: value for name, value in self.options if name in SETTINGS}

    def without_settings(self) -> "SinkUri":
        """The same sink, without how its lake is kept."""
        options = tuple(pair for pair in self.options if pair[0] not in SETTINGS)
        return dataclasses.replace(self, options=options)

    def mode(self, mode: str) -> str:
        """`mode`, or the format's default for an empty one.

        Raises:
            SourceError: ErrModeUnsupported.
        """
        modes = find_format(self.format).modes
        if mode and mode not in modes:
            raise SourceError(
                "ErrModeUnsupported",
                f"a {self.format} target cannot do --mode {mode}; it can do {', '.join(modes)}"
                if mode in MODES
                else f"--mode is {', '.join(MODES)}, not {mode!r}",
            )
        return mode or modes[0]

    def check_write(self, write: str) -> None:
        """Check that whoever is to write the rows (one of `WRITES`) can.

        Raises:
            SourceError: ErrWriteUnsupported.
        """
        if write == SPARK and not _tasks_write(self.format, is_remote=self.is_remote):
            place = "target where only Hadoop reaches" if self.is_remote else "target"
            raise SourceError(
                "ErrWriteUnsupported",
                f"a {self.format} {place} cannot do --write spark or --tasks-from-mib: only the "
                "driver can write there; leave the option out",
            )

    def partitions(self, text: str) -> PartitionRules:
        """What the option `partition-by` says, for tables of this format.

        Raises:
            SourceError: ErrPartitionUnsupported.
        """
        if fault := SETTINGS["partition-by"](text) or partition_fault(self.format, text):
            raise SourceError(
                "ErrPartitionUnsupported", f"--partition-by is {fault}, not {text[:80]!r}"
            )
        return PartitionRules.parse(text)

    def sorting(self, text: str) -> SortRules:
        """What the option `sort-by` says, for tables of this format.

        Raises:
            SourceError: ErrSortUnsupported.
        """
        if fault := SETTINGS["sort-by"](text) or _sort_fault(self.format, text):
            raise SourceError("ErrSortUnsupported", f"--sort-by is {fault}, not {text[:80]!r}")
        return SortRules.parse(text)


def partition_fault(lake_format: str, text: str) -> str:
    """What a valid value of `partition-by` has to be for a format, or nothing if it is that."""
    rules, possible = PartitionRules.parse(text), find_format(lake_format).partitions
    if rules.rules and not possible:
        return f"nothing for a {lake_format} target, whose tables have no partitions"
    if possible == COLUMNS and not rules.has_only_columns():
        return f"columns as they are for a {lake_format} target, which has no transforms"
    return ""


def _sort_fault(lake_format: str, text: str) -> str:
    """The same of a valid value of `sort-by`."""
    if SortRules.parse(text).rules and not find_format(lake_format).is_sorted:
        return f"nothing for a {lake_format} target, whose tables have no sort orders"
    return ""


def format_of(text: str) -> str:
    """The format that a stored sink URI asks for, also where it is not valid,
    as in a record of an earlier version.
    """
    return text.partition(":")[0].partition("+")[0].lower()


def settings_of(text: str) -> dict[str, str]:
    """How a stored sink URI says that its lake is kept; nothing for what is no valid URI, as a
    record of an earlier version may have.
    """
    try:
        return SinkUri.parse(text).settings
    except SourceError:
        return {}


def redacted(text: str) -> str:
    """A stored sink URI as it may be shown: a valid one as it is,
    any other with `***` wherever a secret may be.
    """
    try:
        SinkUri.parse(text)
    except SourceError:
        return masked(text)
    return text


def holds_secret(text: str) -> bool:
    """Whether a stored sink URI may hold a secret, and is masked wherever it is shown."""
    return redacted(text) != text


def _check_text(text: str) -> None:
    if len(text) > _CHARACTERS_MAX:
        raise _invalid(f"a sink URI has at most {_CHARACTERS_MAX} characters")
    if text != text.strip() or any(
        unicodedata.category(character) in ("Cc", "Cs") for character in text
    ):
        raise _invalid("a sink URI has no blanks at its ends, and no control characters")


def _options(
    parts: SplitResult,
    others: tuple[str, ...] = (),
    advice: str = "",
    settings: tuple[str, ...] = tuple(SETTINGS),
) -> Options:
    """The options of a lake's URI, all checked; `others` are allowed beside the settings."""
    options = tuple(parse_qsl(parts.query, keep_blank_values=True))
    wrong = faults(options, others, settings)
    mode = dict(options).get("mode", "")
    modes = find_format(parts.scheme.partition("+")[0]).modes
    if mode in MODES and mode not in modes:
        wrong.append(f"mode={mode}: such a target can do {', '.join(modes)}")
    lake_format, _, system = parts.scheme.partition("+")
    for name in ("write", "tasks-from-mib"):
        value = dict(options).get(name, "0")
        asks_for_tasks = value == SPARK if name == "write" else value.strip("0")
        if asks_for_tasks and not _tasks_write(lake_format, is_remote=system in SYSTEMS):
            wrong.append(f"{name}={value}: only the driver can write to such a target")
    partitions = dict(options).get("partition-by", "")
    if not SETTINGS["partition-by"](partitions) and (
        fault := partition_fault(lake_format, partitions)
    ):
        wrong.append(f"partition-by is {fault}")
    order = dict(options).get("sort-by", "")
    if not SETTINGS["sort-by"](order) and (fault := _sort_fault(lake_format, order)):
        wrong.append(f"sort-by is {fault}")
    if wrong:
        raise _invalid(f"options of the sink URI: {'; '.join(wrong)}{advice}")
    return options


def _tasks_write(lake_format: str, *, is_remote: bool) -> bool:
    record = find_format(lake_format)
    return record.tasks_write_remotely if is_remote else record.tasks_write


def _check_login(parts: SplitResult) -> None:
    if ":" in unquote(parts.netloc.rpartition("@")[0]):
        raise _invalid(_BY_REFERENCE)
    if parts.fragment:
        raise _invalid("a sink URI has no fragment: leave out # and what follows it")


def _check_path(path: str) -> None:
    for spelling in (path, unquote(path)):
        if {".", ".."} & set(re.split(r"[/\\]", spelling)) or "\0" in spelling:
            raise _invalid(f"the path {path!r} of the sink URI has . or .. in it: write it without")


def _unknown_scheme(text: str, parts: SplitResult) -> str:
    scheme = parts.scheme
    if not scheme or not SCHEME.match(text):
        advice = (
            f"delta://{masked(text)}"
            if text.startswith("/")
            else "delta:///path or postgresql://user@host/db"
        )
        return (
            f"the sink URI {masked(text)!r} has no scheme; give one such as "
            f"{_NEAREST.get(scheme) or advice}"
        )
    near = _nearest(scheme)
    return (
        f"no sink is called {scheme}://{f'; the nearest is {near}' if near else ''}. A sink is "
        f"{FORMS}"
    )


def _nearest(scheme: str) -> str:
    close = next(
        iter(difflib.get_close_matches(scheme, (*_NEAREST, *FORMATS, *READERS), 1, 0.6)), ""
    )
    if close in _NEAREST or not close:
        return _NEAREST.get(close, "")
    return (
        f"{close}://user@host/db"
        if close in _DATABASES
        else f"{close}://host:port/topic?protocol=…"
        if close in _TOPICS
        else f"{close}://"
        if close in READERS
        else f"{close}:///path"
    )


def _quoted(value: str) -> str:
    return quote(value, safe="/:")


def _invalid(said: str) -> SourceError:
    return SourceError("ErrTargetInvalid", said)
