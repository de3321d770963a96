"""What the `tidemark cli` commands share: the addresses, the calls, and what a failed call tells the user."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from server.rpc.client import connect, metadata_at
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from storage.meta.client import EtcdMeta
from storage.model.errors import InvalidError, TidemarkError, UnavailableError

CALL_S = 30.0


class CaptureUnavailableError(UnavailableError):
    """No capture answers."""

    code = "ErrCaptureUnavailable"


class NotServedError(InvalidError):
    """The daemon does not know the call: it is a real PD, or of another version."""

    code = "ErrNotServed"


class RemoteError(TidemarkError):
    """What the daemon said; it begins with the daemon's own code, if it has one."""

    code = "ErrRemote"

    def __init__(self, message: str) -> None:
        super().__init__(message if message.startswith("[") else f"[TM:{self.code}] {message}")

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Remote:
    """The cluster a command talks to."""

    server: str
    pd: str
    security: SecurityConfig

    @asynccontextmanager
    async def capture(self) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to the capture for the block.

        Raises:
            CaptureUnavailableError: nobody listens there.
            RemoteError: it refused, and says why.
        """
        try:
            async with connect(self.server, self.security) as channel:
                yield channel
        except grpc.aio.AioRpcError as err:
            details = err.details() or err.code().name
            if err.code() == grpc.StatusCode.UNAVAILABLE and not details.startswith("[TM:"):
                raise CaptureUnavailableError(
                    f"no capture answers at {self.server}; start one with `tidemark capture` (or `tidemark up`), "
                    "or name its address with --server"
                ) from err
            raise RemoteError(details) from err

    @asynccontextmanager
    async def coordinator(self) -> AsyncIterator[PdClient]:
        """A coordinator's client for the block; raises PdUnavailableError if none answers."""
        async with PdClient.open(self.pd, self.security) as pd:
            yield pd

    def metadata(self) -> AbstractAsyncContextManager[EtcdMeta]:
        """The cluster's metadata for the block."""
        return metadata_at(self.pd, self.security)

    @asynccontextmanager
    async def leader(self) -> AsyncIterator[tuple[PdClient, grpc.aio.Channel]]:
        """A coordinator's client and a channel to the one that leads, for the block.

        Raises:
            PdUnavailableError: none answers.
            NotServedError: it is of another kind or version.
            RemoteError: it refused, and says why.
        """
        async with self.coordinator() as pd:
            await pd.tso()  # only the leader has one: whoever is wrongly believed to lead is asked no more
            address = await pd.leader_address()
            try:
                async with connect(address, self.security) as channel:
                    yield pd, channel
            except grpc.aio.AioRpcError as err:
                details = err.details() or err.code().name
                if err.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise NotServedError(f"the coordinator at {address} does not have this call: {details}") from err
                raise RemoteError(details) from err
