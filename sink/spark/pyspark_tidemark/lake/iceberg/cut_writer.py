"""Writes the files of a cut of an Iceberg table: those of the rows that live, and what says which
rows are gone, deletion vectors or equality deletes. They are on no commit yet.

A cut that the driver holds is folded and written here; what only executors hold is written by a
Spark job; what tasks have written already (`task_writers`) lacks only what is gone.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema

from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.changes import DELETE, INSERT, Changes
from pyspark_tidemark.lake.columns import map_in_arrow, quoted
from pyspark_tidemark.lake.cut_tasks import check_arrived
from pyspark_tidemark.lake.files import file_system, is_on_disk
from pyspark_tidemark.lake.fold import FIRST_OP, fold, fold_frame, met_keys
from pyspark_tidemark.lake.format import APPEND
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import (
    WRITTEN,
    Layout,
    Written,
    rows_by_task,
    write,
    written_by_task,
)
from pyspark_tidemark.lake.iceberg.masking import CutMasks, Masking
from pyspark_tidemark.lake.iceberg.snapshot import Snapshot
from pyspark_tidemark.lake.iceberg.table_keys import Inserted
from pyspark_tidemark.lake.iceberg.task_writers import Made
from pyspark_tidemark.lake.iceberg.types import key_fields
from pyspark_tidemark.lake.iceberg.vectors import Mask
from pyspark_tidemark.lake.ranges import any_near
from pyspark_tidemark.lake.schema import fitted


class CutWriter:
    """Writes the cuts of one lake's tables, in one mode."""

    def __init__(
        self,
        spark: SparkSession,
        catalog: Catalog,
        mode: str,
        inserted: Inserted,
        masking: Masking | None,
    ) -> None:
        """Without `masking`, equality deletes say which rows are gone."""
        self._spark = spark
        self._catalog = catalog
        self._mode = mode
        self._inserted = inserted
        self._masking = masking

    def written(
        self, table: Any, changes: Changes, layout: Layout
    ) -> tuple[list[Written], CutMasks, int]:
        """The files of a cut, the vectors of rows that it takes out, and how many of the keys that
        it inserts the table has already.
        """
        if changes.by_tasks is not None:
            return self._written_by_tasks(table, changes, layout)
        if changes.in_arrow:
            return self._written_by_driver(table, changes, layout)
        frame, key, none = changes.frame(self._spark), changes.table.key, CutMasks.none(table)
        if self._mode == APPEND:
            return self._run(frame, rows_by_task(layout)), none, 0
        last = fold_frame(frame, key)
        live = last.where(F.col("_op") != DELETE)
        if changes.emptied:
            return self._run(live, rows_by_task(layout)), none, 0
        again = self._inserted_again(table, last, layout)
        masking = self._masking_of(table)
        if masking is None:
            layout = dataclasses.replace(layout, deletes_inserted=again > 0)
            return self._run(last, written_by_task(layout)), none, again
        gone = last if again else last.where(F.col(quoted(FIRST_OP)) != INSERT)
        keys = gone.select(*[F.col(quoted(name)) for name in key])
        masks = none
        if self._near(table, keys, layout):
            masks = CutMasks.made(
                table, partial(self._masks_by_tasks, masking, changes.table, keys)
            )
        return self._run(live, rows_by_task(layout)), masks, again

    def _written_by_driver(
        self, table: Any, changes: Changes, layout: Layout
    ) -> tuple[list[Written], CutMasks, int]:
        name, key, none = changes.table.name, changes.table.key, CutMasks.none(table)
        if self._mode == APPEND:
            return write(layout, changes.arrow), none, 0
        folded = fold(changes.arrow, key)
        rows = layout.in_order(folded.live)
        if changes.emptied:
            return write(layout, rows), none, 0
        existing, new, live = (
            each.select(list(key)) for each in (folded.existing, folded.new, rows)
        )
        gone, again = self._gone(name, table, layout, (existing, new))
        if self._masking_of(table) is None:
            return write(layout, rows, gone), none, again
        return write(layout, rows), self._masks(name, table, gone, live), again

    def _written_by_tasks(
        self, table: Any, changes: Changes, layout: Layout
    ) -> tuple[list[Written], CutMasks, int]:
        """As `_written`, of what the tasks of the cut's job have written."""
        assert changes.by_tasks is not None
        name, none = changes.table.name, CutMasks.none(table)
        parts: Sequence[Made] = changes.by_tasks.parts
        files = [file for part in parts for file in part.files]
        for file in files:
            if is_on_disk(file.path):
                check_arrived(Path(file_system(file.path)[1]), file.size)
        if self._mode == APPEND or changes.emptied:
            return files, none, 0
        [part] = parts
        gone, again = self._gone(name, table, layout, (part.existing, part.new))
        if self._masking_of(table) is None:
            return files + write(layout, gone.slice(0, 0), gone), none, again
        return files, self._masks(name, table, gone, part.live), again

    def _gone(
        self, name: str, table: Any, layout: Layout, keys: tuple[Any, Any]
    ) -> tuple[Any, int]:
        """The keys whose rows go, of those that the table may have and those that are inserted; and
        how many of the latter it has.
        """
        # As the table has them: with another type than the cut's, a bound may be no value of it.
        fields = key_fields(layout.arrow, layout.key)
        existing, new = (fitted(of, fields) for of in keys)
        there = self._inserted.there(name, table, layout.there(new))
        return pa.concat_tables([existing, there]), len(there)

    def _masks(self, name: str, table: Any, gone: Any, live: Any) -> CutMasks:
        masking = self._masking_of(table)
        assert masking is not None
        masks = CutMasks.made(table, lambda current: masking.masks(name, current, gone))
        return dataclasses.replace(masks, keys_written=live)

    def _masking_of(self, table: Any) -> Masking | None:
        """What masks rows of a table; None: keys are deleted."""
        return self._masking if self._catalog.knows_vectors(table) else None

    def _masks_by_tasks(
        self, masking: Masking, of: TableMeta, keys: DataFrame, table: Any
    ) -> list[Mask]:
        """Vectors for the rows with keys that only tasks hold."""
        snapshot = Snapshot(self._spark, self._catalog, table, table.currentSnapshot().snapshotId())
        return masking.at(of.name, table, of.key, snapshot.places_of(keys, of.key))

    def _near(self, table: Any, keys: DataFrame, layout: Layout) -> bool:
        """Whether the table may hold one of the keys, by the bounds of all."""
        if table.currentSnapshot() is None or not layout.key_ranges:
            return False
        columns = [F.col(quoted(name)) for name in layout.key]
        ends = keys.agg(F.count("*"), *map(F.min, columns), *map(F.max, columns)).collect()[0]
        lows, highs = ends[1 : len(columns) + 1], ends[len(columns) + 1 :]
        return ends[0] > 0 and any_near(layout.key, lows, highs, layout.key_ranges)

    def _inserted_again(self, table: Any, last: DataFrame, layout: Layout) -> int:
        """How many of the keys that a large cut inserts the table has already:
        looked for unless bounds exclude all.
        """
        columns = [F.col(quoted(name)) for name in layout.key]
        inserted = last.where(F.col(quoted(FIRST_OP)) == INSERT).select(*columns)
        if not self._near(table, inserted, layout):
            return 0
        snapshot = table.currentSnapshot()
        shown = (
            Snapshot(self._spark, self._catalog, table, snapshot.snapshotId())
            .frame()
            .select(*columns)
        )
        return met_keys(shown, inserted, layout.key)

    @staticmethod
    def _run(frame: DataFrame, task: Any) -> list[Written]:
        rows = map_in_arrow(frame, task, from_arrow_schema(WRITTEN)).collect()
        return [Written.parse(row) for row in rows]
