"""The row changes of one table in one cut, read on the driver unless they are large,
else by the executors.
"""

import dataclasses
import json
from collections.abc import Iterator
from functools import cached_property, reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed, SliceEndpoint, TableMeta
from pyspark_tidemark.lake.checksum import checksum, hexadecimal
from pyspark_tidemark.lake.columns import map_in_arrow, quoted
from pyspark_tidemark.lake.format import AUTO, DRIVER, SPARK
from pyspark_tidemark.lake.schema import fitted
from pyspark_tidemark.lake.shards import with_shard
from pyspark_tidemark.lake.soft_delete import as_sent, as_sent_frame, marked, marked_frame

DELETE, INSERT = "delete", "insert"
FEW_ROWS_MAX = 20_000
"""Up to this many changes of a table in a cut, plans over them are not worth compiling."""
DRIVER_READ_MAX_BYTES = 8 << 20
"""Changes up to this size are read in the driver; larger ones by executors, which cost a Python
worker, and have to read twice to count.

Several tables are written at a time, and their rows are in the JVM, too, whose heap has 1 GiB by
default.
"""
ARROW_READ_MAX_BYTES = 64 << 20
"""The same where the driver writes the files itself: the JVM never has the rows."""
DRIVER_ONLY_READ_MAX_BYTES = 64 << 20
DRIVER_ONLY_ARROW_READ_MAX_BYTES = 256 << 20
"""Both bounds where the driver is asked to write (`--write driver`): beyond the second, tasks do.

Of what is read for the JVM, Spark takes less than 128 MiB in a message.
"""
_CELL_BYTES = 8
"""What a cell takes in memory at least, in Arrow and in Spark: captures count a byte or two, as for
nulls.
"""
_COUNTED = pa.schema([("rows", pa.int64()), ("checksum", pa.string())])


@dataclasses.dataclass(frozen=True)
class Counted:
    """What a cut holds of a table, counted from its rows: how many, and their checksum."""

    rows: int
    checksum: str


@dataclasses.dataclass(frozen=True)
class ByTasks:
    """What tasks have written of a table in a cut: files that nobody reads before the driver
    commits them.
    """

    counted: Counted
    parts: tuple[Any, ...]
    """What each task says of its files, as the target's `TaskWriter` says it."""


