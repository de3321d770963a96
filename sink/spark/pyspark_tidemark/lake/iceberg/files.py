"""The Parquet files of an Iceberg table, written and read by pyarrow, on the driver or by tasks.

`write` and `write_rows` write data files and equality deletes for a `Layout`; `Written` names a
complete file, which a commit makes visible (`catalog.Catalog.commit`). Columns are read by their
field ids: a file may have them under other names, or be older than one of them. If the table has a
sort order, the rows of each data file are sorted by it.
"""

import dataclasses
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pyspark_tidemark.lake.changes import DELETE, INSERT
from pyspark_tidemark.lake.files import (
    file_system,
    is_on_disk,
    parquet_file,
    repeating_columns,
    sync,
)
from pyspark_tidemark.lake.fold import FIRST_OP
from pyspark_tidemark.lake.iceberg.partitions import UNPARTITIONED, Partition, Partitioning
from pyspark_tidemark.lake.iceberg.row_order import RowOrder, Runs
from pyspark_tidemark.lake.iceberg.storage import Storage, is_s3
from pyspark_tidemark.lake.iceberg.types import field_ids, key_fields
from pyspark_tidemark.lake.iceberg.vectors import Vector
from pyspark_tidemark.lake.ranges import Bounds, possible

MOST_NEAR = 64
"""Of the ranges that are compared with each key; where more are near, a delete is cheaper."""
WRITTEN = pa.schema(
    [
        ("path", pa.string()),
        ("deletes", pa.bool_()),
        ("size", pa.int64()),
        ("partition", pa.struct([("spec", pa.int32()), ("values", pa.string())])),
        ("sort_order", pa.int32()),
    ]
)
"""What tasks yield, one row a `Written`."""
PENDING_BYTES_MAX = 128 << 20
"""Bytes gathered for row groups, of all partitions together, before they are written; about as many
are sorted at once.
"""
OPEN_FILES_MAX = 256
"""Partitions that are written at a time; rows of others go to further files."""
SHARE_BYTES = 128 << 20
"""About how much of a file one task reads."""
_FIELD_ID = b"PARQUET:field_id"
_READ_ROWS = 32_768
_GROUP_BYTES = 32 << 20
"""Rows are gathered for a row group of about this size."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a table's files go and what is in them; pickled into tasks."""

    data: str
    """The directory for files, a path or URI."""
    schema: bytes
    """The table's schema with field ids, serialized."""
    key: tuple[str, ...]
    """The columns of equality deletes; empty: rows are never deleted."""
    key_ranges: tuple[Bounds, ...] | None = None
    """Each key of the table is within one of these ranges; None: the ranges are not known."""
    storage: Storage = dataclasses.field(default_factory=Storage)
    partitioning: Partitioning = dataclasses.field(default_factory=Partitioning)
    deletes_inserted: bool = False
    """Whether tasks write deletes of the keys that are inserted, too: some are there already."""
    order: RowOrder = dataclasses.field(default_factory=RowOrder)
    """Of the rows in each data file."""

    @property
    def arrow(self) -> Any:
        """The schema of data files."""
        return pa.ipc.read_schema(pa.py_buffer(self.schema))

    @property
    def deletes(self) -> Any:
        """The schema of equality-delete files."""
        return pa.schema([self.arrow.field(name) for name in self.key])

    @property
    def order_columns(self) -> Any:
        """The schema of the columns by which data files are sorted."""
        schema, sources = self.arrow, {field.source for field in self.order.fields}
        return pa.schema(
            [schema.field(name) for name, number in field_ids(schema).items() if number in sources]
        )

    def in_order(self, rows: Any) -> Any:
        """Rows (pyarrow.Table) as data files have them, one after the other."""
        if not self.order.fields or not len(rows):
            return rows
        return rows.take(pa.array(self.places(rows)))

    def places(self, rows: Any) -> Any:
        """Where the rows are of which that is made (NumPy)."""
        fields = self.order_columns
        names = {number: name for name, number in field_ids(fields).items()}
        # As the table has them: another type's values may be sorted, and truncated, otherwise.
        return self.order.places(rows.select(fields.names).cast(fields), names)

    def there(self, rows: Any) -> Any:
        """Those of `rows` (pyarrow.Table) whose keys the table may hold."""
        if self.key_ranges is None or not self.key or not len(rows):
            return rows
        # As the table has them: a bound may be no value of a narrower type, as tasks get them.
        keys = rows.select(list(self.key)).cast(key_fields(self.arrow, self.key))
        return rows.filter(possible(keys, self.key_ranges, MOST_NEAR))


