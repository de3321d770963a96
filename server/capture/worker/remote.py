"""A share of a changefeed in another process: the owner reads its positions from the status that
the worker reports, and calls the worker for everything else.

The share lives exactly as long as the stream of `run`: if the owner goes away, the worker ends the
share; if the worker goes away, the owner gets WorkerLostError. Rows come over Flight, everything
else over gRPC; every call has a deadline.

`ShareStatus` has the positions and statistics of the worker's last report. Positions only move
forward, so a report that arrives after the answer to a later acknowledgement changes nothing. There
is one exception: a table that comes from another share may take the share's checkpoint_ts back,
since the share may have been further than that table. A worker's errors keep their code and kind.
"""

import asyncio
import json
import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
import pyarrow as pa
import pyarrow.flight as fl
from pyspark_tidemark import tracing
from tidemarkpb.v1 import capture_pb2
from tidemarkpb.v1 import worker_pb2 as pb
from tidemarkpb.v1.worker_pb2_grpc import WorkerServiceStub

from server.capture import long_lived
from server.capture.cut import CutPart
from server.capture.processor import ProcessorStats, Sink
from server.capture.traffic import Traffic
from server.capture.worker import wire
from server.capture.worker.share import ShareStart
from server.capture.worker.wire import span_of
from server.changefeed.table import SourceTable
from server.puller.source import TableChange
from server.rpc.errors import coded, error_of_peer
from sink.cut import Bounds, Slice
from sink.flight.documents import Ticket
from storage.model.errors import InvalidError, TidemarkError, UnavailableError
from storage.model.span import Span

T = TypeVar("T")
RUN_METADATA = "tidemark-run"
SILENCE_S = 60.0
"""A worker reports every second; after this long a silent one is given up."""
_STOP_S = 30.0
_PEER_STOP_S = 3.0
"""How long to wait for a capture to stop a share; a share that runs on does no harm."""
_CALL_S = 20.0
_BLOCKERS_S = 2.0
_DUMP_S = 60.0
_MOVE_S = 60.0
_READ_S = 3600.0
_STEP_TABLES = 1000
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class WorkerLostError(UnavailableError):
    """A worker process, or another capture, has died or does not answer;
    its tables are pulled again.
    """

    code = "ErrWorkerLost"


def lost(worker: str) -> WorkerLostError:
    """Return the error for a worker that is gone."""
    return WorkerLostError(
        f"{worker} has died or does not answer; its tables are pulled again, here or elsewhere"
    )


def error_of(worker: str, err: grpc.RpcError | Any) -> TidemarkError:
    """The worker's own error, code and kind as it raised it; WorkerLostError if it said nothing."""
    if error := error_of_peer(err):
        return error
    return lost(worker) if err.code() in _LOST else TidemarkError(f"{worker}: {err.details()}")


def error_of_flight(worker: str, err: Exception) -> TidemarkError:
    """The worker's own error in the text of a Flight error; WorkerLostError if there is none."""
    match = re.search(r"\[TM:(\w+)\] (.*?)(?:\. Detail: |$)", str(err), re.DOTALL)
    if match is None:
        return lost(worker)
    kind = UnavailableError if isinstance(err, fl.FlightUnavailableError) else InvalidError
    return coded(kind, *match.groups())


class RemoteWorker(Protocol):
    """A worker in another process, as its shares use it."""

    @property
    def name(self) -> str:
        """Its name in messages; unique."""
        ...

    @property
    def stub(self) -> WorkerServiceStub:
        """The client for calls from any thread; it reconnects by itself."""
        ...

    def do_get(self, ticket: fl.Ticket, timeout_s: float) -> fl.FlightStreamReader:
        """Its rows, from any thread."""
        ...

    @property
    def comes_back(self) -> bool:
        """Whether the worker is restarted when it dies; its shares wait for that."""
        ...

    def connect(self) -> grpc.aio.Channel:
        """A channel for calls from the event loop."""
        ...

    def lost(self) -> None:
        """Note that it does not answer."""
        ...

    def kill(self) -> None:
        """End it, or leave it out: a silent worker's later answers must not count."""
        ...


