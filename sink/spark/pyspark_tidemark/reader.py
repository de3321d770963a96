"""The batch reader: rows of one table with startTs < _commit_ts <= endTs, one Spark partition per slice."""

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from pyspark_tidemark.flight import Changefeed, Slice
from pyspark_tidemark.options import Options


class SlicePartition(InputPartition):
    """What an executor needs to read one slice."""

    def __init__(self, part: Slice) -> None:
        super().__init__(part)
        self.part = part


def planned(options: Options, start_ts: int, end_ts: int) -> list[SlicePartition]:
    """The partitions of `(start_ts, end_ts]` of the options' table."""
    if end_ts <= start_ts or options.table is None:
        return []
    return [SlicePartition(part) for part in Changefeed(options).plan(start_ts, end_ts, [options.table])]


def batches(options: Options, partition: InputPartition | None) -> Iterator[Any]:
    """The record batches of a partition; Spark asks with None when there are no partitions at all."""
    if isinstance(partition, SlicePartition):
        yield from Changefeed(options).read(partition.part)


class BatchReader(DataSourceReader):
    """`spark.read.format("tidemark")`."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the range; it begins at the checkpoint and ends at what is resolved now, unless options say else."""
        changefeed = Changefeed(self._options)
        start_ts = self._options.start_ts
        if start_ts is None:
            start_ts = changefeed.describe().checkpoint_ts
        end_ts = self._options.end_ts
        if end_ts is None:
            end_ts = changefeed.latest(start_ts)
        return planned(self._options, start_ts, end_ts)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Runs on executors."""
        return batches(self._options, partition)
