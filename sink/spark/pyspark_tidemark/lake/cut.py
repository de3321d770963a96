"""One cut after another: barrier, plan, all tables in parallel, manifest, acknowledgement; so nothing is ever lost.

A crash may come between any two steps. The cut is then replayed: tables that hold it already say so by their position,
a cut that stands in the manifest is only acknowledged again.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed, Slice, TableMeta
from pyspark_tidemark.lake.barrier import Barrier, Crossed, Policy
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.cuts import CutRecord, TableCut
from pyspark_tidemark.lake.manifest import Manifest
from pyspark_tidemark.lake.target import Target


@dataclasses.dataclass(frozen=True)
class Cut:
    """All changes with `start_ts < commit_ts <= end_ts`, as Spark's batch `batch`."""

    batch: int
    start_ts: int
    end_ts: int


class CutApplier:
    """Applies cuts to a lake; one call at a time."""

    def __init__(
        self,
        changefeed: Changefeed,
        name: str,
        target: Target,
        manifest: Manifest,
        *,
        policy: Policy,
        source_options: dict[str, str],
        parallel: int,
    ) -> None:
        self._changefeed = changefeed
        self._name = name
        self._target = target
        self._manifest = manifest
        self._policy = policy
        self._barrier = Barrier(changefeed, target, policy)
        self._source_options = source_options
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="table")
        self._fitted: dict[str, tuple[TableMeta, TableMeta]] = {}
        self._positions: dict[str, int] = {}

    @property
    def applied_ts(self) -> int:
        """The end of the newest cut in the manifest; -1 for an empty lake."""
        return -1 if self._manifest.last is None else self._manifest.last.end_ts

    def apply(self, cut: Cut) -> CutRecord:
        """Bring every table to `cut.end_ts`, then commit the cut; a cut that is there already changes nothing.

        Raises:
            SourceError: ErrCutGap, the lake does not end where the cut starts, or a lake's or a capture's error.
        """
        last = self._manifest.last
        if last is not None and cut.end_ts <= last.end_ts:
            return last
        start_ts = self._start_ts(cut, last)
        end_ts = self._manifest.announce(start_ts, cut.end_ts)
        crossed = self._barrier.cross(start_ts, first=last is None)
        self._forget(crossed)
        applied = tuple(self._apply_tables(crossed, start_ts, end_ts))
        record = CutRecord(
            changefeed=self._name,
            start_ts=start_ts,
            end_ts=end_ts,
            batch=cut.batch,
            applied_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            tables=applied,
            mode=self._policy.mode,
            dropped=crossed.dropped,
            renamed=crossed.renamed,
        )
        self._manifest.commit(record)
        return record if end_ts >= cut.end_ts else self.apply(cut)  # another job began a shorter one

    def acknowledge(self) -> int:
        """Tell the changefeed how far the lake is; returns its checkpoint_ts."""
        assert self._manifest.last is not None
        return self._changefeed.ack(self._manifest.last.end_ts)

    @staticmethod
    def _start_ts(cut: Cut, last: CutRecord | None) -> int:
        if last is None and cut.batch > 0:
            raise SourceError(
                "ErrCutGap",
                "the lake is gone, but Spark's checkpoint is not; start with a new changefeed and checkpoint",
            )
        start_ts = cut.start_ts if last is None else last.end_ts
        if cut.start_ts > start_ts:
            raise SourceError("ErrCutGap", f"the lake ends at {start_ts}, Spark's checkpoint at {cut.start_ts}")
        return start_ts

    def _forget(self, crossed: Crossed) -> None:
        """Names that mean another table from here on."""
        for name in (*crossed.dropped, *(name for pair in crossed.renamed for name in pair)):
            self._positions.pop(name, None)
            self._fitted.pop(name, None)

    def _apply_tables(self, crossed: Crossed, start_ts: int, end_ts: int) -> Sequence[TableCut]:
        slices: dict[str, list[Slice]] = defaultdict(list)
        for part in self._changefeed.plan(start_ts, end_ts):
            slices[part.table].append(part)
        tables = crossed.tables
        first = self._manifest.last is None
        names = sorted(tables if first else slices.keys() | crossed.changed)
        work = [(tables[name], start_ts, end_ts, slices.get(name, [])) for name in names]
        writing = [self._pool.submit(self._apply_table, *arguments) for arguments in work]
        wait(writing)  # when one has failed, too: nobody else may write before all have ended
        return [table.result() for table in writing]

    def _apply_table(self, table: TableMeta, start_ts: int, end_ts: int, slices: list[Slice]) -> TableCut:
        position = self._positions.get(table.name)
        if position is None:
            position = self._target.position(table)
        if position is not None and position >= end_ts:
            self._positions[table.name] = position
            changes = self._changes(table, table, start_ts, end_ts, slices)
            return TableCut(table.name, changes.planned_rows, self._target.version(table))
        if position is not None and position > start_ts:
            start_ts, slices = position, self._changefeed.plan(position, end_ts, [table.name])
        changes = self._changes(self._fitting(table, position), table, start_ts, end_ts, slices)
        applied = self._target.create(changes) if position is None else self._target.apply(changes)
        self._positions[table.name] = end_ts
        return TableCut(table.name, applied.rows, applied.version, applied.checksum)

    def _fitting(self, table: TableMeta, position: int | None) -> TableMeta:
        """The table as the target is written to; compared once for each of its schemas."""
        if position is None:
            return table
        known = self._fitted.get(table.name)
        if known is None or not known[0].schema.equals(table.schema):
            known = self._fitted[table.name] = (table, self._barrier.fitting(table))
        return known[1]

    def _changes(self, table: TableMeta, read: TableMeta, start_ts: int, end_ts: int, slices: list[Slice]) -> Changes:
        schema = None if table is read else read.schema
        return Changes(table, start_ts, end_ts, tuple(slices), self._changefeed, self._source_options, schema)
