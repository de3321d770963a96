"""The files of a Delta table, written and read by pyarrow: data files in Parquet, and the deletion
vectors that mask rows of them.

- `Layout`: where a table's files are, and the names of its columns in them. With column mapping
  these are physical names and field ids, which a rename of the column does not change.
- `DataFile`: a data file that a version shows. The functions after it return actions of Delta's log
  that add, remove and mask files; a commit (`log`) makes them visible.
- `NewFile` and `pieces` write and read Parquet; `DeletionVectors` the vectors, whose format is in
  `roaring`. `partitions` has the columns that are not in files, as they partition the table.

Invariants:
1. However large a file is, only a few pieces of it are in memory.
2. A file whose rows are all masked is removed. A file's statistics still bound the rows that are
   left when some are masked, so they are kept.
"""

import dataclasses
import itertools
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_tidemark.lake import roaring
from pyspark_tidemark.lake.delta import partitions
from pyspark_tidemark.lake.delta.partitions import Values
from pyspark_tidemark.lake.files import file_system, parquet_file, repeating_columns
from pyspark_tidemark.lake.keys import ColumnCache, places_of
from pyspark_tidemark.lake.ranges import Bounds, extent, hull, met
from pyspark_tidemark.lake.schema import VALID_TO, fitted

_FIELD_ID = b"PARQUET:field_id"
_PIECE_ROWS = 8192
_GROUP_BYTES = 32 << 20
_OPEN_FILES_MAX = 256
"""Partitions that are written at a time; rows of others go to further files."""
_PENDING_BYTES_MAX = 128 << 20
"""Bytes gathered for row groups, of all partitions together, before they are written."""
_STATISTICS_COLUMNS, _STATISTICS_CHARACTERS = 32, 32
"""Of how many columns a file has statistics, and of how many characters of a text: Delta's own
defaults.
"""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a table's files are, and how its columns are stored in them."""

    root: str
    schema: Any
    """The table's columns (pyarrow.Schema)."""
    physical: Mapping[str, str]
    """What files call them."""
    ids: Mapping[str, int]
    """Their field ids; none without column mapping."""
    vectors: bool = True
    """Whether rows that are gone are masked; else their files are written anew without them."""
    partitions: tuple[str, ...] = ()
    """The columns that files have not, as all rows of one are of the same partition."""

    def location(self, add: Mapping[str, Any]) -> str:
        """Where the file of an action is."""
        return f"{self.root}/{unquote(add['path'])}"

    @property
    def stored(self) -> Any:
        """The schema of a new file."""
        return pa.schema([self._stored(self.schema.field(name)) for name in self.in_files])

    @property
    def in_files(self) -> list[str]:
        """The columns that files have."""
        return [name for name in self.schema.names if name not in self.partitions]

    @property
    def partition_columns(self) -> dict[str, str]:
        """The columns that files have not, and what the log calls them."""
        return {name: self.physical[name] for name in self.partitions}

    def constants(self, add: Mapping[str, Any]) -> dict[str, Any]:
        """The values (pyarrow.Scalar) of the file of an action in the columns that it has not."""
        values = add.get("partitionValues") or {}
        return {
            name: partitions.decoded(values.get(stored), self.schema.field(name).type)
            for name, stored in self.partition_columns.items()
        }

    def _stored(self, field: Any) -> Any:
        number = self.ids.get(field.name)
        metadata = None if number is None else {_FIELD_ID: str(number)}
        return pa.field(self.physical[field.name], field.type, metadata=metadata)


