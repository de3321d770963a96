"""A Flight listener beside an event loop: it serves in threads of its own,
which are waited for outside the loop.

The server listens once it is made. pyarrow's `serve` would catch the process's signals, which are
the daemon's, so a thread calls `wait`.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from server.config import ConfigError
from server.rpc.access_list import (
    Access,
    ForbiddenError,
    OpenAccess,
    Right,
    UnauthenticatedError,
)
from server.rpc.config import Limits, connections_per_address
from server.rpc.connection_guard import ConnectionGuard
from server.rpc.credentials import CredentialsError, SecurityConfig
from sink.flight.feeds import Feeds
from sink.flight.server import FlightServer, FlightTls, open_server
from sink.flight.tokens import (
    MayRead,
    OneToken,
    ReaderRefusedError,
    Readers,
    ReaderUnknownError,
    read_token,
)
from storage.tasks import beside


class ClosableFeeds(Feeds, Protocol):
    """Feeds whose waiting calls can be let go."""

    def close(self) -> None:
        """End all waiting."""
        ...


class KnownClients:
    """Implements `Readers` by the clients that a capture knows."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def admit(self, tokens: Sequence[bytes]) -> MayRead:
        """See `Readers`; Flight's library tells nobody the name in a client's certificate."""
        try:
            client = self._access.client(tokens)
        except UnauthenticatedError as err:
            raise ReaderUnknownError(err.message) from None

        def may_read(changefeed: str) -> None:
            try:
                client.check(Right.ROWS, "read rows", changefeed)
            except ForbiddenError as err:
                raise ReaderRefusedError(err.message) from None

        return may_read


def readers_of(access: Access, token_file: str) -> Readers | None:
    """Who may read over Flight: the clients of `access`, or whoever has the token of a file; None:
    everybody.

    Raises:
        ConfigError: both are given.
        TokenFileError: the file cannot be read, or holds no token.
    """
    if isinstance(access, OpenAccess):
        return OneToken(read_token(token_file)) if token_file else None
    if token_file:
        raise ConfigError(
            "--access-file says who may read over Flight, so --flight-token-file is not for this "
            "capture: give the token of its lake jobs a [[client]] with the role lake"
        )
    return KnownClients(access)


@asynccontextmanager
async def serving_flight(
    feeds: ClosableFeeds,
    addr: str,
    advertise_addr: str = "",
    security: SecurityConfig | None = None,
    readers: Readers | None = None,
) -> AsyncIterator[FlightServer]:
    """Serve `feeds` for the block; at its end `feeds.close` is called first, and then calls under
    way are waited for.

    With `readers`, only these are served.

    Raises:
        CredentialsError: names of clients matter, and everybody may read.
        FlightPortError: the address cannot be listened on.
    """
    tls = _tls(security, readers) if security else None
    server = open_server(feeds, addr, advertise_addr, tls, readers)
    thread = threading.Thread(target=server.wait, name="flight", daemon=True)
    thread.start()
    try:
        async with beside(_guard(server, addr)):
            yield server
    finally:
        # `shutdown` waits for calls under way, some of which wait for rows: they are let go first.
        feeds.close()
        await asyncio.to_thread(server.shutdown)
        await asyncio.to_thread(thread.join)


async def _guard(server: FlightServer, addr: str) -> None:
    """Bound the listener's connections as those of gRPC's listeners are."""
    if not addr.startswith("unix:"):
        await ConnectionGuard(
            server.port, Limits(connections_per_address=connections_per_address())
        ).run()


def _tls(security: SecurityConfig, readers: Readers | None) -> FlightTls | None:
    if not security.enabled:
        return None
    check_readers(security, readers)
    root = Path(security.ca_path).read_bytes() if security.ca_path else None
    return FlightTls(
        certificate=Path(security.cert_path).read_bytes(),
        key=Path(security.key_path).read_bytes(),
        root=root,
    )


def check_readers(security: SecurityConfig, readers: Readers | None) -> None:
    """See that the Flight port can tell whom it serves.

    Raises:
        CredentialsError: names of clients matter, and everybody may read.
    """
    # Flight's library tells nobody the name in a client's certificate.
    if security.enabled and security.cert_allowed_cn and readers is None:
        raise CredentialsError(
            "the Flight port cannot look at names in certificates: with --cert-allowed-cn it needs "
            "--flight-token-file or --access-file"
        )
