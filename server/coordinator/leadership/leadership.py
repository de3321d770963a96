"""One coordinator's right to answer and to write, and the guard of the RPCs that need it.

Invariants:

1. Nothing is answered at or after `deadline`: it is counted from before the lease's renewal was
   requested, so no other coordinator can lead earlier, and a process that was stopped and continued
   knows before it hears anything.
2. Every write carries `fence`, the create revision of the leader key: what was on its way when the
   lease ended fails.
3. A right that ended never comes back; whoever leads again has a new one, and a new term's memory.

`while_leading` and `batch_while_leading` interrupt RPCs when the term ends, so that no client waits
for a coordinator that cannot answer.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from server.coordinator.errors import NotLeaderError
from server.rpc.errors import status_of
from server.rpc.front import Answer, BatchHandler
from storage.meta.meta import Compare

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Leadership:
    """A held leader key; without arguments it is of a coordinator whose metadata nobody else can
    reach.
    """

    def __init__(
        self,
        fence: Sequence[Compare] = (),
        deadline: Callable[[], float] = lambda: math.inf,
        refusal: Callable[[], NotLeaderError] = NotLeaderError,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fence = tuple(fence)
        self.ended = asyncio.Event()
        self.reason = ""
        """Why it was given up, if there is more to say than that the lease is over."""
        self.since = clock()
        """Monotonic seconds; what was seen before says nothing about it."""
        self._deadline = deadline
        self.refusal = refusal
        """What is answered once it has ended."""
        self._clock = clock
        self._timeouts: set[asyncio.Timeout] = set()

    @property
    def held(self) -> bool:
        """Whether nobody else can lead now."""
        return not self.ended.is_set() and self._clock() < self._deadline()

    def check(self) -> None:
        """Raises: NotLeaderError: another coordinator may lead;
        nothing in memory is to be trusted.
        """
        if not self.held:
            raise self.refusal()

    def end(self, reason: str = "") -> None:
        """Give the right up and interrupt `while_held` blocks. The first reason counts."""
        if not self.ended.is_set():
            self.reason = reason
        # First: what the interrupted blocks do on their way out must already find the right gone.
        self.ended.set()
        for timeout in self._timeouts:
            timeout.reschedule(0)

    @asynccontextmanager
    async def while_held(self) -> AsyncIterator[None]:
        """Run the block only while the right is held.

        Raises:
            NotLeaderError: it was not, or ended meanwhile.
        """
        self.check()
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._timeouts.add(timeout)
                try:
                    yield
                finally:
                    self._timeouts.discard(timeout)
        # A timeout of ours is the end of leading; one that the block raised by itself is passed on.
        except TimeoutError:
            if timeout.expired():
                raise self.refusal() from None
            raise


def while_leading(handler: Any, leadership: Leadership) -> Any:
    """The same gRPC handler; when the leadership ends,
    its calls and streams end with `not leader`.
    """
    functions = {kind: getattr(handler, kind) for kind in _KINDS}
    return handler._replace(
        **{kind: _guarded(call, leadership) for kind, call in functions.items() if call}
    )


def batch_while_leading(function: BatchHandler, leadership: Leadership) -> BatchHandler:
    """The same batch function; when the leadership ends,
    all of its batch are answered with `not leader`.
    """

    async def answers(requests: Sequence[bytes]) -> Sequence[Answer]:
        async with leadership.while_held():
            result = await function(requests)
        # Checked again after the work: the answer may have waited behind a stopped process, and
        # another may lead by now.
        leadership.check()
        return result

    return answers


def _guarded(function: Callable[..., Any], leadership: Leadership) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with leadership.while_held():
                answer = await function(request, context)
            leadership.check()
        except NotLeaderError as err:
            await context.abort(*status_of(err))
        else:
            return answer

    return call
