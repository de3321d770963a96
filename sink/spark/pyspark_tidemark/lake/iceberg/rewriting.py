"""Data files of an Iceberg table joined into fewer ones, without the rows that are gone, while cuts
go on. Only the commit excludes cuts, for the time that takes.

With deletion vectors (`Rewriting`) a new file has the live rows of old files in their order, so the
new place of a row follows from its old one. Cuts that come while the new files are written mask
rows of the old ones; the commit masks the same rows in the new ones. A table may have equality
deletes, of a job without deletion vectors: those become vectors first.

Without them (`WholeRewriting`) new files get the sequence number of the snapshot that was read, so
equality deletes of later cuts apply to them as they would have to the files that they replace.
"""

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from pyspark_tidemark.lake import compaction
from pyspark_tidemark.lake.columns import map_in_arrow
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import (
    WRITTEN,
    Layout,
    Share,
    Written,
    joined,
    joined_by_task,
    joined_places,
    rows_by_task,
)
from pyspark_tidemark.lake.iceberg.java_files import CutFiles
from pyspark_tidemark.lake.iceberg.masking import new_masks
from pyspark_tidemark.lake.iceberg.partitions import UNPARTITIONED, Partition
from pyspark_tidemark.lake.iceberg.shown import ShownFiles, no_bounds, vector_of
from pyspark_tidemark.lake.iceberg.snapshot import SHARE, Snapshot
from pyspark_tidemark.lake.iceberg.storage import Storage
from pyspark_tidemark.lake.iceberg.vectors import Mask, Masked, Vector, no_positions, written
from pyspark_tidemark.lake.keys import ColumnCache

FULL_BYTES: Final = 128 << 20
"""A new file is made of old ones with about so much that lives."""
MOST_BYTES: Final = 64 << 20
"""About so much is joined by the driver itself, beside the cuts: a Spark job costs more."""
_JOINS: Final = StructType(
    [StructField("number", LongType()), StructField("shares", ArrayType(SHARE))]
)
_JOINED: Final = StructType(
    [
        StructField("number", LongType()),
        StructField("path", StringType()),
        StructField("size", LongType()),
    ]
)


@dataclasses.dataclass(frozen=True)
class OldFile:
    """A data file as the snapshot shows it from which rewriting begins."""

    java: Any
    share: Share
    """All of it."""
    size: int
    rows: int
    masked: int
    ended: bool = False
    """Cuts may look into every file."""
    partition: Partition = UNPARTITIONED

    @property
    def location(self) -> str:
        """Where it is."""
        return self.share.location

    @property
    def live_bytes(self) -> float:
        """About so much of it lives."""
        return self.size * (1 - self.masked / max(1, self.rows))


class _Joined(NamedTuple):
    """Files that were written for groups of old ones, and how."""

    layout: Layout
    groups: Sequence[Sequence[OldFile]]
    new: Mapping[int, Written]


class _Rewriter:
    def __init__(self, spark: SparkSession, catalog: Catalog, committing: threading.Lock) -> None:
        """Who holds `committing` commits, and nobody else."""
        self._spark = spark
        self._catalog = catalog
        self._committing = committing

    def _snapshot(self, table: Any) -> Snapshot:
        """The table's current snapshot."""
        current = table.currentSnapshot().snapshotId()
        return Snapshot(self._spark.newSession(), self._catalog, table, current)


