"""A Flight listener beside an event loop: it serves in threads of its own,
which are waited for outside the loop.

The server listens once it is made. pyarrow's `serve` would catch the process's signals, which are
the daemon's, so a thread calls `wait`.

Flight's library keeps the certificate that a server was made with. Once the files have changed, a
new server takes the place of the old one at its port, which carries out the calls that it has.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

from prometheus_client import Counter

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
from server.rpc.credentials import (
    CredentialsError,
    SecurityConfig,
    reloaded_files,
    server_tls,
)
from server.rpc.reloaded import Reloaded
from sink.flight.feeds import Feeds
from sink.flight.server import FlightPortError, FlightServer, FlightTls, open_server
from sink.flight.tokens import (
    MayRead,
    OneToken,
    ReaderRefusedError,
    Readers,
    ReaderUnknownError,
    read_token,
)
from storage.tasks import beside

_LOOK_EVERY_S: Final = 1.0
_PORT_RETRY_S: Final = 0.02
_TOKEN_RELOADS = Counter(
    "tidemark_capture_token_reloads_total",
    "Changes of the file of --flight-token-file: `ok` if it is used, `failed` if it cannot be",
    ["outcome"],
)


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


class TokenFile:
    """Implements `Readers` by the token of a file, which is read again when it changes; one that
    cannot be used changes nothing, and the log says so.
    """

    def __init__(self, path: str) -> None:
        """Read it; raises TokenFileError."""
        self._readers: Reloaded[OneToken] = Reloaded(
            [path], lambda: OneToken(read_token(path)), _TOKEN_RELOADS, "the readers' token"
        )

    def admit(self, tokens: Sequence[bytes]) -> MayRead:
        """See `Readers`."""
        return self._readers.current().admit(tokens)


def readers_of(access: Access, token_file: str) -> Readers | None:
    """Who may read over Flight: the clients of `access`, or whoever has the token of a file; None:
    everybody.

    Raises:
        ConfigError: both are given.
        TokenFileError: the file cannot be read, or holds no token.
    """
    if isinstance(access, OpenAccess):
        return TokenFile(token_file) if token_file else None
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
) -> AsyncIterator["FlightListener"]:
    """Serve `feeds` for the block; at its end `feeds.close` is called first, and then calls under
    way are waited for.

    With `readers`, only these are served.

    Raises:
        CredentialsError: names of clients matter, and everybody may read.
        FlightPortError: the address cannot be listened on.
    """
    files = _tls_files(security, readers) if security and security.enabled else None
    listener = FlightListener(
        addr, lambda at, tls: open_server(feeds, at, advertise_addr, tls, readers), files
    )
    try:
        async with beside(_guard(listener.port, addr), listener.renewing()):
            yield listener
    finally:
        # `close` waits for calls under way, some of which wait for rows: they are let go first.
        feeds.close()
        await listener.close()


class FlightListener:
    """The server that listens, and those before it whose calls go on."""

    def __init__(
        self,
        addr: str,
        open_at: Callable[[str, FlightTls | None], FlightServer],
        files: Reloaded[FlightTls] | None = None,
    ) -> None:
        """Listen on `addr`; raises what `open_at` raises."""
        self._open_at = open_at
        self._files = files
        self._version = files.version if files else 0
        self._server = open_at(addr, files.current() if files else None)
        self._ending: set[asyncio.Future[None]] = set()
        self.bound: str = self._server.bound
        """Where it listens."""
        self.port: int = self._server.port
        self._thread = _waiting(self._server)

    async def renewing(self) -> None:
        """Show a new certificate within a second or two after its files have changed; for ever."""
        while self._files is not None:
            await asyncio.sleep(_LOOK_EVERY_S)
            tls = self._files.current()
            if self._files.version != self._version:
                self._version = self._files.version
                await self._replace(tls)

    async def close(self) -> None:
        """Stop listening, and wait for the calls under way."""
        await asyncio.to_thread(_ended, self._server, self._thread)
        await asyncio.gather(*self._ending)

    async def _replace(self, tls: FlightTls) -> None:
        """Listen with another certificate; the old server ends when its calls have."""
        loop = asyncio.get_running_loop()
        ending = loop.run_in_executor(None, _ended, self._server, self._thread)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        # The port is free in some milliseconds. Who connects meanwhile is refused, and tries again.
        while True:
            try:
                self._server = self._open_at(self.bound, tls)
            except FlightPortError:
                await asyncio.sleep(_PORT_RETRY_S)
            else:
                self._thread = _waiting(self._server)
                return


def _waiting(server: FlightServer) -> threading.Thread:
    thread = threading.Thread(target=server.wait, name="flight", daemon=True)
    thread.start()
    return thread


def _ended(server: FlightServer, thread: threading.Thread) -> None:
    server.shutdown()
    thread.join()


async def _guard(port: int, addr: str) -> None:
    """Bound the listener's connections as those of gRPC's listeners are."""
    if not addr.startswith("unix:"):
        limits = Limits(connections_per_address=connections_per_address())
        await ConnectionGuard(port, limits).run()


def _tls_files(security: SecurityConfig, readers: Readers | None) -> Reloaded[FlightTls]:
    check_readers(security, readers)
    return reloaded_files(security, lambda: _tls(security))


def _tls(security: SecurityConfig) -> FlightTls:
    # Flight would say nothing of files that do not fit, and refuse every handshake.
    server_tls(security)
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
