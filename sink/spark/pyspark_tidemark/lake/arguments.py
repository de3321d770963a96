"""The arguments of the lake job. What the target's URI says of its lake wins over an option."""

import argparse
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.format import (
    DELETION_VECTORS,
    EVOLUTIONS,
    MODES,
    ON,
    ON_DROP,
    SPARK,
    WRITES,
)
from pyspark_tidemark.lake.partitioning import PartitionRules
from pyspark_tidemark.lake.registry import default_modes
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.lake.sorting import SortRules
from pyspark_tidemark.sink_settings import HELP
from pyspark_tidemark.sink_uri import FORMS, SinkUri
from pyspark_tidemark.uri_secrets import is_secret

_IDLE_ELSEWHERE_MS = 10_000
"""Short enough for what calls a changefeed synced: its checkpoint is less than 15 s old then."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What the job keeps current, and how."""

    endpoint: str
    changefeed: str
    reader: str
    """The name of one beside the changefeed's lake job; empty: this is it."""
    target: SinkUri
    checkpoint_dir: Path
    master: str
    driver_memory: str
    trigger: str
    max_rows: int
    idle_ms: int | None
    """How old the lake grows before a cut without rows; None: as the captures have it."""
    until_ts: int | None
    parallel: int
    compact_every: int
    deletion_vectors: bool
    write: str
    """One of `WRITES`."""
    tasks_from_bytes: int
    """With `auto`, tasks write the cuts that have so many bytes or more; 0: none."""
    partitions: PartitionRules
    sorting: SortRules
    keep_hours: float
    mode: str
    policy: Policy
    follow_parent: bool
    tls: dict[str, str]
    conf: dict[str, str]

    @property
    def source_options(self) -> dict[str, str]:
        """Options for `format("tidemark")`; the job acknowledges by itself."""
        options = {"endpoint": self.endpoint, "changefeed": self.changefeed, "ack": "false"}
        options |= {"reader": self.reader} if self.reader else {}
        options |= {"idleMs": str(self.idle_ms)} if self.idle_ms else {}
        return options | self.tls

    @classmethod
    def parse(cls, argv: Sequence[str]) -> "Arguments":
        """Read the command line.

        Raises:
            SourceError: ErrTargetInvalid, ErrModeUnsupported, ErrWriteUnsupported,
                ErrPartitionUnsupported, ErrSortUnsupported.
            SystemExit: bad usage.
        """
        parser = _parser()
        given = parser.parse_args(list(argv))
        target = SinkUri.parse(given.target)
        if target.settings:
            # Parsed once more, behind what was given: the last value of an option counts.
            of_uri = (f"--{name}={value}" for name, value in target.settings.items())
            given = parser.parse_args([*argv, *of_uri])
            target = target.without_settings()
        mode = target.mode(given.mode)
        target.check_write(SPARK if given.tasks_from_mib else given.write)
        partitions, sorting = target.partitions(given.partition_by), target.sorting(given.sort_by)
        tls = {"caPath": given.ca_path, "certPath": given.cert_path, "keyPath": given.key_path}
        tls["tokenFile"] = given.token_file
        return cls(
            endpoint=given.endpoint,
            changefeed=given.changefeed,
            reader=given.reader,
            target=target,
            checkpoint_dir=given.checkpoint_dir or _default_checkpoint(target, given.changefeed),
            master=given.master,
            driver_memory=given.driver_memory,
            trigger=given.trigger,
            max_rows=given.max_rows_per_trigger,
            idle_ms=_idle_ms(given.idle_cut_seconds, target),
            until_ts=given.until_ts,
            parallel=given.parallel_tables,
            compact_every=given.compact_every,
            deletion_vectors=given.deletion_vectors == ON,
            write=given.write,
            tasks_from_bytes=given.tasks_from_mib << 20,
            partitions=partitions,
            sorting=sorting,
            keep_hours=given.keep_cuts_hours,
            mode=mode,
            policy=Policy(mode, given.schema_evolution, given.on_drop),
            follow_parent=given.follow_parent,
            tls={name: value for name, value in tls.items() if value},
            conf=dict(item.split("=", 1) for item in given.conf),
        )


