"""Which files the current snapshot of an Iceberg table shows: data files with the bounds of their
keys and their deletion vectors, and files of equality deletes.

Invariant: what is remembered of a table is that of its current snapshot, or nothing. It is read
from the metadata when it is first needed, and kept with each commit of ours.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_items
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.java_files import Committed
from pyspark_tidemark.lake.iceberg.partitions import UNPARTITIONED, Partition
from pyspark_tidemark.lake.iceberg.types import field_ids
from pyspark_tidemark.lake.iceberg.vectors import Vector
from pyspark_tidemark.lake.ranges import Bounds

BoundsOf = Callable[[Any, Sequence[str], Sequence[Any]], list[Bounds]]
"""The bounds of the key's columns in files, as Iceberg names them."""


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A data file."""

    location: str
    sequence: int
    """An equality delete applies to the data files with smaller ones."""
    rows: int
    """Masked ones included."""
    bounds: Bounds
    vector: Vector | None = None
    java_vector: Any = None
    """The same as Iceberg names it: a commit that replaces it must say so."""
    partition: Partition = UNPARTITIONED


@dataclasses.dataclass(frozen=True)
class EqualityDeletes:
    """A file of keys that are deleted in older data files."""

    location: str
    sequence: int
    key: frozenset[int]
    """The fields that it names."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a snapshot shows."""

    snapshot: int
    data: tuple[DataFile, ...]
    deletes: tuple[EqualityDeletes, ...]


def no_bounds(_table: Any, _key: Sequence[str], files: Sequence[Any]) -> list[Bounds]:
    """As `BoundsOf`, where nobody looks for keys."""
    return [{} for _ in files]


class ShownFiles:
    """The files of tables, by table name."""

    def __init__(self, catalog: Catalog, bounds_of: BoundsOf) -> None:
        self._catalog = catalog
        self._bounds_of = bounds_of
        self._known: dict[str, Shown] = {}

    def of(self, name: str, table: Any, key: Sequence[str]) -> Shown:
        """The files of the table's current snapshot.

        Raises:
            SourceError: ErrTargetForeign, somebody else masks rows in a way of old versions, or
                deletes keys in one partition only.
        """
        snapshot = table.currentSnapshot()
        if snapshot is None:
            return Shown(0, (), ())
        cached = self._known.get(name)
        if cached is None or cached.snapshot != snapshot.snapshotId():
            cached = self._known[name] = self._read(table, key)
        return cached

    def committed(self, name: str, table: Any, key: Sequence[str], made: Committed) -> None:
        """Remember the files of our commit, which `table` shows as its current snapshot."""
        # On top of another snapshot than the remembered one, somebody else's files are missing.
        cached, snapshot = self._known.pop(name, None), table.currentSnapshot()
        if cached is None or snapshot.parentId() != cached.snapshot:
            return
        sequence = int(snapshot.sequenceNumber())
        new = {mask.data_file: (mask.vector, added) for mask, added in made.masks}
        data = [
            dataclasses.replace(
                file, vector=new[file.location][0], java_vector=new[file.location][1]
            )
            if file.location in new
            else file
            for file in cached.data
        ]
        bounds = self._bounds_of(table, key, made.rows)
        partitions = self._catalog.java_files.partitions(table, made.rows)
        data += [
            DataFile(
                str(file.location()), sequence, int(file.recordCount()), of, partition=partition
            )
            for file, of, partition in zip(made.rows, bounds, partitions, strict=True)
        ]
        ids = field_ids(self._catalog.schema(table))
        named = frozenset(ids[column] for column in key)
        deletes = [EqualityDeletes(location, sequence, named) for location in made.deletes]
        self._known[name] = Shown(
            int(snapshot.snapshotId()), tuple(data), (*cached.deletes, *deletes)
        )

    def forget(self, name: str) -> None:
        """Drop what is remembered of a table: it is another one now, or has another key."""
        self._known.pop(name, None)

    def _read(self, table: Any, key: Sequence[str]) -> Shown:
        tasks = self._catalog.planned(table.newScan().includeColumnStats())
        files = [task.file() for task in tasks]
        masks: list[Any] = []
        by_location: dict[str, Any] = {}
        for task in tasks:
            vectors, equality = parted(java_items(task.deletes()))
            masks.append(vectors[0] if vectors else None)
            by_location |= {str(each.location()): each for each in equality}
        self._catalog.java_files.check_global(table, by_location.values())
        bounds = self._bounds_of(table, key, files)
        partitions = self._catalog.java_files.partitions(table, files)
        return Shown(
            int(table.currentSnapshot().snapshotId()),
            tuple(
                DataFile(
                    str(file.location()),
                    int(file.dataSequenceNumber()),
                    int(file.recordCount()),
                    of,
                    None if mask is None else vector_of(mask),
                    mask,
                    partition,
                )
                for file, mask, of, partition in zip(files, masks, bounds, partitions, strict=True)
            ),
            tuple(
                EqualityDeletes(
                    location, int(each.dataSequenceNumber()), frozenset(equality_key(each))
                )
                for location, each in by_location.items()
            ),
        )


def parted(deletes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The deletes of a data file (Iceberg's Java): its vector, if it has one, and files of equality
    deletes.

    Raises:
        SourceError: ErrTargetForeign.
    """
    equality = [each for each in deletes if each.equalityFieldIds() is not None]
    vectors = [each for each in deletes if each.equalityFieldIds() is None]
    if any(each.contentOffset() is None for each in vectors):
        raise SourceError(
            "ErrTargetForeign",
            f"{vectors[0].location()} has position deletes of format version 2, which nothing here "
            "writes: let whoever wrote them rewrite the table's data files",
        )
    return vectors, equality


def equality_key(deletes: Any) -> list[int]:
    """The fields that a file of equality deletes (Iceberg's Java) names."""
    return sorted(map(int, java_items(deletes.equalityFieldIds())))


def vector_of(deletes: Any) -> Vector:
    """Where a vector (Iceberg's Java) is."""
    return Vector(
        str(deletes.location()), int(deletes.contentOffset()), int(deletes.contentSizeInBytes())
    )
