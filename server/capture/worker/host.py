"""The shares of changefeeds that a worker process, or a capture, runs, by changefeed id."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from server.capture import long_lived
from server.capture.errors import ChangefeedNotRunningError, ChangefeedStateError, NotOwnerError
from server.capture.local import LocalProcessor
from server.capture.processor import Assignment
from server.capture.run import LocalSink
from server.capture.runner import worst
from server.puller.source import SourceContext
from server.puller.tikv.puller import TablePuller
from storage.defect import request_error
from storage.model.errors import TidemarkError

T = TypeVar("T")
Make = Callable[[Assignment], LocalProcessor]


@dataclass(slots=True, eq=False)
class Hosted:
    """One share; `error` is set when it has ended by itself."""

    assignment: Assignment
    processor: LocalProcessor
    run_id: str = ""
    """Which run of the changefeed it belongs to."""
    task: asyncio.Task[None] | None = None
    error: TidemarkError | None = None
    cancelled: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Run the share until cancelled or failed."""
        try:
            await self.processor.run()
        except* Exception as group:  # noqa: BLE001 - nobody expected it: it is logged and ends this alone
            self.error = worst(group)
        finally:
            self.ended.set()
            # The share is ending: `cancel` must not interrupt the deletion below, since the next
            # share of this changefeed uses the same directory.
            self.cancelled = True
            await asyncio.to_thread(self.processor.wipe)
            long_lived.dropped_tables(len(self.assignment.catalog.read()))

    def cancel(self) -> None:
        """End it; `task` ends when nothing of it is left."""
        if self.task is not None and not self.cancelled:
            self.cancelled = True
            self.task.cancel()


class Host:
    """Starts and ends shares; their tasks are children of `tasks`."""

    def __init__(self, tasks: asyncio.TaskGroup, make: Make) -> None:
        self._tasks = tasks
        self._make = make
        self._hosted: dict[str, Hosted] = {}
        self._term = 0

    async def start(self, assignment: Assignment, run_id: str = "", term: int = 0) -> Hosted:
        """Run a share for the owner of that term; one that runs for an earlier run ends first.

        Raises:
            NotOwnerError: an owner that was elected later has asked already.
            ChangefeedStateError: another one of this changefeed was faster.
        """
        changefeed = assignment.changefeed
        if term < self._term:
            raise NotOwnerError("another capture owns the changefeeds by now")
        # Before the wait below, so that calls of an owner that is deposed meanwhile are refused.
        self._term = term
        await self.stop(changefeed)
        if changefeed in self._hosted or term < self._term:
            raise ChangefeedStateError(
                f"another share of changefeed {changefeed} was started here; try again"
            )
        hosted = Hosted(assignment, self._make(assignment), run_id)
        self._hosted[changefeed] = hosted
        hosted.task = self._tasks.create_task(hosted.run(), name=f"share of {changefeed}")
        hosted.task.add_done_callback(lambda _: self._hosted.pop(changefeed, None))
        return hosted

    async def stop(self, changefeed: str, run_id: str | None = None) -> None:
        """End a share, of that run if one is given, and wait until nothing of it is left;
        none is no error.
        """
        hosted = self._hosted.get(changefeed)
        if hosted is None or run_id not in (None, hosted.run_id):
            return
        if hosted.task is not None:
            hosted.cancel()
            await asyncio.wait([hosted.task])

    def running(self, changefeed: str, run_id: str | None = None) -> tuple[Hosted, LocalSink]:
        """A share that serves, of that run if one is given; callable from any thread.

        Raises:
            ChangefeedNotRunningError: it does not, or not yet.
        """
        hosted = self._hosted.get(changefeed)
        sink = hosted.processor.sink if hosted else None
        if hosted is None or sink is None or run_id not in (None, hosted.run_id):
            raise self.not_running(changefeed)
        return hosted, sink

    def not_running(self, changefeed: str) -> ChangefeedNotRunningError:
        """Return the error for a share that does not serve, or not yet."""
        return ChangefeedNotRunningError(
            f"changefeed {changefeed} does not run in this worker now; try again"
        )

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end even if the caller is cancelled; raises what it raises."""
        outcome = await asyncio.shield(self._tasks.create_task(_outcome(work)))
        if isinstance(outcome, TidemarkError):
            raise outcome
        return outcome

    def close(self) -> None:
        """End all shares."""
        for hosted in self._hosted.values():
            hosted.cancel()

    def pullers(self) -> list[TablePuller]:
        """The pullers of all shares, at this moment."""
        return [
            puller for hosted in self._hosted.values() for puller in hosted.processor.table_pullers
        ]


def host_context(context: SourceContext) -> SourceContext:
    """Return the context of a process that runs shares only; the metadata is the owner's."""
    return SourceContext(context.pd, context.feeds, context.kv)


async def _outcome(work: Coroutine[Any, Any, T]) -> T | TidemarkError:
    try:
        return await work
    except Exception as err:  # noqa: BLE001 - it is the request's: nothing that a client sends ends the worker
        return request_error(err, "worker API")
