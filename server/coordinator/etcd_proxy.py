"""etcd's services on the coordinator's port, passed on byte for byte to the real etcd: any method, any message."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import structlog

from storage.meta.remote import RemoteEtcd

_PREFIXES = ("/etcdserverpb.", "/v3electionpb.", "/v3lockpb.")

_log = structlog.get_logger(__name__)


class EtcdProxy(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Handles every method of etcd's packages as a stream of bytes; a unary call is one of one message each way."""

    def __init__(self, remote: RemoteEtcd) -> None:
        self._remote = remote

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method, or None if it is not etcd's."""
        method = handler_call_details.method
        if not method.startswith(_PREFIXES):
            return None

        async def passed_on(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            metadata = [(key, value) for key, value in context.invocation_metadata() if _is_users(key)]
            call = self._remote.channel.stream_stream(method, None, None)(
                requests, timeout=context.time_remaining(), metadata=metadata
            )
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as err:
                if err.code() == grpc.StatusCode.UNAVAILABLE:
                    self._remote.move_on()
                await context.abort(err.code(), err.details() or "", tuple(err.trailing_metadata() or ()))
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(passed_on)


def _is_users(key: str) -> bool:
    return not key.startswith((":", "grpc-", "user-agent", "content-type", "te"))
