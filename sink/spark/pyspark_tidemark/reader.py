"""Reading a range: its slices packed into Spark partitions on the driver, their batches fetched on
executors; as a table's own columns, or in the envelope.

The envelope is one schema for the changes of all tables, with key, row before and row after as JSON
text. It never changes, so schema changes pass through it: they come as rows themselves, `_op` is
`ddl`, `after` has the statement and what it did to the table, and rows with a larger `_commit_ts`
have the new columns.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import BEFORE, Changefeed, ChangefeedMeta, Ddl, SliceEndpoint
from pyspark_tidemark.json_text import objects
from pyspark_tidemark.options import LOGICAL_BITS, Options
from pyspark_tidemark.query_schema import (
    COMMIT_TIME,
    check_schema,
    segments,
    without_commit_time,
)

_SPLIT_HINT = (
    "a batch has one set of columns: read the range up to the change (endTs) and the range after it "
    "(startTs) by two queries"
)
META = ("_op", "_commit_ts", "_start_ts", "_seq")
ENVELOPE_SCHEMA = pa.schema(
    [
        ("_op", pa.string()),
        *((name, pa.int64()) for name in META[1:]),
        *((name, pa.string()) for name in ("_table", "key", "before", "after")),
    ]
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One DoGet and the key of its table."""

    slice: SliceEndpoint
    key: tuple[str, ...]


class SlicePartition(InputPartition):
    """What one task reads, in order."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__(parts)
        self.parts = parts


class DdlPartition(InputPartition):
    """A schema change, as rows of the envelope."""

    def __init__(self, ddl: Ddl, tables: tuple[str, ...]) -> None:
        super().__init__((ddl, tables))
        self.ddl = ddl
        self.tables = tables


class BatchReader(DataSourceReader):
    """`spark.read.format("tidemark")`."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = without_commit_time(schema)

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
                check_schema(described, options.table, start, self._schema, hint=_SPLIT_HINT)
            partitions += plan_partitions(options, start, end, described)
        return partitions

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Runs on executors."""
        return read_batches(self._options, partition)


def plan_partitions(
    options: Options, start_ts: int, end_ts: int, described: ChangefeedMeta
) -> list[InputPartition]:
    """The partitions of `(start_ts, end_ts]`, a range without a schema change inside; `described`
    has the tables of its rows.
    """
    if end_ts <= start_ts:
        return []
    names = sorted(name for name in described.tables if options.chooses(name))
    slices = Changefeed(options).plan(start_ts, end_ts, names) if names else []
    parts = [Part(part, described.tables[part.table].key) for part in slices]
    partitions: list[InputPartition] = [
        SlicePartition(some) for some in packed_slices(parts, options.slice_bytes)
    ]
    if options.envelope:
        for ddl in described.ddls:
            touched = tuple(sorted(name for name in ddl.touched if options.chooses(name)))
            if start_ts < ddl.ts <= end_ts and touched:
                partitions.append(DdlPartition(ddl, touched))
    return partitions


def packed_slices(parts: Iterable[Part], limit_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Neighbouring slices together, up to `limit_bytes`: a task costs more than a small slice."""
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


def read_batches(options: Options, partition: InputPartition | None) -> Iterator[Any]:
    """The record batches of a partition; Spark calls it with None if there are no partitions."""
    for batch in _read_batches(options, partition):
        yield with_commit_time(batch) if options.commit_time else batch


def with_commit_time(batch: Any) -> Any:
    """The batch with `_commit_time`: a TSO's milliseconds, in UTC."""
    commit_ts = batch["_commit_ts"]
    time = pc.shift_right(commit_ts, pa.scalar(LOGICAL_BITS, pa.int64()))
    place = batch.schema.get_field_index("_commit_ts") + 1
    arrays, fields = list(batch.columns), list(batch.schema)
    arrays.insert(place, time.cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")))
    fields.insert(place, pa.field(COMMIT_TIME, arrays[place].type))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _read_batches(options: Options, partition: InputPartition | None) -> Iterator[Any]:
    if isinstance(partition, DdlPartition):
        yield ddl_rows(partition.ddl, partition.tables)
    if isinstance(partition, SlicePartition):
        changefeed = Changefeed(options)
        for part in partition.parts:
            for batch in changefeed.read(part.slice):
                yield in_envelope(batch, part.slice.table, part.key) if options.envelope else batch


def in_envelope(rows: Any, table: str, key: Sequence[str]) -> Any:
    """Mounted rows of one table in the envelope; a table without a key has null keys."""
    names = [name for name in rows.schema.names if name not in (*META, BEFORE)]
    row = objects(names, [rows[name] for name in names])
    is_delete = pc.equal(rows["_op"], "delete")
    nothing = pa.nulls(len(rows), pa.string())
    before = _before(rows[BEFORE], names) if BEFORE in rows.schema.names else nothing
    columns = [
        *(rows[name] for name in META),
        pa.repeat(pa.scalar(table), len(rows)),
        objects(key, [rows[name] for name in key]) if key else nothing,
        pc.if_else(is_delete, row, before),
        pc.if_else(is_delete, None, row),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ENVELOPE_SCHEMA)


def ddl_rows(ddl: Ddl, tables: Sequence[str]) -> Any:
    """A schema change, a row for each of `tables`."""
    after = [
        json.dumps({"query": ddl.query} | dict(_effects(ddl, name)), ensure_ascii=False)
        for name in tables
    ]
    count = len(tables)
    columns = [
        ["ddl"] * count,
        [ddl.ts] * count,
        [ddl.ts] * count,
        range(count),
        tables,
        *[[None] * count] * 2,
        after,
    ]
    arrays = [
        pa.array(column, field.type) for column, field in zip(columns, ENVELOPE_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE_SCHEMA)


def _effects(ddl: Ddl, name: str) -> Iterator[tuple[str, Any]]:
    """What a DDL did to a table, as members of the envelope's `after`."""
    for effect in ("dropped", "truncated"):
        if name in getattr(ddl, effect):
            yield effect, True
    for old, new in ddl.renamed:
        if name in (old, new):
            yield ("renamed_to", new) if name == old else ("renamed_from", old)


def _before(images: Any, names: Sequence[str]) -> Any:
    columns = [pc.struct_field(images, [name]) for name in names]
    return pc.if_else(images.is_valid(), objects(names, columns), None)
