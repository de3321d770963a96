"""Spans for OpenTelemetry: one trace shows one cut, from the source to the lake.

The lake job begins the trace, and names it in the tickets of the slices that it reads
(docs/format/flight.md, `traceparent`); the captures add what they did for these slices: when their
rows were pulled, sorted and staged, and how long they took to be sent. A cut without rows has no
trace. There is no span for a row, a commit or a batch (docs/operations.md, *Traces*).

Spans are sent where `OTEL_EXPORTER_OTLP_ENDPOINT` is set and the extra `otel` is installed; by HTTP
where `OTEL_EXPORTER_OTLP_PROTOCOL` says `http/protobuf`, which the extra `otel-http` can. Without
either no module of OpenTelemetry is imported, and `begin` returns `NO_SPAN`, whose methods
do nothing.
"""

import importlib
import importlib.metadata
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

Warn: TypeAlias = Callable[[str], None]
"""Tells an operator why no spans arrive."""

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS: Final = {
    "grpc": ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "otel"),
    "http/protobuf": ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "otel-http"),
}
"""By the names of OpenTelemetry's protocols: the module of each exporter, and our extra with it."""
_HEADER: Final = "traceparent"
_WARN_EVERY_S: Final = 60.0
_FLUSH_MS: Final = 2_000
"""How long a process that ends waits for a collector to take its last spans."""

_tracer: Any = None
"""OpenTelemetry's, or None while nothing is sent."""


class Span:
    """One span that was begun; may be ended by any thread, once."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Any, traceparent: str) -> None:
        self._span = span
        self.traceparent: Final = traceparent
        """Names the span to other processes, as W3C's Trace Context has it."""

    @property
    def is_recording(self) -> bool:
        """Whether it will be sent."""
        return True

    def set(self, **attributes: Any) -> None:
        """Add attributes, each named `tidemark.…`."""
        self._span.set_attributes(_named(attributes))

    def child(self, name: str, start_ns: int | None = None, **attributes: Any) -> "Span":
        """Begin a span below this one, now or at `start_ns` (nanoseconds since 1970)."""
        return _begun(name, _context_of(self._span), start_ns, attributes)

    def end(self, error: BaseException | None = None, end_ns: int | None = None) -> None:
        """It ended, now or at `end_ns`; `error` is what it failed with."""
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            # Not `record_exception`: a stack trace may hold what a row holds.
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end(end_ns)


class _NoSpan(Span):
    """Stands for a span where nothing is traced."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(None, "")

    @property
    def is_recording(self) -> bool:
        return False

    def set(self, **attributes: Any) -> None:
        """Nothing."""

    def child(self, name: str, start_ns: int | None = None, **attributes: Any) -> Span:  # noqa: ARG002 - the base's
        """Nothing either."""
        return self

    def end(self, error: BaseException | None = None, end_ns: int | None = None) -> None:
        """Nothing."""


NO_SPAN: Final = _NoSpan()
_current: ContextVar[Span] = ContextVar("tidemark_span", default=NO_SPAN)


def is_on() -> bool:
    """Whether spans are sent."""
    return _tracer is not None


def begin(name: str, start_ns: int | None = None, **attributes: Any) -> Span:
    """Begin a trace, now or at `start_ns` (nanoseconds since 1970)."""
    return NO_SPAN if _tracer is None else _begun(name, None, start_ns, attributes)


def begin_below(traceparent: str, name: str, **attributes: Any) -> Span:
    """Begin the span of a call that another process made within its own span; `NO_SPAN` where
    that process did not say which.
    """
    if _tracer is None or not traceparent:
        return NO_SPAN
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    from_caller = TraceContextTextMapPropagator().extract({_HEADER: traceparent})
    if not from_caller:
        return NO_SPAN
    return _begun(name, from_caller, None, attributes, is_call=True)


def current() -> Span:
    """The span of the call that this thread is at."""
    return _current.get()


@contextmanager
def within(span: Span) -> Iterator[None]:
    """Make a span the thread's `current` one for the block."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def sending(service: str, warn: Warn) -> Iterator[None]:
    """Send the process's spans for the block, if the environment asks for it.

    `service` is the service's name unless `OTEL_SERVICE_NAME` says another one. `warn` is told why
    nothing can be sent; a collector that does not answer is told of once a minute at most.
    """
    global _tracer  # noqa: PLW0603 - as OpenTelemetry's own provider, it is the process's
    provider = _provider(service, warn)
    if provider is None:
        yield
        return
    _tracer = provider.get_tracer("tidemark")
    try:
        yield
    finally:
        _tracer = None
        # The exporter tries again for as long as it may, also while it shuts down: a collector
        # that is away must not hold up the end of a daemon.
        provider.force_flush(_FLUSH_MS)
        provider.shutdown()


def _provider(service: str, warn: Warn) -> Any:
    """OpenTelemetry's tracer provider; None where nothing is to be sent, or nothing can be."""
    if not any(map(os.environ.get, ENDPOINTS)) or _is_disabled():
        return None
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name))), "grpc")
    if protocol not in _EXPORTERS:
        warn(
            f"no traces are sent: OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, and grpc (port 4317 "
            "of most collectors) and http/protobuf (4318) are spoken here"
        )
        return None
    module, extra = _EXPORTERS[protocol]
    try:
        exporters = importlib.import_module(module)
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as err:
        warn(
            "no traces are sent: OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not "
            f"installed ({err}); install it with pip install 'tidemark-cdc[{extra}]'"
        )
        return None
    _tell_warnings(warn)
    try:
        exporter = exporters.OTLPSpanExporter()
        provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except (OSError, ValueError) as err:
        warn(f"no traces are sent: an OTEL_… variable has a value that cannot be used: {err}")
        return None
    return provider


def _is_disabled() -> bool:
    """Whether the environment has an endpoint, but wants no traces."""
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    return os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none"


def _resource(service: str) -> Any:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    facts = {"service.name": service, "tidemark.daemon": service}
    with suppress(importlib.metadata.PackageNotFoundError):  # run from a zip file, as by Spark
        facts["service.version"] = importlib.metadata.version("pyspark-tidemark")
    # Given attributes would win over those of the environment, which are the operator's.
    for name in OTELResourceDetector().detect().attributes:
        facts.pop(name, None)
    return Resource.create(facts)


class _Warnings(logging.Handler):
    """Passes on what the exporter says, once a minute at most."""

    def __init__(self, warn: Warn) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn
        self._next_s = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a record, unless one was a short time ago."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _WARN_EVERY_S
            self._warn(f"traces: {record.getMessage()}")


def _tell_warnings(warn: Warn) -> None:
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [_Warnings(warn)]
    logger.propagate = False


def _begun(
    name: str,
    context: Any,
    start_ns: int | None,
    attributes: dict[str, Any],
    *,
    is_call: bool = False,
) -> Span:
    tracer = _tracer
    if tracer is None:  # it was stopped meanwhile
        return NO_SPAN
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    span = tracer.start_span(
        f"tidemark.{name}",
        # An empty context, where there is no parent: the thread's own must not be taken.
        context=Context() if context is None else context,
        kind=SpanKind.SERVER if is_call else SpanKind.INTERNAL,
        attributes=_named(attributes),
        start_time=start_ns,
    )
    if not span.is_recording():  # OTEL_TRACES_SAMPLER, or the caller's sampler, left it out
        return NO_SPAN
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, _context_of(span))
    return Span(span, carrier[_HEADER])


def _context_of(span: Any) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span, Context())


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"tidemark.{name}": value for name, value in attributes.items()}
