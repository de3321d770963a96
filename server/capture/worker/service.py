"""`tidemarkpb.v1.WorkerService`: the owner's calls to workers that run shares."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import grpc.aio
from tidemarkpb.v1 import worker_pb2 as pb

from server.capture.run import LocalSink
from server.capture.source.registry import MakeSource
from server.capture.worker import wire
from server.capture.worker.host import Host, Hosted
from server.capture.worker.remote import RUN_METADATA
from server.changefeed.info import check_id
from server.dump.cluster.chunks import Dumpable, LocalChunks
from sorter.errors import TableNotFoundError
from storage.model.span import Span

T = TypeVar("T")
CheckTerm = Callable[[int], Awaitable[None]]
_TICK_S, _TICK_S_PER_TABLE = 0.05, 50e-6
_SPEAK_EVERY_S = 1.0
_TRAFFIC_EVERY_S = 5.0
_THREAD_TABLES_MIN = 1000
_COUNT_S = 5.0
"""A share's tables wait this long at most for tables that are counted in."""
Context = grpc.aio.ServicerContext[Any, Any]


def report_interval_s(tables: int) -> float:
    """Return the interval between two reports of a share with so many tables."""
    return _TICK_S + tables * _TICK_S_PER_TABLE


def count_in(sink: LocalSink, positions: Mapping[Span, int]) -> None:
    """Make tables that stand by a part of a share; `positions` are the ts up to which each is
    committed.

    Raises:
        NotResolvedError: they are not as far as the others within `_COUNT_S`.
    """
    ends_s = time.monotonic() + _COUNT_S
    for span, checkpoint_ts in positions.items():
        sink.count(span, checkpoint_ts, max(0.0, ends_s - time.monotonic()))


