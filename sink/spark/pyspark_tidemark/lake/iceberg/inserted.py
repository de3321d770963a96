"""The keys of a cut's inserts that a table has already: a delete of them is written,
and they are counted and told.

Which files a snapshot shows is read from its metadata when an insert falls within the table's
bounds for the first time, and kept with each commit of ours.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pyspark_tidemark.lake.files import file_system
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.types import field_ids
from pyspark_tidemark.lake.key_index import FileKeys, KeyIndex, numbers
from pyspark_tidemark.lake.ranges import Bounds, met

_FIELD_ID = b"PARQUET:field_id"
BoundsOf = Callable[[Any, Sequence[str], Sequence[Any]], list[Bounds]]


@dataclasses.dataclass(frozen=True)
class _File:
    """A data file, or one of equality deletes."""

    location: str
    sequence: int
    """A delete applies to the data files with smaller ones."""
    rows: int = 0
    bounds: Bounds = dataclasses.field(default_factory=dict)
    key: frozenset[int] = frozenset()
    """The fields that a delete names."""


@dataclasses.dataclass(frozen=True)
class _Shown:
    """What a snapshot shows."""

    snapshot: int
    data: tuple[_File, ...]
    deletes: tuple[_File, ...]


class Inserted:
    """Searches the files of tables for keys that should not be there."""

    def __init__(self, catalog: Catalog, bounds_of: BoundsOf) -> None:
        self._catalog = catalog
        self._bounds_of = bounds_of
        self._index = KeyIndex()
        self._known: dict[str, _Shown] = {}

    def there(self, name: str, table: Any, keys: Any) -> Any:
        """Those of `keys` (pyarrow.Table, each key once) that the table shows."""
        shown = self._shown(name, table, keys.column_names)
        searched = list(
            itertools.compress(shown.data, met(keys, [file.bounds for file in shown.data]))
        )
        if not searched:
            return keys.slice(0, 0)
        ids = [field_ids(self._catalog.schema(table))[column] for column in keys.column_names]
        self._index.keep_only(name, [(file.location, *ids) for file in shown.data])
        digests = numbers(keys)
        hits = [self._hits(name, file, digests, ids, keys.schema) for file in searched]
        candidates = keys.filter(pa.array(reduce(np.logical_or, hits)))
        if not len(candidates):
            return candidates
        holding = [file for file, among in zip(searched, hits, strict=True) if among.any()]
        return _living(candidates, holding, shown.deletes, ids)

    def committed(
        self, name: str, table: Any, key: Sequence[str], rows: Sequence[Any], deletes: Sequence[str]
    ) -> None:
        """A snapshot was put on top of another one: with files of rows,
        and of deletes at these locations.
        """
        cached, snapshot = self._known.get(name), table.currentSnapshot()
        if cached is None or snapshot.parentId() != cached.snapshot:
            self._known.pop(name, None)
            return
        sequence = int(snapshot.sequenceNumber())
        ids = field_ids(self._catalog.schema(table))
        named = frozenset(ids[column] for column in key)
        data = (*cached.data, *self._data(table, key, rows, sequence))
        gone = (*cached.deletes, *(_File(location, sequence, key=named) for location in deletes))
        self._known[name] = _Shown(int(snapshot.snapshotId()), data, gone)

    def forget(self, name: str) -> None:
        """The table is another one now."""
        self._known.pop(name, None)
        self._index.forget(name)

    def _shown(self, name: str, table: Any, key: Sequence[str]) -> _Shown:
        snapshot = table.currentSnapshot()
        if snapshot is None:
            return _Shown(0, (), ())
        cached = self._known.get(name)
        if cached is None or cached.snapshot != snapshot.snapshotId():
            tasks = self._catalog.listed(table.newScan().includeColumnStats().planFiles())
            data = self._data(table, key, [task.file() for task in tasks], None)
            by_location = {delete.location(): delete for task in tasks for delete in task.deletes()}
            deletes = tuple(_delete(location, file) for location, file in by_location.items())
            cached = self._known[name] = _Shown(int(snapshot.snapshotId()), data, deletes)
        return cached

    def _data(
        self, table: Any, key: Sequence[str], files: Sequence[Any], sequence: int | None
    ) -> tuple[_File, ...]:
        bounds = self._bounds_of(table, key, files)
        return tuple(
            _File(
                str(file.location()),
                int(file.dataSequenceNumber()) if sequence is None else sequence,
                int(file.recordCount()),
                file_bounds,
            )
            for file, file_bounds in zip(files, bounds, strict=True)
        )

    def _hits(self, name: str, file: _File, digests: Any, ids: Sequence[int], schema: Any) -> Any:
        there = FileKeys(lambda: _read(file.location, ids, schema), file.rows)
        return self._index.hits(name, (file.location, *ids), digests, there)


def _delete(location: str, file: Any) -> _File:
    numbered = file.equalityFieldIds()
    key = frozenset(int(number) for number in numbered) if numbered is not None else frozenset()
    return _File(str(location), int(file.dataSequenceNumber()), key=key)


def _living(keys: Any, data: Sequence[_File], deletes: Sequence[_File], ids: Sequence[int]) -> Any:
    """Those of `keys` that a data file holds and no younger delete names;
    one of another key counts for nothing.
    """
    named = [file for file in deletes if file.key == frozenset(ids)]
    written, gone = (_last(keys, files, ids) for files in (data, named))
    both = written.join(
        gone,
        keys=keys.column_names,
        join_type="left outer",
        right_suffix="_deleted",
        use_threads=False,
    )
    shown = pc.greater_equal(both["_sequence"], pc.fill_null(both["_sequence_deleted"], -1))
    return both.filter(shown).select(keys.column_names).cast(keys.schema)


def _last(keys: Any, files: Sequence[_File], ids: Sequence[int]) -> Any:
    """The keys that are in one of the files, with the largest of these files' sequence numbers."""
    parts = [keys.slice(0, 0).append_column("_sequence", pa.array([], pa.int64()))]
    for file in files:
        matching = keys.join(
            _read(file.location, ids, keys.schema),
            keys=keys.column_names,
            join_type="left semi",
            use_threads=False,
        )
        parts.append(
            matching.append_column(
                "_sequence", pa.array([file.sequence] * len(matching), pa.int64())
            )
        )
    grouped = pa.concat_tables(parts, promote_options="permissive").group_by(keys.column_names)
    return grouped.aggregate([("_sequence", "max")]).rename_columns(
        [*keys.column_names, "_sequence"]
    )


def _read(location: str, ids: Sequence[int], schema: Any) -> Any:
    """The key's columns of a file, which may call them otherwise, or be older than one of them."""
    system, path = file_system(location)
    with pq.ParquetFile(path, filesystem=system) as file:
        named = {
            int(field.metadata[_FIELD_ID]): field.name
            for field in file.schema_arrow
            if field.metadata and _FIELD_ID in field.metadata
        }
        stored = file.read(columns=[named[number] for number in ids if number in named])
    none = pa.nulls(stored.num_rows)
    columns = [stored[named[number]] if number in named else none for number in ids]
    return pa.table(columns, names=schema.names).cast(schema)