@dataclasses.dataclass(frozen=True)
class Written:
    """A complete file."""

    path: str
    deletes: bool
    size: int
    """In bytes."""
    partition: Partition = UNPARTITIONED
    """Of a data file."""
    sort_order: int = 0
    """The id of the order that its rows have; 0: none."""

    @classmethod
    def parse(cls, row: Sequence[Any]) -> "Written":
        """A file as a task yields it."""
        path, deletes, size, partition, sort_order = row
        return cls(path, deletes, size, Partition(*partition), sort_order)


class _Rows:
    """Rows that wait to be written, with the columns and types of a file's schema."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._waiting: list[Any] = []
        self.nbytes = 0

    def add(self, rows: Any) -> None:
        if len(rows):
            self._waiting.append(rows.select(self._schema.names).cast(self._schema))
            self.nbytes += self._waiting[-1].nbytes

    def take(self) -> Any:
        """All of them (pyarrow.Table), which wait no longer; None: there are none."""
        waiting, self._waiting, self.nbytes = self._waiting, [], 0
        return pa.concat_tables(waiting) if waiting else None


class _File:
    """One Parquet file, made at its first row."""

    def __init__(
        self, layout: Layout, *, deletes: bool = False, partition: Partition = UNPARTITIONED
    ) -> None:
        self._layout = layout
        self._deletes = deletes
        self._partition = partition
        self._schema = layout.deletes if deletes else layout.arrow
        self._path = f"{layout.data}/{uuid.uuid4()}{'-deletes' if deletes else ''}.parquet"
        self._sink: Any = None
        self._writer: Any = None
        self.pending = _Rows(self._schema)

    def add(self, rows: Any) -> None:
        self.pending.add(rows)
        if self.pending.nbytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        rows = self.pending.take()
        if rows is None:
            return
        with self._layout.storage.errors_named(self._path):
            if self._writer is None:
                self._writer = self._opened(repeating_columns(rows))
            self._writer.write_table(rows)

    def close(self) -> list[Written]:
        self.flush()
        if self._writer is None:
            return []
        with self._layout.storage.errors_named(self._path):
            self._writer.close()
            size = self._sink.tell()
            self._sink.close()
            if is_on_disk(self._path):
                sync(file_system(self._path)[1])
        order = 0 if self._deletes else self._layout.order.number
        return [Written(self._path, self._deletes, size, self._partition, order)]

    def _opened(self, repeating: list[str]) -> Any:
        system, path = self._layout.storage.open(self._path)
        # S3 has no directories, and would get an empty object for one.
        if not is_s3(self._path):
            system.create_dir(path.rpartition("/")[0], recursive=True)
        self._sink = system.open_output_stream(path)
        return pq.ParquetWriter(
            self._sink, self._schema, compression="zstd", use_dictionary=repeating
        )


class _PartitionFiles:
    """Data files of any rows, each with those of one partition."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._names = {number: name for name, number in field_ids(layout.arrow).items()}
        self._pending = _Rows(layout.arrow)
        self._open: dict[Partition, _File] = {}
        self._written: list[Written] = []

    def add(self, rows: Any) -> None:
        # Many rows at once, as each partition that they belong to gets a piece of its own.
        self._pending.add(rows)
        if self._pending.nbytes >= _GROUP_BYTES:
            self._split()

    def close(self) -> list[Written]:
        self._split()
        self._close_files()
        return self._written

    def _split(self) -> None:
        rows = self._pending.take()
        if rows is None:
            return
        for partition, part in self._layout.partitioning.split(rows, self._names):
            if partition not in self._open:
                if len(self._open) >= OPEN_FILES_MAX:
                    self._close_files()
                self._open[partition] = _File(self._layout, partition=partition)
            self._open[partition].add(part)
        # Each file waits for a row group of its own, and there may be very many.
        if sum(file.pending.nbytes for file in self._open.values()) >= PENDING_BYTES_MAX:
            for file in self._open.values():
                file.flush()

    def _close_files(self) -> None:
        for file in self._open.values():
            self._written += file.close()
        self._open = {}


