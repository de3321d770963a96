"""The shares of several worker processes as one changefeed: `CombinedSink` is the one sink of its
readers, `SchemaChangeRouter` the one listener of its catalog, `WorkerChunks` what its dump reads.

A changefeed whose only share runs in this process asks its sink as if there were no shares.

Invariant of the sink: what is answered here is what one sink manager with all tables would answer,
at some moment not long ago: a share's positions are known a little late, and positions only move
forward. So resolved_ts is the least of the shares', a cut is chosen over the rows of all, and an
acknowledgement goes to all.

A schema change is sent to the shares that have its tables. A span stays with its worker whatever it
is called; a name may go from one worker to another, when its table gets a new span. So each worker
gets the names that end in its spans and those that begin there, and nothing of the others.

The capture runs the dump's job; the workers that pull the tables read and add the chunks.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from server.capture.catalog import FeedCatalog
from server.capture.cut import combined_cut
from server.capture.processor import Sink
from server.capture.traffic import Traffic
from server.capture.worker import wire
from server.capture.worker.placement import TablePlacement
from server.capture.worker.pool import Worker
from server.capture.worker.share import Share, WorkerShare
from server.changefeed.table import SourceTable
from server.dump.cluster.chunks import (
    Page,
    Pulled,
    RoundRead,
    TableAwayError,
)
from server.puller.source import TableChange
from sink.cut import Bounds, Slice
from sink.errors import AckAboveResolvedError
from sink.versions import Ddl
from sorter.errors import RangeCleanedError, TableNotFoundError
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import MAX_TS

_BARRIER_EVERY_S = 0.05
_DELIVERED_EVERY_S = 0.1
T = TypeVar("T")
K = TypeVar("K")


class CombinedSink:
    """Implements `server.capture.processor.Sink` over the shares that own the tables."""

    def __init__(
        self, owners: Mapping[Span, Share], executor: Executor, others: Iterable[Share] = ()
    ) -> None:
        """`executor` asks shares at the same time; `others` are those without tables at the
        start.
        """
        self._owners = dict(owners)
        self._shares = list(dict.fromkeys((*self._owners.values(), *others)))
        self._executor = executor
        self._moved = threading.Condition()
        self._moves = 0
        """How often tables went from one share to another, and shares without tables away."""
        self.keep_ts = 0
        """What is acknowledged is kept above it; 0: it is not kept."""
        self._held_ts = MAX_TS
        """How far the whole goes at most while a share joins."""
        self._gone_ts = 0
        """Tables of shares that are gone had rows at or below it."""

    def adopt(self, span: Span, share: Share) -> None:
        """A table has begun."""
        self._owners[span] = share

    @contextmanager
    def holding(self) -> Iterator[int]:
        """Let the whole go no further than it is, which is given, for the block: a share that joins
        must not take it back.
        """
        self._held_ts = held_ts = self.resolved_ts()
        try:
            yield held_ts
        finally:
            self._held_ts = MAX_TS
            self.notify()

    def join(self, share: Share) -> None:
        """One more share, which has no tables yet, and is as far as the whole (`holding`)."""
        self._shares = [*self._shares, share]

    def leave(self, share: Share, gone_ts: int = 0) -> None:
        """A share that has no tables any more; those that ended there did at or below `gone_ts`."""
        # First: a plan that finds the share gone must find this.
        self._gone_ts = max(self._gone_ts, gone_ts)
        self._shares = [each for each in self._shares if each is not share]
        # Whoever plans over all shares asks once more: this one may end meanwhile.
        self._moves += 1
        self.notify()

    def move(self, spans: Iterable[Span], share: Share) -> None:
        """Tables are asked of that share from now on: both shares have them, and count them."""
        # A copy: a plan under way must ask one share of each table, by the owners of before or of
        # after. By those of before it sees that there was a move, and is made again.
        self._owners = self._owners | dict.fromkeys(spans, share)
        self._moves += 1

    def is_with(self, share: Share, span: Span) -> bool:
        """Whether a table, also one that has ended, is asked of that share."""
        return self._owners.get(span) is share

    def notify(self) -> None:
        """A share has moved: look again."""
        with self._moved:
            self._moved.notify_all()

    def resolved_ts(self, span: Span | None = None) -> int:
        """See `Sink.resolved_ts`."""
        if span is not None:
            return self._owner(span).resolved_ts(span)
        return min(self._held_ts, *(share.resolved_ts() for share in self._shares))

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """See `Sink.checkpoint_ts`."""
        if span is not None:
            return self._owner(span).checkpoint_ts(span)
        return min(share.checkpoint_ts() for share in self._shares)

    def wait_resolved(self, after_ts: int, timeout_s: float, span: Span | None = None) -> int:
        """See `Sink.wait_resolved`."""
        if span is None and (only := self._only_sink()) is not None:
            only.wait_resolved(after_ts, timeout_s)
            return self.resolved_ts()
        # The condition is looked at under the lock that `notify` takes: no report is missed between
        # the look and the wait.
        with self._moved:
            self._moved.wait_for(lambda: self.resolved_ts(span) > after_ts, timeout_s)
        return self.resolved_ts(span)

    def cut(
        self,
        start_ts: int,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        span: Span | None = None,
    ) -> int:
        """See `Sink.cut`; with bounds, it may end earlier:
        after `server.capture.cut.COMMITS_MAX` commit_ts.
        """
        if span is not None:
            return self._owner(span).cut(start_ts, max_rows, max_bytes, span)
        self._check_kept(start_ts)
        if (only := self._only_sink()) is not None:
            return only.cut(start_ts, max_rows, max_bytes)
        # Taken once for all shares: with a later one for each, a share could offer rows above what
        # another one has complete.
        upper_ts = self.resolved_ts()
        if upper_ts <= start_ts:
            return start_ts
        bounds = Bounds(max_rows, max_bytes)
        return combined_cut(
            self._ask_all(lambda share: share.cut_part(start_ts, upper_ts, bounds)),
            start_ts,
            bounds,
        )

    def plan_tables(
        self,
        spans: Sequence[Span] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[Slice]:
        """See `Sink.plan_tables`; the tables of one share follow one another."""
        while True:
            moves, owners = self._moves, self._owners
            try:
                slices = self._plan(owners, spans, start_ts, end_ts, slice_bytes)
            except TidemarkError:
                if moves == self._moves:
                    raise
            else:
                # A table that moved meanwhile may have been asked of a share that has it no more.
                if moves == self._moves:
                    return slices

    def _plan(
        self,
        owners: Mapping[Span, Share],
        spans: Sequence[Span] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None,
    ) -> list[Slice]:
        if spans is None:
            self._check_kept(start_ts)
        by_share: dict[Share, list[Span] | None] = (
            dict.fromkeys(self._shares) if spans is None else _by_share(owners, spans)
        )
        parts = self._map(
            lambda pair: [
                # While a table moves two shares have it.
                part
                for part in pair[0].plan_tables(pair[1], start_ts, end_ts, slice_bytes)
                if owners.get(part.span, pair[0]) is pair[0]
            ],
            list(by_share.items()),
        )
        return list(itertools.chain.from_iterable(parts))

    def read(
        self, span: Span, start_ts: int, end_ts: int, *, before: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """See `Sink.read`."""
        return self._owner(span).read(span, start_ts, end_ts, before=before)

    def ack(self, ts: int, span: Span | None = None) -> int:
        """See `Sink.ack`.

        Raises:
            AckAboveResolvedError: `ts` is above the resolved_ts of a table; nothing was
                acknowledged.
        """
        # Checked before any share is asked: a refusal by the last one would come after the others
        # have moved. A worker that dies meanwhile leaves some tables acknowledged and others not,
        # which is harmless, as the reader acknowledges again.
        resolved_ts = self.resolved_ts(span)
        if ts > resolved_ts:
            raise AckAboveResolvedError(
                f"cannot acknowledge {ts}: rows are complete up to {resolved_ts} here; after a "
                "restart, try again when they have been pulled again"
            )
        if span is not None:
            return self._owner(span).ack(ts, span)
        return min(self._ask_all(lambda share: share.ack(ts)))

    def keep_above(self, ts: int) -> None:
        """See `Sink.keep_above`."""
        self._ask_all(lambda share: share.keep_above(ts))
        self.keep_ts = ts

    def kept_ts(self) -> int:
        """See `Sink.kept_ts`."""
        return max([self.keep_ts, self._gone_ts, *(share.kept_ts() for share in self._shares)])

    def _check_kept(self, start_ts: int) -> None:
        """See that a range of all tables begins where none is gone that had rows in it."""
        if start_ts < self._gone_ts:
            raise RangeCleanedError(
                f"tables that ended before {self._gone_ts} are gone with the capture that had them, "
                f"and their rows above {start_ts}: they are acknowledged; begin at the checkpoint_ts"
            )

    def _ask_all(self, ask: Callable[[Share], T]) -> list[T]:
        while True:
            shares = self._shares
            try:
                return self._map(ask, shares)
            except TidemarkError:
                # A share that has no tables any more may end while it is asked.
                if shares is self._shares:
                    raise

    def _map(self, ask: Callable[[K], T], asked: Sequence[K]) -> list[T]:
        """Ask at the same time; one alone without a thread of its own."""
        return list(map(ask, asked) if len(asked) == 1 else self._executor.map(ask, asked))

    def _only_sink(self) -> Sink | None:
        """The sink of the only share, if this process runs it and no other one joins."""
        shares = self._shares
        return shares[0].local_sink if len(shares) == 1 and self._held_ts == MAX_TS else None

    def _owner(self, span: Span) -> Share:
        return _owner(self._owners, span)


def _by_share(
    owners: Mapping[Span, Share], spans: Sequence[Span]
) -> dict[Share, list[Span] | None]:
    owner_of = {span: _owner(owners, span) for span in spans}
    shares = dict.fromkeys(owner_of.values())
    return {share: [span for span in spans if owner_of[span] is share] for share in shares}


def _owner(owners: Mapping[Span, Share], span: Span) -> Share:
    share = owners.get(span)
    if share is None:
        raise TableNotFoundError(f"table {span.table_id} is not in this changefeed; see describe")
    return share


@dataclass(frozen=True, slots=True)
class SharedTables:
    """The tables of one run of a changefeed, and the shares that have them."""

    changefeed: str
    catalog: FeedCatalog
    placement: TablePlacement[Worker]
    shares: dict[Worker, WorkerShare]
    sink: CombinedSink
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a schema change is sent to the shares, and while a table goes over."""

    def traffic(self) -> dict[Span, Traffic]:
        """How much tables change, as the workers say that have them."""
        return {
            span: each
            for worker, share in self.shares.items()
            for span, each in share.traffic().items()
            if self.placement.has(worker, span)
        }


