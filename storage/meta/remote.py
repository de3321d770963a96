"""The etcd API over the network: several endpoints, users, timeouts, and etcd's statuses as our
errors.

A call that fails for lack of a server moves on to the next endpoint. Calls are repeated with
back-off when they were not sent, when they read, and when they write the same state however often
they run. A transaction with conditions that was sent is not repeated: its caller must read and
decide.

For an etcd that demands users, name and password come from the environment or a file (`User`); the
`Token` for them goes with every call.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from etcdpb import rpc_pb2, rpc_pb2_grpc

from storage.backoff import Backoff
from storage.meta.calls import KeepAlives, OpenCalls, cancellations
from storage.meta.errors import (
    AuthNotEnabledError,
    EtcdError,
    InvalidTokenError,
    MetaAuthError,
    MetaUnavailableError,
    NoSpaceError,
    TooManyRequestsError,
    UserNeededError,
    error_of,
)

R = TypeVar("R")
Metadata = tuple[tuple[str, str], ...]
NEEDS_LEADER: Metadata = (("hasleader", "true"),)
"""Sent with streams: a member that is cut off from the others then ends them,
and does not stay silent.
"""
USER_ENV = "TIDEMARK_METADATA_USER"
PASSWORD_ENV = "TIDEMARK_METADATA_PASSWORD"  # noqa: S105 - the name of a variable
PASSWORD_FILE_ENV = "TIDEMARK_METADATA_PASSWORD_FILE"  # noqa: S105 - the name of a variable
_CONNECT_SECONDS = 2.0
_CALL_SECONDS = 10.0
_ATTEMPT_SECONDS = 5.0
_BACKOFF_SECONDS = (0.05, 1.0)


@dataclass(frozen=True, slots=True)
class User:
    """A name and a password; the password is not shown."""

    name: str
    password: str = field(repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "User | None":
        """The user that the variables name; None when there is none.

        Raises:
            MetaAuthError: a name without a password, or the password file cannot be read.
        """
        if not (name := environ.get(USER_ENV, "")):
            return None
        if path := environ.get(PASSWORD_FILE_ENV, ""):
            try:
                return cls(name, Path(path).read_text().rstrip("\n"))
            except (OSError, UnicodeDecodeError) as err:
                raise MetaAuthError(
                    f"cannot read {path} ({PASSWORD_FILE_ENV}): {type(err).__name__}"
                ) from err
        if PASSWORD_ENV in environ:
            return cls(name, environ[PASSWORD_ENV])
        raise MetaAuthError(
            f"{USER_ENV} is set, but neither {PASSWORD_FILE_ENV} nor {PASSWORD_ENV}"
        )


class Token:
    """The token of a user, requested when it is first needed; without a user there is none."""

    def __init__(self, user: User | None) -> None:
        self._user = user
        self._metadata: Metadata | None = None
        self._authenticating = asyncio.Lock()

    async def metadata(self, channel: grpc.aio.Channel) -> Metadata:
        """The metadata for a call on `channel`; empty, too,
        while the server has authentication switched off.

        Raises:
            grpc.aio.AioRpcError: as the call would.
        """
        if self._user is None:
            return ()
        async with self._authenticating:
            if self._metadata is None:
                self._metadata = await self._authenticate(self._user, channel)
            return self._metadata

    def invalidate(self) -> bool:
        """Request a new token next time; returns whether there is a user."""
        self._metadata = None
        return self._user is not None

    async def _authenticate(self, user: User, channel: grpc.aio.Channel) -> Metadata:
        request = rpc_pb2.AuthenticateRequest(name=user.name, password=user.password)
        try:
            return (("token", (await rpc_pb2_grpc.AuthStub(channel).Authenticate(request)).token),)
        except grpc.aio.AioRpcError as err:
            if AuthNotEnabledError.text in (err.details() or ""):
                return ()
            raise


class Endpoints:
    """Channels to the members of a metadata cluster; one of them is used until it fails.

    Made by `open`.
    """

    def __init__(self, addresses: Sequence[str], channels: Sequence[grpc.aio.Channel]) -> None:
        self._addresses = addresses
        self._channels = channels
        self._current = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls, addresses: Sequence[str], channel: Callable[[str], grpc.aio.Channel]
    ) -> AsyncIterator["Endpoints"]:
        """Channels to all addresses for the block; they connect when used."""
        async with AsyncExitStack() as stack:
            yield cls(
                addresses,
                [await stack.enter_async_context(channel(address)) for address in addresses],
            )

    @property
    def current(self) -> str:
        """The address in use."""
        return self._addresses[self._current]

    def leave(self, address: str) -> None:
        """Use the next endpoint from now on, unless another caller has already left `address`."""
        if self.current == address:
            self._current = (self._current + 1) % len(self._channels)

    async def connected(self) -> grpc.aio.Channel:
        """The channel in use, once it is connected, or the next one that connects.

        Raises:
            MetaUnavailableError: none of them connects; nothing was sent.
        """
        for _ in self._channels:
            address, channel = self.current, self._channels[self._current]
            if await _connects(channel):
                return channel
            self.leave(address)
        raise MetaUnavailableError(
            f"no metadata server can be reached at {', '.join(self._addresses)}; is it running, "
            "and do the addresses and certificates fit?"
        )


async def _connects(channel: grpc.aio.Channel) -> bool:
    state = channel.get_state(try_to_connect=True)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            while state not in (
                grpc.ChannelConnectivity.READY,
                grpc.ChannelConnectivity.TRANSIENT_FAILURE,
            ):
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        return False
    return state == grpc.ChannelConnectivity.READY


class _NotSentError(Exception):
    """A call that was not sent, so that it may be repeated whatever it does."""

    def __init__(self, reason: MetaUnavailableError) -> None:
        super().__init__(reason)
        self.reason = reason


class RemoteEtcd:
    """Implements `storage.meta.client.EtcdApi`; made by `open`."""

    def __init__(self, endpoints: Endpoints, user: User | None = None) -> None:
        self._endpoints = endpoints
        self._token = Token(user)
        self._keep_alives = KeepAlives(self._open_keep_alive)
        self.calls = OpenCalls()
        """Calls that end when their server falls silent."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        endpoints: Sequence[str],
        channel: Callable[[str], grpc.aio.Channel],
        user: User | None = None,
    ) -> AsyncIterator["RemoteEtcd"]:
        """Channels to all endpoints for the block; without a `user`,
        that of the environment (`meta.user`), if any.
        """
        async with Endpoints.open(endpoints, channel) as members:
            remote = cls(members, user or User.from_environment(os.environ))
            try:
                yield remote
            finally:
                remote._keep_alives.close()

    @property
    def address(self) -> str:
        """The endpoint in use."""
        return self._endpoints.current

    async def connected(self) -> tuple[grpc.aio.Channel, Metadata]:
        """A connected channel and the metadata that a call on it needs.

        Raises:
            MetaUnavailableError: no endpoint can be reached, or gives a token in time; nothing was
                sent beyond the request for it.
            grpc.aio.AioRpcError: no token was given.
        """
        channel = await self._endpoints.connected()
        address = self._endpoints.current
        try:
            # Around the wait for another caller's request for the token, too: each of many callers
            # would otherwise wait for the former ones' attempts.
            async with asyncio.timeout(_ATTEMPT_SECONDS):
                return channel, await self._token.metadata(channel)
        except TimeoutError as err:
            raise self.failed(err, address) from err

    def failed(self, err: TimeoutError | grpc.aio.AioRpcError, address: str) -> EtcdError:
        """Our error for `err`; an endpoint that failed, or a token that is no longer valid,
        is not used again.
        """
        if isinstance(err, TimeoutError):
            # A server that is silent ends no stream: without this, its watches would wait for ever.
            self._endpoints.leave(address)
            self.calls.cancel_all(address)
            return MetaUnavailableError(
                f"the metadata server at {address} did not answer in time; is it running?"
            )
        failure = error_of(err.code().name, err.details() or "")
        if isinstance(failure, InvalidTokenError | UserNeededError) and self._token.invalidate():
            return InvalidTokenError()
        if type(failure) is MetaUnavailableError:
            self._endpoints.leave(address)
            return MetaUnavailableError(
                f"the metadata server at {address} is away: {failure.text}; is it running?"
            )
        return failure

    async def read(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """See `EtcdApi.read`."""
        return await self._call(
            lambda channel, metadata: rpc_pb2_grpc.KVStub(channel).Range(request, metadata=metadata)
        )

    async def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """See `EtcdApi.txn`."""
        return await self._call(
            lambda channel, metadata: rpc_pb2_grpc.KVStub(channel).Txn(request, metadata=metadata),
            repeat=not request.compare,
        )

    async def lease_grant(self, request: rpc_pb2.LeaseGrantRequest) -> rpc_pb2.LeaseGrantResponse:
        """See `EtcdApi.lease_grant`."""
        return await self._call(
            lambda channel, metadata: rpc_pb2_grpc.LeaseStub(channel).LeaseGrant(
                request, metadata=metadata
            )
        )

    async def lease_revoke(
        self, request: rpc_pb2.LeaseRevokeRequest
    ) -> rpc_pb2.LeaseRevokeResponse:
        """See `EtcdApi.lease_revoke`."""
        # Sent twice, the second one would answer that there is no such lease.
        return await self._call(
            lambda channel, metadata: rpc_pb2_grpc.LeaseStub(channel).LeaseRevoke(
                request, metadata=metadata
            ),
            repeat=False,
        )

    async def keep_alive(self, lease: int, within_s: float) -> int:
        """See `EtcdApi.keep_alive`."""
        address = self._endpoints.current
        try:
            async with asyncio.timeout(min(within_s, _ATTEMPT_SECONDS)):
                return await self._keep_alives.renew(lease)
        except (TimeoutError, grpc.aio.AioRpcError) as err:
            raise self.failed(err, address) from err

    async def watch(
        self, request: rpc_pb2.WatchCreateRequest
    ) -> AsyncGenerator[rpc_pb2.WatchResponse, None]:
        """See `EtcdApi.watch`."""
        address = self._endpoints.current
        try:
            async with asyncio.timeout(_ATTEMPT_SECONDS):
                channel, metadata = await self.connected()
            address = self._endpoints.current
            call = rpc_pb2_grpc.WatchStub(channel).Watch(None, metadata=metadata + NEEDS_LEADER)
            with self.calls.reading(call, address):
                async with asyncio.timeout(_ATTEMPT_SECONDS):
                    await call.write(rpc_pb2.WatchRequest(create_request=request))
                    response: Any = await call.read()
                while isinstance(response, rpc_pb2.WatchResponse):
                    yield response
                    if response.canceled:
                        return
                    response = await call.read()
        except (TimeoutError, grpc.aio.AioRpcError) as err:
            raise self.failed(err, address) from err

    async def _open_keep_alive(self) -> Any:
        channel, metadata = await self.connected()
        return rpc_pb2_grpc.LeaseStub(channel).LeaseKeepAlive(
            None, metadata=metadata + NEEDS_LEADER
        )

    async def _call(
        self, attempt: Callable[[grpc.aio.Channel, Metadata], Awaitable[R]], *, repeat: bool = True
    ) -> R:
        backoff = Backoff(*_BACKOFF_SECONDS)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CALL_SECONDS
        while True:
            try:
                return await self._attempt(attempt)
            except _NotSentError as err:
                failure, retry = err.reason, True
            except MetaUnavailableError as err:
                failure = err
                retry = isinstance(err, TooManyRequestsError | InvalidTokenError)
                retry = retry or (repeat and not isinstance(err, NoSpaceError))
            pause_s = backoff.next_s()
            if not retry or loop.time() + pause_s >= deadline:
                raise failure
            await asyncio.sleep(pause_s)

    async def _attempt(self, attempt: Callable[[grpc.aio.Channel, Metadata], Awaitable[R]]) -> R:
        try:
            channel, metadata = await self.connected()
        except MetaUnavailableError as err:
            raise _NotSentError(err) from err
        except grpc.aio.AioRpcError as err:
            raise self.failed(err, self._endpoints.current) from err
        address, before = self._endpoints.current, cancellations()
        try:
            call = attempt(channel, metadata)
            async with asyncio.timeout(_ATTEMPT_SECONDS):
                with self.calls.reading(call, address):
                    return await call
        except (TimeoutError, grpc.aio.AioRpcError) as err:
            if cancellations() > before:
                # gRPC raises the failure when it comes together with a cancellation.
                raise asyncio.CancelledError from err
            raise self.failed(err, address) from err
