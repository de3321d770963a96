"""The owner's own capture as one of its workers: the share runs in this process, so asking it costs
no call over the network.

A changefeed that one capture runs alone has this one share, and tables move to others when they
come. Positions are not mirrored, as those of `RemoteShare` are: they are what the sink says now.
"""

import asyncio
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa
from tidemarkpb.v1 import capture_pb2
from tidemarkpb.v1 import worker_pb2 as pb

from server.capture.cut import CutPart
from server.capture.errors import ChangefeedNotRunningError
from server.capture.processor import ProcessorStats, Sink
from server.capture.run import LocalSink
from server.capture.source.registry import MakeSource
from server.capture.traffic import Traffic
from server.capture.worker import wire
from server.capture.worker.host import Host, Hosted
from server.capture.worker.service import count_in, ends_of, round_of
from server.capture.worker.share import ShareStart, WorkerShare, newest
from server.changefeed.table import SourceTable
from server.puller.source import TableChange
from sink.cut import Bounds, Slice
from storage.model.errors import TidemarkError
from storage.model.span import Span

T = TypeVar("T")
_LOOK_EVERY_S: Final = 0.05
_CALL_S: Final = 60.0


class LocalWorker:
    """Implements `server.capture.worker.pool.Worker` by this process."""

    def __init__(self, identity: str, host: Host, make_source: MakeSource) -> None:
        """`identity` is the capture's."""
        self.id = identity
        self.location = ""
        """Set by who knows this capture's record (`peers`); empty: readers ask where they are."""
        self._host = host
        self._make_source = make_source

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"capture {self.id}"

    def share(self, start: ShareStart) -> WorkerShare:
        """See `Worker.share`."""
        return LocalShare(self._host, self._make_source, start)


