"""Data files of a Delta table as its log names them: rows written with statistics, keys found, their rows masked.

Files are written and read by pyarrow; what becomes of them is said by actions, which a commit puts into the log. A file
whose rows are all masked is removed. Statistics bound what is left of a file, too, so they are kept when rows go.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_tidemark.lake.delta import masks
from pyspark_tidemark.lake.iceberg.files import file_system
from pyspark_tidemark.lake.ranges import Bounds, extent, may_meet

_STATISTICS = 32  # Delta's own default: so many columns
_TEXT = 32  # and so many characters of a text; a longer one bounds nothing from above
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

    def stored(self, rows: Any) -> Any:
        """Rows as they stand in a file."""
        fields = [
            pa.field(
                self.physical[field.name],
                field.type,
                metadata={_FIELD_ID: str(self.ids[field.name])} if field.name in self.ids else None,
            )
            for field in self.schema
        ]
        return pa.Table.from_arrays(rows.select(self.schema.names).columns, schema=pa.schema(fields))


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file that a table's version shows."""

    add: Mapping[str, Any]
    """The log's action."""
    bounds: Bounds
    """Of its columns, by their names in the table."""

    @classmethod
    def of(cls, add: Mapping[str, Any], layout: Layout) -> "DataFile":
        """With the bounds that the action's statistics tell."""
        told = json.loads(add.get("stats") or "{}", parse_float=Decimal)
        low, high = told.get("minValues", {}), told.get("maxValues", {})
        known = {name: stored for name, stored in layout.physical.items() if stored in low and stored in high}
        return cls(add, {name: (low[stored], high[stored]) for name, stored in known.items()})


def written(layout: Layout, rows: Any) -> list[dict[str, Any]]:
    """The actions of one new file with `rows` (pyarrow.Table), if there are any."""
    if not len(rows):
        return []
    name = f"part-{uuid.uuid4()}.parquet"
    system, path = file_system(f"{layout.root}/{name}")
    pq.write_table(layout.stored(rows), path, filesystem=system, compression="zstd")
    size = system.get_file_info(path).size
    common = {"path": name, "partitionValues": {}, "size": size, "modificationTime": now_ms(), "dataChange": True}
    return [{"add": common | {"stats": _statistics(layout, rows)}}]


def without(layout: Layout, files: Iterable[DataFile], keys: Any) -> list[dict[str, Any]]:
    """The actions that take the rows with `keys` (pyarrow.Table of the key's columns) out of files."""
    actions, vectors = [], Vectors(layout.root)
    for file in files:
        if not may_meet(keys, file.bounds):
            continue
        found, rows = _found(layout, file, keys)
        gone = vectors.read(file.add.get("deletionVector"))
        now = np.union1d(gone, found)
        if len(now) == len(gone):
            continue
        actions.append(_removed(file.add))
        if len(now) < rows:
            kept = {
                "dataChange": True,
                "stats": _loose(file.add.get("stats"), rows),
                "deletionVector": vectors.add(now),
            }
            actions.append({"add": {**file.add, **kept}})
    vectors.close()
    return actions


def now_ms() -> int:
    """As actions tell time."""
    return int(time.time() * 1000)


class Vectors:
    """The deletion vectors of a table; new ones go into one file, which is there when it is closed."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._id = uuid.uuid4()
        self._data = bytearray(masks.VERSION)

    def add(self, positions: Any) -> dict[str, Any]:
        """How an action names a vector of these positions."""
        vector = masks.encoded(positions)
        found = {"offset": len(self._data), "sizeInBytes": len(vector), "cardinality": len(positions)}
        self._data += masks.framed(vector)
        return {"storageType": "u", "pathOrInlineDv": masks.z85(self._id.bytes)} | found

    def read(self, named: Mapping[str, Any] | None) -> Any:
        """The positions of a vector, none for a file without one."""
        if named is None:
            return np.empty(0, np.int64)
        kind, place = named["storageType"], named["pathOrInlineDv"]
        if kind == "i":
            return masks.decoded(masks.unz85(place)[: named["sizeInBytes"]])
        location = self._location(uuid.UUID(bytes=masks.unz85(place[-20:])), place[:-20]) if kind == "u" else place
        system, path = file_system(location)
        with system.open_input_file(path) as file:
            data = file.read_at(named["sizeInBytes"] + masks.FRAME_BYTES, named.get("offset", 1))
        return masks.decoded(masks.unframed(data))

    def close(self) -> None:
        """Write the new ones."""
        if len(self._data) == len(masks.VERSION):
            return
        system, path = file_system(self._location(self._id, ""))
        with system.open_output_stream(path) as file:
            file.write(bytes(self._data))

    def _location(self, number: uuid.UUID, prefix: str) -> str:
        return f"{self._root}/{prefix}{'/' if prefix else ''}deletion_vector_{number}.bin"


def _found(layout: Layout, file: DataFile, keys: Any) -> tuple[Any, int]:
    """The positions of rows with one of the keys (sorted), and how many rows the file has."""
    system, path = file_system(f"{layout.root}/{unquote(file.add['path'])}")
    stored = [layout.physical[name] for name in keys.column_names]
    held = pq.read_table(path, columns=stored, filesystem=system, partitioning=None).select(stored)
    held = held.rename_columns(keys.column_names).cast(keys.schema)
    numbered = held.append_column("_row", pa.array(np.arange(len(held))))
    same = numbered.join(keys, keys=keys.column_names, join_type="left semi", use_threads=False)
    return np.sort(same["_row"].to_numpy()), len(held)


def _removed(add: Mapping[str, Any]) -> dict[str, Any]:
    names = ("path", "partitionValues", "size", "deletionVector")
    told = {name: add[name] for name in names if name in add}
    return {"remove": told | {"deletionTimestamp": now_ms(), "dataChange": True, "extendedFileMetadata": True}}


def _loose(stats: str | None, rows: int) -> str:
    """Statistics of a file, some rows of which are masked."""
    if not stats or '"numRecords"' not in stats:
        return json.dumps({"numRecords": rows, "tightBounds": False})
    return '{"tightBounds":false,' + stats.replace(',"tightBounds":true', "").replace('"tightBounds":false,', "")[1:]


def _statistics(layout: Layout, rows: Any) -> str:
    names = layout.schema.names[:_STATISTICS]
    ends = {layout.physical[name]: _told(*found) for name, found in extent(rows, names).items()}
    found = {
        "numRecords": len(rows),
        "minValues": {name: low for name, (low, _) in ends.items() if low is not None},
        "maxValues": {name: high for name, (_, high) in ends.items() if high is not None},
        "nullCount": {layout.physical[name]: rows[name].null_count for name in names},
        "tightBounds": True,
    }
    return json.dumps(found, separators=(",", ":"))


def _told(low: Any, high: Any) -> tuple[Any, Any]:
    """Bounds as JSON can tell them; None where it cannot."""
    if isinstance(low, str):
        return low[:_TEXT], high if len(high) <= _TEXT else None
    if isinstance(low, Decimal):
        return (int(low), int(high)) if low == int(low) and high == int(high) else (None, None)
    return low, high
