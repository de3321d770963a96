"""Calls that the owner carries out: any capture takes them, and passes them on to it."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc.aio

from server.capture.errors import NotOwnerError
from server.capture.membership import Membership
from server.capture.owner import Owner
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.errors import passed_on

_FORWARDED: Final = "tidemark-forwarded"
_FORWARD_S: Final = 30.0
A = TypeVar("A")
Context = grpc.aio.ServicerContext[Any, Any]


class ToOwner:
    """Calls that the owner carries out, wherever they come in."""

    def __init__(self, owner: Owner, membership: Membership, security: SecurityConfig) -> None:
        self._owner = owner
        self._membership = membership
        self._security = security

    async def carry_out(
        self,
        stub: Callable[[grpc.aio.Channel], Any],
        method: str,
        request: Any,
        context: Context,
        call: Callable[[], Awaitable[A]],
    ) -> Any:
        """`call` if this is the owner, else the same request to that one.

        Raises:
            NotOwnerError: there is none at this moment; and what the owner raises.
        """
        if self._owner.is_active:
            return await call()
        # A call is forwarded once. While an election is under way two captures may each take the
        # other one for the owner, and would pass the call to and fro until its deadline.
        if any(key == _FORWARDED for key, _ in context.invocation_metadata() or ()):
            raise NotOwnerError("the owner of the changefeeds has changed just now; ask again")
        async with connect(await self._membership.owner_address(), self._security) as channel:
            forward = getattr(stub(channel), method)
            try:
                return await forward(request, timeout=_FORWARD_S, metadata=((_FORWARDED, "1"),))
            except grpc.aio.AioRpcError as err:
                raise passed_on(err) from err
