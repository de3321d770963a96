"""A Flight listener beside an event loop: it serves in threads of its own,
which are waited for outside the loop.

The server listens once it is made. pyarrow's `serve` would catch the process's signals, which are
the daemon's, so a thread calls `wait`.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from server.rpc.connection_guard import ConnectionGuard
from server.rpc.credentials import CredentialsError, SecurityConfig
from server.rpc.engine import connections_per_address
from server.rpc.limits import Limits
from sink.flight.feeds import Feeds
from sink.flight.server import FlightServer, FlightTls, open_server, read_token
from storage.tasks import beside


class ClosableFeeds(Feeds, Protocol):
    """Feeds whose waiting calls can be let go."""

    def close(self) -> None:
        """End all waiting."""
        ...


@asynccontextmanager
async def serving_flight(
    feeds: ClosableFeeds,
    addr: str,
    advertise_addr: str = "",
    security: SecurityConfig | None = None,
    token_file: str = "",
) -> AsyncIterator[FlightServer]:
    """Serve `feeds` for the block; at its end `feeds.close` is called first, and then calls under
    way are waited for.

    With a `token_file`, only clients that send its token are served.

    Raises:
        TokenFileError: it cannot be read, or holds no token.
        CredentialsError: names of clients matter, and there is no token.
        FlightPortError: the address cannot be listened on.
    """
    token = read_token(token_file) if token_file else ""
    server = open_server(
        feeds, addr, advertise_addr, _tls(security, token) if security else None, token
    )
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


def _tls(security: SecurityConfig, token: str) -> FlightTls | None:
    if not security.enabled:
        return None
    # Flight's library tells nobody the name in a client's certificate.
    if security.cert_allowed_cn and not token:
        raise CredentialsError(
            "the Flight port cannot look at names in certificates: with --cert-allowed-cn it needs "
            "--flight-token-file"
        )
    root = Path(security.ca_path).read_bytes() if security.ca_path else None
    return FlightTls(
        certificate=Path(security.cert_path).read_bytes(),
        key=Path(security.key_path).read_bytes(),
        root=root,
    )
