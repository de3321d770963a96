"""etcd's services on the coordinator's port, passed on byte for byte to the real etcd:
any method, any message.

A call without a token of its own carries the coordinator's (`remote.Token`): a client of the
coordinator needs no account of etcd, as behind a PD; the coordinator's own TLS says who that is.
And the members' client addresses are told to be the coordinators': clients that follow them (TiDB
does, every 30 s) need reach no etcd.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
from etcdpb import election_pb2, lock_pb2, rpc_pb2
from google.protobuf.message import DecodeError

from server.coordinator.keys import check_bytes, check_keys
from server.coordinator.leadership.members import Members
from storage.meta.errors import EtcdError, InvalidTokenError
from storage.meta.remote import RemoteEtcd

_PREFIXES = ("/etcdserverpb.", "/v3electionpb.", "/v3lockpb.")
_LEASE_REVOKE = "/etcdserverpb.Lease/LeaseRevoke"
_LEASE_TIME_TO_LIVE = "/etcdserverpb.Lease/LeaseTimeToLive"
_MEMBER_LIST = "/etcdserverpb.Cluster/MemberList"
_UNARY = {
    f"/{service.full_name}/{method.name}"
    for stubs in (rpc_pb2, election_pb2, lock_pb2)
    for service in stubs.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
}
_OWN = (":", "grpc-", "user-agent", "content-type", "te")


class EtcdProxy(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Handles every method of etcd's packages: the unary ones we know as such,
    all others as streams of bytes.
    """

    def __init__(self, remote: RemoteEtcd, members: Members) -> None:
        self._remote = remote
        self._members = members

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method, or None if it is not etcd's."""
        method: str = handler_call_details.method
        if method in _UNARY:
            return grpc.unary_unary_rpc_method_handler(self._answer(method))
        return (
            grpc.stream_stream_rpc_method_handler(self._stream(method))
            if method.startswith(_PREFIXES)
            else None
        )

    def _answer(self, method: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def forward(request: bytes, context: Any) -> bytes:
            async with self._forwarding(context) as (channel, address, metadata):

                async def call(method: str, request: bytes) -> bytes:
                    call = channel.unary_unary(method, None, None)(
                        request, timeout=context.time_remaining(), metadata=metadata
                    )
                    with self._remote.calls.reading(call, address):
                        answer: bytes = await call
                    return answer

                check_bytes(method, request)
                # The keys of a revoked lease are deleted with it, so revoking the leader's lease is
                # a write of its key.
                if method == _LEASE_REVOKE:
                    await _check_lease(request, partial(call, _LEASE_TIME_TO_LIVE))
                answer = await call(method, request)
            return self._with_our_urls(answer) if method == _MEMBER_LIST else answer

        return forward

    def _stream(self, method: str) -> Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]:
        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async with self._forwarding(context) as (channel, address, metadata):
                call = channel.stream_stream(method, None, None)(
                    requests, timeout=context.time_remaining(), metadata=metadata
                )
                with self._remote.calls.reading(call, address):
                    async for answer in call:
                        yield answer

        return forward

    @asynccontextmanager
    async def _forwarding(
        self, context: Any
    ) -> AsyncIterator[tuple[grpc.aio.Channel, str, list[tuple[str, str]]]]:
        """The channel, address and metadata to forward a call with; a failure in the block is
        passed on to the caller.
        """
        address = self._remote.address
        try:
            channel, ours = await self._remote.connected()
            address = self._remote.address
            yield channel, address, _metadata(context, ours)
        except EtcdError as err:
            await context.abort(grpc.StatusCode[err.status], err.text)
        except grpc.aio.AioRpcError as err:
            failure = self._remote.failed(err, address)
            # The token was ours, not the client's: it cannot mend that, but another try can.
            if isinstance(failure, InvalidTokenError) and not _has_token(context):
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE,
                    f"{failure.text}; a new one is asked for, try again",
                )
            await context.abort(
                err.code(), err.details() or "", tuple(err.trailing_metadata() or ())
            )

    def _with_our_urls(self, answer: bytes) -> bytes:
        member_list = rpc_pb2.MemberListResponse.FromString(answer)
        urls = [url for member in self._members.listed for url in member.client_urls]
        for member in member_list.members:
            member.clientURLs[:] = urls
        return member_list.SerializeToString()


async def _check_lease(request: bytes, time_to_live: Callable[[bytes], Awaitable[bytes]]) -> None:
    """Refuse to revoke a lease that our own keys hang on: the leader's, the members'.

    Raises:
        OwnKeysError: it is one.
        grpc.aio.AioRpcError: etcd does not say.
    """
    try:
        lease = rpc_pb2.LeaseRevokeRequest.FromString(request).ID
    except DecodeError:
        return
    question = rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True)
    answer = await time_to_live(question.SerializeToString())
    check_keys(rpc_pb2.LeaseTimeToLiveResponse.FromString(answer).keys)


def _metadata(context: Any, ours: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    theirs = [
        (key, value) for key, value in context.invocation_metadata() if not key.startswith(_OWN)
    ]
    return theirs if _has_token(context) else [*theirs, *ours]


def _has_token(context: Any) -> bool:
    return any(key == "token" for key, _ in context.invocation_metadata())
