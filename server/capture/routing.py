"""Calls that one capture carries out: the owner, or the one that runs a changefeed. Any capture
takes them, and passes them on to it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc.aio

from server.capture.errors import NotOwnerError
from server.capture.maintainers import Maintainers
from server.capture.membership import CaptureRecord, Membership
from server.capture.worker.peers import PeerAccess
from server.rpc.errors import passed_on
from storage.model.errors import UnavailableError

_FORWARDED: Final = "tidemark-forwarded"
_LOCAL: Final = "tidemark-local"
_FORWARD_S: Final = 30.0
_LOCAL_S: Final = 3.0
_MOVES_S: Final = 15.0
"""As long as the lease of a capture that died lasts, and some more."""
_LOOK_EVERY_S: Final = 0.05
A = TypeVar("A")
Context = grpc.aio.ServicerContext[Any, Any]
Stub = Callable[[grpc.aio.Channel], Any]


class Router:
    """Finds the capture for a call."""

    def __init__(
        self, maintainers: Maintainers, membership: Membership, access: PeerAccess
    ) -> None:
        self._maintainers = maintainers
        self._membership = membership
        self._access = access

    async def carry_out(
        self,
        stub: Stub,
        method: str,
        request: Any,
        context: Context,
        call: Callable[[], Awaitable[A]],
        changefeed: str = "",
    ) -> Any:
        """`call` if this is the capture for it, else the same request to that one: to who runs
        `changefeed`, or the owner.

        Raises:
            NotOwnerError: there is none at this moment; and what that capture raises.
        """
        is_forwarded = _has(context, _FORWARDED)
        gives_up_s = asyncio.get_running_loop().time() + _MOVES_S
        while True:
            try:
                capture = await self.find(changefeed)
                if capture is None:
                    return await call()
                # A call is forwarded once. While an election is under way two captures may each
                # take the other one for the owner, and would pass the call to and fro.
                if is_forwarded:
                    raise NotOwnerError("the changefeed has moved just now; ask again")
                return await self._ask(capture, stub, method, request, _FORWARDED, _FORWARD_S)
            except UnavailableError as err:
                # It began to move after it was found: nothing was changed, and it is found again.
                moves = bool(changefeed) and not is_forwarded and err.code == NotOwnerError.code
                if not moves or asyncio.get_running_loop().time() > gives_up_s:
                    raise
            await asyncio.sleep(_LOOK_EVERY_S)

    async def find(self, changefeed: str = "", moves_s: float = _MOVES_S) -> CaptureRecord | None:
        """The capture that runs a changefeed, without one the owner; None: this one, which also
        answers for changefeeds that there are not. One on its way to another capture is waited for.

        Raises:
            NotOwnerError: there is none at this moment.
        """
        if self._maintainers.has(changefeed):
            return None
        try:
            async with asyncio.timeout(moves_s):
                # A changefeed of a log may be with nobody for a moment, or, after a capture has
                # died, for as long as its lease lasts.
                while changefeed and await self._membership.has_maintainer(changefeed):
                    capture = await self._membership.maintainer(changefeed)
                    if self._maintainers.has(changefeed):
                        return None
                    if capture is not None and capture.id != self._membership.id:
                        return capture
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            raise NotOwnerError(
                f"changefeed {changefeed} is on its way to another capture; ask again"
            ) from None
        return None if self._maintainers.owner.is_active else await self._membership.owner()

    async def of_others(self, stub: Stub, method: str, request: Any) -> list[Any]:
        """What the other captures that run changefeeds answer about their own; one that does not
        answer is left out.
        """
        captures = await self._membership.maintaining()
        calls = [
            self._ask(capture, stub, method, request, _LOCAL, _LOCAL_S)
            for capture in captures
            if capture.id != self._membership.id
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _ask(
        self, capture: CaptureRecord, stub: Stub, method: str, request: Any, mark: str, for_s: float
    ) -> Any:
        async with self._access.connect(capture.address) as channel:
            forward = getattr(stub(channel), method)
            try:
                return await forward(request, timeout=for_s, metadata=((mark, "1"),))
            except grpc.aio.AioRpcError as err:
                raise passed_on(err) from err


def is_local(context: Context) -> bool:
    """Whether another capture asks about this one's own changefeeds only."""
    return _has(context, _LOCAL)


def _has(context: Context, mark: str) -> bool:
    return any(key == mark for key, _ in context.invocation_metadata() or ())
