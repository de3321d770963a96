"""A share of a changefeed: some of its tables, pulled and served by one worker.

`Share` has what the combined sink needs, `MovableShare` what moves need, and `WorkerShare` what the
owner needs to run it and to change its tables. `RemoteShare` (`remote`) is a share in another
process, `LocalShare` (`local_share`) one in the owner's own.
"""

import asyncio
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from tidemarkpb.v1 import capture_pb2
from tidemarkpb.v1 import worker_pb2 as pb

from server.capture.cut import CutPart
from server.capture.processor import ProcessorStats, Sink
from server.capture.traffic import Traffic
from server.changefeed.table import SourceTable
from server.puller.source import TableChange
from sink.cut import Bounds, Slice
from sorter.errors import TableNotFoundError
from storage.model.errors import TidemarkError
from storage.model.span import Span


@dataclass(frozen=True, slots=True)
class ShareStart:
    """The state with which a share begins."""

    changefeed: str
    tables: tuple[SourceTable, ...]
    """The tables in force at `start_ts`."""
    start_ts: int
    changes: tuple[TableChange, ...] = ()
    """The changes known above `start_ts`."""
    term: int = 0
    """The owner's."""
    keep_ts: int = 0
    """Acknowledged rows above it are kept from the start on; 0: none are kept."""


class Share(Protocol):
    """The tables of one worker; see `server.capture.processor.Sink`. Calls come from any thread."""

    @property
    def local_sink(self) -> Sink | None:
        """Its sink while this process runs it."""
        ...

    def resolved_ts(self, span: Span | None = None) -> int:
        """Return the ts up to which the table (None: the share) can be read.

        Raises:
            TableNotFoundError: a share of this process does not have it, or not yet.
        """
        ...

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """Return the ts up to which it is acknowledged."""
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

    def keep_above(self, ts: int) -> None:
        """See `Sink.keep_above`."""
        ...

    def kept_ts(self) -> int:
        """See `Sink.kept_ts`; of the share."""
        ...


class MovableShare(Share, Protocol):
    """A share whose tables can move. Calls may block, and are made outside of the event loop."""

    @property
    def start_ts(self) -> int:
        """The ts at which the share began."""
        ...

    def add(self, tables: Sequence[tuple[SourceTable, int]], start_ts: int) -> None:
        """Pull tables above `start_ts`, each given with the ts of its schema; another share serves
        them until `count`.
        """
        ...

    def count(self, positions: Mapping[Span, int]) -> None:
        """Count added tables in the totals; `positions` are the ts up to which each is
        committed.
        """
        ...

    def remove(self, spans: Sequence[Span], timeout_s: float = ...) -> None:
        """Drop tables; it is no error if some are not there."""
        ...


class WorkerShare(MovableShare, Protocol):
    """A share with what its owner needs to run it."""

    @property
    def tables(self) -> dict[Span, SourceTable]:
        """The newest of each span."""
        ...

    @property
    def running(self) -> asyncio.Event:
        """Set when it serves."""
        ...

    @property
    def stats(self) -> ProcessorStats:
        """Return what the share holds."""
        ...

    def traffic(self) -> Mapping[Span, Traffic]:
        """See `Processor.traffic`; of its own tables."""
        ...

    @property
    def ends(self) -> int:
        """The number of pullers that have ended; as new as checkpoint_ts, or newer."""
        ...

    @property
    def repairing(self) -> Collection[Span]:
        """See `Processor.repairing`; one elsewhere repairs its tables by itself, and logs it."""
        ...

    @property
    def damage(self) -> TidemarkError | None:
        """See `Processor.damage`."""
        ...

    async def run(
        self, target_ts: int, moved: Callable[[], None], *, limited: bool = False
    ) -> None:
        """Run the share until cancelled; `moved` is called when its positions have moved. If
        `limited`, it gives no rows above the last barrier of `limit`.

        Raises:
            TidemarkError: the share's own error, or its worker is gone.
        """
        ...

    def change(self, change: TableChange) -> None:
        """Bring a schema change in force; blocks until it is."""
        ...

    def limit(self, barrier_ts: int) -> None:
        """Allow rows up to `barrier_ts`: all schema changes up to there are known."""
        ...

    def dump(self, span: Span, pages: Sequence[pb.DumpPage]) -> pb.DumpTableResponse:
        """Run one round of a dump of a table, or of a part of one."""
        ...

    def blockers(self, limit: int, *, with_locks: bool) -> list[capture_pb2.TableBlockers]:
        """The share's tables that are furthest behind, and why."""
        ...


def known_blockers(share: WorkerShare, limit: int, problem: str) -> list[capture_pb2.TableBlockers]:
    """The tables furthest behind of a share that is silent, as far as they were known before
    `problem`.
    """
    blockers: list[capture_pb2.TableBlockers] = []
    for table in list(share.tables.values()):
        with suppress(TableNotFoundError):  # it is coming or going
            resolved_ts = share.resolved_ts(table.span)
            region = capture_pb2.RegionBlockers(resolved_ts=resolved_ts, problem=problem)
            blockers.append(
                capture_pb2.TableBlockers(
                    name=table.name,
                    table_id=table.span.table_id,
                    resolved_ts=resolved_ts,
                    checkpoint_ts=share.checkpoint_ts(table.span),
                    regions=[region],
                )
            )
    return heapq.nsmallest(limit, blockers, key=lambda each: each.resolved_ts)


def newest(
    tables: Iterable[SourceTable], changes: Iterable[TableChange]
) -> dict[Span, SourceTable]:
    """The newest table of each span."""
    return {
        table.span: table
        for group in (tables, *(change.tables for change in changes))
        for table in group
    }
