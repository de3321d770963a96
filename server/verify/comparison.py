"""The comparison of one table: sums of ranges on both sides at the same time,
then the rows of ranges that differ.

Memory is bounded, whatever differs: the sums of 2^14 to 2^20 ranges, and as many rows of differing
ranges as a budget allows. Ranges beyond it are counted and not looked at, and the report says that
it is not complete.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark_tidemark.digest import RangeChecksums, Ranges, digests, key_texts, row_texts
from pyspark_tidemark.lake.keys import renamed

from server.verify.catalog import Table
from server.verify.difference import (
    ONLY_UPSTREAM,
    Budget,
    Difference,
    DifferingKey,
    affordable,
    differences,
    differing,
    divided,
)
from server.verify.lake.client import Lake
from server.verify.lake.question import key_columns
from server.verify.progress import LAKE, UPSTREAM, Progress
from server.verify.spans import KeySpans, Sample, Span
from server.verify.upstream import Upstream


@dataclass(frozen=True, slots=True)
class Repaired:
    """Keys that were removed from the lake, and rows that were written anew;
    without a version nothing was done yet.
    """

    removed: int
    written: int
    version: int | None = None


@dataclass(slots=True)
class TableReport:
    """The result of comparing one table."""

    table: str
    upstream_rows: int
    lake_rows: int
    differing_ranges: int = 0
    differing_rows: int = 0
    """Keys, in the ranges that were looked at."""
    differences: list[Difference] = field(default_factory=list)
    """The first of them."""
    missing_rows: int = 0
    """The number of differing rows that only the upstream has."""
    complete: bool = True
    """Whether all differing ranges were examined."""
    ts: int = 0
    sampled: KeySpans | None = None
    """The keys that were compared; None: all."""
    note: str = ""
    """A possible explanation of the difference."""
    repaired: Repaired | None = None

    @property
    def differing_spans(self) -> list[Span]:
        """The ranges of keys in which rows differ, of those that were compared; all,
        if not all were looked at.
        """
        if self.sampled is None or self.equal:
            return []
        if not self.complete or len(self.differences) < self.differing_rows:
            return list(self.sampled.spans)
        differing_spans = {
            self.sampled.of(int(each.key[self.sampled.column])) for each in self.differences
        }
        return [span for span in self.sampled.spans if span in differing_spans]

    @property
    def is_right(self) -> bool:
        """Whether the whole table was compared and equals the upstream, or was repaired."""
        repaired = self.repaired is not None and self.repaired.version is not None and self.complete
        return self.sampled is None and (self.equal or repaired)

    @property
    def equal(self) -> bool:
        """Whether the lake holds the upstream's rows."""
        return not self.differing_ranges


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of a comparison: how tables are compared, and how differences are treated."""

    limit: int = 1000
    """Differences that a table's report holds, at most."""
    repair: bool = False
    """Whether differing rows of the lake are repaired."""
    dry_run: bool = False
    """With `repair`: only say what it would do."""
    sample: Sample | None = None
    """Compare some ranges of each table's keys only."""
    rows_per_s: float = 0.0
    """The upstream is read no faster; 0: as fast as it gives rows."""
    budget: Budget = field(default_factory=Budget)
    """Rows of differing ranges that are looked at one by one, in a table."""


