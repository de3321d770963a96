"""One Spark job for a whole cut: its tasks read the slices of many tables from the captures and
write their files; the driver gets the files' names to commit, and no rows.

A target gives a `TaskWriter` for the changes of a table. Small tables share a task, as a task costs
more than a small file; the slices of a large one go to several tasks, if its writer allows that.

Invariant: a file that a task has written belongs to no table before the driver commits it, and its
name is unique. So Spark may run a task again, or in several places at once: files that are not
committed are never read.
"""

import dataclasses
import heapq
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import SliceEndpoint
from pyspark_tidemark.lake.changes import ByTasks, Changes, Counted
from pyspark_tidemark.lake.checksum import hexadecimal
from pyspark_tidemark.lake.failure import in_table

SHARE_BYTES = 32 << 20
"""About how many bytes of a large table one task writes, into one file."""
_TABLE_COST_BYTES = 256 << 10
"""The fixed cost of a table in a task, as the bytes that are written in the same time."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The outcome of one task for a table."""

    rows: int
    checksum: int
    """A sum, as of `lake.checksum.checksum`."""
    made: Any
    """The files, as the target needs them for its commit."""


class TaskWriter(Protocol):
    """Writes the files of a table's changes in a task, where it is sent to by pickle."""

    @property
    def is_divisible(self) -> bool:
        """Whether tasks may write the changes slice by slice; else one task gets all of them."""

    def write(self, changes: Changes) -> Part:
        """Read the changes and write their files, durable as far as the task's machine can say."""


@dataclasses.dataclass(frozen=True)
class Share:
    """Changes of one table for one task."""

    table: str
    changes: Changes
    writer: TaskWriter

    @property
    def cost(self) -> int:
        """By which tasks get shares, in bytes."""
        return self.changes.planned_bytes + _TABLE_COST_BYTES


def write_by_tasks(
    spark: SparkSession, writers: Iterable[tuple[Changes, TaskWriter]]
) -> dict[str, ByTasks]:
    """Run the job for tables of a cut; returns what was written, by the table's name.

    Raises:
        SourceError: a task's, with the table in its message.
        PySparkException: of the job, or any other exception of a task.
    """
    shares = [share for changes, writer in writers for share in divided(changes, writer)]
    if not shares:
        return {}
    context = spark.sparkContext
    groups = packed(shares, context.defaultParallelism)
    parts: dict[str, list[Part]] = defaultdict(list)
    for table, part in context.parallelize(groups, len(groups)).flatMap(_written).collect():
        parts[table].append(part)
    return {table: _joined(of_table) for table, of_table in parts.items()}


def divided(changes: Changes, writer: TaskWriter) -> Iterator[Share]:
    """The changes of a table as shares, each of about SHARE_BYTES or of one slice. Pure."""
    name = changes.table.name
    if not writer.is_divisible:
        yield Share(name, changes, writer)
        return
    waiting: list[SliceEndpoint] = []
    size = 0
    for part in changes.slices:
        if waiting and size + part.size_bytes > SHARE_BYTES:
            yield Share(name, dataclasses.replace(changes, slices=tuple(waiting)), writer)
            waiting, size = [], 0
        waiting.append(part)
        size += part.size_bytes
    yield Share(name, dataclasses.replace(changes, slices=tuple(waiting)), writer)


def packed(shares: Sequence[Share], slots: int) -> list[list[Share]]:
    """Shares in groups for about equal tasks: one for each of the `slots` in which tasks run, more
    where they would get more than SHARE_BYTES each. Pure.
    """
    total = sum(share.cost for share in shares)
    count = min(len(shares), max(1, slots, -(-total // SHARE_BYTES)))
    groups: list[list[Share]] = [[] for _ in range(count)]
    least = [(0, number) for number in range(count)]
    # The largest first, each to the group with the least cost so far.
    for share in sorted(shares, key=lambda each: each.cost, reverse=True):
        cost, number = heapq.heappop(least)
        groups[number].append(share)
        heapq.heappush(least, (cost + share.cost, number))
    return groups


def check_mounted(directory: str) -> None:
    """Check that a directory which the driver has made is one of the task's machine, too.

    Raises:
        SourceError: ErrTargetUnusable.
    """
    if not Path(directory).is_dir():
        raise SourceError(
            "ErrTargetUnusable",
            f"the executor on {socket.gethostname()} has no directory {directory}: mount the lake "
            "under the same path on every machine of the cluster, or use --write driver",
        )


def check_arrived(path: Path, size: int) -> None:
    """Check that the driver has a file that a task has written.

    Raises:
        SourceError: ErrTargetUnusable.
    """
    if not path.exists() or path.stat().st_size != size:
        raise SourceError(
            "ErrTargetUnusable",
            f"an executor has written {path}, and the driver does not see it: mount the lake under "
            "the same path on every machine of the cluster, or use --write driver",
        )


def _written(group: Iterable[Share]) -> Iterator[tuple[str, Part]]:
    """Runs in a task."""
    for share in group:
        try:
            yield share.table, share.writer.write(share.changes)
        except SourceError as err:
            # Of a task's traceback the driver reads the first code, so there must be one only.
            raise in_table(err, share.table) from None


def _joined(parts: Sequence[Part]) -> ByTasks:
    total = sum(part.checksum for part in parts)
    counted = Counted(sum(part.rows for part in parts), hexadecimal(total))
    return ByTasks(counted, tuple(part.made for part in parts))