class ShareStatus:
    """A worker's last report of its share; written on the event loop and by acknowledgements, read
    by any thread.
    """

    def __init__(self, start_ts: int) -> None:
        self.resolved_ts = self.checkpoint_ts = start_ts
        self.kept_ts = 0
        self.stats = ProcessorStats()
        self.ends = 0
        """The number of pullers that have ended; as new as checkpoint_ts, or newer."""
        self.traffic: Mapping[Span, Traffic] = {}
        """The last reported traffic, some seconds old."""
        self._counts = 0
        """The number of the count of tables to which checkpoint_ts belongs."""
        self._lock = threading.Lock()
        self._spans: dict[Span, tuple[int, int]] = {}
        self._start_ts = start_ts

    async def take(self, message: pb.ShareProgress) -> None:
        """Take a report of the worker on the event loop, in steps."""
        # The spans of the first report stay for the share's whole life, so the garbage collector
        # need not look at them.
        with long_lived.building_tables(0 if self._spans else len(message.spans)):
            for _ in self.absorb_in_steps(message):
                await asyncio.sleep(0)

    def absorb_in_steps(self, message: pb.ShareProgress) -> Iterator[None]:
        """Take a report in steps of a few milliseconds: it may be of a hundred thousand tables."""
        # The order of updates matters to other threads. The ends of pullers come before the
        # checkpoint_ts, which they explain; tables come before the share, which is never further
        # than one of them.
        self.ended(message.ends)
        for number, progress in enumerate(message.spans, 1):
            if number % _STEP_TABLES == 0:
                yield
            span = span_of(progress.span)
            resolved_ts, checkpoint_ts = self.table(span)
            self._spans[span] = (
                max(resolved_ts, progress.resolved_ts),
                max(checkpoint_ts, progress.checkpoint_ts),
            )
        self.resolved_ts = max(self.resolved_ts, message.resolved_ts)
        self.acknowledged(message.checkpoint_ts, message.counts)
        self.kept_ts = max(self.kept_ts, message.kept_ts)
        if message.HasField("traffic"):
            self.traffic = wire.traffic_of(message.traffic)
        self.stats = ProcessorStats(
            message.regions,
            message.staged_bytes,
            message.sorter_memory_bytes,
            message.sorter_disk_bytes,
            message.disk_error,
            message.waiting,
            message.pulled_ts,
            message.sorted_ts,
        )

    def acknowledged(self, checkpoint_ts: int, counts: int = 0) -> None:
        """Raise the share's checkpoint_ts to that, unless a table was counted in after the report,
        as its number `counts` says.
        """
        with self._lock:
            if counts > self._counts:
                self._counts, self.checkpoint_ts = counts, checkpoint_ts
            elif counts == self._counts:
                self.checkpoint_ts = max(self.checkpoint_ts, checkpoint_ts)

    def ended(self, ends: int) -> None:
        """Note that at least so many pullers have ended; call it before noting the checkpoint_ts of
        the same report.
        """
        with self._lock:
            self.ends = max(self.ends, ends)

    def removed(self, span: Span) -> None:
        """Forget a table that the share has dropped; if it comes again, it begins anew."""
        self._spans.pop(span, None)

    def table(self, span: Span) -> tuple[int, int]:
        """The resolved_ts and checkpoint_ts of one table in one place."""
        return self._spans.get(span, (self._start_ts, self._start_ts))


