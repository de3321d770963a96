"""Which keys an Iceberg table holds, as far as a cut must know: a key that no data file's bounds
include needs no equality delete (`KeyRanges`), and a key that the cut inserts should not be there
(`Inserted`).

Rows of a dump come in key order, as updates; nearly all of their keys are new. Inserts within the
table's bounds are looked for in its files: those that are there get a delete, and are counted.

Invariant: what is remembered of a table is that of its current snapshot, or of one before it that
nobody but us has added rows to. It is read from the metadata when it is first needed, and kept with
each commit of ours.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.jvm import java_items
from pyspark_tidemark.lake.columns import internal
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import read_columns
from pyspark_tidemark.lake.iceberg.types import field_ids, with_field_ids
from pyspark_tidemark.lake.key_index import FileKeys, KeyIndex, numbers
from pyspark_tidemark.lake.ranges import Bounds, coarser, met

MOST_RANGES = 256
"""More ranges are joined with their neighbours: each cut compares its keys with all of them."""
_SEQUENCE = internal("_sequence")
BoundsOf = Callable[[Any, Sequence[str], Sequence[Any]], list[Bounds]]
Read = Callable[[str], Any]
"""The key's columns of the file at a location."""


class KeyRanges:
    """The key ranges of tables' files, read from their metadata once and kept with each commit."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: dict[str, tuple[int, list[Bounds]]] = {}

    def ranges(self, name: str, table: Any, key: Sequence[str]) -> Sequence[Bounds]:
        """Every key of the table's current snapshot is within one of these."""
        snapshot = table.currentSnapshot()
        if snapshot is None or not key:
            return []
        cached = self._known.get(name)
        if cached is None or cached[0] != snapshot.snapshotId():
            cached = self._known[name] = (int(snapshot.snapshotId()), self._read(table, key))
        return cached[1]

    def committed(self, name: str, table: Any, key: Sequence[str], files: Sequence[Any]) -> None:
        """Remember the files of our commit on top of the snapshot that `ranges` described."""
        if not key:
            return
        ranges = [*self._known.get(name, (0, []))[1], *self.bounds_of(table, key, files)]
        kept = ranges if len(ranges) <= MOST_RANGES else coarser(ranges)
        self._known[name] = (int(table.currentSnapshot().snapshotId()), kept)

    def forget(self, name: str) -> None:
        """Drop what is remembered of a table: it is another one now, or has another key."""
        self._known.pop(name, None)

    def _read(self, table: Any, key: Sequence[str]) -> list[Bounds]:
        summary = table.currentSnapshot().summary()
        if int(summary.get("total-data-files") or 0) > MOST_RANGES:
            # Too many files to read the bounds of: one without bounds includes every key.
            return [{}]
        return self.bounds_of(table, key, self._catalog.files(table))

    def bounds_of(self, table: Any, key: Sequence[str], files: Sequence[Any]) -> list[Bounds]:
        """The bounds of the key's columns in each of the files, as Iceberg names them."""
        ids = field_ids(self._catalog.schema(table))
        columns = {name: (ids[name], table.schema().findType(ids[name])) for name in key}
        bounds: list[Bounds] = []
        for file in files:
            ends = {name: self._catalog.bounds(file, *column) for name, column in columns.items()}
            bounds.append({name: end for name, end in ends.items() if end is not None})
        return bounds


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
        numbered = field_ids(self._catalog.schema(table))
        fields = with_field_ids(keys.schema, numbered)
        ids = [numbered[column] for column in keys.column_names]
        read = partial(read_columns, self._catalog.storage(table), fields=fields)
        self._index.keep_only(name, [(file.location, *ids) for file in shown.data])
        digests = numbers(keys)
        hits = [self._hits(name, file, digests, ids, read) for file in searched]
        candidates = keys.filter(pa.array(reduce(np.logical_or, hits)))
        if not len(candidates):
            return candidates
        holding = [file for file, among in zip(searched, hits, strict=True) if among.any()]
        return _living(candidates, holding, shown.deletes, ids, read)

    def committed(
        self, name: str, table: Any, key: Sequence[str], rows: Sequence[Any], deletes: Sequence[str]
    ) -> None:
        """Remember the files of our commit: those of rows, and those of deletes at these
        locations.
        """
        # On top of another snapshot than the remembered one, somebody else's files are missing.
        cached, snapshot = self._known.get(name), table.currentSnapshot()
        if cached is None or snapshot.parentId() != cached.snapshot:
            self._known.pop(name, None)
            return
        sequence = int(snapshot.sequenceNumber())
        ids = field_ids(self._catalog.schema(table))
        named = frozenset(ids[column] for column in key)
        data = (*cached.data, *self._data(table, key, rows, sequence))
        all_deletes = (
            *cached.deletes,
            *(_File(location, sequence, key=named) for location in deletes),
        )
        self._known[name] = _Shown(int(snapshot.snapshotId()), data, all_deletes)

    def forget(self, name: str) -> None:
        """Drop what is remembered of a table: it is another one now, or has another key."""
        self._known.pop(name, None)
        self._index.forget(name)

    def _shown(self, name: str, table: Any, key: Sequence[str]) -> _Shown:
        snapshot = table.currentSnapshot()
        if snapshot is None:
            return _Shown(0, (), ())
        cached = self._known.get(name)
        if cached is None or cached.snapshot != snapshot.snapshotId():
            tasks = self._catalog.planned(table.newScan().includeColumnStats())
            data = self._data(table, key, [task.file() for task in tasks], None)
            by_location = {
                delete.location(): delete for task in tasks for delete in java_items(task.deletes())
            }
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

    def _hits(self, name: str, file: _File, digests: Any, ids: Sequence[int], read: Read) -> Any:
        there = FileKeys(lambda: read(file.location), file.rows)
        return self._index.hits(name, (file.location, *ids), digests, there)