_EXACT_UNITS, _EXACT_SCALE = 10**15, 22
"""Decimals of fewer units, and of no more digits behind the point, come through a double as they
are.
"""


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file that a table's version shows."""

    add: Mapping[str, Any]
    """The log's action."""
    bounds: Bounds
    """Of its columns, by their names in the table."""
    rows: int
    """How many it has, masked ones included; 0 if the log does not say."""
    ended: bool = False
    """Whether all of them are known to be versions that have ended (mode `scd2`)."""

    @classmethod
    def of(cls, add: Mapping[str, Any], layout: Layout) -> "DataFile":
        """The file of an `add` action, with what its statistics say."""
        statistics = json.loads(add.get("stats") or "{}", parse_float=Decimal)
        low, high = statistics.get("minValues", {}), statistics.get("maxValues", {})
        ends = {
            name: (low[stored], high[stored])
            for name, stored in ((name, layout.physical[name]) for name in layout.in_files)
            if stored in low and stored in high
        }
        bounds = {
            name: pair
            for name, pair in ends.items()
            if all(_is_exact(end, layout.schema.field(name).type) for end in pair)
        }
        if layout.partitions:
            bounds |= extent(_one_row(layout.constants(add)), layout.partitions)
        # Current versions have no end: a file without nulls there has none of them.
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

    @property
    def partition(self) -> Values:
        """The values of its partition, as the log has them."""
        return self.add.get("partitionValues") or {}


class DeletionVectors:
    """The deletion vectors of a table, in files of their own or in the log; new ones go into one
    file, which is written by `close`.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._id = uuid.uuid4()
        self._data = bytearray(roaring.VERSION)

    def add(self, positions: Any) -> dict[str, Any]:
        """The descriptor of a vector of these positions, as actions hold it."""
        vector = roaring.encoded(positions)
        descriptor = {
            "storageType": "u",
            "pathOrInlineDv": roaring.z85(self._id.bytes),
            "offset": len(self._data),
            "sizeInBytes": len(vector),
            "cardinality": len(positions),
        }
        self._data += roaring.framed(vector)
        return descriptor

    def read(self, descriptor: Mapping[str, Any] | None) -> Any:
        """The positions of a vector, none for a file without one."""
        if descriptor is None:
            return np.empty(0, np.int64)
        kind, place = descriptor["storageType"], descriptor["pathOrInlineDv"]
        size = descriptor["sizeInBytes"]
        if kind == "i":
            return roaring.decoded(roaring.unz85(place)[:size])
        location = self.place(descriptor) or place
        system, path = file_system(location)
        with system.open_input_file(path) as file:
            # A file may hold one vector without an offset: behind the byte of its version.
            data = file.read_at(size + roaring.FRAME_BYTES, descriptor.get("offset", 1))
        return roaring.positions_in(data, location)

    def place(self, descriptor: Mapping[str, Any]) -> str | None:
        """The file that a vector is in; None: it has none of the table's own."""
        if descriptor["storageType"] != "u":
            return None
        # The last 20 characters are a UUID as Z85, those before them a directory's name.
        place = descriptor["pathOrInlineDv"]
        return self._location(uuid.UUID(bytes=roaring.unz85(place[-20:])), place[:-20])

    def close(self) -> None:
        """Write the new ones; their file must be there before a commit names it."""
        if len(self._data) == len(roaring.VERSION):
            return
        system, path = file_system(self._location(self._id, ""))
        with system.open_output_stream(path) as file:
            file.write(bytes(self._data))

    def _location(self, number: uuid.UUID, prefix: str) -> str:
        return f"{self._root}/{prefix}{'/' if prefix else ''}deletion_vector_{number}.bin"


def written(layout: Layout, rows: Any) -> list[dict[str, Any]]:
    """The actions of new files with `rows` (pyarrow.Table), of each partition one."""
    return [action for action, _ in written_by_partition(layout, rows)]


def written_by_partition(layout: Layout, rows: Any) -> list[tuple[dict[str, Any], Any]]:
    """The same, each with the rows of its file."""
    actions = []
    for values, part in partitions.split(rows, layout.partition_columns):
        file = NewFile(layout, values)
        file.add(part)
        actions += [(action, part) for action in file.close()]
    return actions


def without(
    layout: Layout, files: Iterable[DataFile], keys: Any, kept: ColumnCache
) -> list[dict[str, Any]]:
    """The actions that take the rows with `keys` (pyarrow.Table of the key's columns) out of
    files, whose key columns are `kept` for the next time.
    """
    actions, vectors = [], DeletionVectors(layout.root)
    for file in meeting(files, keys):
        columns = kept.of(
            kept_as(layout, file.add, keys.schema),
            partial(stored_columns, layout, file, keys.schema),
        )
        masked = vectors.read(file.add.get("deletionVector"))
        places = (masked, places_of(columns, keys), len(columns))
        actions += without_rows(layout, file, places, vectors)
    vectors.close()
    return actions


