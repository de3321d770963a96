"""The settings of a lake that its sink URI may carry, as in `delta:///lake?mode=append`. Pure.

A changefeed's creator says with them what the lake looks like, so they travel with the changefeed:
`changefeed create` refuses a wrong value at once, and every lake job of the changefeed uses them.
They are named like the options of `tidemark spark run`. Options that say what a job may use of a
machine (`--master`, `--driver-memory`) are the operator's and never part of a URI.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pyspark_tidemark.lake.format import DELETION_VECTORS, EVOLUTIONS, MODES, ON_DROP, WRITES
from pyspark_tidemark.lake.partitioning import rules_fault
from pyspark_tidemark.lake.sorting import sort_rules_fault

_DURATION = re.compile(r"[1-9][0-9]{0,8} ?(millisecond|second|minute)s?")


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def fault(value: str) -> str:
        return "" if value in choices else f"one of {', '.join(choices)}"

    return fault


def _whole_number(least: int) -> Callable[[str], str]:
    def fault(value: str) -> str:
        # At most nine digits: more would not fit where Spark counts in 32 bits.
        fits = re.fullmatch(r"[0-9]{1,9}", value) and int(value) >= least
        return "" if fits else f"a whole number, {least} or more"

    return fault


def _hours(value: str) -> str:
    fits = re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", value)
    return "" if fits else "hours, such as 48 or 0.5"


def _duration(value: str) -> str:
    return "" if _DURATION.fullmatch(value) else "a time, such as 500+milliseconds or 5+seconds"


SETTINGS: Final[Mapping[str, Callable[[str], str]]] = {
    "mode": _one_of(MODES),
    "schema-evolution": _one_of(EVOLUTIONS),
    "on-drop": _one_of(ON_DROP),
    "deletion-vectors": _one_of(DELETION_VECTORS),
    "write": _one_of(WRITES),
    "tasks-from-mib": _whole_number(0),
    "partition-by": rules_fault,
    "sort-by": sort_rules_fault,
    "keep-cuts-hours": _hours,
    "compact-every": _whole_number(0),
    "trigger": _duration,
    "max-rows-per-trigger": _whole_number(1),
}
"""Each setting with its rule, which says what a value must be, or nothing if it is that."""

HELP: Final[Mapping[str, str]] = {
    "endpoint": "Flight addresses of captures, grpc://host:port, separated by commas",
    "changefeed": "the changefeed's id",
    "reader": "name of a further reader of the changefeed (`changefeed add-reader`): the target is "
    "a lake beside the changefeed's own, and `changefeed list` does not show this job",
    "until-ts": "end, with status 0, once the lake is exactly at this TSO",
    "schema-evolution": "what to do at a schema change: evolve the table too, exception (stop with "
    "an error), or ignore the change",
    "on-drop": "what to do with the table in the lake when it is dropped at the source: keep it or "
    "drop it",
    "deletion-vectors": "how rows of a file are deleted: on, they are marked in a small file beside "
    "it; off, Delta writes the file again, and Iceberg writes equality deletes",
    "partition-by": "partitions of tables, as 'shop.orders=days(created_at),bucket(16,id); "
    "shop.*=region'; the first rule that fits a table counts; Delta's tables take columns only",
    "sort-by": "order of the rows in files of Iceberg's tables, as 'shop.orders=created_at desc,id; "
    "shop.*=region asc nulls last'; the first rule that fits a table counts",
    "keep-cuts-hours": "how many hours back readers can go; older cuts and their files are removed",
    "trigger": "shortest time between two cuts",
    "max-rows-per-trigger": "most rows of one cut; rows of one commit_ts always stay together",
    "idle-cut-seconds": "seconds between cuts without rows, which show that the lake is current "
    "while nothing changes; 0: 3, and 10 in catalogs, HDFS and object stores",
    "compact-every": "commits of a table between two compactions; 0: no maintenance",
    "write": "who reads the rows of a cut and writes their files: spark, Spark's tasks; driver, the "
    "driver, up to 256 MiB of a table in a cut; auto, the driver up to 64 MiB where it writes the "
    "files by itself, and 8 MiB elsewhere",
    "tasks-from-mib": "with write=auto, tasks write cuts of this many MiB or more, as with spark; "
    "0: never",
    "checkpoint-dir": "directory of this machine for Spark's checkpoint and scratch files; empty: "
    "under the target",
    "master": "Spark master",
    "driver-memory": "JVM heap of a job's driver",
    "conf": "a Spark setting of the job's session, NAME=VALUE; may be repeated; put secrets into "
    "Hadoop's or Spark's own files, as everybody on the machine sees a process's arguments",
    "token-file": "file with the token that captures ask readers for",
}
"""What the options of a lake job say of themselves, in `tidemark spark` and in the job's own help.
"""


def faults(
    options: Sequence[tuple[str, str]],
    others: Sequence[str] = (),
    settings: Sequence[str] = tuple(SETTINGS),
) -> list[str]:
    """What is wrong with the options of a URI, where `others` are allowed besides `settings`."""
    option_names = (*others, *settings)
    names = [name for name, _ in options]
    repeated = sorted({name for name in names if names.count(name) > 1})
    said = [f"{name} is given more than once" for name in repeated]
    for name, value in options:
        if name not in option_names:
            said.append(_unknown(name, option_names))
        elif name in SETTINGS and (rule := SETTINGS[name](value)):
            said.append(f"{name} is {rule}, not {value[:80]!r}")
    return said


def _unknown(name: str, option_names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, option_names, 1, 0.6)
    meant = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"there is no option {name[:80]!r}{meant} The options are {', '.join(option_names)}"
