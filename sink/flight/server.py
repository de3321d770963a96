"""The Flight listener: actions describe, latest, plan, ack and report, and DoGet;
all it knows comes from `Feeds`.

Errors cross the wire as text `[TM:ErrName] …`: FlightUnavailableError where trying again helps,
else FlightServerError.

Where the capture has a readers' token, each call brings `authorization: Bearer <token>`, compared
in constant time, beside TLS. The token is in no message, log or repr of ours.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.flight as fl
from prometheus_client import Counter, Histogram

from sink.flight.documents import (
    Ack,
    Answer,
    Describe,
    FlightRequestError,
    JobReport,
    Latest,
    Plan,
    Ticket,
    described,
    planned,
)
from sink.flight.feeds import Feeds
from storage.defect import request_error
from storage.model.errors import InvalidError, Kind, UnavailableError

_ROWS_SENT = Counter("tidemark_flight_rows_total", "mounted rows handed to readers")
_BYTES_SENT = Counter("tidemark_flight_sent_bytes_total", "Arrow buffers handed to readers")
_CALL_SECONDS = Histogram(
    "tidemark_flight_call_seconds", "time of one call, with its waiting", ["call"]
)

_UNIX = "unix:"
_RETRYABLE = (Kind.UNAVAILABLE, Kind.CLOSED)
_AUTHORIZATION: Final = "authorization"
_BEARER: Final = "bearer"
_ACTIONS = {
    "describe": "a changefeed's state, positions, tables and their schemas",
    "latest": "the end of the next cut",
    "plan": "the slices of a cut",
    "ack": "the reader has everything up to a ts",
    "report": "the lake job says how it is",
}


class FlightPortError(UnavailableError):
    """The Flight address cannot be listened on."""

    code = "ErrPortInUse"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightTls:
    """PEM files' contents; `root` demands and checks clients' certificates."""

    certificate: bytes
    key: bytes
    root: bytes | None = None


class FlightServer(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow is untyped
    """Serves `feeds`; `location` is what plans tell readers to connect to."""

    def __init__(
        self,
        feeds: Feeds,
        addr: str,
        advertise_addr: str = "",
        tls: FlightTls | None = None,
        token: str = "",
    ) -> None:
        """With a `token`, calls must bring it."""
        self._feeds = feeds
        scheme = "grpc" if tls is None else "grpc+tls"
        security: dict[str, Any] = {"middleware": {"token": TokenGuard(token)}} if token else {}
        if tls is not None:
            security["tls_certificates"] = [(tls.certificate, tls.key)]
            security |= {"verify_client": True, "root_certificates": tls.root} if tls.root else {}
        if addr.startswith(_UNIX):
            super().__init__(f"grpc+unix://{addr.removeprefix(_UNIX)}", **security)
            self.bound = addr
        else:
            super().__init__(f"{scheme}://{addr}", **security)
            self.bound = f"{addr.rpartition(':')[0]}:{self.port}"
        self.location = f"{scheme}://{advertise_addr or self.bound}"
        self._actions: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], Answer]]] = {
            "describe": (Describe.parse, self._describe),
            "latest": (Latest.parse, self._latest),
            "plan": (Plan.parse, self._plan),
            "ack": (Ack.parse, self._ack),
            "report": (JobReport.parse, self._report),
        }

    def list_actions(self, context: Any) -> list[tuple[str, str]]:  # noqa: ARG002 - the base class's signature
        """What `do_action` takes."""
        return list(_ACTIONS.items())

    def do_action(self, context: Any, action: Any) -> list[bytes]:  # noqa: ARG002 - the base class's signature
        """One JSON document in, one out."""
        with _errors_cross_the_wire("action"), _CALL_SECONDS.labels(_known(action.type)).time():
            if action.type not in self._actions:
                raise FlightRequestError(
                    f"no action {action.type!r}; there are {', '.join(self._actions)}"
                )
            parse, carry_out = self._actions[action.type]
            body = action.body.to_pybytes()
            request = parse(body)
            ask = self._feeds.elsewhere(request.changefeed)
            if ask is not None:
                return [ask(action.type, body)]
            return [json.dumps(carry_out(request)).encode()]

    def do_get(self, context: Any, ticket: Any) -> Any:  # noqa: ARG002 - the base class's signature
        """The rows of one slice."""
        with _errors_cross_the_wire("get"):
            request = Ticket.parse(ticket.ticket)
            schema, batches = self._feeds.read(
                request.changefeed, request.table, request.start, request.end, before=request.before
            )
            # The batches are made when gRPC asks for them: an error among them has to cross the
            # wire there, too (`_streamed`).
            return fl.GeneratorStream(schema, _streamed(batches))

    def _describe(self, request: Describe) -> Answer:
        description = self._feeds.describe(
            request.changefeed, request.ts, before=request.before, known_ts=request.known_ts
        )
        return described(description)

    def _latest(self, request: Latest) -> Answer:
        wait_s = request.wait_ms / 1e3
        feeds = self._feeds
        ts = feeds.latest(
            request.changefeed,
            request.table,
            request.start,
            request.max_rows,
            request.max_bytes,
            wait_s,
        )
        return {"ts": ts}

    def _plan(self, request: Plan) -> Answer:
        slices = self._feeds.plan(
            request.changefeed, request.tables, request.start, request.end, request.slice_bytes
        )
        return {"slices": [planned(request, part, self.location) for part in slices]}

    def _ack(self, request: Ack) -> Answer:
        checkpoint_ts = self._feeds.ack(
            request.changefeed, request.table, request.ts, request.epoch
        )
        return {"checkpoint_ts": checkpoint_ts}

    def _report(self, request: JobReport) -> Answer:
        self._feeds.report(request.changefeed, request.report)
        return {}


def open_server(
    feeds: Feeds, addr: str, advertise_addr: str = "", tls: FlightTls | None = None, token: str = ""
) -> FlightServer:
    """A server that listens on `addr` (port 0: any; or `unix:/path`,
    where TLS is not for) for those with `token`.

    It listens already: run `wait` in a thread, as pyarrow's `serve` would take the process's
    signals. `shutdown` waits for calls under way.

    Raises:
        FlightPortError: the address is taken or not ours.
    """
    try:
        return FlightServer(feeds, addr, advertise_addr, tls, token)
    except (pa.ArrowException, OSError) as err:
        raise FlightPortError(
            f"cannot listen on {addr} for Arrow Flight; choose another --flight-addr"
        ) from err


def _known(action: str) -> str:
    """The action as a label: whatever a client sends must not make metrics without end."""
    return action if action in _ACTIONS else "unknown"


def _streamed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    started = time.monotonic()
    with _errors_cross_the_wire("get"):
        for batch in batches:
            _ROWS_SENT.inc(batch.num_rows)
            _BYTES_SENT.inc(batch.nbytes)
            yield batch
    _CALL_SECONDS.labels("get").observe(time.monotonic() - started)


@contextmanager
def _errors_cross_the_wire(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as err:
        error = request_error(err, f"Flight {where}")
        if error.kind in _RETRYABLE:
            raise fl.FlightUnavailableError(str(error)) from err
        raise fl.FlightServerError(str(error)) from err


class TokenFileError(InvalidError):
    """The file with the readers' token cannot be used."""

    code = "ErrTokenFile"


