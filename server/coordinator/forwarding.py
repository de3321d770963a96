"""Calls passed on to the member that the client names in `pd-forwarded-host`, byte for byte.

PD's way around a network that is broken between a client and the leader only. Nobody is reached through us but members
of this cluster, and the name is not passed on: a call takes one step.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio

from server.coordinator.leadership.members import Members
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig

HOST = "pd-forwarded-host"
_OWN = (":", "grpc-", "user-agent", "content-type", "te", HOST)


class Forwarding:
    """Channels to the other members; `stack` closes them."""

    def __init__(self, members: Members, security: SecurityConfig, stack: AsyncExitStack) -> None:
        self._members = members
        self._security = security
        self._stack = stack
        self._channels: dict[str, grpc.aio.Channel] = {}

    def handler(self, details: grpc.HandlerCallDetails) -> Any:
        """A handler that passes this call on; None if it is meant for us."""
        named = next((str(value) for key, value in details.invocation_metadata or () if key == HOST), "")
        if not named or _host(named) == _host(self._members.url):
            return None
        return grpc.stream_stream_rpc_method_handler(self._passed_on(details.method, _host(named)))

    def _passed_on(self, method: str, host: str) -> Callable[[AsyncIterator[bytes], Any], Any]:
        async def passed_on(requests: AsyncIterator[bytes], context: Any) -> None:
            if all(_host(url) != host for member in self._members.listed for url in member.client_urls):
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"{host} is no coordinator of this cluster")
            metadata = [(key, value) for key, value in context.invocation_metadata() if not key.startswith(_OWN)]
            call = self._channel(host).stream_stream(method, None, None)(
                requests, timeout=context.time_remaining(), metadata=metadata
            )
            try:
                async for answer in call:
                    await context.write(answer)
            except grpc.aio.AioRpcError as err:
                await context.abort(err.code(), err.details() or "", tuple(err.trailing_metadata() or ()))
            finally:
                call.cancel()

        return passed_on

    def _channel(self, host: str) -> grpc.aio.Channel:
        if host not in self._channels:
            self._channels[host] = connect(host, self._security)
            self._stack.push_async_exit(self._channels[host])
        return self._channels[host]


def _host(url: str) -> str:
    return url.rpartition("//")[2]
