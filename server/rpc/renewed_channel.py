"""Channels that use a new certificate once its files have changed.

gRPC's channels keep the certificate that they were made with, and a daemon runs longer than a
certificate is valid: once it has expired, no connection could be made any more, though the files
have had a new one for long (cert-manager replaces it after two thirds of its life). So a call that
begins after the files have changed uses a new channel. Calls under way stay on their channel, which
is closed when the last of them has ended.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio

from server.rpc.reloaded import Reloaded

C = TypeVar("C")


class _Newest(Generic[C]):
    """The channel of the newest files, and those whose calls go on."""

    def __init__(
        self,
        files: Reloaded[grpc.ChannelCredentials],
        make: Callable[[grpc.ChannelCredentials], C],
    ) -> None:
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._version = files.version
        self._channel = make(files.current())
        self._all: weakref.WeakSet[Any] = weakref.WeakSet([self._channel])
        # A channel that nobody refers to is closed, and its calls with it.
        self._calls: weakref.WeakKeyDictionary[Any, C] = weakref.WeakKeyDictionary()

    def channel(self) -> C:
        """Return the channel for a call that begins now."""
        credentials = self._files.current()
        with self._lock:
            if self._version != self._files.version:
                self._version = self._files.version
                self._channel = self._make(credentials)
                self._all.add(self._channel)
            return self._channel

    def keep(self, call: Any, channel: C) -> None:
        """Keep a call's channel for as long as the call is referred to."""
        with self._lock:
            self._calls[call] = channel

    def all(self) -> list[Any]:
        """Every channel that there still is."""
        with self._lock:
            return list(self._all)


class _Method(Generic[C]):
    """A method of a service, for a stub; each call takes the newest channel."""

    def __init__(self, newest: _Newest[C], make: Callable[[Any], Any]) -> None:
        self._newest = newest
        self._make = make
        # Replaced as a whole: calls come from any thread.
        self._made: tuple[C, Any] | None = None

    def _of_newest(self) -> tuple[C, Any]:
        channel, made = self._newest.channel(), self._made
        if made is None or made[0] is not channel:
            self._made = made = (channel, self._make(channel))
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        channel, method = self._of_newest()
        call = method(*args, **kwargs)
        # Of a blocking call the answer is here already.
        if isinstance(call, (grpc.RpcContext, grpc.aio.Call)):
            self._newest.keep(call, channel)
        return call

    def future(self, *args: Any, **kwargs: Any) -> Any:
        """Call without waiting, as gRPC's `UnaryUnaryMultiCallable.future`."""
        channel, method = self._of_newest()
        call = method.future(*args, **kwargs)
        self._newest.keep(call, channel)
        return call

    def with_call(self, *args: Any, **kwargs: Any) -> Any:
        """Call and return the call beside its answer, as gRPC's
        `UnaryUnaryMultiCallable.with_call`.
        """
        _channel, method = self._of_newest()  # referred to until the answer is here
        return method.with_call(*args, **kwargs)


class _Renewed(Generic[C]):
    """The methods of both kinds of channels; each call takes the newest channel."""

    def __init__(
        self,
        files: Reloaded[grpc.ChannelCredentials],
        make: Callable[[grpc.ChannelCredentials], C],
    ) -> None:
        self._newest = _Newest(files, make)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See `grpc.Channel.unary_unary`."""
        return _Method(self._newest, lambda channel: channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See `grpc.Channel.unary_stream`."""
        return _Method(self._newest, lambda channel: channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See `grpc.Channel.stream_unary`."""
        return _Method(self._newest, lambda channel: channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See `grpc.Channel.stream_stream`."""
        return _Method(self._newest, lambda channel: channel.stream_stream(*args, **kwargs))


class RenewedChannel(_Renewed[grpc.aio.Channel], grpc.aio.Channel):
    """A channel of an event loop; `make` makes one of gRPC's of the files' credentials."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close it; calls under way have `grace` seconds."""
        await asyncio.gather(*(channel.close(grace) for channel in self._newest.all()))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 - gRPC's signature
        """The state of the newest channel."""
        return self._newest.channel().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the newest channel has another state."""
        await self._newest.channel().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the newest channel is ready."""
        await self._newest.channel().channel_ready()


class RenewedBlockingChannel(_Renewed[grpc.Channel], grpc.Channel):
    """The same for threads."""

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,  # noqa: FBT001, FBT002 - gRPC's signature
    ) -> None:
        """Subscribe to the states of the newest channel."""
        self._newest.channel().subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Unsubscribe from every channel."""
        for channel in self._newest.all():
            channel.unsubscribe(callback)

    def close(self) -> None:
        """End all calls."""
        for channel in self._newest.all():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
