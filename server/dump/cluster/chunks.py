"""Rounds of chunks, where their table is pulled: read at one timestamp under a hold,
and added to the table's changes.

    hold → a fresh timestamp S → hold_below(S) → pages are read at S → add_held

Whoever wants them may be another process: a capture asks the worker that pulls the table
(`server.capture.worker`).
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from server.changefeed.table import SourceTable
from server.dump.cluster.holds import HoldableTable, PulledTables
from server.dump.cluster.store import ClusterStore
from server.dump.errors import TableAwayError
from server.dump.puller import Dump
from storage.model.errors import TidemarkError
from storage.model.event import snapshot_rows
from storage.tasks import together

KeysOf: TypeAlias = Callable[[SourceTable, pa.Array], pa.Array]


@dataclass(frozen=True, slots=True)
class Page:
    """What is wanted: the first `limit` rows of `[begin, end)`."""

    begin: bytes
    end: bytes
    limit: int


@dataclass(frozen=True, slots=True)
class PageRead:
    """What came of it; `last` is the key of the last row, empty if there was none."""

    rows: int
    size_bytes: int
    last: bytes
    ends: bool
    """Whether nothing of the range is behind it."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RoundRead:
    """Pages that were added at commit_ts `ts`."""

    ts: int
    generation: Hashable
    """See `Pulled`; of when they were added."""
    pages: tuple[PageRead, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """A table that is pulled at this moment."""

    table: SourceTable
    generation: Hashable
    """Another one when it is pulled anew: what was added above the checkpoint is lost then."""
    resolved_ts: int
    """How far its changes are."""


class Chunks(Protocol):
    """What a dump asks of where its tables are pulled."""

    def tables(self) -> Mapping[int, Pulled]:
        """All of them, by id."""
        ...

    async def read(self, table_id: int, pages: Sequence[Page]) -> RoundRead:
        """One round; all of it was added, or nothing that counts.

        Raises:
            TidemarkError: not now.
        """
        ...


@runtime_checkable
class Dumpable(Protocol):
    """A source whose tables can be dumped wherever they are pulled."""

    @property
    def chunks(self) -> "LocalChunks":
        """Of the tables that this process pulls."""
        ...

    def dump(self, chunks: Chunks) -> Dump | None:
        """What dumps the changefeed's tables as it is asked to; None: nobody can ask."""
        ...


def _as_stored(_table: SourceTable, keys: pa.Array) -> pa.Array:
    return keys


class LocalChunks:
    """Implements `Chunks` for the tables of this process."""

    def __init__(
        self, tables: PulledTables, store: ClusterStore, keys_of: KeysOf = _as_stored
    ) -> None:
        """`keys_of` gives the keys under which the changes of a table tell its rows."""
        self._held = tables
        self._store = store
        self._keys_of = keys_of

    @property
    def ends(self) -> int:
        """How often a table's puller has ended: then what was added to it may be lost."""
        return self._held.ends

    def tables(self) -> Mapping[int, Pulled]:
        """See `Chunks.tables`."""
        return {
            key: Pulled(pulled.table, pulled.generation, pulled.rows.promised_ts)
            for key, pulled in self._held.all().items()
        }

    async def read(self, table_id: int, pages: Sequence[Page]) -> RoundRead:
        """See `Chunks.read`; rounds of one table come one after the other.

        Not to be cancelled: a hold would stay.
        """
        table = self._held.all().get(table_id)
        if table is None:
            raise TableAwayError(
                f"table {table_id} is not pulled here now; its chunk is read later"
            )
        async with table.rounds:
            answer = await self._round(table, pages)
        if self._held.all().get(table_id) is not table:
            raise TableAwayError(
                f"table {table_id} was pulled anew while it was read; its chunk is read again"
            )
        return answer

    async def _round(self, table: HoldableTable, pages: Sequence[Page]) -> RoundRead:
        loop, rows = asyncio.get_running_loop(), table.rows
        await loop.run_in_executor(rows.executor, rows.hold)
        try:
            ts = await self._store.now()
            await loop.run_in_executor(rows.executor, rows.hold_below, ts)
            page_rows = await together(self._page(table.table, page, ts) for page in pages)
            await self._store.check_kept(ts)
            batches = [batch for _, batch in page_rows if batch.num_rows]
            await loop.run_in_executor(rows.executor, rows.add_held, batches)
        except TidemarkError:
            await loop.run_in_executor(rows.executor, rows.let_go)
            raise
        return RoundRead(ts, table.generation, tuple(page for page, _ in page_rows))

    async def _page(
        self, table: SourceTable, page: Page, ts: int
    ) -> tuple[PageRead, pa.RecordBatch]:
        began = time.monotonic()
        keys, values = await self._store.page(page.begin, page.end, ts, page.limit)
        count, size = len(keys), keys.nbytes + values.nbytes
        last = keys[-1].as_py() if count else b""
        read = PageRead(count, size, last, count < page.limit, time.monotonic() - began)
        return read, snapshot_rows(self._keys_of(table, keys), values, ts)
