"""Which keys an Iceberg table holds, as far as a cut must know: a key that no data file's bounds
include has no row to be masked or deleted (`KeyRanges`), and a key that the cut inserts should not
be there (`Inserted`).

Rows of a dump come in key order, as updates; nearly all of their keys are new. Inserts within the
table's bounds are looked for in its files: the rows of those that are there go, and are counted.

Invariant: what is remembered of a table is that of its current snapshot, or of one before it that
nobody but us has added rows to. It is read from the metadata when it is first needed, and kept with
each commit of ours.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.lake.columns import internal
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import read_columns
from pyspark_tidemark.lake.iceberg.shown import DataFile, ShownFiles
from pyspark_tidemark.lake.iceberg.storage import Storage
from pyspark_tidemark.lake.iceberg.types import field_ids, key_fields
from pyspark_tidemark.lake.keys import FileKeys, KeyIndex, numbers, renamed, those_in
from pyspark_tidemark.lake.ranges import Bounds, coarser, met
from pyspark_tidemark.lake.schema import fitted

MOST_RANGES = 256
"""More ranges are joined with their neighbours: each cut compares its keys with all of them."""
_SEQUENCE = internal("_sequence")
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
            ends = {
                name: self._catalog.java_files.bounds(file, *column)
                for name, column in columns.items()
            }
            bounds.append({name: end for name, end in ends.items() if end is not None})
        return bounds


class Inserted:
    """Searches the files of tables for keys that should not be there."""

    def __init__(self, catalog: Catalog, shown: ShownFiles, *, soft_delete: bool) -> None:
        """With `soft_delete` keys that are inserted may rightly be there: those of deleted rows."""
        self._catalog = catalog
        self._shown = shown
        self._index = KeyIndex(is_exact=soft_delete)

    def there(self, name: str, table: Any, keys: Any) -> Any:
        """Those of `keys` (pyarrow.Table, each key once) that the table shows, with its types."""
        fields = key_fields(self._catalog.schema(table), keys.column_names)
        keys = fitted(keys, fields)
        shown = self._shown.of(name, table, keys.column_names)
        searched = list(
            itertools.compress(shown.data, met(keys, [file.bounds for file in shown.data]))
        )
        if not searched:
            return keys.slice(0, 0)
        ids = list(field_ids(fields).values())
        storage = self._catalog.storage(table)
        read = partial(read_columns, storage, fields=fields)
        self._index.keep_only(name, [(file.location, *ids) for file in shown.data])
        digests = numbers(keys)
        hits = [self._hits(name, file, digests, ids, read) for file in searched]
        candidates = keys.filter(pa.array(reduce(np.logical_or, hits)))
        if not len(candidates):
            return candidates
        holding = [file for file, among in zip(searched, hits, strict=True) if among.any()]
        # A table whose key has changed may still have deletes by its old one, of other columns.
        deletes = [file for file in shown.deletes if file.key == frozenset(ids)]
        return living(
            candidates,
            # One after the other: all at once they may not fit into memory.
            ((file.sequence, _live(storage, file, read)) for file in holding),
            ((file.sequence, read(file.location)) for file in deletes),
        )

    def forget(self, name: str) -> None:
        """Drop what is remembered of a table: it is another one now, or has another key."""
        self._index.forget(name)

    def _hits(self, name: str, file: DataFile, digests: Any, ids: Sequence[int], read: Read) -> Any:
        there = FileKeys(lambda: read(file.location), file.rows)
        return self._index.hits(name, (file.location, *ids), digests, there)


def _live(storage: Storage, file: DataFile, read: Read) -> Any:
    """The key's columns of the rows that no vector masks."""
    columns = read(file.location)
    if file.vector is None:
        return columns
    live = np.ones(len(columns), bool)
    live[file.vector.positions(storage)] = False
    return columns.filter(pa.array(live))


def living(keys: Any, data: Iterable[tuple[int, Any]], deletes: Iterable[tuple[int, Any]]) -> Any:
    """Those of `keys` that a data file holds and no younger delete names; files are given by their
    sequence number and their keys. Pure.
    """
    named = renamed(keys)
    both = _last(named, data).join(
        _last(named, deletes),
        keys=named.column_names,
        join_type="left outer",
        right_suffix="_deleted",
        use_threads=False,
    )
    # A delete applies to files with a smaller sequence number (Iceberg's specification, "Scan
    # Planning"): the rows that were committed with it stay.
    shown = pc.greater_equal(both[_SEQUENCE], pc.fill_null(both[f"{_SEQUENCE}_deleted"], -1))
    alive = both.filter(shown).select(named.column_names)
    return alive.rename_columns(keys.column_names).cast(keys.schema)


def _last(keys: Any, files: Iterable[tuple[int, Any]]) -> Any:
    """The keys that are in one of the files, with the largest of these files' sequence numbers."""
    parts = [keys.slice(0, 0).append_column(_SEQUENCE, pa.array([], pa.int64()))]
    for sequence, columns in files:
        matching = those_in(keys, renamed(columns))
        parts.append(
            matching.append_column(_SEQUENCE, pa.array([sequence] * len(matching), pa.int64()))
        )
    grouped = pa.concat_tables(parts, promote_options="permissive").group_by(keys.column_names)
    return grouped.aggregate([(_SEQUENCE, "max")]).rename_columns([*keys.column_names, _SEQUENCE])
