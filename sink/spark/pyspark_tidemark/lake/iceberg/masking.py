"""Rows of an Iceberg table that a cut updates or deletes: found in the data files by their keys,
and masked by new deletion vectors.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import read_columns
from pyspark_tidemark.lake.iceberg.shown import DataFile, ShownFiles
from pyspark_tidemark.lake.iceberg.types import key_fields
from pyspark_tidemark.lake.iceberg.vectors import Mask, Masked, no_positions, written
from pyspark_tidemark.lake.keys import KEPT_BYTES, ColumnCache, places_of
from pyspark_tidemark.lake.ranges import met
from pyspark_tidemark.lake.schema import fitted

MOST_ROWS: Final = 20_000_000
"""Of whose keys a cut looks through more, that is worth a warning."""
_POSITIONS_BYTES: Final = 32 << 20
_log = logging.getLogger(__name__)


class Masking:
    """Makes the vectors of cuts."""

    def __init__(self, catalog: Catalog, shown: ShownFiles) -> None:
        self._catalog = catalog
        self._shown = shown
        self._key_columns = ColumnCache(KEPT_BYTES)
        self._positions = ColumnCache(_POSITIONS_BYTES)
        """Of vectors, as in S3 each is a request."""
        self._costly: set[str] = set()

    def masks(self, name: str, table: Any, keys: Any) -> list[Mask]:
        """Vectors that take the rows with `keys` (pyarrow.Table of the key's columns) out of the
        files that have them.
        """
        if not len(keys):
            return []
        fields = key_fields(self._catalog.schema(table), keys.column_names)
        stored, storage = fitted(keys, fields), self._catalog.storage(table)
        shown = self._shown.of(name, table, keys.column_names)
        bounds = [file.bounds for file in shown.data]
        searched = list(itertools.compress(shown.data, met(stored, bounds)))
        self._note_cost(name, sum(file.rows for file in searched))
        places = {}
        for file in searched:
            columns = self._key_columns.of(
                _kept_as(file.location, fields),
                partial(read_columns, storage, file.location, fields),
            )
            places[file.location] = places_of(columns, stored)
        return self.at(name, table, keys.column_names, places)

    def _note_cost(self, name: str, rows: int) -> None:
        """Say once of a table that a cut had so many keys to look through."""
        if rows <= MOST_ROWS or name in self._costly:
            return
        self._costly.add(name)
        _log.warning(
            "%s: a cut looked for its keys among %s million rows, and so will each that updates keys "
            "everywhere; ?deletion-vectors=off in the sink URI makes cuts cheaper and reading dearer "
            "(docs/operations.md)",
            name,
            rows // 1_000_000,
        )

    def written(self, table: Any, location: str, keys: Any) -> None:
        """Remember the keys (pyarrow.Table) of a new file, in its order: the next cut that updates
        one of its rows need not read it.
        """
        fields = key_fields(self._catalog.schema(table), keys.column_names)
        self._key_columns.put(_kept_as(location, fields), fitted(keys, fields))

    def at(
        self, name: str, table: Any, key: Iterable[str], places: Mapping[str, Any]
    ) -> list[Mask]:
        """Vectors that take the rows at `places` (positions by the location of a file) out of the
        table.
        """
        shown = self._shown.of(name, table, list(key))
        return new_masks(self._catalog, table, shown.data, places, self._positions)


@dataclasses.dataclass(frozen=True)
class CutMasks:
    """The vectors of a cut, made from what one snapshot shows."""

    vectors: Sequence[Mask]
    snapshot: int
    _make: Callable[[Any], Sequence[Mask]]
    keys_written: Any = None
    """The keys (pyarrow.Table) of the rows that the driver writes, in their order."""

    @classmethod
    def made(cls, table: Any, make: Callable[[Any], Sequence[Mask]]) -> "CutMasks":
        """Those that `make` gives for the table's current snapshot."""
        snapshot = _snapshot_id(table)
        return cls(make(table), snapshot, make)

    @classmethod
    def none(cls, table: Any) -> "CutMasks":
        """No row is taken out."""
        return cls.made(table, lambda _: [])

    def current(self, table: Any) -> Sequence[Mask]:
        """The vectors for the table's current snapshot: made again if its files are others."""
        return self.vectors if _snapshot_id(table) == self.snapshot else self._make(table)


def _snapshot_id(table: Any) -> int:
    snapshot = table.currentSnapshot()
    return 0 if snapshot is None else int(snapshot.snapshotId())


def _kept_as(location: str, fields: Any) -> tuple[str, bytes]:
    return location, fields.serialize().to_pybytes()


def new_masks(
    catalog: Catalog,
    table: Any,
    files: Iterable[DataFile],
    places: Mapping[str, Any],
    kept: ColumnCache,
) -> list[Mask]:
    """Vectors for those of the files that have rows at `places` which are not masked yet; `kept`
    has the positions of vectors.
    """
    storage, masked = catalog.storage(table), {}
    for file in files:
        if file.location not in places:
            continue
        before = no_positions()
        if file.vector is not None:
            before = kept.of(file.vector, partial(file.vector.positions, storage))
        positions = np.union1d(before, places[file.location])
        if len(positions) > len(before):
            masked[file.location] = Masked(positions, file.java_vector, file.partition)
    masks = written(storage, catalog.data_location(table), masked)
    for mask in masks:
        kept.put(mask.vector, masked[mask.data_file].positions)
    return masks
