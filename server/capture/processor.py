"""The processor: runs one changefeed's pullers, sorter and sink behind one interface, in this
process or in others.

The owner, the API and the Flight listener know these protocols only. `server.capture.local` runs
everything in this process, `server.capture.worker` in several others. Everything a processor holds
is a cache of the upstream: `run` begins at the checkpoint; when it ends, nothing needs to be kept.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa
from tidemarkpb.v1 import capture_pb2 as pb

from server.capture.catalog import FeedCatalog
from server.capture.traffic import Traffic
from server.puller.source import Source
from server.puller.tikv.puller import TablePuller
from sink.cut import Slice
from storage.model.errors import TidemarkError
from storage.model.span import Span


class Sink(Protocol):
    """The interface for readers of a running changefeed. Methods may be called from any thread, and
    raise the errors of `sink.manager`.

    `span` None means all tables.
    """

    def resolved_ts(self, span: Span | None = None) -> int:
        """Return the ts up to which it can be read."""
        ...

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """Return the ts up to which the reader has committed everything."""
        ...

    def wait_resolved(self, after_ts: int, timeout_s: float, span: Span | None = None) -> int:
        """Wait until `resolved_ts` is above `after_ts`, at most `timeout_s`;
        returns it either way.
        """
        ...

    def cut(
        self,
        start_ts: int,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        span: Span | None = None,
    ) -> int:
        """The largest ts in `(start_ts, resolved_ts]` whose rows fit, at least one commit_ts."""
        ...

    def plan_tables(
        self,
        spans: Sequence[Span] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[Slice]:
        """Estimate how many rows and bytes `read` of the same ranges will return; None: of all
        tables, in slices of about that size.
        """
        ...

    def read(
        self, span: Span, start_ts: int, end_ts: int, *, before: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Return the mounted rows of `(start_ts, end_ts]` in order; with `before` each also has its
        values before the change.
        """
        ...

    def ack(self, ts: int, span: Span | None = None) -> int:
        """The reader has committed everything up to `ts`; returns the checkpoint_ts."""
        ...

    def keep_above(self, ts: int) -> None:
        """Keep acknowledged rows above `ts` and drop those below. `ts` only moves forward; requires
        an assignment with a `keep_ts`.
        """
        ...

    def kept_ts(self) -> int:
        """Return the ts above which rows of all tables can still be read, up to the resolved_ts."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessorStats:
    """What a processor holds at this moment; the fields are those of the messages `Holding` and
    `ShareProgress`.
    """

    regions: int = 0
    staged_bytes: int = 0
    sorter_memory_bytes: int = 0
    sorter_disk_bytes: int = 0
    disk_error: str = ""
    """The error with which the sorter's disk last refused rows; empty while it takes them."""
    waiting: int = 0
    """Calls that wait until it takes rows."""
    pulled_ts: int = 0
    """The lowest ts to which all pullers have read; 0: not known."""
    sorted_ts: int = 0
    """The ts up to which all tables are sorted; 0: not known."""

    def __add__(self, other: "ProcessorStats") -> "ProcessorStats":
        return ProcessorStats(
            self.regions + other.regions,
            self.staged_bytes + other.staged_bytes,
            self.sorter_memory_bytes + other.sorter_memory_bytes,
            self.sorter_disk_bytes + other.sorter_disk_bytes,
            self.disk_error or other.disk_error,
            self.waiting + other.waiting,
            _least_known(self.pulled_ts, other.pulled_ts),
            _least_known(self.sorted_ts, other.sorted_ts),
        )


def _least_known(one: int, other: int) -> int:
    # 0 stands for "not known": the least of both would be 0 as soon as one part has not reported.
    return min(one, other) if one and other else one or other