class SchemaChangeRouter:
    """Implements `server.capture.catalog.Listener` for shares that run."""

    def __init__(self, tables: SharedTables) -> None:
        self._tables = tables
        self._barrier_ts = 0
        self._moved = asyncio.Event()

    async def changed(self, ddl: Ddl) -> None:
        """See `Listener.changed`; raises WorkerLostError."""
        tables = self._tables
        # A table that went to another worker between the look and the call would not be changed.
        async with tables.changing:
            changes = changes_by_worker(tables.catalog, ddl, tables.placement.worker)
            for worker, change in changes.items():
                share = tables.shares[worker]
                # Readers find a table here only when its worker has it.
                await asyncio.to_thread(share.change, change)
                for table in change.tables:
                    tables.sink.adopt(table.span, share)

    def resolved(self, ts: int) -> None:
        """See `Listener.resolved`."""
        self._barrier_ts = max(ts, self._barrier_ts)
        self._moved.set()

    async def wait_delivered(self, ts: int) -> None:
        """See `Listener.wait_delivered`."""
        while self._tables.sink.checkpoint_ts() < ts:  # noqa: ASYNC110 - an acknowledgement comes from a reader's thread
            await asyncio.sleep(_DELIVERED_EVERY_S)

    async def run(self) -> None:
        """Tell the shares how far the schema changes are known, until cancelled;
        raises WorkerLostError.
        """
        while True:
            await self._moved.wait()
            # Cleared before the barrier is read: a change that comes in between sets it again.
            self._moved.clear()
            barrier_ts = self._barrier_ts
            async with asyncio.TaskGroup() as tasks:
                for worker, share in self._tables.shares.items():
                    tasks.create_task(self._limit(worker, share, barrier_ts))
            await asyncio.sleep(_BARRIER_EVERY_S)

    async def _limit(self, worker: Worker, share: WorkerShare, barrier_ts: int) -> None:
        try:
            await asyncio.to_thread(share.limit, barrier_ts)
        except TidemarkError:
            # A share that has no tables any more may end while it is asked.
            if self._tables.shares.get(worker) is share:
                raise


