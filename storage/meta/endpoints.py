"""Channels to the members of a metadata cluster, and which of them is in use."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import grpc.aio

from storage.meta.errors import MetaUnavailableError

CONNECT_SECONDS = 2.0


class Endpoints:
    """Uses one endpoint until it fails; made by `open`."""

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
            yield cls(addresses, [await stack.enter_async_context(channel(address)) for address in addresses])

    @property
    def current(self) -> str:
        """The address in use."""
        return self._addresses[self._current]

    def leave(self, address: str) -> None:
        """Use the next endpoint from now on, unless another caller already left `address`."""
        if self.current == address:
            self._current = (self._current + 1) % len(self._channels)

    async def connected(self) -> grpc.aio.Channel:
        """The channel in use, once it is connected; the next one if it cannot be.

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
        async with asyncio.timeout(CONNECT_SECONDS):
            while state not in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        return False
    return state == grpc.ChannelConnectivity.READY
