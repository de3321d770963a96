"""Data files of a Delta table as its log names them: rows written,
keys found and their rows masked, files joined.

Files are written and read by pyarrow; what becomes of them is said by actions, which a commit puts
into the log. A file whose rows are all masked is removed. Statistics bound what is left of a file,
too, so they are kept when rows go.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_tidemark.lake.delta.deletion_vectors import DeletionVectors
from pyspark_tidemark.lake.delta.parquet import Layout, NewFile, now_ms, pieces
from pyspark_tidemark.lake.files import file_system
from pyspark_tidemark.lake.mode import VALID_TO
from pyspark_tidemark.lake.ranges import Bounds, met


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file that a table's version shows."""

    add: Mapping[str, Any]
    """The log's action."""
    bounds: Bounds
    """Of its columns, by their names in the table."""
    rows: int
    """How many it has, masked ones included; 0 if that is not told."""
    ended: bool = False
    """Whether it is known that all of them are versions that have ended (mode `scd2`)."""

    @classmethod
    def of(cls, add: Mapping[str, Any], layout: Layout) -> "DataFile":
        """With what the action's statistics tell."""
        statistics = json.loads(add.get("stats") or "{}", parse_float=Decimal)
        low, high = statistics.get("minValues", {}), statistics.get("maxValues", {})
        bounded = {
            name: stored
            for name, stored in layout.physical.items()
            if stored in low and stored in high
        }
        bounds = {name: (low[stored], high[stored]) for name, stored in bounded.items()}
        open_versions = statistics.get("nullCount", {}).get(layout.physical.get(VALID_TO))
        return cls(add, bounds, int(statistics.get("numRecords", 0)), open_versions == 0)

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.add["size"])

    @property
    def masked(self) -> int:
        """How many rows it has that the table does not show."""
        return int((self.add.get("deletionVector") or {}).get("cardinality", 0))


def written(layout: Layout, rows: Any) -> list[dict[str, Any]]:
    """The actions of one new file with `rows` (pyarrow.Table), if there are any."""
    file = NewFile(layout)
    file.add(rows)
    return file.close()


def without(layout: Layout, files: Iterable[DataFile], keys: Any) -> list[dict[str, Any]]:
    """The actions that take the rows with `keys` (pyarrow.Table of the key's columns) out of
    files.
    """
    actions, vectors = [], DeletionVectors(layout.root)
    for file in meeting(files, keys):
        stored = numbered(layout, file, keys.schema)
        removed = stored.join(
            keys, keys=keys.column_names, join_type="left semi", use_threads=False
        )
        gone = vectors.read(file.add.get("deletionVector"))
        actions += without_rows(file, gone, removed["_row"].to_numpy(), len(stored), vectors)
    vectors.close()
    return actions


def meeting(files: Iterable[DataFile], keys: Any) -> list[DataFile]:
    """The files that may hold one of `keys` (pyarrow.Table of the key's columns)."""
    all_files = list(files)
    return list(itertools.compress(all_files, met(keys, [file.bounds for file in all_files])))


def without_rows(
    file: DataFile, gone: Any, positions: Any, rows: int, vectors: DeletionVectors
) -> list[dict[str, Any]]:
    """The actions that take the rows at `positions` out of a file of so many rows,
    of which those at `gone` are out.

    The new vector goes into `vectors`.
    """
    now = np.union1d(gone, positions)
    if len(now) == len(gone):
        return []
    if len(now) == rows:
        return [_removed(file.add)]
    stats = _loose(file.add.get("stats"), rows)
    return [
        _removed(file.add),
        {
            "add": {
                **file.add,
                "dataChange": True,
                "stats": stats,
                "deletionVector": vectors.add(now),
            }
        },
    ]


def all_removed(files: Iterable[DataFile]) -> list[dict[str, Any]]:
    """The actions that take files out of the table."""
    return [_removed(file.add) for file in files]


def joined(
    layout: Layout, files: Sequence[DataFile], filled: Sequence[tuple[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The actions that put one new file with the same rows, and no others, into the place of files.

    The columns `filled` hold a value (pyarrow.Scalar) in each of these rows.
    """
    vectors, new, changed = DeletionVectors(layout.root), NewFile(layout), bool(filled)
    for file in files:
        for rows in pieces(layout, file.add, vectors.read(file.add.get("deletionVector"))):
            new.add(_with(rows, filled))
    return [
        *(_removed(file.add, data_change=changed) for file in files),
        *new.close(data_change=changed),
    ]


def _with(rows: Any, values: Iterable[tuple[str, Any]]) -> Any:
    """Rows with the same value (pyarrow.Scalar) in each of them, for some columns."""
    for name, value in values:
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.repeat(value, len(rows)))
    return rows


def numbered(layout: Layout, file: DataFile, schema: Any) -> Any:
    """Columns of a file as they are in `schema`, masked rows included,
    and the position of each row as `_row`.
    """
    system, path = file_system(layout.location(file.add))
    stored = [layout.physical[name] for name in schema.names]
    rows = pq.read_table(path, columns=stored, filesystem=system, partitioning=None)
    none = pa.nulls(rows.num_rows)  # a file may be older than a column
    columns = [rows[name] if name in rows.column_names else none for name in stored]
    rows = pa.table(columns, names=schema.names).cast(schema)
    return rows.append_column("_row", pa.array(np.arange(len(rows))))


def _removed(add: Mapping[str, Any], *, data_change: bool = True) -> dict[str, Any]:
    names = ("path", "partitionValues", "size", "deletionVector")
    identity = {name: add[name] for name in names if name in add}
    fields = {
        "deletionTimestamp": now_ms(),
        "dataChange": data_change,
        "extendedFileMetadata": True,
    }
    return {"remove": identity | fields}


def _loose(stats: str | None, rows: int) -> str:
    """Statistics of a file, some rows of which are masked."""
    if not stats or '"numRecords"' not in stats:
        return json.dumps({"numRecords": rows, "tightBounds": False})
    return (
        '{"tightBounds":false,'
        + stats.replace(',"tightBounds":true', "").replace('"tightBounds":false,', "")[1:]
    )