class Processor(Protocol):
    """Runs one changefeed; its pullers and its sink live as long as `run`."""

    @property
    def start_ts(self) -> int:
        """The ts at which `run` begins; the changefeed's position while it does not run."""
        ...

    @property
    def sink(self) -> Sink | None:
        """Set while it runs."""
        ...

    @property
    def checkpoint_ts(self) -> int:
        """The ts up to which everything is at the target."""
        ...

    @property
    def resolved_ts(self) -> int:
        """The ts up to which everything can be read."""
        ...

    @property
    def table_pullers(self) -> Sequence[TablePuller]:
        """The pullers of this process that pull regions."""
        ...

    @property
    def repairing(self) -> Collection[Span]:
        """Tables that are pulled again from their checkpoint because their sorted rows were
        damaged.
        """
        ...

    @property
    def damage(self) -> TidemarkError | None:
        """The error of the table that was damaged last; None: no table is being pulled again."""
        ...

    def stats(self) -> ProcessorStats:
        """State of this moment; zeros when it does not run."""
        ...

    def traffic(self) -> Mapping[Span, Traffic]:
        """Return how much each changing table changes."""
        ...

    def locations(self, span: Span) -> tuple[str, ...]:
        """Flight locations that serve a table's rows better than the capture's own."""
        ...

    def places(self, span: Span) -> tuple[str, ...]:
        """Flight locations of all workers that have rows of the table: several if it is split."""
        ...

    def worker_of(self, span: Span) -> str:
        """The capture or worker process that pulls and serves a table; empty: this process."""
        ...

    def has_share_at(self, capture: str) -> bool:
        """Whether the capture of this id runs a share of the changefeed in a process other than
        this one. A share counts until it has ended, even without tables.
        """
        ...

    def moving_to(self, span: Span) -> tuple[str, int]:
        """Return the worker that a table is moving to (as `worker_of`) and how far the table is
        there; empty: it is not moving.
        """
        ...

    async def move_table(self, span: Span, worker: str) -> None:
        """Move a table to another capture or worker process; it is served there on return.

        Raises:
            TableMoveError: the table cannot move, or no worker has that name.
            TidemarkError: one of the two workers is gone, or does not catch up.
        """
        ...

    async def split_table(self, span: Span, *, put_together: bool) -> None:
        """Split a table over all captures, or put one together again; it is done on return.

        Raises as `move_table`.
        """
        ...

    async def blockers(self, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
        """The `most` tables that are furthest behind, their slowest regions,
        and the locks that hold those.
        """
        ...

    async def run(self) -> None:
        """Pull until cancelled.

        Raises:
            TidemarkError: in a group; the changefeed cannot go on as it is.
        """
        ...

    def wipe(self) -> None:
        """Delete its directories; it does not run any more."""
        ...


class ProcessorPosition:
    """A processor's position: that of its sink while it runs,
    and where `run` begins while it does not.
    """

    start_ts: int
    sink: Sink | None = None

    @property
    def checkpoint_ts(self) -> int:
        """The ts up to which everything is at the target."""
        sink = self.sink
        return sink.checkpoint_ts() if sink else self.start_ts

    @property
    def resolved_ts(self) -> int:
        """The ts up to which everything can be read."""
        sink = self.sink
        return sink.resolved_ts() if sink else self.start_ts


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a processor should run: the catalog's tables above `checkpoint_ts`, up to `stop_ts` if
    that is not 0.
    """

    changefeed: str
    source: Source
    catalog: FeedCatalog
    checkpoint_ts: int
    stop_ts: int = 0
    target_ts: int = 0
    """The ts at which the changefeed ends, if it is not 0; a cut must be able to end there."""
    keep_ts: int = 0
    """Acknowledged rows above it are kept (`Sink.keep_above`); 0: none are kept."""
    limited: bool = False
    """Whether another process limits how far schema changes are known: at first to the
    checkpoint.
    """
    region_threshold: int = 0
    """Tables with so many regions are split over the workers; 0: none is."""


MakeProcessor: TypeAlias = Callable[[Assignment], Processor]