class Rewriting(_Rewriter):
    """Rewrites the tables of one changefeed, one at a time."""

    def run(self, name: str) -> None:
        """Rewrite what is worth it; no reader sees another row.

        Raises:
            SourceError: ErrTargetBusy, somebody else writes to the table.
        """
        snapshot = self._snapshot(self._catalog.existing(name))
        if snapshot.equality_deletes:
            self._replace_equality_deletes(name, snapshot)
        table = self._catalog.existing(name)
        start = table.currentSnapshot()
        snapshot = self._snapshot(table)
        groups = [
            group
            for files in _by_partition(_old_files(snapshot))
            for chosen in compaction.chosen(files)
            for group in packed(chosen, FULL_BYTES)
        ]
        if groups:
            layout = self._catalog.layout(table, ())
            new = self._joined(layout, groups)
            self._commit(name, int(start.sequenceNumber()), _Joined(layout, groups, new))

    def _replace_equality_deletes(self, name: str, snapshot: Snapshot) -> None:
        """Vectors for the rows that equality deletes take out, in their place."""
        places = snapshot.places_deleted()
        with self._committing:
            table = self._catalog.existing(name)
            transaction = self._catalog.begin(table)
            shown = ShownFiles(self._catalog, no_bounds).of(name, table, ())
            there = {each.location for each in shown.deletes}
            masks = new_masks(self._catalog, table, shown.data, places, ColumnCache(0))
            position = self._catalog.position(table, name) or 0
            gone = [each for each in snapshot.equality_deletes if str(each.location()) in there]
            self._catalog.commit(transaction, CutFiles((), (), masks, gone), position)

    def _joined(self, layout: Layout, groups: Sequence[Sequence[OldFile]]) -> Mapping[int, Written]:
        """The new file of each group, by its number; none for a group without a live row."""
        if sum(file.live_bytes for group in groups for file in group) <= MOST_BYTES:
            new = {number: joined(layout, _shares(group)) for number, group in enumerate(groups)}
            return {
                number: dataclasses.replace(file, partition=groups[number][0].partition)
                for number, file in new.items()
                if file is not None
            }
        given = [
            (number, [dataclasses.astuple(share) for share in _shares(group)])
            for number, group in enumerate(groups)
        ]
        frame = self._spark.newSession().createDataFrame(given, _JOINS).repartition(len(groups))
        rows = frame.mapInArrow(joined_by_task(layout), _JOINED).collect()
        return {
            row.number: Written(
                row.path,
                deletes=False,
                size=row.size,
                partition=groups[row.number][0].partition,
                sort_order=layout.order.number,
            )
            for row in rows
        }

    def _commit(self, name: str, sequence: int, rewritten: "_Joined") -> None:
        """Put new files into the place of old ones, unless one of these is not there any more."""
        with self._committing:
            table = self._catalog.existing(name)
            transaction = self._catalog.begin(table)
            current = self._snapshot(table)
            shown = {str(file.location()) for file in current.data}
            old = [file for group in rewritten.groups for file in group]
            if any(file.location not in shown for file in old):
                return  # the table was emptied, or is another one
            added = {
                number: self._catalog.java_files.data(table, file)
                for number, file in rewritten.new.items()
            }
            masks = self._moved(table, rewritten, added, current.vectors)

            update = transaction.newRewrite()
            update.validateFromSnapshot(table.currentSnapshot().snapshotId())
            # That of what was read: an equality delete that came later still applies.
            update.dataSequenceNumber(sequence)
            for part in old:
                update.deleteFile(part.java)
                if part.location in current.vectors:
                    update.deleteFile(current.vectors[part.location])
            for file in added.values():
                update.addFile(file)
            for vector in self._catalog.java_files.vectors(table, masks):
                update.addFile(vector)
            self._catalog.fenced(transaction, update, self._catalog.position(table, name) or 0)

    def _moved(
        self,
        table: Any,
        rewritten: "_Joined",
        added: Mapping[int, Any],
        vectors: Mapping[str, Any],
    ) -> list[Mask]:
        """Vectors of the new files, for what was masked in the old ones since they were read."""
        storage, masked = self._catalog.storage(table), {}
        for number, file in added.items():
            parts = [
                (
                    old.rows,
                    _positions(old.share.vector, storage),
                    _positions(_vector(vectors, old.location), storage),
                )
                for old in rewritten.groups[number]
            ]
            places = moved(parts)
            if len(places):
                group = rewritten.groups[number]
                places = joined_places(rewritten.layout, _shares(group), places)
                # As metadata calls it, which may be another name of the path.
                masked[str(file.location())] = Masked(places, partition=group[0].partition)
        return written(storage, self._catalog.data_location(table), masked)


