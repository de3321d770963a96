"""Parquet files of an Iceberg table, written by pyarrow to any file system that it knows,
on the driver or by tasks.
"""

import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pyspark_tidemark.lake.changes import DELETE, INSERT
from pyspark_tidemark.lake.files import file_system
from pyspark_tidemark.lake.fold import FIRST_OP
from pyspark_tidemark.lake.ranges import Bounds, possible

MOST_NEAR = 64
"""Of the ranges that are compared with each key; where more are near, a delete is cheaper."""
WRITTEN = pa.schema([("path", pa.string()), ("deletes", pa.bool_())])


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a table's files go and what is in them; pickled into tasks."""

    data: str
    """The directory for files, a path or URI."""
    schema: bytes
    """The table's schema with field ids, serialized."""
    key: tuple[str, ...]
    """What equality deletes name; empty: nothing is ever deleted."""
    key_ranges: tuple[Bounds, ...] | None = None
    """All keys of the table are within one of these; None: that is not known."""
    deletes_inserted: bool = False
    """Whether tasks write deletes of the keys that are inserted, too: some are there already."""

    @property
    def arrow(self) -> Any:
        """The schema of data files."""
        return pa.ipc.read_schema(pa.py_buffer(self.schema))

    @property
    def deletes(self) -> Any:
        """The schema of equality-delete files."""
        return pa.schema([self.arrow.field(name) for name in self.key])

    def there(self, rows: Any) -> Any:
        """Those of `rows` (pyarrow.Table) whose keys the table may hold."""
        if self.key_ranges is None or not self.key or not len(rows):
            return rows
        return rows.filter(possible(rows.select(list(self.key)), self.key_ranges, MOST_NEAR))


@dataclasses.dataclass(frozen=True)
class Written:
    """A complete file."""

    path: str
    deletes: bool


class _File:
    """One Parquet file, made at its first row."""

    def __init__(self, layout: Layout, *, deletes: bool) -> None:
        self._layout = layout
        self._deletes = deletes
        self._schema = layout.deletes if deletes else layout.arrow
        self._path = f"{layout.data}/{uuid.uuid4()}{'-deletes' if deletes else ''}.parquet"
        self._writer: Any = None

    def add(self, rows: Any) -> None:
        if not len(rows):
            return
        if self._writer is None:
            system, path = file_system(self._path)
            system.create_dir(path.rpartition("/")[0], recursive=True)
            self._writer = pq.ParquetWriter(
                path, self._schema, filesystem=system, compression="zstd"
            )
        self._writer.write_table(rows.select(self._schema.names).cast(self._schema))

    def close(self) -> list[Written]:
        if self._writer is None:
            return []
        self._writer.close()
        return [Written(self._path, self._deletes)]


def write(layout: Layout, live: Any, deleted: Any) -> list[Written]:
    """One file of rows and one of keys (pyarrow.Tables), where there are any."""
    return _write(layout, [(live, deleted)])


def write_rows(layout: Layout, batches: Iterator[Any]) -> list[Written]:
    """One file of rows."""
    return _write(
        layout,
        ((pa.Table.from_batches([batch]), layout.deletes.empty_table()) for batch in batches),
    )


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


def _parted(layout: Layout, last: Any) -> tuple[Any, Any]:
    """The rows that live, and those whose keys were there before."""
    live = last.filter(pc.not_equal(last["_op"], DELETE))
    return live, last if layout.deletes_inserted else last.filter(
        pc.not_equal(last[FIRST_OP], INSERT)
    )


def _write(
    layout: Layout, parts: Iterator[tuple[Any, Any]] | Sequence[tuple[Any, Any]]
) -> list[Written]:
    rows, keys = _File(layout, deletes=False), _File(layout, deletes=True)
    for live, deleted in parts:
        rows.add(live)
        if layout.key:
            keys.add(layout.there(deleted))
    return rows.close() + keys.close()


def _names(written: Sequence[Written]) -> Any:
    columns = [[file.path for file in written], [file.deletes for file in written]]
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[0], pa.string()), pa.array(columns[1], pa.bool_())], schema=WRITTEN
    )
