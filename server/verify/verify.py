"""One comparison: each table's leaves on both sides at the same time, then the rows of the leaves that differ."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark_tidemark.digest import Leaves, digests, key_texts, leaf_of, row_texts

from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient
from server.rpc.snapshot import Snapshot
from server.rpc.tikv import KvClient
from server.verify import upstream
from server.verify.catalog import Table, changefeed_info, tables_at
from server.verify.difference import Difference, affordable, differences, differing_leaves
from server.verify.lake import Lake
from storage.meta.meta import Meta

BITS = 14
ROWS_MAX = 200_000
"""Rows of differing leaves that are looked at one by one, in one run."""
_READ_S = 60.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What to compare."""

    changefeed: str
    table: str | None = None
    at: int | None = None
    repair: bool = False


@dataclass(slots=True)
class TableReport:
    """What came out for one table."""

    table: str
    upstream_rows: int
    lake_rows: int
    differing_leaves: int
    differences: list[Difference] = field(default_factory=list)
    complete: bool = True
    """Whether all differing leaves were looked at."""
    repaired_version: int | None = None

    @property
    def equal(self) -> bool:
        """Whether the lake holds the upstream's rows."""
        return not self.differing_leaves


@dataclass(frozen=True, slots=True)
class Report:
    """All tables at one cut."""

    changefeed: str
    cut: int
    tables: list[TableReport]

    @property
    def equal(self) -> bool:
        """Whether all are."""
        return all(table.equal for table in self.tables)


async def verify(pd: PdClient, kv: KvClient, meta: Meta, request: Request, progress: Progress) -> Report:
    """Compare a changefeed's lake with its upstream at the newest cut, or at the newest up to `request.at`.

    Raises:
        VerifyChangefeedError, VerifyUnsupportedError, VerifyHistoryError, VerifyLakeError: they cannot be compared.
    """
    info = await changefeed_info(meta, request.changefeed)
    async with AsyncExitStack() as stack:
        lake = await stack.enter_async_context(Lake.open(info.sink_uri, info.id, repair=request.repair))
        cut = await lake.cut(request.at)
        tables = await tables_at(meta, info.id, cut, request.table)
        await stack.enter_async_context(upstream.held(pd, f"tidemark-verify-{info.id}", cut))
        snapshot = Snapshot(kv, LockResolver(pd, kv), cut, timeout_s=_READ_S)
        compared = [
            await _Comparison(snapshot, lake, table, cut, progress).run(repair=request.repair) for table in tables
        ]
    return Report(info.id, cut, compared)


class _Comparison:
    """Of one table."""

    def __init__(self, snapshot: Snapshot, lake: Lake, table: Table, cut: int, progress: Progress) -> None:
        self._snapshot = snapshot
        self._lake = lake
        self._table = table
        self._key = table.mounter.key_columns
        self._cut = cut
        self._progress = progress
        self._expected = 0

    async def run(self, *, repair: bool) -> TableReport:
        async with asyncio.TaskGroup() as tasks:
            lake_side = tasks.create_task(self._lake_leaves())
            ours = await self._upstream_leaves()
        theirs = lake_side.result()
        found = differing_leaves(ours, theirs)
        report = TableReport(self._table.name, ours.rows, theirs.rows, len(found))
        if found:
            chosen = affordable(found, ours, theirs, ROWS_MAX)
            report.complete = len(chosen) == len(found)
            await self._look_at(chosen, report, repair=repair)
        return report

    async def _lake_leaves(self) -> Leaves:
        leaves, _ = await self._lake.leaves(self._table, self._cut, BITS)
        self._expected = leaves.rows
        return leaves

    async def _upstream_leaves(self) -> Leaves:
        leaves, seen, started = Leaves(BITS), 0, time.monotonic()
        async for rows in upstream.rows(self._snapshot, self._table):
            await asyncio.to_thread(leaves.add, rows, self._key)
            seen += rows.num_rows
            self._progress(_told(self._table.name, seen, self._expected, time.monotonic() - started))
        return leaves

    async def _look_at(self, leaves: Sequence[int], report: TableReport, *, repair: bool) -> None:
        ours = [part async for part in self._upstream_rows(leaves)]
        theirs = await self._lake.rows(self._table, self._cut, BITS, leaves)
        texts = {key: row for part in ours for key, row in _texts(part, self._key)}
        pairs = zip(theirs["key"].to_pylist(), theirs["row"].to_pylist(), strict=True)
        found = list(differences(texts, list(pairs)))
        report.differences = [difference for _, difference in found]
        if repair:
            await self._repair(report, [key for key, _ in found], ours, theirs)

    async def _upstream_rows(self, leaves: Sequence[int]) -> Any:
        async for rows in upstream.rows(self._snapshot, self._table):
            inside = np.isin(leaf_of(digests(key_texts(rows, self._key)), BITS), leaves)
            yield rows.filter(pa.array(inside))

    async def _repair(self, report: TableReport, keys: list[str], ours: list[Any], theirs: pa.Table) -> None:
        wanted = pa.array(keys, pa.string())
        live = [part.filter(pc.is_in(key_texts(part, self._key), wanted)) for part in ours]
        with tempfile.TemporaryDirectory(prefix="tidemark-repair-") as directory:
            gone = (
                theirs.filter(pc.is_in(theirs["key"], wanted)).select(list(self._key)).group_by(self._key).aggregate([])
            )
            files = {"gone": gone, "live": pa.Table.from_batches(live, self._table.schema)}
            paths = {name: _written(Path(directory) / name, table) for name, table in files.items()}
            report.repaired_version = await self._lake.repair(self._table, self._cut, **paths)


def _texts(rows: pa.RecordBatch, key: Sequence[str]) -> Any:
    return zip(key_texts(rows, key).to_pylist(), row_texts(rows).to_pylist(), strict=True) if rows.num_rows else ()


def _written(path: Path, table: pa.Table) -> str:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)


def _told(table: str, seen: int, expected: int, elapsed_s: float) -> str:
    """Progress in words; how much there is to come is known once the lake has counted its rows."""
    rate = seen / max(elapsed_s, 1e-3)
    if expected <= seen:
        return f"{table}: {seen} rows, {rate:.0f} rows/s"
    return f"{table}: {seen} of {expected} rows, {rate:.0f} rows/s, {(expected - seen) / rate:.0f} s to go"
