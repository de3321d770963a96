"""An event loop whose time passes only when nothing is left to do, and then at once."""

import asyncio
import contextlib
import gc
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from random import Random
from typing import Any

from tests.sim.process import Process, current_process
from tests.sim.threads import Threads

EPOCH_S = 1_800_000_000
"""What the simulation's wall clock shows when its time is 0."""
_GC_THRESHOLDS = (200_000, 50, 1000)
_TASK_S = (0.0001, 0.004)
_STOPPED_S = 0.05


class DeadlockError(AssertionError):
    """Everything waits, and nothing is to come."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """What would run in threads of executors runs in the loop, what may wait for others
    (`asyncio.to_thread`) in threads of the simulation: so a run depends on its seed alone.
    """

    def __init__(self, chance: Random | None = None) -> None:
        """Without `chance` all such work is done in the loop, at once; with it a little later, in
        pools of one thread in the order of asking.
        """
        self.now = 1000.0
        self.threads = Threads(self)
        self._chance = chance
        self._busy_until: dict[int, float] = {}
        super().__init__(_Jump(self))

    def time(self) -> float:
        """The simulation's time, in seconds."""
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run it, in the loop."""
        future = self.create_future()
        if self._chance is None:
            _run(future, func, args)
            return future
        process = current_process()
        delay_s = self._chance.uniform(*_TASK_S) + (process.disk_delay_s if process else 0.0)
        at_s = self.now + delay_s
        if getattr(executor, "workers", 0) == 1:
            at_s = max(at_s, self._busy_until.get(id(executor), 0.0) + 1e-6)
            self._busy_until[id(executor)] = at_s
        work = self._work_in_thread if executor is None else self._work
        self.call_at(at_s, work, process, future, func, args)
        return future

    def _work(self, process: Process | None, future: Any, func: Any, args: Any) -> None:
        # Threads of a stopped process stand still, too.
        if process is not None and process.is_stopped:
            self.call_later(_STOPPED_S, self._work, process, future, func, args)
        # Work that has not begun is not begun any more when nobody waits for it.
        elif not future.cancelled():
            _run(future, func, args)

    def _work_in_thread(self, process: Process | None, future: Any, func: Any, args: Any) -> None:
        if process is not None and process.is_dead:
            future.cancel()
        elif not future.cancelled():
            self.threads.start(process, future, func, args)

    async def in_thread(self, process: Process, func: Callable[..., Any], *args: Any) -> Any:
        """Run it in a thread of that process."""
        future = self.create_future()
        self._work_in_thread(process, future, func, args)
        return await future


def _run(future: Any, func: Callable[..., Any], args: Any) -> None:
    try:
        future.set_result(func(*args))
    except Exception as err:  # noqa: BLE001 - as an executor does
        future.set_exception(err)


class _Jump(selectors.SelectSelector):
    """Instead of waiting, time goes on."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise DeadlockError("everything waits, and nothing is to come")
        self._loop.now += max(0.0, timeout)
        return []


@contextlib.contextmanager
def _as_clocks(loop: VirtualLoop) -> Iterator[None]:
    """The product asks the monotonic clock, too, and the wall clock of its machine."""

    def wall_s() -> float:
        process = current_process()
        return EPOCH_S + loop.now + (process.clock_ahead_s if process is not None else 0.0)

    real = time.monotonic, time.time, time.time_ns
    time.monotonic, time.time = loop.time, wall_s
    time.time_ns = lambda: int(wall_s() * 1_000_000_000)
    try:
        yield
    finally:
        time.monotonic, time.time, time.time_ns = real


def simulated(main: Coroutine[Any, Any, Any], chance: Random | None = None) -> Any:
    """Run to the end in simulated time; see `VirtualLoop` for `chance`."""
    # Python's own thresholds cost an eighth of a run: it makes many objects, and few in circles.
    gc.set_threshold(*_GC_THRESHOLDS)
    loop = VirtualLoop(chance)
    with _as_clocks(loop):
        try:
            return loop.run_until_complete(main)
        finally:
            # What is left of a run that failed says nothing more.
            loop.set_exception_handler(lambda *_: None)
            loop.threads.close()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            with contextlib.suppress(BaseException):
                loop.run_until_complete(asyncio.sleep(0))
            loop.close()
