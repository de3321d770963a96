"""Threads of a simulation: one runs at a time, and from its start to where it waits.

They are real threads, for what blocks must not run in the event loop. But the loop stands still
while one of them runs, and goes on when that one waits (`wait`) or ends. So a run depends on its
seed alone. One whose process is stopped does not go on, and one whose process is killed ends where
it waits.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from tests.sim.process import Process, in_process

_STOPPED_S = 0.05
_LOOK_EVERY_S = 0.05
_here = threading.local()


class KilledError(BaseException):
    """The thread's process was killed, or the simulation is over."""


class Threads:
    """Those of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiting: dict[SimThread, None] = {}
        self.has_ended = False

    def start(
        self, process: Process | None, future: Any, func: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        """Run it until it waits; `future` gets its outcome."""
        SimThread(self, process, future, lambda: func(*args)).go_on()

    def close(self) -> None:
        """End those that wait."""
        self.has_ended = True
        while self.waiting:
            next(iter(self.waiting)).go_on()


class SimThread:
    """One of them."""

    def __init__(
        self, threads: Threads, process: Process | None, future: Any, work: Callable[[], Any]
    ) -> None:
        self.loop = threads.loop
        self._threads = threads
        self._process = process
        self._future = future
        self._work = work
        self._outcome: Callable[[], None] | None = None
        self._goes_on, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._os_thread = threading.Thread(target=self._run, daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether it must not make another step."""
        is_dead = self._process is not None and self._process.is_dead
        return is_dead or self._threads.has_ended

    def go_on(self) -> None:
        """Run it, from the loop, until it waits or ends; one that does not wait is left alone."""
        if self._os_thread.ident is not None and self not in self._threads.waiting:
            return
        if not self.is_over and self._process is not None and self._process.is_stopped:
            self.loop.call_later(_STOPPED_S, self.go_on)
            return
        self._threads.waiting.pop(self, None)
        if self._os_thread.ident is None:
            self._os_thread.start()
        self._goes_on.release()
        self._rests.acquire()
        if self._outcome is not None:
            self._os_thread.join()
            self._outcome()

    def rest(self) -> None:
        """Let the loop go on, from this thread, until `go_on`.

        Raises:
            KilledError: there is no going on.
        """
        if self.is_over:
            raise KilledError
        self._threads.waiting[self] = None
        self._rests.release()
        self._goes_on.acquire()
        if self.is_over:
            raise KilledError

    def _run(self) -> None:
        self._goes_on.acquire()
        _here.thread = self
        try:
            context = contextvars.Context() if self._process is None else in_process(self._process)
            outcome = context.run(self._work)
        except KilledError:
            self._outcome = self._future.cancel
        except BaseException as err:  # noqa: BLE001 - as an executor does
            failure = err
            self._outcome = lambda: self._settle(self._future.set_exception, failure)
        else:
            self._outcome = lambda: self._settle(self._future.set_result, outcome)
        self._rests.release()

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        # Nobody may wait for it any more.
        if not self._future.done():
            settle(outcome)


def wait(work: Coroutine[Any, Any, Any]) -> Any:
    """In a thread of the simulation: run it in the loop, and wait for its outcome."""
    thread: SimThread | None = getattr(_here, "thread", None)
    assert thread is not None, "the event loop would be blocked"
    if thread.is_over:
        work.close()
        raise KilledError
    task = thread.loop.create_task(work)
    task.add_done_callback(lambda _: thread.go_on())
    thread.rest()
    return task.result()


class Condition(threading.Condition):
    """As `threading.Condition`, for threads of the simulation, which wait with a limit."""

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """See `threading.Condition.wait_for`."""
        thread: SimThread | None = getattr(_here, "thread", None)
        assert thread is not None, "the event loop would be blocked"
        assert timeout is not None, "whoever waits looks up from time to time"
        until_s = thread.loop.time() + timeout
        while not (result := predicate()) and thread.loop.time() < until_s:
            state = self._release_save()  # type: ignore[attr-defined]
            try:
                wait(asyncio.sleep(_LOOK_EVERY_S))
            finally:
                self._acquire_restore(state)  # type: ignore[attr-defined]
        return result


class Submitted:
    """In the place of what `asyncio.run_coroutine_threadsafe` returns."""

    def __init__(self, work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(work)

    def result(self, timeout: float | None = None) -> Any:
        """See `concurrent.futures.Future.result`."""
        return wait(self._result(timeout))

    def cancel(self) -> None:
        """See `concurrent.futures.Future.cancel`."""
        self._task.cancel()

    async def _result(self, timeout_s: float | None) -> Any:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._task)
