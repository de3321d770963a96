"""etcd's services on the coordinator's port, passed on byte for byte to the real etcd: any method, any message.

A call without a token of its own carries the coordinator's (`storage.meta.user`): whoever may speak to the coordinator
finds etcd there without an account, as behind a PD; the coordinator's own TLS says who that is.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from storage.meta.errors import EtcdError
from storage.meta.remote import RemoteEtcd

_PREFIXES = ("/etcdserverpb.", "/v3electionpb.", "/v3lockpb.")
_OWN = (":", "grpc-", "user-agent", "content-type", "te")


class EtcdProxy(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Handles every method of etcd's packages as a stream of bytes; a unary call is one of one message each way."""

    def __init__(self, remote: RemoteEtcd) -> None:
        self._remote = remote

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method, or None if it is not etcd's."""
        method: str = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(self._passed_on(method)) if method.startswith(_PREFIXES) else None

    def _passed_on(self, method: str) -> Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]:
        async def passed_on(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            address, call = self._remote.address, None
            try:
                channel, ours = await self._remote.connected()
                address = self._remote.address
                call = channel.stream_stream(method, None, None)(
                    requests, timeout=context.time_remaining(), metadata=_metadata(context, ours)
                )
                async for answer in call:
                    yield answer
            except EtcdError as err:
                await context.abort(grpc.StatusCode[err.status], err.text)
            except grpc.aio.AioRpcError as err:
                self._remote.failed(err, address)
                await context.abort(err.code(), err.details() or "", tuple(err.trailing_metadata() or ()))
            finally:
                if call is not None:
                    call.cancel()

        return passed_on


def _metadata(context: Any, ours: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    theirs = [(key, value) for key, value in context.invocation_metadata() if not key.startswith(_OWN)]
    return theirs if any(key == "token" for key, _ in theirs) else [*theirs, *ours]
