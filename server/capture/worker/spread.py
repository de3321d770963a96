"""A changefeed of the cluster's tables that runs here while this capture is the only worker, and is
divided among all workers else.

When workers come or go it begins again at its checkpoint, among those that are there then: what is
above the checkpoint is pulled anew, and is the same. Nobody is told of an error for that.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import structlog
from tidemarkpb.v1 import capture_pb2 as pb

from server.capture import metrics
from server.capture.processor import Assignment, MakeProcessor, Processor, ProcessorStats, Sink
from server.capture.worker.pool import Worker
from server.puller.tikv.puller import TablePuller
from storage.model.errors import TidemarkError
from storage.model.span import Span
from storage.tasks import beside

_LOOK_EVERY_S = 0.5
_SETTLED_S = 2.0
"""Workers that come or go do so one after the other, as when all are restarted."""

_log = structlog.get_logger(__name__)


class _DealtAnewError(Exception):
    """Other workers are there than those that the changefeed was dealt to."""


class SpreadProcessor:
    """Implements `server.capture.processor.Processor`.

    `workers` are those that can be used now, none but this process if it is empty; `here` and
    `divided` make the processor for the one and the other.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        here: MakeProcessor,
        divided: MakeProcessor,
        assignment: Assignment,
    ) -> None:
        self._workers = workers
        self._here = here
        self._divided = divided
        self._assignment = assignment
        self._inner: Processor = here(assignment)

    @property
    def start_ts(self) -> int:
        """See `Processor`."""
        return self._inner.start_ts

    @property
    def sink(self) -> Sink | None:
        """See `Processor`."""
        return self._inner.sink

    @property
    def checkpoint_ts(self) -> int:
        """See `Processor`."""
        return self._inner.checkpoint_ts

    @property
    def resolved_ts(self) -> int:
        """See `Processor`."""
        return self._inner.resolved_ts

    @property
    def table_pullers(self) -> Sequence[TablePuller]:
        """See `Processor`."""
        return self._inner.table_pullers

    @property
    def repairing(self) -> Collection[Span]:
        """See `Processor`."""
        return self._inner.repairing

    @property
    def damage(self) -> TidemarkError | None:
        """See `Processor`."""
        return self._inner.damage

    def stats(self) -> ProcessorStats:
        """See `Processor`."""
        return self._inner.stats()

    def locations(self, span: Span) -> tuple[str, ...]:
        """See `Processor`."""
        return self._inner.locations(span)

    async def blockers(self, most: int, *, with_locks: bool) -> list[pb.TableBlockers]:
        """See `Processor`."""
        return await self._inner.blockers(most, with_locks=with_locks)

    def wipe(self) -> None:
        """See `Processor`."""
        self._here(self._assignment).wipe()
        self._divided(self._assignment).wipe()

    async def run(self) -> None:
        """See `Processor`."""
        while True:
            workers = tuple(self._workers())
            make = self._divided if workers else self._here
            self._inner = make(replace(self._assignment, checkpoint_ts=self._inner.start_ts))
            try:
                async with beside(self._inner.run()):
                    await self._changed(workers)
            except* _DealtAnewError:
                metrics.MOVES.labels(self._assignment.changefeed).inc()
                _log.info(
                    "tables are dealt anew",
                    changefeed=self._assignment.changefeed,
                    workers=[worker.name for worker in self._workers()],
                )

    async def _changed(self, workers: Sequence[Worker]) -> None:
        """Wait until other workers are there; raises _DealtAnewError."""
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        while loop.time() - since_s < _SETTLED_S:
            await asyncio.sleep(_LOOK_EVERY_S)
            if tuple(self._workers()) == tuple(workers):
                since_s = loop.time()
        raise _DealtAnewError
