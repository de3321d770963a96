"""PD's RPCs on any coordinator: answered from the present term, refused as PD does,
or forwarded to a named member.

Only the leader answers. A follower refuses with PD's words by default; see
docs/design/0009-coordinator-ha.md for why it does not forward by itself. A client may name a member
in the metadata `pd-forwarded-host`: the call is then passed on to that member byte for byte. This
is PD's way around a network that is broken between a client and the leader only. Nobody but members
of this cluster is reached through us, and the name is not passed on: a call takes one step.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio

from server.coordinator.leadership.members import Members
from server.coordinator.term import CurrentTerm
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.errors import status_of

_LEADER_SERVICES = ("/pdpb.PD/", "/keyspacepb.Keyspace/")
FORWARDED_HOST = "pd-forwarded-host"
_OWN = (":", "grpc-", "user-agent", "content-type", "te", FORWARDED_HOST)


class MemberForwarder:
    """Channels to the other members; `stack` closes them."""

    def __init__(self, members: Members, security: SecurityConfig, stack: AsyncExitStack) -> None:
        self._members = members
        self._security = security
        self._stack = stack
        self._channels: dict[str, grpc.aio.Channel] = {}

    def handler(self, details: grpc.HandlerCallDetails) -> Any:
        """A handler that forwards this call; None if it is meant for us."""
        host = next(
            (
                str(value)
                for key, value in details.invocation_metadata or ()
                if key == FORWARDED_HOST
            ),
            "",
        )
        if not host or _host(host) == _host(self._members.url):
            return None
        return grpc.stream_stream_rpc_method_handler(self._forward(details.method, _host(host)))

    def _forward(self, method: str, host: str) -> Callable[[AsyncIterator[bytes], Any], Any]:
        async def forward(requests: AsyncIterator[bytes], context: Any) -> None:
            # Only members of the cluster are reached: otherwise this port would call any address
            # that a client names.
            if all(
                _host(url) != host for member in self._members.listed for url in member.client_urls
            ):
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE, f"{host} is no coordinator of this cluster"
                )
            metadata = [
                (key, value)
                for key, value in context.invocation_metadata()
                if not key.startswith(_OWN)
            ]
            call = self._channel(host).stream_stream(method, None, None)(
                requests, timeout=context.time_remaining(), metadata=metadata
            )
            try:
                async for answer in call:
                    await context.write(answer)
            except grpc.aio.AioRpcError as err:
                await context.abort(
                    err.code(), err.details() or "", tuple(err.trailing_metadata() or ())
                )
            finally:
                call.cancel()

        return forward

    def _channel(self, host: str) -> grpc.aio.Channel:
        if host not in self._channels:
            self._channels[host] = connect(host, self._security)
            self._stack.push_async_exit(self._channels[host])
        return self._channels[host]


class TermRouter(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """The gRPC handler of the methods that only the leader answers."""

    def __init__(self, current: CurrentTerm, members: Members, forwarder: MemberForwarder) -> None:
        self._current = current
        self._members = members
        self._forwarder = forwarder
        self._refusing = grpc.stream_stream_rpc_method_handler(self._refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method; None if even the leader does not have it."""
        method = handler_call_details.method
        if not method.startswith(_LEADER_SERVICES):
            return None
        if forwarding := self._forwarder.handler(handler_call_details):
            return forwarding
        term = self._current.term
        # Looked up at each call, since the next term has handlers of its own.
        return term.handlers.get(method) if term else self._refusing

    async def _refuse(self, _requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(*status_of(self._members.not_leader()))


def _host(url: str) -> str:
    return url.rpartition("//")[2]
