"""Repeated checks of open calls: a client may be removed from the access file, get another role or
expire while its streams are open.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self, TypeVar

from server.rpc.errors import StatusError

RECHECK_S: Final = 1.0
T = TypeVar("T")


class Recheck:
    """Calls `check` every `RECHECK_S` for the block: one timer for each stream, however many
    messages it has. A refusal ends the wait of `wait`.
    """

    def __init__(self, check: Callable[[], object]) -> None:
        self._check = check
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._checked_s = self._loop.time()
        self._limit: asyncio.Timeout | None = None
        """The timeout of the work that is awaited now."""
        self._refusal: StatusError | None = None

    def __enter__(self) -> Self:
        """Begin to check."""
        self._timer = self._loop.call_later(RECHECK_S, self._look)
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()

    async def wait(self, work: Awaitable[T]) -> T:
        """Await `work`; one at a time.

        Raises:
            StatusError: the refusal; and what `work` raises.
        """
        try:
            # Without a deadline it sets no timer.
            async with asyncio.timeout(None) as self._limit:
                result = await work
        except TimeoutError:
            # The work may have one of its own.
            if self._limit is not None and self._limit.expired() and self._refusal is not None:
                raise self._refusal from None
            raise
        finally:
            self._limit = None
        # Work that is always ready, as messages of a backlog are, may let no timer have its turn.
        if self._loop.time() >= self._checked_s + RECHECK_S:
            self._look()
        if self._refusal is not None:
            raise self._refusal
        return result

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._checked_s = self._loop.time()
        try:
            self._check()
        except StatusError as err:
            self._refusal = err
            if self._limit is not None:
                self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(RECHECK_S, self._look)


async def while_allowed(work: Awaitable[T], check: Callable[[], object]) -> T:
    """Await `work`; `check` is called every `RECHECK_S`, and its refusal ends the work.

    Raises:
        StatusError: the refusal; and what `work` raises.
    """
    with Recheck(check) as recheck:
        return await recheck.wait(work)
