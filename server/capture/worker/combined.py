"""The shares of several workers as one sink: readers of a changefeed use a `CombinedSink`.

If the only share runs in this process, calls go right to its sink.

Invariant: every answer is what one sink manager with all tables would have answered a moment ago.
The owner learns positions a little late, and they only move forward. So resolved_ts is the least of
the shares', a cut is chosen over the rows of all shares, and an acknowledgement goes to all of
them. A split table (docs/design/0037) is read from the shares that have its parts, and put together
here (`merging`).
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pyarrow as pa

from server.capture.cut import combined_cut
from server.capture.processor import Sink
from server.capture.worker.merging import joined, merged
from server.capture.worker.share import Share
from sink.cut import Bounds, Slice
from sink.errors import AckAboveResolvedError
from sink.flight.feeds import TableNotExistsError
from sink.mounts import coalesce
from sink.table_sink import READ_BYTES
from sorter.errors import RangeCleanedError, TableNotFoundError
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.model.ts import MAX_TS

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class _Layout:
    """The share that serves each table, at one moment."""

    owners: Mapping[Span, Share]
    """The share of each table; of split tables the share of each part."""
    parts: Mapping[Span, tuple[Span, ...]] = field(default_factory=dict)
    """The parts of each split table, in the order of their keys."""
    whole_of: Mapping[Span, Span] = field(default_factory=dict)
    unasked: frozenset[Span] = frozenset()
    """Spans that shares have but must not be read: parts of a coming split, and those that a split
    or merge has replaced.
    """

    def of(self, span: Span) -> tuple[Span, ...]:
        """Return the spans that shares have of a table: its parts, or the table itself."""
        return self.parts.get(span, (span,))

    def owner(self, span: Span) -> Share:
        """Return the share of a table or part; raises TableNotFoundError."""
        share = self.owners.get(span)
        if share is None:
            raise TableNotFoundError(
                f"table {span.table_id} is not in this changefeed; see describe"
            )
        return share

    def counts_report(self, span: Span, share: Share) -> bool:
        """Whether the share's report on the table counts: during a move two shares have the table,
        and a table that has just begun may be unknown here.
        """
        return span not in self.unasked and self.owners.get(span, share) is share

    def by_share(self, spans: Sequence[Span]) -> dict[Share, list[Span]]:
        """Group the tables, or their parts where they are split, by share."""
        by_share: dict[Share, list[Span]] = {}
        for span in spans:
            for part in self.of(span):
                by_share.setdefault(self.owner(part), []).append(part)
        return by_share

    def expecting(self, spans: Iterable[Span]) -> "_Layout":
        return replace(self, unasked=self.unasked | {*spans} - self.owners.keys())

    def reshaped(self, whole: Span, shape: Mapping[Span, Share]) -> "_Layout":
        """The layout in which `whole` consists of the spans of `shape`."""
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
        """`executor` calls shares in parallel; `others` are shares without tables at the start."""
        self._layout = _Layout(dict(owners))
        self._shares = list(dict.fromkeys((*owners.values(), *others)))
        self._executor = executor
        self._moved = threading.Condition()
        self._moves = 0
        """Counts moves, splits and merges of tables, and shares that ended without tables."""
        self.keep_ts = 0
        """Acknowledged rows above it are kept; 0: none are kept."""
        self._held_ts = MAX_TS
        """The bound of the whole changefeed's resolved_ts while a share joins."""
        self._gone_ts = 0
        """No table that ended on a share which has left has rows above it."""

    def adopt(self, span: Span, share: Share) -> None:
        """Read a table that has begun from `share`."""
        self._layout = replace(self._layout, owners={**self._layout.owners, span: share})

    @contextmanager
    def holding(self) -> Iterator[int]:
        """Hold the resolved_ts of the whole where it is during the block, and yield it: a share
        that joins below it would take it back.
        """
        self._held_ts = held_ts = self.resolved_ts()
        try:
            yield held_ts
        finally:
            self._held_ts = MAX_TS
            self.notify()

    def join(self, share: Share) -> None:
        """Add a share without tables, which is as far as the whole is held (`holding`)."""
        self._shares = [*self._shares, share]

    def leave(self, share: Share, gone_ts: int = 0) -> None:
        """Remove a share that has no tables any more; those that ended on it did so at or below
        `gone_ts`.
        """
        # Set first: a plan that no longer finds the share must find this ts.
        self._gone_ts = max(self._gone_ts, gone_ts)
        self._shares = [each for each in self._shares if each is not share]
        # A plan over all shares that is under way is made again, as this share may end during it.
        self._moves += 1
        self.notify()

    def move(self, spans: Iterable[Span], share: Share) -> None:
        """Read the tables from that share from now on; both shares have them, and both
        count them.
        """
        # The layout is replaced as a whole: a plan under way must ask exactly one share for each
        # table. A plan by the former layout sees that `_moves` has changed, and is made again.
        owners = {**self._layout.owners, **dict.fromkeys(spans, share)}
        self._layout = replace(self._layout, owners=owners)
        self._moves += 1

    def expect(self, spans: Iterable[Span]) -> None:
        """Do not read these spans, which shares are about to get, until `reshape`."""
        self._layout = self._layout.expecting(spans)

    def reshape(self, whole: Span, shape: Mapping[Span, Share]) -> None:
        """Replace a table by these parts, in the order of their keys, or its parts by the table:
        their shares have them, and count them. The former spans are not read any more.
        """
        self._layout = self._layout.reshaped(whole, shape)
        self._moves += 1

    def is_with(self, share: Share, span: Span) -> bool:
        """Whether the share serves a table or a part of it; also true of tables that have ended."""
        layout = self._layout
        return any(layout.owners.get(part) is share for part in layout.of(span))

    def notify(self) -> None:
        """Wake those who wait for a resolved_ts, since a share has moved."""
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
                if layout.counts_report(part.span, pair[0])
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
        """Return the spans of a table, its parts or itself, each with its share."""
        layout = self._layout
        return [(part, layout.owner(part)) for part in layout.of(span)]
