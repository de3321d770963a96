"""The etcd API over the network: several endpoints, users, timeouts, and etcd's statuses as our errors.

A call that fails for lack of a server moves on to the next endpoint. What was not sent for lack of a connection, reads,
and writes that leave the same state when they happen twice, are sent again with back-off; a transaction with conditions
that was sent is not: its caller must read and decide.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from etcdpb import rpc_pb2, rpc_pb2_grpc

from storage.jitter import jittered
from storage.meta.calls import OpenCalls, cancellations
from storage.meta.endpoints import Endpoints
from storage.meta.errors import (
    EtcdError,
    InvalidTokenError,
    MetaUnavailableError,
    NoSpaceError,
    TooManyRequestsError,
    UserNeededError,
    error_of,
)
from storage.meta.keep_alive import KeepAlives
from storage.meta.user import Metadata, Token, User

R = TypeVar("R")
NEEDS_LEADER: Metadata = (("hasleader", "true"),)
"""Sent with streams: a member that is cut off from the others then ends them instead of staying silent."""
_CALL_SECONDS = 10.0
_ATTEMPT_SECONDS = 5.0
_BACKOFF_SECONDS = (0.05, 1.0)


class RemoteEtcd:
    """See `storage.meta.api.EtcdApi`; made by `open`."""

    def __init__(self, endpoints: Endpoints, user: User | None = None) -> None:
        self._endpoints = endpoints
        self._token = Token(user)
        self._keep_alives = KeepAlives(self._open_keep_alive)
        self.calls = OpenCalls()
        """Those that end when their server falls silent."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, endpoints: Sequence[str], channel: Callable[[str], grpc.aio.Channel], user: User | None = None
    ) -> AsyncIterator["RemoteEtcd"]:
        """Channels to all endpoints for the block; without a `user` the environment may name one (`meta.user`)."""
        async with Endpoints.open(endpoints, channel) as opened:
            remote = cls(opened, user or User.from_environment(os.environ))
            try:
                yield remote
            finally:
                remote._keep_alives.close()

    @property
    def address(self) -> str:
        """The endpoint in use."""
        return self._endpoints.current

    async def connected(self) -> tuple[grpc.aio.Channel, Metadata]:
        """A connected channel and what a call on it has to carry.

        Raises:
            MetaUnavailableError: no endpoint can be reached.
            grpc.aio.AioRpcError: no token was given.
        """
        channel = await self._endpoints.connected()
        return channel, await self._token.metadata(channel)

    def failed(self, err: TimeoutError | grpc.aio.AioRpcError, address: str) -> EtcdError:
        """`err` as our error, once the endpoint or the token that it speaks of is no longer used."""
        if isinstance(err, TimeoutError):
            self._endpoints.leave(address)
            self.calls.give_up(address)
            return MetaUnavailableError(f"the metadata server at {address} did not answer in time; is it running?")
        failure = error_of(err.code().name, err.details() or "")
        if isinstance(failure, InvalidTokenError | UserNeededError) and self._token.forget():
            return InvalidTokenError()
        if type(failure) is MetaUnavailableError:
            self._endpoints.leave(address)
            return MetaUnavailableError(f"the metadata server at {address} is away: {failure.text}; is it running?")
        return failure

    async def read(self, asked: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """See `EtcdApi.read`."""
        return await self._call(lambda channel, has: rpc_pb2_grpc.KVStub(channel).Range(asked, metadata=has))

    async def txn(self, asked: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """See `EtcdApi.txn`."""
        return await self._call(
            lambda channel, has: rpc_pb2_grpc.KVStub(channel).Txn(asked, metadata=has), repeat=not asked.compare
        )

    async def lease_grant(self, asked: rpc_pb2.LeaseGrantRequest) -> rpc_pb2.LeaseGrantResponse:
        """See `EtcdApi.lease_grant`."""
        return await self._call(lambda channel, has: rpc_pb2_grpc.LeaseStub(channel).LeaseGrant(asked, metadata=has))

    async def lease_revoke(self, asked: rpc_pb2.LeaseRevokeRequest) -> rpc_pb2.LeaseRevokeResponse:
        """See `EtcdApi.lease_revoke`."""
        return await self._call(
            lambda channel, has: rpc_pb2_grpc.LeaseStub(channel).LeaseRevoke(asked, metadata=has), repeat=False
        )

    async def keep_alive(self, lease: int, within_s: float) -> int:
        """See `EtcdApi.keep_alive`."""
        address = self._endpoints.current
        try:
            async with asyncio.timeout(min(within_s, _ATTEMPT_SECONDS)):
                return await self._keep_alives.renew(lease)
        except (TimeoutError, grpc.aio.AioRpcError) as err:
            raise self.failed(err, address) from err

    async def watch(self, asked: rpc_pb2.WatchCreateRequest) -> AsyncGenerator[rpc_pb2.WatchResponse, None]:
        """See `EtcdApi.watch`."""
        address = self._endpoints.current
        try:
            async with asyncio.timeout(_ATTEMPT_SECONDS):
                channel, has = await self.connected()
            address = self._endpoints.current
            call = rpc_pb2_grpc.WatchStub(channel).Watch(None, metadata=has + NEEDS_LEADER)
            with self.calls.reading(call, address):
                async with asyncio.timeout(_ATTEMPT_SECONDS):
                    await call.write(rpc_pb2.WatchRequest(create_request=asked))
                    response: Any = await call.read()
                while isinstance(response, rpc_pb2.WatchResponse):
                    yield response
                    if response.canceled:
                        return
                    response = await call.read()
        except (TimeoutError, grpc.aio.AioRpcError) as err:
            raise self.failed(err, address) from err

    async def _open_keep_alive(self) -> Any:
        channel, has = await self.connected()
        return rpc_pb2_grpc.LeaseStub(channel).LeaseKeepAlive(None, metadata=has + NEEDS_LEADER)

    async def _call(self, attempt: Callable[[grpc.aio.Channel, Metadata], Awaitable[R]], *, repeat: bool = True) -> R:
        pause, most = _BACKOFF_SECONDS
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CALL_SECONDS
        while True:
            try:
                return await self._attempt(attempt)
            except _NotSentError as err:
                failure, again = err.reason, True
            except MetaUnavailableError as err:
                failure = err
                again = isinstance(err, TooManyRequestsError | InvalidTokenError)
                again = again or (repeat and not isinstance(err, NoSpaceError))
            if not again or loop.time() + pause >= deadline:
                raise failure
            await asyncio.sleep(jittered(pause))
            pause = min(pause * 2, most)

    async def _attempt(self, attempt: Callable[[grpc.aio.Channel, Metadata], Awaitable[R]]) -> R:
        try:
            channel, has = await self.connected()
        except MetaUnavailableError as err:
            raise _NotSentError(err) from err
        except grpc.aio.AioRpcError as err:
            raise self.failed(err, self._endpoints.current) from err
        address, before = self._endpoints.current, cancellations()
        try:
            call = attempt(channel, has)
            async with asyncio.timeout(_ATTEMPT_SECONDS):
                with self.calls.reading(call, address):
                    return await call
        except (TimeoutError, grpc.aio.AioRpcError) as err:
            if cancellations() > before:
                raise asyncio.CancelledError from err  # gRPC answers with the failure if both come at once
            raise self.failed(err, address) from err


class _NotSentError(Exception):
    """A call that never left, so that it may be made again whatever it does."""

    def __init__(self, reason: MetaUnavailableError) -> None:
        super().__init__(reason)
        self.reason = reason
