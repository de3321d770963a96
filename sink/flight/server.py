"""The Flight listener: actions describe, latest, plan, ack and report, and DoGet;
all it knows comes from `Feeds`.

Errors cross the wire as text `[TM:ErrName] …`: FlightUnavailableError where trying again helps,
else FlightServerError.

Where readers must be known, each call brings `authorization: Bearer <token>`, beside TLS.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.flight as fl
from prometheus_client import Counter, Histogram
from pyspark_tidemark import tracing

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
from sink.flight.feeds import Feeds, Poll
from sink.flight.tokens import MayRead, ReaderRefusedError, Readers, ReaderUnknownError, tokens_of
from storage.defect import request_error
from storage.model.errors import Kind, UnavailableError

_ROWS_SENT = Counter("tidemark_flight_rows_total", "mounted rows handed to readers")
_BYTES_SENT = Counter("tidemark_flight_sent_bytes_total", "Arrow buffers handed to readers")
_REFUSED = Counter(
    "tidemark_flight_refused_calls_total",
    "Calls that were refused: `too many` are under way, or the method is `not served`",
    ["reason"],
)
_CALL_SECONDS = Histogram(
    "tidemark_flight_call_seconds", "time of one call, with its waiting", ["call"]
)

_UNIX = "unix:"
_RETRYABLE = (Kind.UNAVAILABLE, Kind.CLOSED)
_AUTHORIZATION: Final = "authorization"
_CALLS: Final = "calls"
"""Name of the middleware."""
MAX_CALLS: Final = 768
"""At a time: each has a thread, and containers often allow 1,024."""
_SERVED: Final = (fl.FlightMethod.DO_GET, fl.FlightMethod.DO_ACTION, fl.FlightMethod.LIST_ACTIONS)
_RECHECK_S: Final = 1.0
"""So often a call that goes on is asked about again."""
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
        readers: Readers | None = None,
    ) -> None:
        """With `readers`, only these are served."""
        self._feeds = feeds
        scheme = "grpc" if tls is None else "grpc+tls"
        security: dict[str, Any] = {"middleware": {_CALLS: CallGuard(readers)}}
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
        """The actions that `do_action` takes."""
        return list(_ACTIONS.items())

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """One JSON document in, one out."""
        with _errors_cross_the_wire("action"), _CALL_SECONDS.labels(_known(action.type)).time():
            if action.type not in self._actions:
                raise FlightRequestError(
                    f"no action {action.type!r}; there are {', '.join(self._actions)}"
                )
            parse, carry_out = self._actions[action.type]
            body = action.body.to_pybytes()
            request = parse(body)
            context.get_middleware(_CALLS).check(request.changefeed)
            forward = self._feeds.remote_action(request.changefeed)
            if forward is not None:
                return [forward(action.type, body)]
            return [json.dumps(carry_out(request)).encode()]

    def do_get(self, context: Any, ticket: Any) -> Any:
        """The rows of one slice."""
        with _errors_cross_the_wire("get"):
            request = Ticket.parse(ticket.ticket)
            context.get_middleware(_CALLS).check(request.changefeed)
            span = _begun_slice(request)
            try:
                with tracing.within(span):
                    schema, batches = self._feeds.read(
                        request.changefeed,
                        request.table,
                        request.start,
                        request.end,
                        before=request.before,
                    )
            except Exception as err:
                span.end(err)
                raise
            # The batches are made when gRPC asks for them: an error among them has to cross the
            # wire there, too (`_streamed`).
            check = partial(context.get_middleware(_CALLS).check_again, request.changefeed)
            return fl.GeneratorStream(schema, _streamed(batches, span, check))

    def _describe(self, request: Describe) -> Answer:
        description = self._feeds.describe(
            request.changefeed,
            request.ts,
            before=request.before,
            known_ts=request.known_ts,
            reader=request.reader,
        )
        return described(description)

    def _latest(self, request: Latest) -> Answer:
        ts = self._feeds.latest(
            request.changefeed,
            request.table,
            request.start,
            request.max_rows,
            request.max_bytes,
            Poll(request.wait_ms / 1e3, request.idle_ms),
        )
        return {"ts": ts}

    def _plan(self, request: Plan) -> Answer:
        slices = self._feeds.plan(
            request.changefeed, request.tables, request.start, request.end, request.slice_bytes
        )
        return {"slices": [planned(request, part, self.location) for part in slices]}

    def _ack(self, request: Ack) -> Answer:
        checkpoint_ts = self._feeds.ack(
            request.changefeed, request.table, request.ts, request.epoch, request.reader
        )
        return {"checkpoint_ts": checkpoint_ts}

    def _report(self, request: JobReport) -> Answer:
        self._feeds.report(request.changefeed, request.report)
        return {}


def open_server(
    feeds: Feeds,
    addr: str,
    advertise_addr: str = "",
    tls: FlightTls | None = None,
    readers: Readers | None = None,
) -> FlightServer:
    """A server that listens on `addr` (port 0: any; or `unix:/path`,
    where TLS is not for) for `readers`, None: for all.

    It listens already: run `wait` in a thread, as pyarrow's `serve` would take the process's
    signals. `shutdown` waits for calls under way.

    Raises:
        FlightPortError: the address is taken or not ours.
    """
    try:
        return FlightServer(feeds, addr, advertise_addr, tls, readers)
    except (pa.ArrowException, OSError) as err:
        raise port_error(addr) from err


def port_error(addr: str) -> FlightPortError:
    """The error of a Flight address that cannot be listened on."""
    return FlightPortError(
        f"cannot listen on {addr} for Arrow Flight; choose another --flight-addr"
    )


def _known(action: str) -> str:
    """The action as a label: whatever a client sends must not make metrics without end."""
    return action if action in _ACTIONS else "unknown"


def _begun_slice(request: Ticket) -> tracing.Span:
    return tracing.begin_below(
        request.traceparent,
        "slice",
        changefeed=request.changefeed,
        table=request.table,
        start_ts=request.start,
        commit_ts=request.end,
    )


def _streamed(
    batches: Iterator[pa.RecordBatch],
    span: tracing.Span = tracing.NO_SPAN,
    check: Callable[[], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The batches, until `check` refuses them to their reader."""
    started = checked = time.monotonic()
    rows, size_bytes = 0, 0
    failure: BaseException | None = None
    try:
        with _errors_cross_the_wire("get"):
            for batch in batches:
                if check is not None and time.monotonic() >= checked + _RECHECK_S:
                    check()
                    checked = time.monotonic()
                rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
                _ROWS_SENT.inc(batch.num_rows)
                _BYTES_SENT.inc(batch.nbytes)
                yield batch
    except BaseException as err:  # a reader that goes away closes the generator
        failure = err
        raise
    finally:
        span.set(rows=rows, bytes=size_bytes)
        span.end(failure)
    _CALL_SECONDS.labels("get").observe(time.monotonic() - started)


