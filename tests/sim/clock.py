"""An event loop whose time passes only when nothing is left to do, and then at once."""

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any


class DeadlockError(AssertionError):
    """Everything waits, and nothing is to come."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """What would run in threads runs at once, in order: so a run depends on its seed alone."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """The simulation's time, in seconds."""
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run it now."""
        del executor
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as err:  # noqa: BLE001 - as an executor does
            future.set_exception(err)
        return future


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
def _as_monotonic(loop: VirtualLoop) -> Iterator[None]:
    """The product asks the monotonic clock, too."""
    real = time.monotonic
    time.monotonic = loop.time
    try:
        yield
    finally:
        time.monotonic = real


def simulated(main: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end in simulated time."""
    loop = VirtualLoop()
    with _as_monotonic(loop):
        try:
            return loop.run_until_complete(main)
        finally:
            # What is left of a run that failed says nothing more.
            loop.set_exception_handler(lambda *_: None)
            for task in asyncio.all_tasks(loop):
                task.cancel()
            with contextlib.suppress(BaseException):
                loop.run_until_complete(asyncio.sleep(0))
            loop.close()