class WorkerService:
    """Over the shares of `host`."""

    def __init__(
        self, host: Host, make_source: MakeSource, check_term: CheckTerm | None = None
    ) -> None:
        """`check_term` raises NotOwnerError unless the term is the present owner's; a worker
        process, whose only client is its capture, needs no check.
        """
        self._host = host
        self._make_source = make_source
        self._check_term = check_term

    async def Run(
        self, request: pb.RunRequest, context: Context
    ) -> AsyncIterator[pb.ShareProgress]:
        """Run a share as long as the capture listens."""
        del context
        # it becomes the name of a directory, which is deleted in the end
        check_id(request.changefeed)
        if self._check_term is not None:
            await self._check_term(request.term)
        source = self._make_source(request.changefeed, "")
        # A hundred thousand tables take a minute to read.
        assignment = await asyncio.to_thread(wire.assignment, request, source)
        hosted = await self._host.start(assignment, request.run, request.term)
        progress = _ReportedProgress()
        try:
            while not hosted.ended.is_set():
                message = await progress.changes_now(hosted)
                if message is not None:
                    yield message
                await _wait(hosted.ended, report_interval_s(progress.tables))
        finally:
            hosted.cancel()
        if hosted.error is not None:
            raise hosted.error

    async def ChangeShare(
        self, request: pb.ChangeShareRequest, context: Context
    ) -> pb.ChangeShareResponse:
        """A schema change of the share's tables."""
        hosted, _ = self._host.running(request.changefeed, _run_of(context))
        assignment = hosted.assignment
        await assignment.catalog.change(wire.change_of(request.change, assignment.source))
        return pb.ChangeShareResponse()

    async def LimitShare(
        self, request: pb.LimitShareRequest, context: Context
    ) -> pb.LimitShareResponse:
        """Tell the share up to which ts the schema changes are known."""
        hosted, _ = self._host.running(request.changefeed, _run_of(context))
        hosted.assignment.catalog.resolve(request.barrier_ts)
        return pb.LimitShareResponse()

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:
        """End a share."""
        await self._host.stop(request.changefeed, _run_of(context))
        return pb.StopResponse()

    async def Extents(self, request: pb.ExtentsRequest, context: Context) -> pb.ExtentsResponse:
        """The share's part in choosing a cut."""
        bounds = wire.bounds_of(request)

        def part(sink: LocalSink) -> pb.ExtentsResponse:
            return wire.part_message(sink.cut_part(request.start_ts, request.upper_ts, bounds))

        return await self._asked(request.changefeed, context, part)

    async def CutTable(self, request: pb.CutTableRequest, context: Context) -> pb.CutTableResponse:
        """The end of a cut of one table."""
        bounds, span = wire.bounds_of(request), wire.span_of(request.span)

        def cut(sink: LocalSink) -> pb.CutTableResponse:
            return pb.CutTableResponse(
                end_ts=sink.cut(request.start_ts, bounds.max_rows, bounds.max_bytes, span)
            )

        return await self._asked(request.changefeed, context, cut)

    async def PlanTables(
        self, request: pb.PlanTablesRequest, context: Context
    ) -> pb.PlanTablesResponse:
        """Estimate how much each table has in a range."""

        def plan(sink: LocalSink) -> pb.PlanTablesResponse:
            return wire.plan_message(sink.plan_tables(*wire.plan_of(request)))

        return await self._asked(request.changefeed, context, plan)

    async def AckShare(self, request: pb.AckShareRequest, context: Context) -> pb.AckShareResponse:
        """The reader has committed everything up to a ts."""
        hosted, _ = self._host.running(request.changefeed, _run_of(context))
        span = wire.span_of(request.span) if request.HasField("span") else None

        def ack(sink: LocalSink) -> pb.AckShareResponse:
            checkpoint_ts = sink.ack(request.ts, span)
            counts, share_ts = sink.counted_checkpoint()
            return pb.AckShareResponse(
                checkpoint_ts=checkpoint_ts,
                counts=counts,
                share_checkpoint_ts=share_ts,
                ends=ends_of(hosted),
            )

        return await self._asked(request.changefeed, context, ack)

    async def KeepHistory(
        self, request: pb.KeepHistoryRequest, context: Context
    ) -> pb.KeepHistoryResponse:
        """Set the ts above which acknowledged rows are kept."""

        def keep(sink: LocalSink) -> pb.KeepHistoryResponse:
            sink.keep_above(request.ts)
            return pb.KeepHistoryResponse()

        return await self._asked(request.changefeed, context, keep)

    async def AddTables(
        self, request: pb.AddTablesRequest, context: Context
    ) -> pb.AddTablesResponse:
        """Pull tables that another share serves until they are counted in here."""
        hosted, _ = self._host.running(request.changefeed, _run_of(context))
        for moved in request.tables:
            table = hosted.assignment.source.table(wire.table_record(moved.table))
            await self._host.run_to_end(
                hosted.processor.adopt(table, moved.from_ts, request.start_ts)
            )
        return pb.AddTablesResponse()

    async def CountTables(
        self, request: pb.CountTablesRequest, context: Context
    ) -> pb.CountTablesResponse:
        """Count added tables in the totals."""

        def count(sink: LocalSink) -> pb.CountTablesResponse:
            count_in(sink, {wire.span_of(each.span): each.checkpoint_ts for each in request.tables})
            counts, checkpoint_ts = sink.counted_checkpoint()
            return pb.CountTablesResponse(counts=counts, checkpoint_ts=checkpoint_ts)

        return await self._asked(request.changefeed, context, count)

    async def RemoveTables(
        self, request: pb.RemoveTablesRequest, context: Context
    ) -> pb.RemoveTablesResponse:
        """Pull and serve tables no more."""
        hosted, _ = self._host.running(request.changefeed, _run_of(context))
        for span in map(wire.span_of, request.spans):
            await self._host.run_to_end(hosted.processor.release(span))
        return pb.RemoveTablesResponse()

    async def GetTableBlockers(
        self, request: pb.GetTableBlockersRequest, context: Context
    ) -> pb.GetTableBlockersResponse:
        """The share's tables that are furthest behind."""
        hosted, _ = self._host.running(request.changefeed, _run_of(context))
        tables = await hosted.processor.blockers(request.limit, with_locks=request.with_locks)
        return pb.GetTableBlockersResponse(tables=tables)

    async def DumpTable(
        self, request: pb.DumpTableRequest, context: Context
    ) -> pb.DumpTableResponse:
        """A round of a dump."""
        hosted, _ = self._host.running(request.changefeed, _run_of(context))
        # A round that is cancelled would leave its table's resolved_ts held.
        return await self._host.run_to_end(round_of(self._host, hosted, request))

    async def _asked(self, changefeed: str, context: Context, ask: Callable[[LocalSink], T]) -> T:
        """Ask the share's sink, in a thread: it may read from disk."""
        _, sink = self._host.running(changefeed, _run_of(context))
        try:
            return await asyncio.to_thread(ask, sink)
        except TableNotFoundError as err:  # it is ending
            raise self._host.not_running(changefeed) from err