@contextmanager
def _errors_cross_the_wire(where: str) -> Iterator[None]:
    try:
        yield
    except ReaderUnknownError as err:
        raise fl.FlightUnauthenticatedError(f"[TM:ErrUnauthenticated] {err}") from None
    except ReaderRefusedError as err:
        raise fl.FlightUnauthorizedError(f"[TM:ErrUnauthorized] {err}") from None
    except Exception as err:
        error = request_error(err, f"Flight {where}")
        if error.kind in _RETRYABLE:
            raise fl.FlightUnavailableError(str(error)) from err
        raise fl.FlightServerError(str(error)) from err


class CallGuard(fl.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow is untyped
    """Lets calls pass of methods that are served, of readers that are known, and so many at a time.

    Arrow's library has a thread for each call. For methods that nobody serves, such as DoPut, it
    waits there for a first message, which may never come, before it says so.
    """

    def __init__(self, readers: Readers | None, most: int = MAX_CALLS) -> None:
        """With `readers`, only these are served."""
        super().__init__()
        self._readers = readers
        self._most = most
        self._count = 0
        self._lock = threading.Lock()

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str | bytes]]) -> "_Call":
        """Find out who calls.

        Raises:
            NotImplementedError: nobody serves the method.
            FlightUnauthenticatedError: nobody who is known.
            FlightUnavailableError: too many calls are under way.
        """
        if info.method not in _SERVED:
            _REFUSED.labels("not served").inc()
            raise NotImplementedError("this port serves DoGet, DoAction and ListActions only")
        sent = [
            value
            for name, values in headers.items()
            if name.lower() == _AUTHORIZATION
            for value in values
        ]
        admit = partial(self._readers.admit, tokens_of(sent)) if self._readers else None
        try:
            call = _Call(admit, self._ended)
        except ReaderUnknownError as err:
            raise fl.FlightUnauthenticatedError(f"[TM:ErrUnauthenticated] {err}") from None
        self._begin()
        return call

    def _begin(self) -> None:
        with self._lock:
            if self._count < self._most:
                self._count += 1
                return
        _REFUSED.labels("too many").inc()
        text = f"{self._most} Flight calls are under way, and no more are taken; try again"
        raise fl.FlightUnavailableError(f"[TM:ErrServerBusy] {text}")

    def _ended(self) -> None:
        with self._lock:
            self._count -= 1


class _Call(fl.ServerMiddleware):  # type: ignore[misc]  # pyarrow is untyped
    """One call, and what its reader may read."""

    def __init__(self, admit: Callable[[], MayRead] | None, ended: Callable[[], None]) -> None:
        """Raises ReaderUnknownError; without `admit`, everybody may read."""
        super().__init__()
        self._admit = admit
        self._may_read = admit() if admit else None
        self._ended = ended

    def call_completed(self, exception: BaseException | None) -> None:  # noqa: ARG002 - the base class's signature
        """Make room for another call."""
        self._ended()

    def check(self, changefeed: str) -> None:
        """Raises ReaderRefusedError if the reader may not read the changefeed."""
        if self._may_read:
            self._may_read(changefeed)

    def check_again(self, changefeed: str) -> None:
        """See that the reader may still read: the clients may have changed since the call began.

        Raises:
            ReaderUnknownError, ReaderRefusedError: it may not.
        """
        if self._admit:
            self._admit()(changefeed)
