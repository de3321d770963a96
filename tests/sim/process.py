"""A process of the simulation: its tasks can be stopped as by SIGSTOP, and killed as by SIGKILL."""

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from typing import Any

_CURRENT: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class Process:
    """Everything that `start` runs, and all tasks that come of it."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.clock_ahead_s = 0.0
        """How far its machine's wall clock is ahead of the simulation's."""
        self.disk_delay_s = 0.0
        """How much longer than usual its threads take."""
        self.is_dead = False
        """Whether it was killed: nothing of it reaches anybody."""
        self._runs = asyncio.Event()
        self._runs.set()
        self._main: asyncio.Task[Any] | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether it makes no step now."""
        return not self._runs.is_set()

    def start(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run it, as this process."""
        loop = asyncio.get_running_loop()
        self._main = loop.create_task(main, context=in_process(self))
        return self._main

    @property
    def end(self) -> str:
        """How it ended by itself; empty: it did not."""
        if self._main is None or not self._main.done():
            return ""
        return "cancelled" if self._main.cancelled() else repr(self._main.exception())

    def stop(self) -> None:
        """As SIGSTOP: nothing of it goes on, while time does."""
        self._runs.clear()

    def go_on(self) -> None:
        """As SIGCONT."""
        self._runs.set()

    async def runs(self) -> None:
        """Wait while it is stopped: for whoever calls it."""
        await self._runs.wait()

    async def kill(self) -> None:
        """End it; its links are cut before, so that its last wishes reach nobody."""
        self.is_dead = True
        self.go_on()
        assert self._main is not None
        self._main.cancel()
        await asyncio.wait([self._main])


def current_process() -> Process | None:
    """The process whose task runs now."""
    return _CURRENT.get()


def in_process(process: Process) -> contextvars.Context:
    """A context for tasks of this process."""
    context = contextvars.copy_context()
    context.run(_CURRENT.set, process)
    return context


class _Steps:
    """Awaits a coroutine, and makes no step of it while its process is stopped."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], process: Process) -> None:
        self._coroutine = coroutine
        self._process = process

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            while self._process.is_stopped:
                try:
                    yield from self._process.runs().__await__()
                except GeneratorExit:
                    self._coroutine.close()
                    raise
                except asyncio.CancelledError as err:
                    error = err
            try:
                waits_for = (
                    self._coroutine.send(None) if error is None else self._coroutine.throw(error)
                )
            except StopIteration as end:
                return end.value
            error = None
            try:
                yield waits_for
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as err:  # noqa: BLE001 - it is thrown into the coroutine
                error = err


async def _stepwise(coroutine: Coroutine[Any, Any, Any], process: Process) -> Any:
    return await _Steps(coroutine, process)


class _Task(asyncio.Task[Any]):
    """Sets of tasks are walked in the order in which these were made, whatever their addresses."""

    _made = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        _Task._made += 1
        self._number = _Task._made
        super().__init__(*args, **named)

    def __hash__(self) -> int:
        return self._number


def task_factory(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    """Tasks belong to the process in whose context they are made."""
    context = options.get("context")
    process = _CURRENT.get() if context is None else context.get(_CURRENT)
    if process is not None:
        coroutine = _stepwise(coroutine, process)
    return _Task(coroutine, loop=loop, **options)
