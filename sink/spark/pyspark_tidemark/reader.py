"""Reading a range: its slices packed into Spark partitions on the driver,
their batches fetched on executors.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pyspark_tidemark.barrier import check_schema, segments
from pyspark_tidemark.envelope import ddl_rows, enveloped
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed, ChangefeedMeta, Ddl, Slice
from pyspark_tidemark.options import Options

_APART = "a batch has one set of columns: read up to it and from it on apart (endTs, startTs)"


@dataclasses.dataclass(frozen=True)
class Part:
    """One DoGet and the key of its table."""

    slice: Slice
    key: tuple[str, ...]


class SlicePartition(InputPartition):
    """What one task reads, in order."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__(parts)
        self.parts = parts


class DdlPartition(InputPartition):
    """A schema change, told in the envelope."""

    def __init__(self, ddl: Ddl, tables: tuple[str, ...]) -> None:
        super().__init__((ddl, tables))
        self.ddl = ddl
        self.tables = tables


def planned(
    options: Options, start_ts: int, end_ts: int, described: ChangefeedMeta
) -> list[InputPartition]:
    """The partitions of `(start_ts, end_ts]`, which no schema change lies inside of;
    `described` is in force in it.
    """
    if end_ts <= start_ts:
        return []
    names = sorted(name for name in described.tables if options.chooses(name))
    slices = Changefeed(options).plan(start_ts, end_ts, names) if names else []
    parts = [Part(part, described.tables[part.table].key) for part in slices]
    partitions: list[InputPartition] = [
        SlicePartition(some) for some in packed(parts, options.slice_bytes)
    ]
    if options.envelope:
        for ddl in described.ddls:
            touched = tuple(sorted(name for name in ddl.touched if options.chooses(name)))
            if start_ts < ddl.ts <= end_ts and touched:
                partitions.append(DdlPartition(ddl, touched))
    return partitions


def packed(parts: Iterable[Part], limit_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Neighbours together, up to `limit_bytes`: a task costs more than a small slice."""
    waiting: list[Part] = []
    size = 0
    for part in parts:
        if waiting and size + part.slice.size_bytes > limit_bytes:
            yield tuple(waiting)
            waiting, size = [], 0
        waiting.append(part)
        size += part.slice.size_bytes
    if waiting:
        yield tuple(waiting)


def batches(options: Options, partition: InputPartition | None) -> Iterator[Any]:
    """The record batches of a partition; Spark asks with None when there are no partitions at
    all.
    """
    if isinstance(partition, DdlPartition):
        yield ddl_rows(partition.ddl, partition.tables)
    if isinstance(partition, SlicePartition):
        changefeed = Changefeed(options)
        for part in partition.parts:
            for batch in changefeed.read(part.slice):
                yield enveloped(batch, part.slice.table, part.key) if options.envelope else batch


class BatchReader(DataSourceReader):
    """`spark.read.format("tidemark")`."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the range; it begins at the checkpoint and ends at what is resolved now,
        unless options say else.

        Raises:
            SourceError: ErrSchemaChanged, the table's columns change within the range;
                ErrOptionInvalid, it is empty.
        """
        changefeed, options = Changefeed(self._options), self._options
        now = changefeed.describe()
        start_ts = now.checkpoint_ts if options.start_ts is None else options.start_ts
        end_ts = now.resolved_ts if options.end_ts is None else options.end_ts
        if options.end_ts is not None and end_ts < start_ts:
            raise SourceError(
                "ErrOptionInvalid",
                f"option 'endTs' ({end_ts}) is before the checkpoint, {start_ts}",
            )
        partitions: list[InputPartition] = []
        for start, end, described in segments(changefeed.describe, start_ts, end_ts):
            if options.table is not None and not options.envelope:
                check_schema(described, options.table, start, self._schema, hint=_APART)
            partitions += planned(options, start, end, described)
        return partitions

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Runs on executors."""
        return batches(self._options, partition)