def changes_by_worker(
    catalog: FeedCatalog, ddl: Ddl, owner: Callable[[Span], Worker]
) -> dict[Worker, TableChange]:
    """A change that is in force in `catalog`, as it is sent to the workers concerned."""
    parts: dict[Worker, _ChangePart] = {}
    for versions in catalog.versions.spans_of(ddl):
        part = parts.setdefault(owner(versions[0].span), _ChangePart())
        # A worker's catalog is told a change as ours was, by the source's names.
        part.ended |= {catalog.of(version).name for version in versions if version.to_ts == ddl.ts}
        part.begun += [catalog.of(version) for version in versions if version.from_ts == ddl.ts]
    truncated = catalog.source_names(ddl.truncated, ddl.ts)
    return {worker: part.change(ddl, truncated) for worker, part in parts.items()}


@dataclass(slots=True)
class _ChangePart:
    """What a change means to one worker."""

    ended: set[str] = field(default_factory=set)
    begun: list[SourceTable] = field(default_factory=list)

    def change(self, ddl: Ddl, truncated: tuple[str, ...]) -> TableChange:
        names = {table.name for table in self.begun}
        return TableChange(
            ddl.ts, ddl.query, tuple(self.begun), tuple(sorted(self.ended - names)), truncated
        )


class WorkerChunks:
    """Implements `server.dump.cluster.chunks.Chunks` over the shares that run, on the event loop.

    A share tells how often a puller of it has ended. If another one did, too much is read again,
    never too little.
    """

    def __init__(self, tables: SharedTables) -> None:
        self._tables = tables

    def tables(self) -> Mapping[int, Pulled]:
        """See `Chunks.tables`."""
        pulled: dict[int, Pulled] = {}
        for table in self._tables.catalog.tables:
            worker = self._tables.placement.worker(table.span)
            share = self._tables.shares[worker]
            generation = (worker.name, share.ends, table.span)
            try:
                resolved_ts = share.resolved_ts(table.span)
            except TableNotFoundError:  # the change that brings it is on its way to the share
                continue
            pulled[table.span.table_id] = Pulled(table, generation, resolved_ts)
        return pulled

    async def read(self, table_id: int, pages: Sequence[Page]) -> RoundRead:
        """See `Chunks.read`."""
        table = next(
            (each for each in self._tables.catalog.tables if each.span.table_id == table_id), None
        )
        if table is None:
            raise TableAwayError(f"table {table_id} is gone")
        worker = self._tables.placement.worker(table.span)
        share = self._tables.shares[worker]
        answer = await asyncio.to_thread(share.dump, table_id, list(map(wire.page_message, pages)))
        generation = (worker.name, answer.ends, table.span)
        return RoundRead(answer.ts, generation, tuple(map(wire.dumped_page_of, answer.pages)))
