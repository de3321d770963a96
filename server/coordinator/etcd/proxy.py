"""etcd's services on the coordinator's port, passed on byte for byte to the real etcd: any method, any message.

A call without a token of its own carries the coordinator's (`storage.meta.user`): whoever may speak to the coordinator
finds etcd there without an account, as behind a PD; the coordinator's own TLS says who that is. And the members'
client addresses are told to be the coordinators': clients that follow them (TiDB does, every 30 s) need reach no etcd.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from etcdpb import rpc_pb2

from server.coordinator.members import Members
from storage.meta.errors import EtcdError
from storage.meta.remote import RemoteEtcd

_PREFIXES = ("/etcdserverpb.", "/v3electionpb.", "/v3lockpb.")
_MEMBER_LIST = "/etcdserverpb.Cluster/MemberList"
_OWN = (":", "grpc-", "user-agent", "content-type", "te")


class EtcdProxy(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Handles every method of etcd's packages as a stream of bytes; a unary call is one of one message each way."""

    def __init__(self, remote: RemoteEtcd, members: Members) -> None:
        self._remote = remote
        self._members = members

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method, or None if it is not etcd's."""
        method: str = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(self._passed_on(method)) if method.startswith(_PREFIXES) else None

    def _passed_on(self, method: str) -> Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]:
        async def passed_on(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            address = self._remote.address
            try:
                channel, ours = await self._remote.connected()
                address = self._remote.address
                call = channel.stream_stream(method, None, None)(
                    requests, timeout=context.time_remaining(), metadata=_metadata(context, ours)
                )
                with self._remote.calls.reading(call, address):
                    async for answer in call:
                        yield self._with_our_urls(answer) if method == _MEMBER_LIST else answer
            except EtcdError as err:
                await context.abort(grpc.StatusCode[err.status], err.text)
            except grpc.aio.AioRpcError as err:
                self._remote.failed(err, address)
                await context.abort(err.code(), err.details() or "", tuple(err.trailing_metadata() or ()))

        return passed_on

    def _with_our_urls(self, answer: bytes) -> bytes:
        told = rpc_pb2.MemberListResponse.FromString(answer)
        urls = [url for member in self._members.listed for url in member.client_urls]
        for member in told.members:
            member.clientURLs[:] = urls
        return told.SerializeToString()


def _metadata(context: Any, ours: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    theirs = [(key, value) for key, value in context.invocation_metadata() if not key.startswith(_OWN)]
    return theirs if any(key == "token" for key, _ in theirs) else [*theirs, *ours]