def _default_checkpoint(target: SinkUri, changefeed: str) -> Path:
    if target.is_database or target.is_topic or target.has_place:
        raise SourceError(
            "ErrTargetInvalid",
            "such a target needs --checkpoint-dir, a directory of this machine for Spark's own "
            "files",
        )
    return (
        Path(target.path)
        / "_tidemark_checkpoint"
        / hashlib.sha256(changefeed.encode()).hexdigest()[:12]
    )


def _idle_ms(seconds: float, target: SinkUri) -> int | None:
    """Each cut is a few requests, which somebody may pay for, and files."""
    if seconds:
        return max(1, round(seconds * 1000))
    return _IDLE_ELSEWHERE_MS if target.has_place else None


def _setting(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    if name.startswith("spark.sql.catalog.") and is_secret(name):
        raise argparse.ArgumentTypeError(
            f"{name} may hold a secret, and arguments are seen by everybody on the machine: write "
            "it into spark-defaults.conf of SPARK_CONF_DIR"
        )
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyspark_tidemark.job", allow_abbrev=False, description=__doc__
    )
    for add_to in (_add_source, _add_target, _add_cuts, _add_spark, _add_access):
        add_to(parser)
    parser.add_argument(
        "--follow-parent", action="store_true", help="end at once when standard input closes"
    )
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    """Whose rows are read, and by whom."""
    _add(parser, "endpoint", required=True)
    _add(parser, "changefeed", required=True)
    _add(parser, "reader", default="")
    _add(parser, "until-ts", type=int)


def _add_target(parser: argparse.ArgumentParser) -> None:
    """Where they go, and in what shape."""
    parser.add_argument("--target", required=True, help=FORMS)
    modes = f"{', '.join(MODES)} (default: {default_modes()})"
    parser.add_argument("--mode", default="", help=modes)
    _add(parser, "schema-evolution", default=EVOLUTIONS[0], choices=EVOLUTIONS)
    _add(parser, "on-drop", default=ON_DROP[0], choices=ON_DROP)
    _add(parser, "deletion-vectors", default=DELETION_VECTORS[0], choices=DELETION_VECTORS)
    _add(parser, "partition-by", default="")
    _add(parser, "sort-by", default="")
    _add(parser, "keep-cuts-hours", type=float, default=48.0)


def _add_cuts(parser: argparse.ArgumentParser) -> None:
    """How large cuts are, when they come, and who writes them."""
    _add(parser, "trigger", default="500 milliseconds")
    _add(parser, "max-rows-per-trigger", type=int, default=250_000)
    _add(parser, "idle-cut-seconds", type=float, default=0.0)
    parser.add_argument(
        "--parallel-tables",
        type=int,
        default=4,
        help="tables written at the same time (default: %(default)s)",
    )
    _add(parser, "compact-every", type=int, default=64)
    _add(parser, "write", default=WRITES[0], choices=WRITES)
    _add(parser, "tasks-from-mib", type=int, default=0)


def _add_spark(parser: argparse.ArgumentParser) -> None:
    """What Spark runs with."""
    _add(parser, "checkpoint-dir", type=Path)
    _add(parser, "master", default="local[2]")
    _add(parser, "driver-memory", default="1g")
    _add(parser, "conf", action="append", default=[], type=_setting)


def _add_access(parser: argparse.ArgumentParser) -> None:
    """How captures are reached."""
    add = parser.add_argument
    add("--ca-path", default="", help="PEM file of the CA that captures are checked against")
    add("--cert-path", default="", help="PEM file of our certificate")
    add("--key-path", default="", help="PEM file of our key")
    _add(parser, "token-file", default="")


def _add(parser: argparse.ArgumentParser, name: str, **how: Any) -> None:
    """An option that `tidemark spark run` has, too."""
    shown = " (default: %(default)s)" if how.get("default") else ""
    parser.add_argument(f"--{name}", help=HELP[name] + shown, **how)
