"""The shares of several worker processes as one changefeed: `CombinedSink` is the one sink of its
readers, `SchemaChangeRouter` the one listener of its catalog, `WorkerChunks` what its dump reads.

A changefeed whose only share runs in this process asks its sink as if there were no shares.

Invariant of the sink: what is answered here is what one sink manager with all tables would answer,
at some moment not long ago: a share's positions are known a little late, and positions only move
forward. So resolved_ts is the least of the shares', a cut is chosen over the rows of all, and an
acknowledgement goes to all. A table that is split (docs/design/0037) is asked of the shares that
have its parts, and answered as a whole (`merging`).

A schema change is sent to the shares that have its tables. A span stays with its worker whatever it
is called; a name may go from one worker to another, when its table gets a new span. So each worker
gets the names that end in its spans and those that begin there, and nothing of the others.

The capture runs the dump's job; the workers that pull the tables read and add the chunks.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pyarrow as pa

from server.capture.catalog import FeedCatalog
from server.capture.cut import combined_cut
from server.capture.processor import Sink
from server.capture.traffic import Traffic
from server.capture.worker import wire
from server.capture.worker.merging import joined, merged
from server.capture.worker.placement import TablePlacement
from server.capture.worker.pool import Worker
from server.capture.worker.share import Share, WorkerShare
from server.capture.worker.splitting import Splitting
from server.changefeed.table import SourceTable
from server.dump.cluster.chunks import (
    Page,
    PageRead,
    Pulled,
    RoundRead,
    TableAwayError,
)
from server.puller.source import TableChange
from server.puller.splitting import Splittable
from sink.cut import Bounds, Slice
from sink.errors import AckAboveResolvedError
from sink.flight.feeds import TableNotExistsError
from sink.mounts import coalesce
from sink.table_sink import READ_BYTES
from sink.versions import Ddl
from sorter.errors import RangeCleanedError, TableNotFoundError
from storage.model.errors import TidemarkError
from storage.model.span import KeyRange, Span
from storage.model.ts import MAX_TS

_BARRIER_EVERY_S = 0.05
_DELIVERED_EVERY_S = 0.1
_NO_ROWS = PageRead(0, 0, b"", ends=True, seconds=0.0)
T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which share is asked of which table, at one moment."""

    owners: Mapping[Span, Share]
    """Of parts of tables, too."""
    parts: Mapping[Span, tuple[Span, ...]] = field(default_factory=dict)
    """Of tables that are split, in the order of their keys."""
    whole_of: Mapping[Span, Span] = field(default_factory=dict)
    unasked: frozenset[Span] = frozenset()
    """What shares may have that nobody is to ask: parts to come, and what parts have replaced."""

    def of(self, span: Span) -> tuple[Span, ...]:
        """What shares have of a table: its parts, or itself."""
        return self.parts.get(span, (span,))

    def owner(self, span: Span) -> Share:
        """Who has a table or part; raises TableNotFoundError."""
        share = self.owners.get(span)
        if share is None:
            raise TableNotFoundError(
                f"table {span.table_id} is not in this changefeed; see describe"
            )
        return share

    def is_asked(self, span: Span, share: Share) -> bool:
        """Whether what the share says of the table counts: while a table moves two shares have it,
        and one that has just begun may not be known here yet.
        """
        return span not in self.unasked and self.owners.get(span, share) is share

    def by_share(self, spans: Sequence[Span]) -> dict[Share, list[Span]]:
        """The tables, as parts where they are split, by who has them."""
        by_share: dict[Share, list[Span]] = {}
        for span in spans:
            for part in self.of(span):
                by_share.setdefault(self.owner(part), []).append(part)
        return by_share

    def expecting(self, spans: Iterable[Span]) -> "_Layout":
        return replace(self, unasked=self.unasked | {*spans} - self.owners.keys())

    def reshaped(self, whole: Span, shape: Mapping[Span, Share]) -> "_Layout":
        """The table consists of these now."""
        before = self.of(whole)
        owners = {span: share for span, share in self.owners.items() if span not in before}
        parts = {span: each for span, each in self.parts.items() if span != whole}
        whole_of = {span: each for span, each in self.whole_of.items() if each != whole}
        if {*shape} != {whole}:
            parts[whole] = tuple(shape)
            whole_of |= dict.fromkeys(shape, whole)
        unasked = (self.unasked | {*before}) - shape.keys()
        return _Layout(owners | {**shape}, parts, whole_of, unasked)


