"""Which keys an Iceberg table may hold: a key that no data file's bounds include needs no equality
delete.

Rows of a dump come in key order, as updates; nearly all of their keys are new. Invariant: what is
remembered of a table is that of its current snapshot, or of one before it that nobody but us has
added rows to.
"""

from collections.abc import Sequence
from typing import Any

from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.types import field_ids
from pyspark_tidemark.lake.ranges import Bounds, coarser

MOST_RANGES = 256


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
        """A snapshot was put on top of the one that `ranges` told of, with files more."""
        if not key:
            return
        ranges = [*self._known.get(name, (0, []))[1], *self.bounds_of(table, key, files)]
        kept = ranges if len(ranges) <= MOST_RANGES else coarser(ranges)
        self._known[name] = (int(table.currentSnapshot().snapshotId()), kept)

    def forget(self, name: str) -> None:
        """The table is another one now."""
        self._known.pop(name, None)

    def _read(self, table: Any, key: Sequence[str]) -> list[Bounds]:
        summary = table.currentSnapshot().summary()
        if int(summary.get("total-data-files") or 0) > MOST_RANGES:
            # Too many files to read the bounds of: no bounds at all, which include every key.
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
