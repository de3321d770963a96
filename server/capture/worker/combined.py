"""The sinks of several worker processes as one: least of the resolved_ts,
cuts over all rows, acknowledgements to all.

Invariant: what is answered here is what one sink manager with all tables would answer, at some
moment not long ago: a share's positions are known a little late, and positions only move forward.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Protocol, TypeVar

import pyarrow as pa

from server.capture.cut import CutPart, combined_cut
from sink.cut import Bounds, Slice
from sink.errors import AckAboveResolvedError, TableNotFoundError
from storage.model.span import Span

T = TypeVar("T")


class Share(Protocol):
    """The tables of one worker; see `server.capture.processor.Sink`. Any thread may ask."""

    def resolved_ts(self, span: Span | None = None) -> int:
        """How far the table (None: the share) can be read."""
        ...

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """How far it is acknowledged."""
        ...

    def cut(
        self,
        start_ts: int,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        span: Span | None = None,
    ) -> int:
        """The end of a cut of one table."""
        ...

    def cut_part(self, start_ts: int, upper_ts: int, bounds: Bounds) -> CutPart:
        """The share's part in choosing a cut that ends at or below `upper_ts`."""
        ...

    def plan_tables(
        self,
        spans: Sequence[Span] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[Slice]:
        """See `Sink.plan_tables`."""
        ...

    def read(
        self, span: Span, start_ts: int, end_ts: int, *, before: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """A table's mounted rows."""
        ...

    def ack(self, ts: int, span: Span | None = None) -> int:
        """Everything up to `ts` of the table (None: of the share) is committed."""
        ...


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

    def adopt(self, span: Span, share: Share) -> None:
        """A table has begun."""
        self._owners[span] = share

    def notify(self) -> None:
        """A share has moved: look again."""
        with self._moved:
            self._moved.notify_all()

    def resolved_ts(self, span: Span | None = None) -> int:
        """See `Sink.resolved_ts`."""
        if span is not None:
            return self._owner(span).resolved_ts(span)
        return min(share.resolved_ts() for share in self._shares)

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """See `Sink.checkpoint_ts`."""
        if span is not None:
            return self._owner(span).checkpoint_ts(span)
        return min(share.checkpoint_ts() for share in self._shares)

    def wait_resolved(self, after_ts: int, timeout_s: float, span: Span | None = None) -> int:
        """See `Sink.wait_resolved`."""
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
        by_share: dict[Share, list[Span] | None] = (
            dict.fromkeys(self._shares) if spans is None else self._by_share(spans)
        )
        shares = by_share.items()
        parts = self._executor.map(
            lambda pair: pair[0].plan_tables(pair[1], start_ts, end_ts, slice_bytes), shares
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

    def _by_share(self, spans: Sequence[Span]) -> dict[Share, list[Span] | None]:
        owners = {span: self._owner(span) for span in spans}
        shares = dict.fromkeys(owners.values())
        return {share: [span for span in spans if owners[span] is share] for share in shares}

    def _ask_all(self, ask: Callable[[Share], T]) -> list[T]:
        return list(self._executor.map(ask, self._shares))

    def _owner(self, span: Span) -> Share:
        share = self._owners.get(span)
        if share is None:
            raise TableNotFoundError(
                f"table {span.table_id} is not in this changefeed; see describe"
            )
        return share