def kept_as(layout: Layout, add: Mapping[str, Any], key: Any) -> tuple[Any, ...]:
    """How `ColumnCache` calls the columns of `key` (pyarrow.Schema) in the file of an action."""
    return layout.location(add), tuple(layout.physical[name] for name in key.names), str(key)


def meeting(files: Iterable[DataFile], keys: Any) -> list[DataFile]:
    """The files that may hold one of `keys` (pyarrow.Table of the key's columns)."""
    all_files = list(files)
    return list(itertools.compress(all_files, met(keys, [file.bounds for file in all_files])))


def without_rows(
    layout: Layout, file: DataFile, places: tuple[Any, Any, int], vectors: DeletionVectors
) -> list[dict[str, Any]]:
    """The actions that take rows out of a file: `places` are the positions of those that are out
    already, of those that are to go, and the number of all its rows.

    The new vector goes into `vectors`; in a table without vectors a new file has the other rows.
    """
    masked, positions, rows = places
    all_masked = np.union1d(masked, positions)
    if len(all_masked) == len(masked):
        return []
    if len(all_masked) == rows:
        return [_removed(file.add)]
    if not layout.vectors:
        new = NewFile(layout, file.partition)
        for piece in pieces(layout, file.add, all_masked):
            new.add(piece)
        return [_removed(file.add), *new.close()]
    # A file with another deletion vector is another logical file to Delta's protocol: it is removed
    # and added again, under the same path.
    added = {
        **file.add,
        "dataChange": True,
        "stats": _loose(file.add.get("stats"), rows),
        "deletionVector": vectors.add(all_masked),
    }
    return [_removed(file.add), {"add": added}]


def all_removed(files: Iterable[DataFile]) -> list[dict[str, Any]]:
    """The actions that take files out of the table."""
    return [_removed(file.add) for file in files]