class _SortedFiles:
    """Data files of any rows, each sorted: there are further ones where they would get too large to
    be sorted in memory.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pending = _Rows(layout.arrow)
        self._written: list[Written] = []

    def add(self, rows: Any) -> None:
        self._pending.add(rows)
        if self._pending.nbytes >= PENDING_BYTES_MAX:
            self._write()

    def close(self) -> list[Written]:
        self._write()
        return self._written

    def _write(self) -> None:
        rows = self._pending.take()
        if rows is None:
            return
        files = _unsorted_files(self._layout)
        files.add(self._layout.in_order(rows))
        self._written += files.close()


def _data_files(layout: Layout) -> "_File | _PartitionFiles | _SortedFiles":
    return _SortedFiles(layout) if layout.order.fields else _unsorted_files(layout)


def _unsorted_files(layout: Layout) -> "_File | _PartitionFiles":
    if layout.partitioning.fields:
        return _PartitionFiles(layout)
    return _File(layout, partition=Partition(layout.partitioning.spec, UNPARTITIONED.values))


def write(layout: Layout, live: Any, deleted: Any = None) -> list[Written]:
    """One file of rows, of each partition one, and one of keys (pyarrow.Tables), where there are
    any.
    """
    return _write(layout, [(live, deleted)])


def write_rows(layout: Layout, batches: Iterator[Any]) -> list[Written]:
    """One file of rows, of each partition one."""
    return _write(layout, ((pa.Table.from_batches([batch]), None) for batch in batches))


def written_by_task(layout: Layout) -> Any:
    """For mapInArrow over the folded changes with FIRST_OP:
    writes a task's files and yields their names.
    """

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        yield _names(
            _write(layout, (_parted(layout, pa.Table.from_batches([batch])) for batch in batches))
        )

    return run


def rows_by_task(layout: Layout) -> Any:
    """For mapInArrow over rows: writes a task's file and yields its name."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        yield _names(write_rows(layout, batches))

    return run


def joined(layout: Layout, parts: "Iterable[Share]") -> Written | None:
    """One file with the live rows of `parts`, which are of one partition, in order; None: there are
    none. Whoever asked for it knows the partition.
    """
    file = _File(layout)
    for part in _in_order(layout, list(parts)):
        file.add(part)
    return next(iter(file.close()), None)


def _in_order(layout: Layout, parts: "list[Share]") -> Iterator[Any]:
    """The live rows of `parts` in the table's order (pyarrow.Tables)."""
    if not layout.order.fields:
        yield from _live_tables(layout, parts, layout.arrow)
        return
    keys = [_table(layout, [part], layout.order_columns) for part in parts]
    if not any(map(len, keys)):
        return
    runs = Runs(layout.places(pa.concat_tables(keys)), [len(each) for each in keys])
    del keys
    if runs.are_sorted:
        rows = [_live_tables(layout, [part], layout.arrow) for part in parts]
        yield from runs.merged(rows, _READ_ROWS)
    else:  # files that are older than the table's order
        yield layout.in_order(_table(layout, parts, layout.arrow))


def joined_places(layout: Layout, parts: "Iterable[Share]", places: Any) -> Any:
    """Where those rows of `parts` are in the file that `joined` makes of them which would be at
    `places` if it did not sort; all of them in ascending order (NumPy).
    """
    if not layout.order.fields:
        return places
    fields = layout.order_columns
    order = layout.places(_table(layout, parts, fields))
    new_places = np.empty(len(order), np.int64)
    new_places[order] = np.arange(len(order))
    return np.sort(new_places[places])


def _table(layout: Layout, parts: "Iterable[Share]", fields: Any) -> Any:
    return pa.concat_tables([fields.empty_table(), *_live_tables(layout, parts, fields)])


def _live_tables(layout: Layout, parts: "Iterable[Share]", fields: Any) -> Iterator[Any]:
    for share in parts:
        for rows, _ in live_rows(layout.storage, share, fields):
            yield pa.Table.from_batches([rows])


def joined_by_task(layout: Layout) -> Any:
    """For mapInArrow over numbered groups of shares: writes the file of each (`joined`),
    and yields its number, name and size, if there is one.
    """

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for row in batch.to_pylist():
                written = joined(layout, map(Share.parse, row["shares"]))
                if written is not None:
                    yield pa.RecordBatch.from_pydict(
                        {"number": [row["number"]], "path": [written.path], "size": [written.size]}
                    )

    return run


def _parted(layout: Layout, last: Any) -> tuple[Any, Any]:
    """The rows that live, and those whose keys were there before."""
    live = last.filter(pc.not_equal(last["_op"], DELETE))
    return live, last if layout.deletes_inserted else last.filter(
        pc.not_equal(last[FIRST_OP], INSERT)
    )


def _write(
    layout: Layout, parts: Iterator[tuple[Any, Any]] | Sequence[tuple[Any, Any]]
) -> list[Written]:
    rows, keys = _data_files(layout), _File(layout, deletes=True)
    for live, deleted in parts:
        rows.add(live)
        if layout.key and deleted is not None:
            keys.add(layout.there(deleted))
    return rows.close() + keys.close()


def _names(written: Sequence[Written]) -> Any:
    rows = [{**dataclasses.asdict(file), "partition": file.partition._asdict()} for file in written]
    return pa.RecordBatch.from_pylist(rows, schema=WRITTEN)


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a file, for one task: the row groups whose middle lies in it."""

    location: str
    sequence: int
    """The file's data sequence number, which a column may show."""
    number: int
    of: int
    vector: Vector | None = None
    """Which rows of the file are no rows of the table."""

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> "Share":
        """A share as tasks are given it."""
        vector = row["vector"]
        return cls(**{**row, "vector": None if vector is None else Vector(**vector)})