class RemoteShare:
    """Implements `server.capture.worker.share.WorkerShare` for `tables` of one changefeed."""

    local_sink: Sink | None = None
    """See `Share.local_sink`."""
    repairing: Collection[Span] = ()
    """See `WorkerShare.repairing`."""
    damage: TidemarkError | None = None
    """See `WorkerShare.damage`."""

    def __init__(
        self,
        worker: RemoteWorker,
        changefeed: str,
        tables: Sequence[SourceTable],
        start_ts: int,
        changes: Sequence[TableChange] = (),
        *,
        term: int = 0,
    ) -> None:
        """`tables` are in force at `start_ts`, `changes` are known above it; `term` is
        the owner's.
        """
        self.tables: dict[Span, SourceTable] = {}
        """The newest of each span."""
        self.status = ShareStatus(start_ts)
        self.running = asyncio.Event()
        self._worker = worker
        self._changefeed = changefeed
        self.start_ts = start_ts
        self.keep_ts = 0
        """Acknowledged rows above it are kept from the start on; 0: none are kept."""
        self._term = term
        self._run = ((RUN_METADATA, uuid.uuid4().hex),)
        self._began = tuple(tables)
        self._changes = tuple(changes)
        self._names: dict[Span, list[tuple[int, str]]] = {}
        self._note(self._began, start_ts)
        for change in changes:
            self._note(change.tables, change.commit_ts)

    @classmethod
    def of(cls, worker: RemoteWorker, start: ShareStart) -> "RemoteShare":
        """A share on `worker`."""
        share = cls(
            worker, start.changefeed, start.tables, start.start_ts, start.changes, term=start.term
        )
        share.keep_ts = start.keep_ts
        return share

    @property
    def stats(self) -> ProcessorStats:
        """See `WorkerShare.stats`."""
        return self.status.stats

    def traffic(self) -> Mapping[Span, Traffic]:
        """See `WorkerShare.traffic`."""
        return self.status.traffic

    @property
    def ends(self) -> int:
        """See `WorkerShare.ends`."""
        return self.status.ends

    async def run(
        self, target_ts: int, moved: Callable[[], None], *, limited: bool = False
    ) -> None:
        """Run the share until cancelled; `moved` is called at each report of it.

        If `limited`, it gives no rows above the last barrier of `limit`.

        Raises:
            TidemarkError: the share's own error.
            WorkerLostError: the worker is gone.
        """
        # A hundred thousand tables take seconds to write.
        request = await asyncio.to_thread(self._request, target_ts, limited=limited)
        async with self._worker.connect() as channel:
            stub = WorkerServiceStub(channel)
            try:
                await self._follow(stub.Run(request, wait_for_ready=self._worker.comes_back), moved)
            except grpc.aio.AioRpcError as err:
                error = error_of(self._worker.name, err)
                if isinstance(error, WorkerLostError):
                    self._worker.lost()
                raise error from err
            except TimeoutError as err:
                # The worker may hang and wake up later: a process of our own is killed, another
                # capture gets no shares for a while.
                self._worker.kill()
                raise lost(self._worker.name) from err
            finally:
                await self._stop(stub)

    def _request(self, target_ts: int, *, limited: bool) -> pb.RunRequest:
        packs = len(self._began) >= wire.PACKED_TABLES_MIN
        return pb.RunRequest(
            changefeed=self._changefeed,
            tables=() if packs else map(wire.table_message, self._began),
            packed_tables=wire.packed_tables(self._began) if packs else b"",
            checkpoint_ts=self.start_ts,
            target_ts=target_ts,
            changes=map(wire.change_message, self._changes),
            limited=limited,
            run=self._run[0][1],
            term=self._term,
            keep_ts=self.keep_ts,
        )

    async def _follow(self, stream: Any, moved: Callable[[], None]) -> None:
        messages = aiter(stream)
        while True:
            async with asyncio.timeout(SILENCE_S):
                message = await anext(messages, None)
            if message is None:
                raise lost(self._worker.name)
            await self.status.take(message)
            self.running.set()
            moved()

    async def _stop(self, stub: Any) -> None:
        """Stop the share, and wait until the worker has deleted it, if the worker still answers."""
        try:
            request = pb.StopRequest(changefeed=self._changefeed)
            limit_s = _STOP_S if self._worker.comes_back else _PEER_STOP_S
            await stub.Stop(request, timeout=limit_s, metadata=self._run)
        except grpc.aio.AioRpcError:
            return

    def change(self, change: TableChange) -> None:
        """Bring a schema change in force; blocks until it is."""
        request = pb.ChangeShareRequest(
            changefeed=self._changefeed, change=wire.change_message(change)
        )
        # Its name is known before the worker has the table: a reader may ask for it at once.
        self._note(change.tables, change.commit_ts)
        self._ask(lambda stub: stub.ChangeShare(request, timeout=_CALL_S, metadata=self._run))

    def limit(self, barrier_ts: int) -> None:
        """Allow rows up to `barrier_ts`: all schema changes up to there are known."""
        request = pb.LimitShareRequest(changefeed=self._changefeed, barrier_ts=barrier_ts)
        self._ask(lambda stub: stub.LimitShare(request, timeout=_CALL_S, metadata=self._run))

    def resolved_ts(self, span: Span | None = None) -> int:
        """See `Share.resolved_ts`."""
        return self.status.resolved_ts if span is None else self.status.table(span)[0]

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """See `Share.checkpoint_ts`."""
        return self.status.checkpoint_ts if span is None else self.status.table(span)[1]

    def cut(
        self,
        start_ts: int,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        span: Span | None = None,
    ) -> int:
        """See `Share.cut`."""
        assert span is not None, "a cut over several tables is chosen over all shares"
        request = pb.CutTableRequest(
            changefeed=self._changefeed,
            span=wire.span_message(span),
            start_ts=start_ts,
            max_rows=max_rows,
            max_bytes=max_bytes,
        )
        return self._ask(
            lambda stub: stub.CutTable(request, timeout=_CALL_S, metadata=self._run)
        ).end_ts

    def cut_part(self, start_ts: int, upper_ts: int, bounds: Bounds) -> CutPart:
        """See `Share.cut_part`."""
        request = wire.extents_request(self._changefeed, start_ts, upper_ts, bounds)
        return wire.part_of(
            self._ask(lambda stub: stub.Extents(request, timeout=_CALL_S, metadata=self._run))
        )

    def plan_tables(
        self,
        spans: Sequence[Span] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[Slice]:
        """See `Share.plan_tables`."""
        request = pb.PlanTablesRequest(
            changefeed=self._changefeed,
            spans=map(wire.span_message, spans or ()),
            start_ts=start_ts,
            end_ts=end_ts,
            all_tables=spans is None,
            slice_bytes=slice_bytes,
        )
        return wire.slices_of(
            self._ask(lambda stub: stub.PlanTables(request, timeout=_CALL_S, metadata=self._run))
        )

    def ack(self, ts: int, span: Span | None = None) -> int:
        """See `Share.ack`."""
        message = wire.span_message(span) if span else None
        request = pb.AckShareRequest(changefeed=self._changefeed, ts=ts, span=message)
        answer = self._ask(lambda stub: stub.AckShare(request, timeout=_CALL_S, metadata=self._run))
        self.status.ended(answer.ends)
        self.status.acknowledged(answer.share_checkpoint_ts, answer.counts)
        return answer.checkpoint_ts

    def keep_above(self, ts: int) -> None:
        """See `Share.keep_above`."""
        request = pb.KeepHistoryRequest(changefeed=self._changefeed, ts=ts)
        self._ask(lambda stub: stub.KeepHistory(request, timeout=_CALL_S, metadata=self._run))

    def kept_ts(self) -> int:
        """See `Share.kept_ts`."""
        return self.status.kept_ts

    def add(self, tables: Sequence[tuple[SourceTable, int]], start_ts: int) -> None:
        """Pull tables above `start_ts`, each given with the ts of its schema; another share serves
        them until `count`.
        """
        for table, from_ts in tables:
            self._note([table], from_ts)
            self.status.removed(table.span)
        request = pb.AddTablesRequest(
            changefeed=self._changefeed,
            tables=[
                pb.MovedTable(table=wire.table_message(table), from_ts=from_ts)
                for table, from_ts in tables
            ],
            start_ts=start_ts,
        )
        self._ask(lambda stub: stub.AddTables(request, timeout=_MOVE_S, metadata=self._run))

    def count(self, positions: Mapping[Span, int]) -> None:
        """Count added tables in the totals; `positions` are the ts up to which each is
        committed.
        """
        request = pb.CountTablesRequest(
            changefeed=self._changefeed,
            tables=[
                pb.SpanProgress(span=wire.span_message(span), checkpoint_ts=checkpoint_ts)
                for span, checkpoint_ts in positions.items()
            ],
        )
        answer = self._ask(
            lambda stub: stub.CountTables(request, timeout=_MOVE_S, metadata=self._run)
        )
        # Noted before the former share drops the tables: its own position limits the whole until
        # then.
        self.status.acknowledged(answer.checkpoint_ts, answer.counts)

    def remove(self, spans: Sequence[Span], timeout_s: float = _MOVE_S) -> None:
        """Drop tables; it is no error if some are not there."""
        request = pb.RemoveTablesRequest(
            changefeed=self._changefeed, spans=map(wire.span_message, spans)
        )
        self._ask(lambda stub: stub.RemoveTables(request, timeout=timeout_s, metadata=self._run))
        for span in spans:
            self.tables.pop(span, None)
            self.status.removed(span)

    def dump(self, span: Span, pages: Sequence[pb.DumpPage]) -> pb.DumpTableResponse:
        """See `WorkerShare.dump`."""
        request = wire.dump_request(self._changefeed, span, pages)
        answer = self._ask(
            lambda stub: stub.DumpTable(request, timeout=_DUMP_S, metadata=self._run)
        )
        self.status.ended(answer.ends)
        return answer

    def read(
        self, span: Span, start_ts: int, end_ts: int, *, before: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """See `Share.read`: passes the worker's rows on; errors of the range are raised at once."""
        # The first batch is fetched here: an error that came with it only when the rows are
        # iterated would reach the Flight reader in the middle of its stream.
        ticket = Ticket(
            self._changefeed,
            self._name(span, start_ts),
            start_ts,
            end_ts,
            traceparent=tracing.current().traceparent,
        ).document()
        batches = self._batches(ticket | {"before": True} if before else ticket)
        first = next(batches, None)
        return batches if first is None else _chained(first, batches)

    def blockers(self, limit: int, *, with_locks: bool) -> list[capture_pb2.TableBlockers]:
        """The share's tables that are furthest behind, and why."""
        request = pb.GetTableBlockersRequest(
            changefeed=self._changefeed, limit=limit, with_locks=with_locks
        )
        return list(
            self._ask(
                lambda stub: stub.GetTableBlockers(request, timeout=_BLOCKERS_S, metadata=self._run)
            ).tables
        )

    def _note(self, tables: Sequence[SourceTable], from_ts: int) -> None:
        for table in tables:
            self.tables[table.span] = table
            self._names.setdefault(table.span, []).append((from_ts, table.target_name))

    def _name(self, span: Span, ts: int) -> str:
        """Return the name that the worker uses for the table right above `ts`."""
        names = self._names[span]
        return next((name for from_ts, name in reversed(names) if from_ts <= ts), names[0][1])

    def _batches(self, ticket: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        try:
            stream = self._worker.do_get(fl.Ticket(json.dumps(ticket).encode()), _READ_S)
            for chunk in stream:
                yield chunk.data
        except (fl.FlightError, pa.ArrowException) as err:
            raise error_of_flight(self._worker.name, err) from err

    def _ask(self, call: Callable[[WorkerServiceStub], T]) -> T:
        try:
            return call(self._worker.stub)
        except grpc.RpcError as err:
            raise error_of(self._worker.name, err) from err


def _chained(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from others