@dataclasses.dataclass(frozen=True)
class Changes:
    """Rows with `start_ts < _commit_ts <= end_ts`; the same range always gives the same rows."""

    table: TableMeta
    start_ts: int
    end_ts: int
    slices: tuple[SliceEndpoint, ...]
    changefeed: Changefeed
    source_options: dict[str, str]
    read_schema: Any = None
    """What the captures send, where it is not the schema of `table`:
    rows are then fitted to the latter.
    """
    emptied: bool = False
    """The target's rows from before the cut go with it (`Target.empties_with_cut`)."""
    soft_delete: bool = False
    """Deletes come as updates that mark their rows (`lake.soft_delete`)."""
    write: str = AUTO
    """Who is to read them and write their files, one of `format.WRITES`."""
    by_tasks: "ByTasks | None" = None
    """What the tasks of the cut's one job have written of them; None: nothing yet."""

    @property
    def planned_rows(self) -> int:
        """How many, as estimated by the captures."""
        return sum(part.rows for part in self.slices)

    @property
    def few(self) -> bool:
        """Whether there are few of them."""
        return self.planned_rows <= FEW_ROWS_MAX

    @property
    def here(self) -> bool:
        """Whether the driver reads them, also into a DataFrame."""
        # As one task's data they are then less than the 128 MiB that Spark allows in a message.
        return self._are_within(DRIVER_READ_MAX_BYTES, DRIVER_ONLY_READ_MAX_BYTES)

    @property
    def in_arrow(self) -> bool:
        """Whether the driver reads them to write files itself."""
        return self._are_within(ARROW_READ_MAX_BYTES, DRIVER_ONLY_ARROW_READ_MAX_BYTES)

    @property
    def in_one_task(self) -> bool:
        """Whether one task may hold all of them in memory."""
        return self.planned_bytes <= ARROW_READ_MAX_BYTES

    def _are_within(self, usual_bytes: int, driver_only_bytes: int) -> bool:
        if self.write == SPARK:
            # Where there is nothing to read, no task is needed to say so.
            return not self.slices
        return self.planned_bytes <= (driver_only_bytes if self.write == DRIVER else usual_bytes)

    @property
    def planned_bytes(self) -> int:
        """What they take in memory, as estimated by the captures."""
        reported_bytes = sum(part.size_bytes for part in self.slices)
        return max(reported_bytes, self.planned_rows * len(self.table.schema) * _CELL_BYTES)

    @property
    def spark_schema(self) -> StructType:
        """The Spark schema of the changes, envelope included."""
        return from_arrow_schema(self.table.schema)

    @cached_property
    def arrow(self) -> Any:
        """All of them as a pyarrow.Table in this process."""
        return pa.Table.from_batches(list(self.batches()), schema=self.table.schema)

    def batches(self) -> Iterator[Any]:
        """All of them in commit order, batch by batch, in this process.

        Raises:
            SourceError: ErrKeyValueUnsupported, a key is null, as of captures that know no better.
        """
        for part in sorted(self.slices, key=_start_ts):
            for batch in self.changefeed.read(part):
                _check_keys(self.table, batch)
                if self._comes_as_written:
                    yield batch
                else:
                    rows = with_shard(pa.Table.from_batches([batch]), self.table, part.table)
                    rows = marked(rows) if self.soft_delete else rows
                    yield from fitted(rows, self.table.schema).to_batches()

    def frame(self, session: SparkSession) -> DataFrame:
        """All of them as a DataFrame, read when it runs: by tasks, or from this process.

        Raises:
            SourceError: as `batches`, of what this process reads; a task fails with the same code
                and message.
        """
        if self.here:
            return session.createDataFrame(self.arrow, schema=self.spark_schema).coalesce(1)
        if not self.table.shards:
            return self._read_by_tasks(session, self.table.name)
        shards = sorted({part.table for part in self.slices})
        return reduce(DataFrame.union, [self._read_by_tasks(session, each) for each in shards])

    def _read_by_tasks(self, session: SparkSession, name: str) -> DataFrame:
        """The changes of the table, or of one shard of it."""
        reader = session.read.format("tidemark").options(**self.source_options)
        bounds = {"table": name, "startTs": str(self.start_ts), "endTs": str(self.end_ts)}
        if self.changefeed.traceparent:
            bounds["traceparent"] = self.changefeed.traceparent
        frame = _with_keys(self.table, reader.options(**bounds).load())
        if self._comes_as_written:
            return frame
        if self.table.shards:
            frame = frame.withColumn(self.table.key[0], F.lit(name))
        frame = marked_frame(frame) if self.soft_delete else frame
        return frame.select(*_fitted(frame.schema, self.spark_schema))

    def sent(self, rows: Any) -> Any:
        """Rows of them (pyarrow.Table) as the captures sent them, for a checksum."""
        return as_sent(rows) if self.soft_delete else rows

    @property
    def sums(self) -> tuple[int, int]:
        """Rows and checksum, as of `lake.checksum.checksum`, of what this process reads."""
        return checksum([self.sent(self.arrow)])

    @property
    def read_again(self) -> "Changes":
        """The same, as if no task had written them."""
        return dataclasses.replace(self, by_tasks=None, write=AUTO)

    @property
    def _comes_as_written(self) -> bool:
        return self.read_schema is None and not self.soft_delete and not self.table.shards

    def counted(self, session: SparkSession) -> Counted:
        """Rows and checksum; executors read their rows once more for it, unless they have counted
        what they wrote.
        """
        if self.by_tasks is not None:
            return self.by_tasks.counted
        if self.here or "arrow" in self.__dict__:
            rows, total = self.sums
            return Counted(rows, hexadecimal(total))
        frame = self.frame(session)
        frame = as_sent_frame(frame) if self.soft_delete else frame
        parts = map_in_arrow(frame, _counted, from_arrow_schema(_COUNTED)).collect()
        total = sum(int(part.checksum, 16) for part in parts)
        return Counted(sum(part.rows for part in parts), hexadecimal(total))


class CountedBatches:
    """The batches of changes, counted while they pass."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.rows = 0
        self.total = 0
        """A sum, as of `lake.checksum.checksum`."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self._changes.batches():
            rows, total = checksum([self._changes.sent(pa.Table.from_batches([batch]))])
            self.rows, self.total = self.rows + rows, self.total + total
            yield batch


def _check_keys(table: TableMeta, batch: Any) -> None:
    """Refuse a null in a key."""
    # Nothing finds a row again whose key is null: it could not be changed, and would come twice.
    for name in table.key:
        if name in batch.schema.names and batch.column(name).null_count:
            raise _null_key(table, name)


def _with_keys(table: TableMeta, frame: DataFrame) -> DataFrame:
    """`_check_keys` of a frame, when it runs."""
    return frame.withColumns(
        {
            name: F.coalesce(F.col(quoted(name)), F.raise_error(F.lit(str(_null_key(table, name)))))
            for name in table.key
            if name in frame.columns
        }
    )


def _null_key(table: TableMeta, name: str) -> SourceError:
    return SourceError(
        "ErrKeyValueUnsupported",
        f"{table.name}: a row's key column {name} is null, as by a capture of an older version: "
        "create the changefeed anew with a dump, and with --zero-dates key-text if the column is "
        "a date",
    )


def _counted(batches: Iterator[Any]) -> Iterator[Any]:
    rows, total = checksum(batches)
    yield pa.RecordBatch.from_arrays([[rows], [hexadecimal(total)]], schema=_COUNTED)


def _fitted(read: StructType, schema: StructType) -> list[Column]:
    return [
        (F.col(quoted(field.name)) if field.name in read.names else F.lit(None))
        .cast(field.dataType)
        .alias(field.name)
        for field in schema
    ]


def _start_ts(part: SliceEndpoint) -> int:
    return int(json.loads(part.ticket)["start"])
