"""Connections to captures: one for each process and address, opened at first use;
endpoints are tried in turn.

Invariants:
1. A connection belongs to one process. Spark forks and pickles readers, so clients live in a
   module-level cache keyed by pid, never in a reader.
2. A token is read from its file for each call, and sent as a header.
3. A client shows the certificate of the files as they were when it was made. Once they have
   changed there is a new one: a job may live longer than a certificate.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from pyspark_tidemark.errors import UNKNOWN, SourceError, from_text
from pyspark_tidemark.options import Credentials

T = TypeVar("T")
Pause: TypeAlias = Callable[[float], object]
"""Waits for so many seconds; returns true if the caller is to give up."""
sleep: Pause = time.sleep
"""A pause that never makes the caller give up."""

RETRY_S = 60.0
"""How long an unavailable capture is waited for before the query fails."""
FIRST_S = 8.0
"""The same for the first call of all, whose address may be wrong."""
RETRYABLE = (fl.FlightUnavailableError, fl.FlightTimedOutError)
_BACKOFF_S, _BACKOFF_MAX_S = 0.1, 2.0
_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
PING_MS, PING_TIMEOUT_MS = 25_000, 10_000
"""A PING is sent after so long without a byte from the capture, and its ACK must come within so
long.

Without PINGs a reader would wait for a capture whose machine or network is gone until the stream's
deadline: TCP tells a side that only receives nothing.
"""
# Captures answer within 60 s, or end the call. Arrow's server ends a connection at the fourth ping
# since it last sent anything, so more frequent ones would break calls that only wait.

_PORT_HINT = "a capture gives rows at its Flight port, 8301 unless --flight-addr says else"

_Files = tuple[tuple[int, int, int] | None, ...]
_clients: dict[tuple[int, str, Credentials], tuple[_Files, Any]] = {}
_last_answered: dict[tuple[str, ...], str] = {}
_tokens: dict[str, bytes] = {}
_authenticated: set[tuple[str, str]] = set()
"""Captures that have accepted a token, each with the file of the token."""


def client(uri: str, credentials: Credentials) -> Any:
    """This process's client of the capture at `uri`."""
    # By pid: a forked worker inherits the cache, and gRPC's threads do not survive a fork.
    identity = (os.getpid(), uri, credentials)
    files, made = _clients.get(identity, ((), None))
    now = _state_of_files(credentials)
    if made is None or files != now:
        try:
            made = _connect(uri, credentials)
        except SourceError:
            # Files that are being replaced may be away for a moment.
            if made is None:
                raise
        else:
            _clients[identity] = now, made
    return made


def _state_of_files(credentials: Credentials) -> _Files:
    paths = (credentials.ca_path, credentials.cert_path, credentials.key_path)
    return tuple(_state_of(path) for path in paths if path)


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        state = Path(path).stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size


def call_options(credentials: Credentials, timeout_s: float) -> Any:
    """The deadline of a call in seconds, and the token as its header."""
    headers = []
    if credentials.token_file:
        headers.append((b"authorization", b"Bearer " + _token(credentials.token_file)))
    return fl.FlightCallOptions(timeout=timeout_s, headers=headers)


def _token(path: str) -> bytes:
    """The token in a file; while the file is empty or missing, the token that it had before."""
    try:
        _tokens[path] = _read_token(path)
    except SourceError:
        if path not in _tokens:
            raise
    return _tokens[path]


def _read_token(path: str) -> bytes:
    if token := _content(path, "token file").strip():
        return token
    raise SourceError("ErrCredentials", f"the token file {path} is empty")


@contextmanager
def token_may_change(uri: str, credentials: Credentials) -> Iterator[None]:
    """For one call: take a capture that accepted this token file before, and refuses it now, for
    one that is unavailable. A new token reaches captures and readers one after the other.
    """
    key = uri, credentials.token_file
    try:
        yield
    except fl.FlightUnauthenticatedError as err:
        if key in _authenticated:
            raise fl.FlightUnavailableError(str(err)) from err
        raise
    if credentials.token_file:
        _authenticated.add(key)


def last_good_first(
    uris: tuple[str, ...],
    ask: Callable[[str], T],
    retry_s: float | None = None,
    pause: Pause = sleep,
) -> T:
    """As `first_answer`, beginning with the endpoint that answered last."""
    # So the timeout of an endpoint that is gone is paid once, not at each call.

    def asked(uri: str) -> T:
        answer = ask(uri)
        _last_answered[uris] = uri
        return answer

    in_order = sorted(uris, key=lambda uri: uri != _last_answered.get(uris))
    return first_answer(in_order, asked, retry_s, pause)


def first_answer(
    uris: Sequence[str],
    ask: Callable[[str], T],
    retry_s: float | None = None,
    pause: Pause = sleep,
) -> T:
    """The answer of the first capture that is available. If none is, all are asked again for
    `retry_s` (None: `RETRY_S`), or until `pause` returns true.

    Raises:
        SourceError: what a capture refused with, or the last one's unavailability (retryable);
            ErrNoFlight, there is another server.
    """
    deadline = time.monotonic() + (RETRY_S if retry_s is None else retry_s)
    pause_s = _BACKOFF_S
    while True:
        for uri in uris:
            try:
                return ask(uri)
            # Only an unavailable capture is followed by the next one: what one capture refuses, all
            # refuse.
            except RETRYABLE as err:
                last = _unavailable(uri, err)
            except pa.ArrowNotImplementedError as err:
                raise _no_flight(uri, err) from None
            except (fl.FlightError, pa.ArrowException) as err:
                raise from_text(f"{uri}: {err}", retryable=False) from None
        if time.monotonic() + pause_s > deadline or pause(pause_s):
            raise last
        pause_s = min(2 * pause_s, _BACKOFF_MAX_S)


def _unavailable(uri: str, err: Exception) -> SourceError:
    error = from_text(f"{uri}: {err}", retryable=True)
    # A capture that gives a reason of its own was reached: then its address is no fault.
    if error.code != UNKNOWN:
        return error
    return SourceError(UNKNOWN, f"{error.message} ({_PORT_HINT})", retryable=True)


def _no_flight(uri: str, err: Exception) -> SourceError:
    error = from_text(f"{uri}: {err}", retryable=False)
    if error.code != UNKNOWN:
        return error
    return SourceError(
        "ErrNoFlight", f"{uri} answers, but does not speak Arrow Flight: {_PORT_HINT}"
    )


def _connect(uri: str, credentials: Credentials) -> Any:
    scheme, separator, address = uri.partition("://")
    if not separator or scheme not in ("grpc", "grpc+tcp", "grpc+tls"):
        raise SourceError("ErrOptionInvalid", f"endpoint {uri!r} must look like grpc://host:port")
    options = [
        *_RECONNECT,
        # The proxy of http_proxy is for the web; gRPC's own variable names one for captures.
        ("grpc.enable_http_proxy", int("grpc_proxy" in os.environ)),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        # of the pings that measure the bandwidth, too: no other one is sent beside them
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ]
    if not credentials.encrypted:
        return fl.FlightClient(uri, generic_options=options)
    return fl.FlightClient(
        f"grpc+tls://{address}",
        tls_root_certs=_pem(credentials.ca_path),
        cert_chain=_pem(credentials.cert_path),
        private_key=_pem(credentials.key_path),
        generic_options=options,
    )


def _pem(path: str) -> bytes | None:
    return _content(path, "TLS file") if path else None


def _content(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as err:
        raise SourceError(
            "ErrCredentials", f"cannot read the {what} {path}: {err.strerror}"
        ) from None