class Comparison:
    """The comparison of one table."""

    def __init__(
        self,
        upstream: Upstream,
        lake: Lake,
        table: Table,
        options: VerifyOptions,
        progress: Progress,
    ) -> None:
        self._upstream = upstream
        self._lake = lake
        self._table = table
        self._options = options
        self._progress = progress

    async def run(self) -> TableReport:
        """Compare.

        Raises:
            VerifyLakeError: the lake cannot be read, or not be repaired.
        """
        ours, theirs = await self._both("comparing checksums of key ranges", Ranges())
        unequal = differing(ours, theirs)
        report = TableReport(
            self._table.name, ours.rows, theirs.rows, len(unequal), ts=self._table.ts
        )
        report.sampled = self._table.spans
        if not unequal:
            return report

        chosen = affordable(unequal, ours, theirs, self._options.budget)
        if len(chosen) < len(unequal):
            # Too many rows to look at them all: finer ranges leave out more of those that are
            # equal.
            ours, theirs = await self._both(
                "comparing checksums of smaller ranges where they differ", divided(unequal)
            )
            unequal = differing(ours, theirs)
            chosen = affordable(unequal, ours, theirs, self._options.budget)
            report.differing_ranges = len(unequal)
        report.complete = len(chosen) == len(unequal)
        if chosen:
            await self._look_at(ours.ranges, chosen, report)
        return report

    async def _both(self, stage: str, ranges: Ranges) -> tuple[RangeChecksums, RangeChecksums]:
        self._progress.enter(stage, self._table.name)
        # At the same time, because the upstream has to keep its history for as long as this takes.
        async with asyncio.TaskGroup() as tasks:
            lake_side = tasks.create_task(self._lake_checksums(ranges))
            ours = await self._upstream_checksums(ranges)
        return ours, lake_side.result()

    async def _lake_checksums(self, ranges: Ranges) -> RangeChecksums:
        with self._progress.awaiting(LAKE):
            range_checksums = await self._lake.range_checksums(self._table, ranges)
        self._progress.expect(range_checksums.rows)
        return range_checksums

    async def _upstream_checksums(self, ranges: Ranges) -> RangeChecksums:
        range_checksums = RangeChecksums(ranges)
        async for rows in self._upstream_rows():
            await asyncio.to_thread(range_checksums.add, rows, self._table.key)
        self._progress.expect(range_checksums.rows)
        return range_checksums

    async def _look_at(self, ranges: Ranges, chosen: Sequence[int], report: TableReport) -> None:
        self._progress.enter("reading the rows of ranges that differ", self._table.name)
        ours = [part async for part in self._upstream_inside(ranges, chosen)]
        with self._progress.awaiting(LAKE):
            theirs = await self._lake.rows(self._table, ranges, chosen)

        upstream_pairs = (pair for part in ours for pair in _texts(part, self._table.key))
        lake_pairs = zip(theirs["key"].to_pylist(), theirs["row"].to_pylist(), strict=True)
        differing_keys = list(differences(upstream_pairs, lake_pairs))
        report.differing_rows = len(differing_keys)
        report.missing_rows = sum(each.kind == ONLY_UPSTREAM for each in differing_keys)
        report.differences = [Difference.of(each) for each in differing_keys[: self._options.limit]]
        if self._options.repair:
            report.repaired = await self._repair(differing_keys, ours, theirs)

    async def _upstream_inside(
        self, ranges: Ranges, chosen: Sequence[int]
    ) -> AsyncIterator[pa.RecordBatch]:
        async for rows in self._upstream_rows():
            places = (
                ranges.of(digests(key_texts(rows, self._table.key)))
                if rows.num_rows
                else np.zeros(0)
            )
            inside = rows.filter(pa.array(np.isin(places, chosen)))
            if inside.num_rows:
                yield inside

    async def _upstream_rows(self) -> AsyncIterator[pa.RecordBatch]:
        rows = aiter(self._upstream.rows(self._table))
        while True:
            with self._progress.awaiting(UPSTREAM):
                batch = await anext(rows, None)
            if batch is None:
                return
            self._progress.read(batch.num_rows)
            yield self._table.only(batch)
            if self._options.rows_per_s:
                await asyncio.sleep(batch.num_rows / self._options.rows_per_s)

    async def _repair(
        self,
        differing_keys: Sequence[DifferingKey],
        ours: Sequence[pa.RecordBatch],
        theirs: pa.Table,
    ) -> Repaired:
        key, texts = self._table.key, pa.array([each.key for each in differing_keys], pa.string())
        live = pa.Table.from_batches(
            [part.filter(pc.is_in(key_texts(part, key), texts)) for part in ours],
            self._table.schema,
        )
        # Grouped, because the lake may have a key more than once.
        keys = renamed(key_columns(theirs.filter(pc.is_in(theirs["key"], texts)), key))
        gone = keys.group_by(keys.column_names).aggregate([]).rename_columns(list(key))
        if self._options.dry_run:
            return Repaired(len(gone), len(live))

        with tempfile.TemporaryDirectory(prefix="tidemark-repair-") as directory:
            files = {"gone": gone, "live": live}
            paths = {name: _written(Path(directory) / name, table) for name, table in files.items()}
            self._progress.enter("repairing the lake", self._table.name)
            with self._progress.awaiting(LAKE):
                version = await self._lake.repair(self._table, **paths)
            return Repaired(len(gone), len(live), version)


def _texts(rows: pa.RecordBatch, key: Sequence[str]) -> Any:
    return zip(key_texts(rows, key).to_pylist(), row_texts(rows).to_pylist(), strict=True)


def _written(path: Path, table: pa.Table) -> str:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)