class _ReportedProgress:
    """The last reported progress of a share: messages hold only what has changed since."""

    def __init__(self) -> None:
        self.tables = 0
        self._known: dict[Span, tuple[int, int]] = {}
        self._position = (0, 0)
        self._spoke_s = self._counted_s = float("-inf")

    async def changes_now(self, hosted: Hosted) -> pb.ShareProgress | None:
        """The same as `changes`; of many tables by a thread, as they take tenths of a second."""
        now_s = asyncio.get_running_loop().time()
        if self.tables < _THREAD_TABLES_MIN:
            return self.changes(hosted, now_s)
        return await asyncio.to_thread(self.changes, hosted, now_s)

    def changes(self, hosted: Hosted, now_s: float) -> pb.ShareProgress | None:
        """Return what has changed since the last call; an empty message after a second
        of silence.
        """
        sink = hosted.processor.sink
        if sink is None:
            return None
        # The share's positions are read before those of its tables. The other way round they could
        # be above a table's, and the owner would take a range for complete that is not.
        resolved_ts = sink.resolved_ts()
        counts, checkpoint_ts = sink.counted_checkpoint()
        kept_ts = sink.kept_ts()
        # Those that ended in history that is kept are still read.
        is_kept = hosted.assignment.keep_ts > 0
        since_ts = min(checkpoint_ts, kept_ts) if is_kept else checkpoint_ts
        spans = [
            versions[0].span for versions in hosted.assignment.catalog.versions.spans(since_ts)
        ]
        self.tables = len(spans)
        moved = [status for span in spans if (status := self._moved(sink, span))]
        # A share without tables is as far as its barrier, and the whole is no further than that.
        has_moved = bool(moved) or (resolved_ts, checkpoint_ts) != self._position
        if not has_moved and now_s - self._spoke_s < _SPEAK_EVERY_S:
            return None
        self._spoke_s, self._position = now_s, (resolved_ts, checkpoint_ts)
        traffic = None
        if now_s - self._counted_s >= _TRAFFIC_EVERY_S:
            self._counted_s = now_s
            traffic = wire.traffic_message(hosted.processor.traffic())
        return pb.ShareProgress(
            resolved_ts=resolved_ts,
            checkpoint_ts=checkpoint_ts,
            counts=counts,
            spans=moved,
            ends=ends_of(hosted),
            kept_ts=kept_ts,
            traffic=traffic,
            **asdict(hosted.processor.stats()),
        )

    def _moved(self, sink: LocalSink, span: Span) -> pb.SpanProgress | None:
        try:
            position = sink.resolved_ts(span), sink.checkpoint_ts(span)
        except TableNotFoundError:  # it is coming or going
            return None
        if self._known.get(span) == position:
            return None
        self._known[span] = position
        return pb.SpanProgress(
            span=wire.span_message(span), resolved_ts=position[0], checkpoint_ts=position[1]
        )


async def round_of(
    host: Host, hosted: Hosted, request: pb.DumpTableRequest
) -> pb.DumpTableResponse:
    """Read a round of a dump of a share's table; raises ChangefeedNotRunningError, too."""
    chunks = _chunks(hosted)
    if chunks is None:
        raise host.not_running(request.changefeed)
    return await round_read(chunks, request)


async def round_read(chunks: LocalChunks, request: pb.DumpTableRequest) -> pb.DumpTableResponse:
    """Read a round of a dump here, where its tables are pulled; raises as `LocalChunks.read`."""
    pages = list(map(wire.page_of, request.pages))
    span = wire.span_of(request.span) if request.HasField("span") else None
    read = await chunks.read(request.table_id, pages, span)
    return pb.DumpTableResponse(
        ts=read.ts, ends=chunks.ends, pages=map(wire.dumped_page_message, read.pages)
    )


def _chunks(hosted: Hosted) -> LocalChunks | None:
    source = hosted.assignment.source
    return source.chunks if isinstance(source, Dumpable) else None


def ends_of(hosted: Hosted) -> int:
    """Return how many pullers of the share have ended; read it after the positions that it is sent
    with.

    A count that is older than the checkpoint would let a dump take chunks for delivered that were
    lost with a puller.
    """
    chunks = _chunks(hosted)
    return chunks.ends if chunks else 0


def _run_of(context: Context) -> str:
    """Which run of a changefeed a call means."""
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == RUN_METADATA), "")


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return