def _delete(location: str, file: Any) -> _File:
    numbered = file.equalityFieldIds()
    key = frozenset() if numbered is None else frozenset(map(int, java_items(numbered)))
    return _File(str(location), int(file.dataSequenceNumber()), key=key)


def _living(
    keys: Any, data: Sequence[_File], deletes: Sequence[_File], ids: Sequence[int], read: Read
) -> Any:
    """Those of `keys` that a data file holds and no younger delete names."""
    # A table whose key has changed may still have deletes by its old one: those name other columns.
    named = [file for file in deletes if file.key == frozenset(ids)]
    written, deleted = (_last(keys, files, read) for files in (data, named))
    both = written.join(
        deleted,
        keys=keys.column_names,
        join_type="left outer",
        right_suffix="_deleted",
        use_threads=False,
    )
    # A delete applies to files with a smaller sequence number (Iceberg's specification, "Scan
    # Planning"): the rows that were committed with it stay.
    shown = pc.greater_equal(both[_SEQUENCE], pc.fill_null(both[f"{_SEQUENCE}_deleted"], -1))
    return both.filter(shown).select(keys.column_names).cast(keys.schema)


def _last(keys: Any, files: Sequence[_File], read: Read) -> Any:
    """The keys that are in one of the files, with the largest of these files' sequence numbers."""
    parts = [keys.slice(0, 0).append_column(_SEQUENCE, pa.array([], pa.int64()))]
    for file in files:
        matching = keys.join(
            read(file.location),
            keys=keys.column_names,
            join_type="left semi",
            use_threads=False,
        )
        parts.append(
            matching.append_column(_SEQUENCE, pa.array([file.sequence] * len(matching), pa.int64()))
        )
    grouped = pa.concat_tables(parts, promote_options="permissive").group_by(keys.column_names)
    return grouped.aggregate([(_SEQUENCE, "max")]).rename_columns([*keys.column_names, _SEQUENCE])