class CombinedSink:
    """Implements `server.capture.processor.Sink` over the shares that own the tables."""

    def __init__(
        self, owners: Mapping[Span, Share], executor: Executor, others: Iterable[Share] = ()
    ) -> None:
        """`executor` asks shares at the same time; `others` are those without tables at the
        start.
        """
        self._layout = _Layout(dict(owners))
        self._shares = list(dict.fromkeys((*owners.values(), *others)))
        self._executor = executor
        self._moved = threading.Condition()
        self._moves = 0
        """How often tables went from one share to another, or were split or put together, and
        shares without tables went away.
        """
        self.keep_ts = 0
        """What is acknowledged is kept above it; 0: it is not kept."""
        self._held_ts = MAX_TS
        """How far the whole goes at most while a share joins."""
        self._gone_ts = 0
        """Tables of shares that are gone had rows at or below it."""

    def adopt(self, span: Span, share: Share) -> None:
        """A table has begun."""
        self._layout = replace(self._layout, owners={**self._layout.owners, span: share})

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
        # Another layout: a plan under way must ask one share of each table, by the one of before or
        # of after. By that of before it sees that there was a move, and is made again.
        owners = {**self._layout.owners, **dict.fromkeys(spans, share)}
        self._layout = replace(self._layout, owners=owners)
        self._moves += 1

    def expect(self, spans: Iterable[Span]) -> None:
        """Shares are to have these, and nobody asks for them until `reshape`."""
        self._layout = self._layout.expecting(spans)

    def reshape(self, whole: Span, shape: Mapping[Span, Share]) -> None:
        """A table consists of these parts from now on, in the order of their keys, or is one again:
        their shares have them, and count them. What it was before is not asked for any more.
        """
        self._layout = self._layout.reshaped(whole, shape)
        self._moves += 1

    def is_with(self, share: Share, span: Span) -> bool:
        """Whether a table, also one that has ended, is asked of that share, if only a part of
        it.
        """
        layout = self._layout
        return any(layout.owners.get(part) is share for part in layout.of(span))

    def notify(self) -> None:
        """A share has moved: look again."""
        with self._moved:
            self._moved.notify_all()

    def resolved_ts(self, span: Span | None = None) -> int:
        """See `Sink.resolved_ts`."""
        if span is not None:
            return min(share.resolved_ts(part) for part, share in self._owned(span))
        return min(self._held_ts, *(share.resolved_ts() for share in self._shares))

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """See `Sink.checkpoint_ts`."""
        if span is not None:
            return min(share.checkpoint_ts(part) for part, share in self._owned(span))
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
            return self._cut_of_table(start_ts, Bounds(max_rows, max_bytes), span)
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
            moves, layout = self._moves, self._layout
            try:
                slices = self._plan(layout, spans, (start_ts, end_ts), slice_bytes)
            except TidemarkError:
                if moves == self._moves:
                    raise
            else:
                # A table that moved meanwhile may have been asked of a share that has it no more.
                if moves == self._moves:
                    return slices

    def _plan(
        self,
        layout: _Layout,
        spans: Sequence[Span] | None,
        bounds: tuple[int, int],
        slice_bytes: int | None,
    ) -> list[Slice]:
        shares: Sequence[tuple[Share, list[Span] | None]]
        if spans is None:
            self._check_kept(bounds[0])
            shares = [(share, None) for share in self._shares]
        else:
            shares = list(layout.by_share(spans).items())
        answers = self._map(
            lambda pair: [
                part
                for part in pair[0].plan_tables(pair[1], *bounds, slice_bytes)
                if layout.is_asked(part.span, pair[0])
            ],
            shares,
        )
        slices, of_split = [], dict[Span, list[Slice]]()
        for part in itertools.chain.from_iterable(answers):
            if (whole := layout.whole_of.get(part.span)) is None:
                slices.append(part)
            else:
                of_split.setdefault(whole, []).append(part)
        for whole, parts in of_split.items():
            slices += joined(whole, parts, bounds, slice_bytes)
        return slices

    def _cut_of_table(self, start_ts: int, bounds: Bounds, span: Span) -> int:
        owned = self._owned(span)
        # Of a split table each part gets an equal part of what fits: the least of their ends then
        # fits for all. It holds a commit_ts at least, as the end of each part does.
        rows, size = (
            None if limit is None else max(limit // len(owned), min(limit, 1))
            for limit in (bounds.max_rows, bounds.max_bytes)
        )
        return min(share.cut(start_ts, rows, size, part) for part, share in owned)

    def read(
        self, span: Span, start_ts: int, end_ts: int, *, before: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """See `Sink.read`; of a table that is split, the rows of its parts in the order that they
        have in the whole.
        """
        while True:
            moves, owned = self._moves, self._owned(span)
            try:
                parts = [share.read(part, start_ts, end_ts, before=before) for part, share in owned]
            except TidemarkError as err:
                if moves != self._moves:
                    continue  # it has other parts by now, or they are elsewhere
                if len(owned) > 1 and err.code == TableNotExistsError.code:
                    # A capture whose share has ended asks the owner, who knows of no such table.
                    raise TableNotFoundError(
                        f"a part of table {span.table_id} is not where it was: its share has ended"
                    ) from err
                raise
            return parts[0] if len(parts) == 1 else coalesce(merged(parts), READ_BYTES)

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
            return min(share.ack(ts, part) for part, share in self._owned(span))
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

    def _map(self, ask: Callable[[K], T], items: Sequence[K]) -> list[T]:
        """Ask at the same time; one alone without a thread of its own."""
        return list(map(ask, items) if len(items) == 1 else self._executor.map(ask, items))

    def _only_sink(self) -> Sink | None:
        """The sink of the only share, if this process runs it and no other one joins."""
        shares = self._shares
        return shares[0].local_sink if len(shares) == 1 and self._held_ts == MAX_TS else None

    def _owned(self, span: Span) -> list[tuple[Span, Share]]:
        """A table's parts, or itself, each with who has it."""
        layout = self._layout
        return [(part, layout.owner(part)) for part in layout.of(span)]


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
    splitting: Splitting | None = None
    """Set where tables may be split."""

    def placed(self, table: SourceTable) -> list[tuple[SourceTable, Worker]]:
        """See `placed_of`."""
        source = self.splitting.source if self.splitting else None
        return placed_of(self.placement, source, table)

    def traffic(self) -> dict[Span, Traffic]:
        """How much tables, and parts of tables, change, as the workers say that have them."""
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
            changes = changes_by_worker(tables.catalog, ddl, tables.placed)
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


def placed_of(
    placement: TablePlacement[Worker], source: Splittable | None, table: SourceTable
) -> list[tuple[SourceTable, Worker]]:
    """A table, or the parts that it is split into as its workers know them, each with its worker;
    a table that was not known gets one.
    """
    spans = placement.parts(table.span)
    if source is None or spans == (table.span,):
        return [(table, placement.worker(table.span))]
    return [(source.part(table, span), placement.worker(span)) for span in spans]


def changes_by_worker(
    catalog: FeedCatalog,
    ddl: Ddl,
    placed: Callable[[SourceTable], Iterable[tuple[SourceTable, Worker]]],
) -> dict[Worker, TableChange]:
    """A change that is in force in `catalog`, as it is sent to the workers concerned."""
    parts: dict[Worker, _ChangePart] = {}
    for versions in catalog.versions.spans_of(ddl):
        for version in versions:
            # A worker's catalog is told a change as ours was, by the source's names.
            for table, worker in placed(catalog.of(version)):
                part = parts.setdefault(worker, _ChangePart())
                if version.to_ts == ddl.ts:
                    part.ended.add(table.name)
                if version.from_ts == ddl.ts:
                    part.begun.append(table)
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
            spans = self._spans(table)
            try:
                generation = tuple(map(self._generation, spans))
                resolved_ts = min(self._share_of(span)[1].resolved_ts(span) for span in spans)
            except (TableAwayError, TableNotFoundError):
                continue  # the change that brings it is on its way to the share
            pulled[table.span.table_id] = Pulled(table, generation, resolved_ts)
        return pulled

    async def read(self, table_id: int, pages: Sequence[Page]) -> RoundRead:
        """See `Chunks.read`; of a table that is split one part is read after the other."""
        table = next(
            (each for each in self._tables.catalog.tables if each.span.table_id == table_id), None
        )
        if table is None:
            raise TableAwayError(f"table {table_id} is gone")
        spans = self._spans(table)
        generation: dict[Span, Hashable] = {span: self._generation(span) for span in spans}
        ts, read = 0, list[PageRead | None]([None] * len(pages))
        for span in spans:
            inside = {
                number: part
                for number, page in enumerate(pages)
                if (part := _within(page, read[number], span if len(spans) > 1 else None))
            }
            if not inside:
                continue
            answer = await self._read(span, list(inside.values()))
            ts, generation[span] = max(ts, answer.ts), answer.generation
            for number, page_read in zip(inside, answer.pages, strict=True):
                read[number] = _continued(read[number], page_read)
        # Whoever asked compares it: with other parts meanwhile, all of it is read again.
        parts = tuple(generation[span] for span in spans)
        return RoundRead(ts, parts, tuple(page or _NO_ROWS for page in read))

    async def _read(self, span: Span, pages: Sequence[Page]) -> RoundRead:
        worker, share = self._share_of(span)
        messages = list(map(wire.page_message, pages))
        answer = await asyncio.to_thread(share.dump, span, messages)
        generation = (worker.name, answer.ends, span)
        return RoundRead(answer.ts, generation, tuple(map(wire.dumped_page_of, answer.pages)))

    def _spans(self, table: SourceTable) -> tuple[Span, ...]:
        placement = self._tables.placement
        spans = placement.parts(table.span)
        if spans == (table.span,):
            placement.worker(table.span)  # one that has just come is placed here
        return spans

    def _share_of(self, span: Span) -> tuple[Worker, WorkerShare]:
        worker = self._tables.placement.find(span)
        if worker is None:
            raise TableAwayError(
                f"table {span.table_id} is being split, put together or begun; its chunk is read "
                "later"
            )
        return worker, self._tables.shares[worker]

    def _generation(self, span: Span) -> tuple[str, int, Span]:
        worker, share = self._share_of(span)
        return worker.name, share.ends, span


def _within(page: Page, read: PageRead | None, span: Span | None) -> Page | None:
    """What of a page is to be read of one part (None: of the whole table), behind what was read of
    the parts in front of it; None: nothing.
    """
    if span is None:
        return page
    keys = KeyRange(span.start_key, span.end_key).clip(KeyRange(page.begin, page.end))
    limit = page.limit - (read.rows if read else 0)
    return Page(keys.start_key, keys.end_key, limit) if keys and limit > 0 else None


def _continued(read: PageRead | None, more: PageRead) -> PageRead:
    """A page of which a further part was read: it ends where all of its parts do."""
    if read is None:
        return more
    return PageRead(
        read.rows + more.rows,
        read.size_bytes + more.size_bytes,
        more.last or read.last,
        more.ends,
        read.seconds + more.seconds,
    )
