"""The etcd API over the network: several endpoints, timeouts, and etcd's statuses as our errors.

A call that fails for lack of a server moves on to the next endpoint. Reads, and writes that leave the same state when
they happen twice, are sent again with back-off; a transaction with conditions is not: its caller must read and decide.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from etcdpb import rpc_pb2, rpc_pb2_grpc

from storage.meta.errors import (
    CompactedError,
    FutureRevisionError,
    LeaseExistsError,
    LeaseNotFoundError,
    MetaRequestError,
    MetaUnavailableError,
)
from storage.model.errors import TidemarkError

R = TypeVar("R")
_CALL_SECONDS = 10.0
_ATTEMPT_SECONDS = 5.0
_BACKOFF_SECONDS = (0.05, 1.0)
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class RemoteEtcd:
    """See `storage.meta.api.EtcdApi`; made by `open`."""

    def __init__(self, endpoints: Sequence[str], channels: Sequence[grpc.aio.Channel]) -> None:
        self._endpoints = endpoints
        self._channels = channels
        self._current = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls, endpoints: Sequence[str], channel: Callable[[str], grpc.aio.Channel]
    ) -> AsyncIterator["RemoteEtcd"]:
        """Channels to all endpoints for the block; they connect when used."""
        async with AsyncExitStack() as stack:
            yield cls(endpoints, [await stack.enter_async_context(channel(endpoint)) for endpoint in endpoints])

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to the endpoint in use."""
        return self._channels[self._current]

    def move_on(self) -> None:
        """Use the next endpoint from now on."""
        self._current = (self._current + 1) % len(self._channels)

    async def read(self, asked: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """See `EtcdApi.read`."""
        return await self._call(lambda: rpc_pb2_grpc.KVStub(self.channel).Range(asked), repeat=True)

    async def txn(self, asked: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """See `EtcdApi.txn`."""
        return await self._call(lambda: rpc_pb2_grpc.KVStub(self.channel).Txn(asked), repeat=not asked.compare)

    async def lease_grant(self, asked: rpc_pb2.LeaseGrantRequest) -> rpc_pb2.LeaseGrantResponse:
        """See `EtcdApi.lease_grant`."""
        return await self._call(lambda: rpc_pb2_grpc.LeaseStub(self.channel).LeaseGrant(asked), repeat=True)

    async def lease_revoke(self, asked: rpc_pb2.LeaseRevokeRequest) -> rpc_pb2.LeaseRevokeResponse:
        """See `EtcdApi.lease_revoke`."""
        return await self._call(lambda: rpc_pb2_grpc.LeaseStub(self.channel).LeaseRevoke(asked), repeat=False)

    async def keep_alive(self, lease: int) -> int:
        """See `EtcdApi.keep_alive`."""

        async def renew() -> int:
            request = rpc_pb2.LeaseKeepAliveRequest(ID=lease)
            async for answer in rpc_pb2_grpc.LeaseStub(self.channel).LeaseKeepAlive(iter((request,))):
                return int(answer.TTL)
            raise MetaUnavailableError(f"{self._endpoints[self._current]} ended the renewal of a lease; try again")

        return await self._call(renew, repeat=False)

    async def watch(self, asked: rpc_pb2.WatchCreateRequest) -> AsyncIterator[rpc_pb2.WatchResponse]:
        """See `EtcdApi.watch`."""
        call = rpc_pb2_grpc.WatchStub(self.channel).Watch(None)
        try:
            async with asyncio.timeout(_ATTEMPT_SECONDS):
                await call.write(rpc_pb2.WatchRequest(create_request=asked))
                response: Any = await call.read()
            while isinstance(response, rpc_pb2.WatchResponse):
                yield response
                if response.canceled:
                    return
                response = await call.read()
        except (TimeoutError, grpc.aio.AioRpcError) as err:
            raise self._failed(err) from err
        finally:
            call.cancel()

    async def _call(self, attempt: Callable[[], Awaitable[R]], *, repeat: bool) -> R:
        pause, most = _BACKOFF_SECONDS
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CALL_SECONDS
        while True:
            try:
                async with asyncio.timeout(_ATTEMPT_SECONDS):
                    return await attempt()
            except (TimeoutError, grpc.aio.AioRpcError) as err:
                failure = self._failed(err)
                last = not repeat or loop.time() + pause >= deadline
                if last or not isinstance(failure, MetaUnavailableError):
                    raise failure from err
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter needs no secrecy
            pause = min(pause * 2, most)

    def _failed(self, err: TimeoutError | grpc.aio.AioRpcError) -> TidemarkError:
        endpoint = self._endpoints[self._current]
        if isinstance(err, TimeoutError) or err.code() in _TRANSIENT:
            self.move_on()
            reason = "no answer in time" if isinstance(err, TimeoutError) else err.details()
            return MetaUnavailableError(f"the metadata server at {endpoint} is away: {reason}; is it running?")
        return error_of(err.code(), err.details() or "")


def error_of(status: grpc.StatusCode, details: str) -> TidemarkError:
    """An etcd status as our error."""
    if "has been compacted" in details:
        return CompactedError(0)
    if "future revision" in details:
        return FutureRevisionError()
    if "lease not found" in details:
        return LeaseNotFoundError()
    if "lease already exists" in details:
        return LeaseExistsError()
    return MetaRequestError(f"{details} ({status.name})")
