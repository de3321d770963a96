"""Rounds of chunks, where their table is pulled: read from the store at one timestamp under a hold,
and added to the table's changes.

    hold → a fresh timestamp S → hold_below(S) → pages are read at S → add_held

`Chunks` may be in another process: a capture asks the worker that pulls the table
(`server.capture.worker`). `ClusterStore` reads the store, for rounds and for the surveys that plan
them.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from server.changefeed.table import SourceTable
from server.dump.cluster.holds import HoldableTable, PulledTables
from server.dump.puller import Dump
from server.puller.tidb.table import physical_spans
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient
from server.rpc.region_cache import region_start
from server.rpc.tikv import KvClient
from server.rpc.transaction import Snapshot
from storage.codec import encode_bytes
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.event import snapshot_rows
from storage.model.span import Span
from storage.tasks import gather

_TIMEOUT_S: Final = 30.0
_REGIONS_MAX: Final = 1024
KeysOf: TypeAlias = Callable[[SourceTable, pa.Array], pa.Array]


class ChunkLostError(UnavailableError):
    """GC was faster than a chunk; it is read again by itself."""

    code = "ErrDumpSnapshotLost"


class TableAwayError(UnavailableError):
    """A table is not pulled here now, or was pulled anew while it was read;
    its chunk is read again by itself.
    """

    code = "ErrDumpTableAway"


class ClusterStore:
    """Reads through the cluster's clients, past locks as any snapshot read; holds nothing."""

    def __init__(self, pd: PdClient, kv: KvClient) -> None:
        self._pd = pd
        self._kv = kv
        self._resolver = LockResolver(pd, kv)

    async def now(self) -> int:
        """A timestamp above all that anybody has."""
        return await self._pd.tso()

    async def page(
        self, begin: bytes, end: bytes, ts: int, limit: int
    ) -> tuple[pa.Array, pa.Array]:
        """Keys and values of the first `limit` rows of `[begin, end)` at `ts`.

        Raises:
            GaveUpError: a live transaction kept a key locked for too long, or no store answered.
        """
        keys, values = await self._snapshot(ts).scan_columns(begin, end, limit)
        return pa.array(keys, pa.binary()), pa.array(values, pa.binary())

    async def check_kept(self, ts: int) -> None:
        """Check that a read at `ts` was complete: GC had not passed it afterwards.

        Raises:
            ChunkLostError: it had.
        """
        safe_point = await self._pd.gc_safe_point()
        if ts < safe_point:
            raise ChunkLostError(
                f"the store's GC passed {ts} while a chunk was read at it, and stands at "
                f"{safe_point}: it is read again at a later timestamp; if this is said again and "
                "again, GC keeps too little history"
            )

    async def keys(self, begin: bytes, end: bytes, ts: int, limit: int) -> list[bytes]:
        """The first `limit` keys of `[begin, end)` at `ts`; raises as `page`."""
        return [key for key, _ in await self._snapshot(ts).scan(begin, end, limit, key_only=True)]

    async def last(self, begin: bytes, end: bytes, ts: int) -> bytes | None:
        """The last key of `[begin, end)` at `ts`, if there is one; raises as `page`."""
        return await self._snapshot(ts).last_key(begin, end)

    async def region_bounds(self, begin: bytes, end: bytes) -> list[bytes]:
        """Return the region bounds within `(begin, end)`; none if there are more than one request
        can return.
        """
        routes = await self._pd.scan_regions(encode_bytes(begin), encode_bytes(end), _REGIONS_MAX)
        starts = [region_start(route) for route in routes] if len(routes) < _REGIONS_MAX else []
        return [key for key in starts if begin < key < end]

    def parts(self, table: SourceTable) -> Sequence[Span]:
        """Return the spans of a table's rows in key order: its own span, or those of its
        partitions.
        """
        return sorted(physical_spans(table.record), key=lambda part: part.start_key)

    def _snapshot(self, ts: int) -> Snapshot:
        return Snapshot(self._kv, self._resolver, ts, timeout_s=_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Page:
    """The first `limit` rows of `[begin, end)`, to be read."""

    begin: bytes
    end: bytes
    limit: int


@dataclass(frozen=True, slots=True)
class PageRead:
    """The result of a page; `last` is the key of the last row, empty if there was none."""

    rows: int
    size_bytes: int
    last: bytes
    ends: bool
    """Whether the range ends with it."""
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
    """Changes when the table is pulled anew: rows added above the checkpoint are lost then."""
    resolved_ts: int
    """The ts up to which its changes are complete."""


class Chunks(Protocol):
    """Reads chunks, where a dump's tables are pulled."""

    def tables(self) -> Mapping[int, Pulled]:
        """All of them, by id."""
        ...

    async def read(self, table_id: int, pages: Sequence[Page]) -> RoundRead:
        """Read and add one round: all of it, or nothing that counts.

        Raises:
            TidemarkError: not now.
        """
        ...


@runtime_checkable
class Dumpable(Protocol):
    """A source whose tables can be dumped wherever they are pulled."""

    @property
    def chunks(self) -> "LocalChunks":
        """The chunks of the tables that this process pulls."""
        ...

    def dump(self, chunks: Chunks) -> Dump | None:
        """Runs the dump of the changefeed's tables; None: dumps are not possible."""
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
        """Return how often a table's puller has ended; rows added before that may be lost."""
        return self._held.ends

    def tables(self) -> Mapping[int, Pulled]:
        """See `Chunks.tables`."""
        return {
            key: Pulled(pulled.table, pulled.generation, pulled.rows.promised_ts)
            for key, pulled in self._held.all().items()
        }

    async def read(
        self, table_id: int, pages: Sequence[Page], span: Span | None = None
    ) -> RoundRead:
        """See `Chunks.read`; rounds of one table come one after the other. With `span`, of what is
        pulled in it: a part of the table, say.

        Not to be cancelled: a hold would stay.
        """
        table = self._held.find(table_id, span)
        if table is None:
            raise TableAwayError(
                f"table {table_id} is not pulled here now; its chunk is read later"
            )
        async with table.rounds:
            answer = await self._round(table, pages)
        # What was added to a puller that has ended since may be lost with it.
        if self._held.find(table_id, span) is not table:
            raise TableAwayError(
                f"table {table_id} was pulled anew while it was read; its chunk is read again"
            )
        return answer

    async def _round(self, table: HoldableTable, pages: Sequence[Page]) -> RoundRead:
        loop, rows = asyncio.get_running_loop(), table.rows
        # Held before the timestamp is taken: else the puller could resolve the table beyond S
        # between the two, and the chunk would come too late for it.
        await loop.run_in_executor(rows.executor, rows.hold)
        try:
            ts = await self._store.now()
            await loop.run_in_executor(rows.executor, rows.hold_below, ts)
            page_rows = await gather(self._page(table.table, page, ts) for page in pages)
            # After the reads: GC that passed S while they went on may have taken versions away.
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