class WholeRewriting(_Rewriter):
    """Replaces all files of a table by ones with the rows that live, and no deletes."""

    def run(self, name: str) -> None:
        """Rewrite a table that has deletes, or more than one file.

        Raises:
            SourceError: ErrTargetBusy, somebody else writes to the table.
        """
        table = self._catalog.existing(name)
        start = table.currentSnapshot()
        snapshot = self._snapshot(table)
        if not snapshot.deletes and len(snapshot.data) < 2:
            return
        layout = self._catalog.layout(table, ())
        size = sum(int(file.fileSizeInBytes()) for file in snapshot.data)
        rows = snapshot.frame().coalesce(max(1, size // FULL_BYTES))
        written = map_in_arrow(rows, rows_by_task(layout), from_arrow_schema(WRITTEN)).collect()
        self._commit(name, start, snapshot, [Written.parse(row) for row in written])

    def _commit(self, name: str, start: Any, snapshot: Snapshot, new: Sequence[Written]) -> None:
        with self._committing:
            transaction = self._catalog.begin(self._catalog.existing(name))
            table = transaction.table()
            # With the sequence number of what was read, deletes of later cuts apply to the new
            # files; with the commit's own one, rows that were deleted meanwhile would come back.
            update = transaction.newRewrite().validateFromSnapshot(start.snapshotId())
            update.dataSequenceNumber(start.sequenceNumber())
            for file in (*snapshot.data, *snapshot.deletes):
                update.deleteFile(file)
            for written in new:
                update.addFile(self._catalog.java_files.data(table, written))
            self._catalog.fenced(transaction, update, self._catalog.position(table, name) or 0)


def moved(parts: Iterable[tuple[int, Any, Any]]) -> Any:
    """Where rows are in a file that was made of several: those that were masked after it was made.

    Each part is an old file: how many rows it has, the positions that were masked when the new file
    was made, which it therefore has not, and those that are masked now. Pure.
    """
    begin, places = 0, [no_positions()]
    for rows, before, now in parts:
        since = np.setdiff1d(now, before, assume_unique=True)
        places.append(begin + since - np.searchsorted(before, since))
        begin += rows - len(before)
    return np.concatenate(places)


def packed(files: Iterable[OldFile], full_bytes: float) -> list[list[OldFile]]:
    """Files in groups of about `full_bytes` that live; a group of one is a file that is masked.
    Pure.
    """
    groups: list[list[OldFile]] = []
    left = 0.0
    for file in files:
        if not groups or file.live_bytes > left:
            groups.append([])
            left = full_bytes
        groups[-1].append(file)
        left -= file.live_bytes
    return [group for group in groups if len(group) > 1 or group[0].masked]


def _by_partition(files: Iterable[OldFile]) -> list[list[OldFile]]:
    """The files of each partition: one file has rows of one only."""
    parts = defaultdict(list)
    for file in files:
        parts[file.partition].append(file)
    return list(parts.values())


def _shares(group: Iterable[OldFile]) -> list[Share]:
    return [file.share for file in group]


def _old_files(snapshot: Snapshot) -> list[OldFile]:
    return [
        OldFile(
            file,
            snapshot.whole_share(file),
            int(file.fileSizeInBytes()),
            int(file.recordCount()),
            0 if vector is None else int(vector.recordCount()),
            partition=partition,
        )
        for file, partition in zip(snapshot.data, snapshot.partitions, strict=True)
        for vector in [snapshot.vectors.get(str(file.location()))]
    ]


def _vector(vectors: Mapping[str, Any], location: str) -> Vector | None:
    return vector_of(vectors[location]) if location in vectors else None


def _positions(vector: Vector | None, storage: Storage) -> Any:
    return no_positions() if vector is None else vector.positions(storage)
