"""The Parquet files of a Delta table: written in pieces, with statistics of all of them;
read without deleted rows.

A `Layout` says where a table's files are, and what they call its columns: with column mapping, by
physical names and field ids that renaming leaves alone.

Invariant: however large files are, what is in memory of them is a few pieces.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_tidemark.lake.files import file_system
from pyspark_tidemark.lake.ranges import Bounds, extent, hull
from pyspark_tidemark.lake.schema import fitted

_FIELD_ID = b"PARQUET:field_id"


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is needed to read and write a table's files."""

    root: str
    schema: Any
    """The table's columns (pyarrow.Schema)."""
    physical: Mapping[str, str]
    """What files call them."""
    ids: Mapping[str, int]
    """Their field ids; none without column mapping."""

    def location(self, add: Mapping[str, Any]) -> str:
        """Where the file of an action is."""
        return f"{self.root}/{unquote(add['path'])}"

    @property
    def stored(self) -> Any:
        """The schema of a new file."""
        return pa.schema([self._stored(field) for field in self.schema])

    def _stored(self, field: Any) -> Any:
        number = self.ids.get(field.name)
        metadata = None if number is None else {_FIELD_ID: str(number)}
        return pa.field(self.physical[field.name], field.type, metadata=metadata)


_STATISTICS = 32  # Delta's own default: so many columns
# and so many characters of a text; a longer one bounds nothing from above
_TEXT = 32
_PIECE_ROWS = 8192
_GROUP_BYTES = 32 << 20


class NewFile:
    """A file that rows are added to, made at the first of them; complete when it is closed."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._name = f"part-{uuid.uuid4()}.parquet"
        self._system, self._path = file_system(f"{layout.root}/{self._name}")
        self._columns = layout.schema.names[:_STATISTICS]
        self._pending: list[Any] = []
        self._writer: Any = None
        self._rows = 0
        self._ends: Bounds = {}
        self._nulls = dict.fromkeys(self._columns, 0)

    def add(self, rows: Any) -> None:
        """Add rows (pyarrow.Table) that have at least the columns of the table."""
        self._pending.append(rows.select(self._layout.schema.names))
        if sum(piece.nbytes for piece in self._pending) >= _GROUP_BYTES:
            self._flush()

    def close(self, *, data_change: bool = True) -> list[dict[str, Any]]:
        """The action that adds the file to the table, if it has rows."""
        self._flush()
        if self._writer is None:
            return []
        self._writer.close()
        size = self._system.get_file_info(self._path).size
        common = {
            "path": self._name,
            "partitionValues": {},
            "size": size,
            "modificationTime": now_ms(),
        }
        return [{"add": common | {"dataChange": data_change, "stats": self._statistics()}}]

    def _flush(self) -> None:
        rows = (
            pa.concat_tables(self._pending) if self._pending else self._layout.schema.empty_table()
        )
        self._pending = []
        if not len(rows):
            return
        schema = self._layout.stored
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._path, schema, filesystem=self._system, compression="zstd"
            )
        self._writer.write_table(pa.Table.from_arrays(rows.columns, schema=schema))
        self._rows += len(rows)
        self._ends = hull(self._ends, extent(rows, self._columns))
        for name in self._columns:
            self._nulls[name] += rows[name].null_count

    def _statistics(self) -> str:
        physical = self._layout.physical
        ends = {physical[name]: _told(*column_ends) for name, column_ends in self._ends.items()}
        statistics = {
            "numRecords": self._rows,
            "minValues": {name: low for name, (low, _) in ends.items() if low is not None},
            "maxValues": {name: high for name, (_, high) in ends.items() if high is not None},
            "nullCount": {physical[name]: nulls for name, nulls in self._nulls.items()},
            "tightBounds": True,
        }
        return json.dumps(statistics, separators=(",", ":"))


def pieces(layout: Layout, add: Mapping[str, Any], gone: Any) -> Iterator[Any]:
    """The rows of a file in order, without those at the positions `gone`,
    as the table's columns are now.
    """
    system, path = file_system(layout.location(add))
    with pq.ParquetFile(path, filesystem=system) as file:
        there = {
            name: stored
            for name, stored in layout.physical.items()
            if stored in file.schema_arrow.names
        }
        live = np.ones(file.metadata.num_rows, bool)
        live[gone] = False
        at = 0
        for batch in file.iter_batches(_PIECE_ROWS, columns=list(there.values())):
            rows = (
                pa.Table.from_batches([batch])
                .select(list(there.values()))
                .rename_columns(list(there))
            )
            kept = live[at : at + len(batch)]
            at += len(batch)
            if kept.any():
                yield fitted(rows if kept.all() else rows.filter(pa.array(kept)), layout.schema)


def now_ms() -> int:
    """As actions tell time."""
    return int(time.time() * 1000)


def _told(low: Any, high: Any) -> tuple[Any, Any]:
    """Bounds as JSON can tell them; None where it cannot."""
    if isinstance(low, str):
        return low[:_TEXT], high if len(high) <= _TEXT else None
    if isinstance(low, Decimal):
        return (int(low), int(high)) if low == int(low) and high == int(high) else (None, None)
    return low, high