class TokenGuard(fl.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow is untyped
    """Lets calls with the token pass; keeps a digest of it only."""

    def __init__(self, token: str) -> None:
        super().__init__()
        # Digests have one length: what is compared tells nothing of the token's.
        self._digest = _digest(token.encode())

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str | bytes]]) -> None:  # noqa: ARG002 - the base's
        """Refuse a call without the token.

        Raises:
            FlightUnauthenticatedError: there is none, or another one.
        """
        sent = [
            value
            for name, values in headers.items()
            if name.lower() == _AUTHORIZATION
            for value in values
        ]
        if not sent:
            raise _refused("this capture wants a token; give its file as option tokenFile")
        if not any(hmac.compare_digest(self._digest, _digest(_token(value))) for value in sent):
            raise _refused(
                "the token is not the one of this capture; compare tokenFile with its "
                "--flight-token-file"
            )


def read_token(path: str) -> str:
    """The token of a file, without white space around it.

    Raises:
        TokenFileError: it cannot be read, or holds none that a header can carry.
    """
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        why = err.strerror if isinstance(err, OSError) else "it is not ASCII text"
        raise TokenFileError(
            f"cannot read the token file {path}: {why}; see --flight-token-file"
        ) from None
    if not token or not token.isprintable() or " " in token:
        raise TokenFileError(
            f"the token file {path} must hold one line of printable characters without spaces"
        )
    return token


def _token(value: str | bytes) -> bytes:
    text = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    scheme, _, token = text.partition(b" ")
    return token.strip() if scheme.lower() == _BEARER.encode() else b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _refused(why: str) -> Exception:
    refused: Exception = fl.FlightUnauthenticatedError(f"[TM:ErrUnauthenticated] {why}")
    return refused