class LocalShare:
    """Implements `server.capture.worker.share.WorkerShare` by a share that `host` runs."""

    def __init__(self, host: Host, make_source: MakeSource, start: ShareStart) -> None:
        self.tables = newest(start.tables, start.changes)
        self.running = asyncio.Event()
        self.start_ts = start.start_ts
        self._start = start
        self._host = host
        self._make_source = make_source
        self._run_id = uuid.uuid4().hex
        self._hosted: Hosted | None = None
        self._loop = asyncio.get_running_loop()

    async def run(
        self, target_ts: int, moved: Callable[[], None], *, limited: bool = False
    ) -> None:
        """See `WorkerShare.run`."""
        changefeed = self._start.changefeed
        source = self._make_source(changefeed, "")
        assignment = wire.share_assignment(self._start, source, target_ts, limited=limited)
        self._hosted = hosted = await self._host.start(assignment, self._run_id, self._start.term)
        try:
            seen = (False, 0, 0)
            while not hosted.ended.is_set():
                serves = hosted.processor.sink is not None
                now = serves, self.resolved_ts(), self.checkpoint_ts()
                if serves:
                    self.running.set()
                if now != seen:
                    seen = now
                    moved()
                await _wait(hosted.ended, _LOOK_EVERY_S)
        finally:
            await self._host.stop(changefeed, self._run_id)
        raise hosted.error or self._host.not_running(changefeed)

    @property
    def local_sink(self) -> Sink | None:
        """See `Share.local_sink`."""
        return self._hosted.processor.sink if self._hosted else None

    @property
    def stats(self) -> ProcessorStats:
        """See `WorkerShare.stats`."""
        return self._hosted.processor.stats() if self._hosted else ProcessorStats()

    def traffic(self) -> Mapping[Span, Traffic]:
        """See `WorkerShare.traffic`."""
        return self._hosted.processor.traffic() if self._hosted else {}

    @property
    def ends(self) -> int:
        """See `WorkerShare.ends`."""
        return ends_of(self._hosted) if self._hosted else 0

    @property
    def repairing(self) -> Collection[Span]:
        """See `WorkerShare.repairing`."""
        return self._hosted.processor.repairing if self._hosted else ()

    @property
    def damage(self) -> TidemarkError | None:
        """See `WorkerShare.damage`."""
        return self._hosted.processor.damage if self._hosted else None

    def resolved_ts(self, span: Span | None = None) -> int:
        """See `Share.resolved_ts`."""
        if self._hosted is None:
            return self.start_ts
        sink = self._hosted.processor.sink
        if span is None:
            return self._hosted.processor.resolved_ts
        return self.start_ts if sink is None else sink.resolved_ts(span)

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """See `Share.checkpoint_ts`."""
        if self._hosted is None:
            return self.start_ts
        sink = self._hosted.processor.sink
        if span is None:
            # Also right after its end: what readers have acknowledged is not pulled again.
            return self._hosted.processor.checkpoint_ts
        return self.start_ts if sink is None else sink.checkpoint_ts(span)

    def cut(
        self,
        start_ts: int,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        span: Span | None = None,
    ) -> int:
        """See `Share.cut`."""
        return self._sink().cut(start_ts, max_rows, max_bytes, span)

    def cut_part(self, start_ts: int, upper_ts: int, bounds: Bounds) -> CutPart:
        """See `Share.cut_part`."""
        return self._sink().cut_part(start_ts, upper_ts, bounds)

    def plan_tables(
        self,
        spans: Sequence[Span] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[Slice]:
        """See `Share.plan_tables`."""
        return self._sink().plan_tables(spans, start_ts, end_ts, slice_bytes)

    def read(
        self, span: Span, start_ts: int, end_ts: int, *, before: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """See `Share.read`."""
        return self._sink().read(span, start_ts, end_ts, before=before)

    def ack(self, ts: int, span: Span | None = None) -> int:
        """See `Share.ack`."""
        return self._sink().ack(ts, span)

    def keep_above(self, ts: int) -> None:
        """See `Share.keep_above`."""
        self._sink().keep_above(ts)

    def kept_ts(self) -> int:
        """See `Share.kept_ts`."""
        sink = self.local_sink
        return 0 if sink is None else sink.kept_ts()

    def change(self, change: TableChange) -> None:
        """See `WorkerShare.change`."""
        self.tables |= newest(change.tables, ())
        self._on_loop(self._running().assignment.catalog.change(change))

    def limit(self, barrier_ts: int) -> None:
        """See `WorkerShare.limit`."""
        self._loop.call_soon_threadsafe(self._running().assignment.catalog.resolve, barrier_ts)

    def add(self, tables: Sequence[tuple[SourceTable, int]], start_ts: int) -> None:
        """See `MovableShare.add`."""
        hosted = self._running()
        for table, from_ts in tables:
            self.tables[table.span] = table
            self._to_end(hosted.processor.adopt(table, from_ts, start_ts))

    def count(self, positions: Mapping[Span, int]) -> None:
        """See `MovableShare.count`."""
        count_in(self._sink(), positions)

    def remove(self, spans: Sequence[Span], timeout_s: float = _CALL_S) -> None:
        """See `MovableShare.remove`."""
        hosted = self._running()
        for span in spans:
            self._to_end(hosted.processor.release(span), timeout_s)
            self.tables.pop(span, None)

    def dump(self, span: Span, pages: Sequence[pb.DumpPage]) -> pb.DumpTableResponse:
        """See `WorkerShare.dump`."""
        request = wire.dump_request(self._start.changefeed, span, pages)
        return self._to_end(round_of(self._host, self._running(), request))

    def blockers(self, limit: int, *, with_locks: bool) -> list[capture_pb2.TableBlockers]:
        """See `WorkerShare.blockers`."""
        return self._on_loop(self._running().processor.blockers(limit, with_locks=with_locks))

    def _running(self) -> Hosted:
        hosted, _ = self._host.running(self._start.changefeed, self._run_id)
        return hosted

    def _sink(self) -> LocalSink:
        _, sink = self._host.running(self._start.changefeed, self._run_id)
        return sink

    def _to_end(self, work: Coroutine[Any, Any, T], timeout_s: float = _CALL_S) -> T:
        """Run a change that must not be left half done, such as adding or removing tables."""
        return self._on_loop(self._host.run_to_end(work), timeout_s)

    def _on_loop(self, work: Coroutine[Any, Any, T], timeout_s: float = _CALL_S) -> T:
        """Run `work` on the event loop, from another thread."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)
        except TimeoutError as err:
            raise ChangefeedNotRunningError(
                f"the share of changefeed {self._start.changefeed} on this capture does not answer "
                f"within {timeout_s:g} s; try again"
            ) from err


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return