def shares(file: Share, size: int) -> list[Share]:
    """A file of that many bytes as shares of about SHARE_BYTES."""
    of = max(1, size // SHARE_BYTES)
    return [dataclasses.replace(file, number=number, of=of) for number in range(of)]


def read_columns(storage: Storage, location: str, fields: Any) -> Any:
    """The columns of a file (pyarrow.Table) whose ids `fields` (pyarrow.Schema) has, with its names
    and types; one that the file has not is null.
    """
    with storage.errors_named(location):
        system, path = storage.open(location)
        with parquet_file(system, path, pre_buffer=True) as file:
            stored = file.read(columns=_stored_names(file, fields))
            return pa.table(_columns(file, stored, fields), names=fields.names).cast(fields)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The names of columns that say where a row comes from; empty: there is no such column."""

    sequence: str = ""
    """The data sequence number of its file."""
    file: str = ""
    """The location of its file."""
    position: str = ""
    """Its place among all rows of the file."""


def rows_of_shares(storage: Storage, fields: Any, origin: Origin) -> Any:
    """For mapInArrow over rows of `Share`: the columns of the rows in them that no vector masks, as
    `read_columns` has them, and those of `origin`.
    """
    serialized = fields.serialize().to_pybytes()

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        columns = pa.ipc.read_schema(pa.py_buffer(serialized))
        for batch in batches:
            for row in batch.to_pylist():
                share = Share.parse(row)
                for rows, positions in live_rows(storage, share, columns):
                    yield _with_origin(rows, positions, share, origin)

    return run


def _with_origin(rows: Any, positions: Any, share: Share, origin: Origin) -> Any:
    count = len(rows)
    if origin.sequence:
        sequences = pa.repeat(pa.scalar(share.sequence, pa.int64()), count)
        rows = rows.append_column(origin.sequence, sequences)
    if origin.file:
        rows = rows.append_column(origin.file, pa.repeat(share.location, count))
    if origin.position:
        rows = rows.append_column(origin.position, pa.array(positions, pa.int64()))
    return rows


def live_rows(storage: Storage, share: Share, fields: Any) -> Iterator[tuple[Any, Any]]:
    """The rows of a share that no vector masks (RecordBatch), and their places among all rows of
    the file (NumPy).
    """
    masked = None if share.vector is None else share.vector.positions(storage)
    with storage.errors_named(share.location):
        system, path = storage.open(share.location)
        with parquet_file(system, path, pre_buffer=True) as file:
            groups, at = _row_groups(file.metadata, share)
            names = _stored_names(file, fields)
            for batch in file.iter_batches(_READ_ROWS, row_groups=groups, columns=names):
                positions = np.arange(at, at + batch.num_rows)
                at += batch.num_rows
                # Not of the batch: it has no columns where the file has none of the fields.
                rows = pa.table(_columns(file, batch, fields), names=fields.names).cast(fields)
                if masked is not None and len(masked):
                    is_live = ~np.isin(positions, masked)
                    rows, positions = rows.filter(pa.array(is_live)), positions[is_live]
                for part in rows.combine_chunks().to_batches():
                    yield part, positions


def _row_groups(metadata: Any, share: Share) -> tuple[list[int], int]:
    """The row groups of a share, which follow each other, and the place of their first row; each
    group is in exactly one of a file's shares.
    """
    groups: list[int] = []
    rows, begin, first = metadata.num_rows, 0, 0
    for group in range(metadata.num_row_groups):
        count = metadata.row_group(group).num_rows
        if (begin + count / 2) * share.of // max(1, rows) == share.number:
            first = first if groups else begin
            groups.append(group)
        begin += count
    return groups, first


def _stored_names(file: Any, fields: Any) -> list[str]:
    """What the file calls those of the fields that it has."""
    names = _names_by_id(file)
    return [names[number] for number in _ids(fields) if number in names]


def _columns(file: Any, stored: Any, fields: Any) -> list[Any]:
    names = _names_by_id(file)
    missing = pa.nulls(stored.num_rows)
    return [stored[names[number]] if number in names else missing for number in _ids(fields)]


def _ids(fields: Any) -> list[int]:
    return [int(field.metadata[_FIELD_ID]) for field in fields]


def _names_by_id(file: Any) -> dict[int, str]:
    return {
        int(field.metadata[_FIELD_ID]): field.name
        for field in file.schema_arrow
        if field.metadata and _FIELD_ID in field.metadata
    }
