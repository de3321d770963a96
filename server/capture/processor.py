"""What runs one changefeed: pullers, sorter and sink, behind one face, wherever they are.

The owner, the API and the Flight listener know these protocols only. `server.capture.local` runs everything in this
process, `server.capture.worker` in several others. Everything a processor holds is a cache of the upstream: `run`
begins at the checkpoint; when it ends, nothing needs to be kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa
from tidemarkpb.v1 import capture_pb2 as pb

from server.puller.table import SourceTable
from server.puller.tikv.puller import TablePuller
from sink.manager import Slice
from storage.model.span import Span


class Sink(Protocol):
    """What readers ask of a running changefeed; any thread may ask, and errors are those of `sink.manager`.

    `span` None means all tables.
    """

    def resolved_ts(self, span: Span | None = None) -> int:
        """How far it can be read."""
        ...

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """Everything up to it is committed by the reader."""
        ...

    def wait_resolved(self, after_ts: int, timeout_s: float, span: Span | None = None) -> int:
        """Wait until `resolved_ts` is above `after_ts`, at most `timeout_s`; returns it either way."""
        ...

    def cut(
        self, start_ts: int, max_rows: int | None = None, max_bytes: int | None = None, span: Span | None = None
    ) -> int:
        """The largest ts in `(start_ts, resolved_ts]` whose rows fit, at least one commit_ts."""
        ...

    def plan_tables(self, spans: Sequence[Span], start_ts: int, end_ts: int) -> list[Slice]:
        """How much `read` of the same range will give of each, about."""
        ...

    def read(self, span: Span, start_ts: int, end_ts: int) -> Iterator[pa.RecordBatch]:
        """The mounted rows of `(start_ts, end_ts]`, in order."""
        ...

    def ack(self, ts: int, span: Span | None = None) -> int:
        """The reader has committed everything up to `ts`; returns the checkpoint_ts."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessorStats:
    """What a processor holds at this moment."""

    regions: int = 0
    staged_bytes: int = 0
    sorter_memory_bytes: int = 0
    sorter_disk_bytes: int = 0


class Processor(Protocol):
    """One changefeed's; lives as long as `run`."""

    @property
    def start_ts(self) -> int:
        """Where `run` begins, and where the changefeed stands while it does not run."""
        ...

    @property
    def sink(self) -> Sink | None:
        """Set while it runs."""
        ...

    @property
    def checkpoint_ts(self) -> int:
        """Everything up to it is at the target."""
        ...

    @property
    def resolved_ts(self) -> int:
        """Everything up to it can be read."""
        ...

    @property
    def pullers(self) -> Sequence[TablePuller]:
        """Those of this process."""
        ...

    def stats(self) -> ProcessorStats:
        """State of this moment; zeros when it does not run."""
        ...

    def locations(self, span: Span) -> tuple[str, ...]:
        """Flight locations that serve a table's rows better than the capture's own."""
        ...

    async def blockers(self, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
        """The `most` tables that are furthest behind, their slowest regions, and the locks that hold those."""
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


MakeProcessor: TypeAlias = Callable[[str, tuple[SourceTable, ...], int, int], Processor]
"""Of changefeed id, tables, checkpoint_ts, and target_ts (0: no end)."""
