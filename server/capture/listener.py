"""A Flight listener beside an event loop: it serves in threads of its own,
which are waited for outside the loop.

The server listens once it is made. pyarrow's `serve` would catch the process's signals, which are
the daemon's, so a thread calls `wait`.

Flight's library says nothing of TLS handshakes that fail, waits for them for two minutes, and keeps
the certificate that a server was made with. So with TLS it listens on loopback, behind a
`PassingListener`, which has the public port. Once the files have changed, connections that begin
are passed on to a new server, and the old one carries out the calls that it has.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final, Protocol

import structlog
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
from server.rpc.grpcio_front import PassingListener, passed_on
from server.rpc.listener import warn_if_open
from server.rpc.reloaded import Reloaded
from sink.flight.feeds import Feeds
from sink.flight.server import FlightPortError, FlightServer, FlightTls, open_server, port_error
from sink.flight.tokens import (
    MayRead,
    OneToken,
    ReaderRefusedError,
    Readers,
    ReaderUnknownError,
    read_token,
)
from storage.tasks import background_tasks

_LOOK_EVERY_S: Final = 1.0
_LOOPBACK: Final = "127.0.0.1:0"
_TOKEN_RELOADS = Counter(
    "tidemark_capture_token_reloads_total",
    "Changes of the file of --flight-token-file: `ok` if it is used, `failed` if it cannot be",
    ["outcome"],
)


_log = structlog.get_logger(__name__)


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

    def open_at(at: str, public_addr: str = "", tls: FlightTls | None = None) -> FlightServer:
        return open_server(feeds, at, advertise_addr or public_addr, tls, readers)

    if security and security.enabled:
        listening = _listening_with_tls(open_at, addr, _tls_files(security, readers))
    else:
        listening = _listening(open_at, addr)
    async with listening as listener:
        warn_if_open(addr, has_tls=bool(security and security.enabled))
        try:
            yield listener
        finally:
            # Closing waits for calls under way, some of which wait for rows: they are let go first.
            feeds.close()


class FlightListener:
    """The server that listens, and those before it whose calls go on."""

    def __init__(self, bound: str, server: FlightServer) -> None:
        self.bound = bound
        """Where it listens."""
        self._server = server
        self._thread = _waiting(server)
        self._ending: set[asyncio.Future[None]] = set()

    def replace(self, server: FlightServer) -> None:
        """Serve by another server; the old one ends when its calls have."""
        loop = asyncio.get_running_loop()
        ending = loop.run_in_executor(None, _ended, self._server, self._thread)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        self._server, self._thread = server, _waiting(server)

    async def close(self) -> None:
        """Stop listening, and wait for the calls under way."""
        await asyncio.to_thread(_ended, self._server, self._thread)
        await asyncio.gather(*self._ending)


@asynccontextmanager
async def _listening(
    open_at: Callable[[str], FlightServer], addr: str
) -> AsyncIterator[FlightListener]:
    server = open_at(addr)
    listener = FlightListener(server.bound, server)
    try:
        async with background_tasks(_guard(server.port, addr)):
            yield listener
    finally:
        await listener.close()


@asynccontextmanager
async def _listening_with_tls(
    open_at: Callable[[str, str, FlightTls], FlightServer], addr: str, files: Reloaded[FlightTls]
) -> AsyncIterator[FlightListener]:
    front = PassingListener(_LOOPBACK, passed_on(_limits()), has_tls=True)
    try:
        port = front.bind(addr)
    except OSError as err:
        raise port_error(addr) from err
    bound = f"{addr.rpartition(':')[0]}:{port}"

    def open_inner() -> FlightServer:
        server = open_at(_LOOPBACK, bound, files.current())
        front.address = server.bound
        return server

    with closing(front):
        listener = FlightListener(bound, open_inner())
        renewing = _renewing(files, lambda: listener.replace(open_inner()))
        async with background_tasks(front.run(), _guard(port, addr), renewing):
            try:
                yield listener
            finally:
                await listener.close()


async def _renewing(files: Reloaded[FlightTls], renew: Callable[[], None]) -> None:
    """Call `renew` within a second or two after the files have changed, until it can; for ever."""
    version, failed = files.version, files.version
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        files.current()
        if files.version == version:
            continue
        try:
            renew()
        except FlightPortError as err:
            # Out of files or ports, say: those who are connected are served meanwhile.
            if failed != files.version:
                _log.warning(
                    "Flight cannot show its new certificate; it tries again", error=str(err)
                )
            failed = files.version
        else:
            version = files.version


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
        await ConnectionGuard(port, _limits()).run()


def _limits() -> Limits:
    return Limits(connections_per_address=connections_per_address())


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