def joined(
    layout: Layout, files: Sequence[DataFile], filled: Sequence[tuple[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The actions that put one new file with the same rows, and no others, into the place of files,
    all of one partition.

    The columns `filled` hold a value (pyarrow.Scalar) in each of these rows.
    """
    # Rows that stay as they are make no dataChange: streams that read the table skip such commits.
    vectors, changed = DeletionVectors(layout.root), bool(filled)
    new = NewFile(layout, files[0].partition if files else {})
    for file in files:
        for rows in pieces(layout, file.add, vectors.read(file.add.get("deletionVector"))):
            new.add(_with(rows, filled))
    return [
        *(_removed(file.add, data_change=changed) for file in files),
        *new.close(data_change=changed),
    ]


def by_partition(files: Iterable[DataFile]) -> list[list[DataFile]]:
    """The files of each partition, as the log writes its values."""
    groups: dict[tuple[tuple[str, str | None], ...], list[DataFile]] = {}
    for file in files:
        groups.setdefault(tuple(sorted(file.partition.items())), []).append(file)
    return list(groups.values())


def _with(rows: Any, values: Iterable[tuple[str, Any]]) -> Any:
    """Rows with the same value (pyarrow.Scalar) in each of them, for some columns."""
    for name, value in values:
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.repeat(value, len(rows)))
    return rows


def as_stored(layout: Layout, rows: Any) -> Any:
    """Rows (pyarrow.Table) with the types that the table has for their columns.

    Raises:
        SourceError: ErrSchemaIncompatible, a value does not fit.
    """
    return fitted(rows, pa.schema([layout.schema.field(name) for name in rows.column_names]))


def stored_columns(layout: Layout, file: DataFile, schema: Any) -> Any:
    """Columns of a file as they are in `schema` (pyarrow.Table), masked rows included."""
    system, path = file_system(layout.location(file.add))
    constants = layout.constants(file.add)
    stored = {name: layout.physical[name] for name in schema.names if name not in constants}
    # Not as a dataset, which costs more to open than a small file to read; a cut looks into many.
    with parquet_file(system, path) as opened:
        # A file may be older than a column, of the key as well.
        there = set(opened.schema_arrow.names)
        names = [name for name in stored.values() if name in there]
        rows, count = opened.read(columns=names, use_threads=False), opened.metadata.num_rows
    columns = [
        pa.repeat(constants[name], count)
        if name in constants
        else rows[stored[name]]
        if stored[name] in there
        else pa.nulls(count)
        for name in schema.names
    ]
    return pa.table(columns, names=schema.names).cast(schema)


def _one_row(values: Mapping[str, Any]) -> Any:
    """One row (pyarrow.Table) with these values (pyarrow.Scalar)."""
    return pa.table({name: pa.repeat(value, 1) for name, value in values.items()})


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
    """Statistics of a file some of whose rows are masked: `tightBounds` is false."""
    # Delta's protocol asks for numRecords where there is a deletion vector, and for tightBounds to
    # be false where a bound may be that of a masked row.
    if not stats or '"numRecords"' not in stats:
        return json.dumps({"numRecords": rows, "tightBounds": False})
    # As text: bounds that were read and written again might have other digits. Wherever another
    # writer has put the member, it goes: of two, readers would believe the last one.
    for value in ("true", "false"):
        member = f'"tightBounds":{value}'
        stats = stats.replace(f",{member}", "").replace(f"{member},", "")
    return '{"tightBounds":false,' + stats[1:]


class NewFile:
    """A file that rows of one partition are added to, made at the first of them; complete when it
    is closed.
    """

    def __init__(self, layout: Layout, partition: Values) -> None:
        self._layout = layout
        stored = layout.partition_columns.values()
        self._partition = {name: partition.get(name) for name in stored}
        self._name = f"{partitions.directory(self._partition)}part-{uuid.uuid4()}.parquet"
        self._system, self._path = file_system(f"{layout.root}/{self._name}")
        self._columns = layout.in_files[:_STATISTICS_COLUMNS]
        self._pending: list[Any] = []
        self._writer: Any = None
        self._rows = 0
        self._ends: Bounds = {}
        self._nulls = dict.fromkeys(self._columns, 0)

    def add(self, rows: Any) -> None:
        """Add rows (pyarrow.Table) that have at least the columns of the table."""
        self._pending.append(rows.select(self._layout.in_files))
        if self.pending_bytes >= _GROUP_BYTES:
            self.flush()

    @property
    def pending_bytes(self) -> int:
        """So much waits for a row group."""
        return sum(piece.nbytes for piece in self._pending)

    def close(self, *, data_change: bool = True) -> list[dict[str, Any]]:
        """The action that adds the file to the table, if it has rows."""
        self.flush()
        if self._writer is None:
            return []
        self._writer.close()
        size = self._system.get_file_info(self._path).size
        common = {
            "path": partitions.in_log(self._name),
            "partitionValues": self._partition,
            "size": size,
            "modificationTime": now_ms(),
        }
        return [{"add": common | {"dataChange": data_change, "stats": self._statistics()}}]

    def flush(self) -> None:
        """Write a row group of what waits for it."""
        pending, self._pending = self._pending, []
        if not any(map(len, pending)):
            return
        rows = pa.concat_tables(pending)
        stored = pa.Table.from_arrays(rows.columns, schema=self._layout.stored)
        if self._writer is None:
            if self._partition:
                self._system.create_dir(self._path.rpartition("/")[0], recursive=True)
            self._writer = pq.ParquetWriter(
                self._path,
                stored.schema,
                filesystem=self._system,
                compression="zstd",
                use_dictionary=repeating_columns(stored),
            )
        self._writer.write_table(stored)
        self._rows += len(rows)
        self._ends = hull(self._ends, extent(rows, self._columns))
        for name in self._columns:
            self._nulls[name] += rows[name].null_count

    def _statistics(self) -> str:
        physical = self._layout.physical
        ends = {
            physical[name]: _json_bounds(*column_ends) for name, column_ends in self._ends.items()
        }
        statistics = {
            "numRecords": self._rows,
            "minValues": {name: low for name, (low, _) in ends.items() if low is not None},
            "maxValues": {name: high for name, (_, high) in ends.items() if high is not None},
            "nullCount": {physical[name]: nulls for name, nulls in self._nulls.items()},
            "tightBounds": True,
        }
        return json.dumps(statistics, separators=(",", ":"))


class NewFiles:
    """Files that rows of any partitions are added to."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._open: dict[tuple[str | None, ...], NewFile] = {}
        self._actions: list[dict[str, Any]] = []

    def add(self, rows: Any) -> None:
        """Add rows (pyarrow.Table) that have at least the columns of the table."""
        for values, part in partitions.split(rows, self._layout.partition_columns):
            partition = tuple(values.values())
            if partition not in self._open:
                if len(self._open) >= _OPEN_FILES_MAX:
                    self._close_files()
                self._open[partition] = NewFile(self._layout, values)
            self._open[partition].add(part)
        # Each file waits for a row group of its own, and there may be very many.
        if sum(file.pending_bytes for file in self._open.values()) >= _PENDING_BYTES_MAX:
            for file in self._open.values():
                file.flush()

    def close(self) -> list[dict[str, Any]]:
        """The actions that add the files to the table, those that have rows."""
        self._close_files()
        return self._actions

    def _close_files(self) -> None:
        for file in self._open.values():
            self._actions += file.close()
        self._open = {}


def pieces(layout: Layout, add: Mapping[str, Any], masked: Any) -> Iterator[Any]:
    """The rows of a file in order, without those at the positions `masked`,
    as the table's columns are now.
    """
    system, path = file_system(layout.location(add))
    constants = layout.constants(add)
    with parquet_file(system, path) as file:
        present = {
            name: layout.physical[name]
            for name in layout.in_files
            if layout.physical[name] in file.schema_arrow.names
        }
        live = np.ones(file.metadata.num_rows, bool)
        live[masked] = False
        at = 0
        for batch in file.iter_batches(_PIECE_ROWS, columns=list(present.values())):
            # Parquet gives the columns in the file's order, whatever the order asked for.
            stored_rows = pa.Table.from_batches([batch]).select(list(present.values()))
            rows = stored_rows.rename_columns(list(present))
            for name, value in constants.items():
                rows = rows.append_column(name, pa.repeat(value, len(batch)))
            kept = live[at : at + len(batch)]
            at += len(batch)
            if kept.any():
                # Fitted first: others write types that Arrow cannot filter, as string_view.
                fitting = fitted(rows, layout.schema)
                yield fitting if kept.all() else fitting.filter(pa.array(kept))


def now_ms() -> int:
    """The time as actions hold it."""
    return int(time.time() * 1000)


def _is_exact(end: Any, kind: Any) -> bool:
    """Whether an end of a column's values, as statistics have it, is the value itself.

    delta-rs takes decimals for doubles, and whole ones then for integers of 64 bits at most: what
    it says of large ones may exclude values that are there.
    """
    if not pa.types.is_decimal(kind) or end is None:
        return True
    value = Decimal(end)
    if abs(value).scaleb(kind.scale) < _EXACT_UNITS and kind.scale <= _EXACT_SCALE:
        return True
    double = float(value)
    return value not in (-(1 << 63), (1 << 63) - 1, Decimal(double), Decimal(repr(double)))


def _json_bounds(low: Any, high: Any) -> tuple[Any, Any]:
    """Bounds as JSON can hold them; None where it cannot."""
    if isinstance(low, str):
        # A prefix sorts before the text, so it bounds from below; from above it bounds nothing.
        whole = len(high) <= _STATISTICS_CHARACTERS
        return low[:_STATISTICS_CHARACTERS], high if whole else None
    if isinstance(low, Decimal):
        # JSON numbers are doubles to many readers: a decimal fraction would not come back exactly.
        return (int(low), int(high)) if low == int(low) and high == int(high) else (None, None)
    return low, high
