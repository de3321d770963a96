"""The door of PD's services: calls go to the present term, to the host they name, or back with PD's words.

A follower refuses by default; see docs/design/0009-coordinator-ha.md for why it does not forward by itself.
"""

from typing import Any

import grpc
import grpc.aio

from server.coordinator.forwarding import Forwarding
from server.coordinator.leadership.members import Members
from server.coordinator.term import Seat
from server.rpc.errors import status_of

_LED = ("/pdpb.PD/", "/keyspacepb.Keyspace/")


class Door(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Handles the methods that only the leader answers."""

    def __init__(self, seat: Seat, members: Members, forwarding: Forwarding) -> None:
        self._seat = seat
        self._members = members
        self._forwarding = forwarding
        self._refusing = grpc.stream_stream_rpc_method_handler(self._refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method, or None if the leader does not have it either."""
        method = handler_call_details.method
        if not method.startswith(_LED):
            return None
        if passed_on := self._forwarding.handler(handler_call_details):
            return passed_on
        term = self._seat.term
        return term.handlers.get(method) if term else self._refusing

    async def _refuse(self, _requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(*status_of(self._members.not_leader()))
