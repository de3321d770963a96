"""An OTLP collector for tests, which keeps what it gets: OpenTelemetry's own service over gRPC, or
its requests by HTTP.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

PATIENCE_S = 120


@dataclass(frozen=True)
class Received:
    """A span as it came over the wire."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, object]
    resource: dict[str, object]

    @property
    def service(self) -> object:
        return self.resource["service.name"]


@dataclass
class Collector(TraceServiceServicer):
    """Keeps all spans in the order in which they came."""

    spans: list[Received] = field(default_factory=list)
    endpoint: str = ""
    headers: list[dict[str, str]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext):
        return self.take(request, context.invocation_metadata())

    def take(self, request: pb.ExportTraceServiceRequest, headers: Iterable[tuple[str, object]]):
        received = [
            Received(
                span.name,
                span.trace_id,
                span.span_id,
                span.parent_span_id,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                span.status.code == 2,
                _values(span.attributes),
                _values(of_process.resource.attributes),
            )
            for of_process in request.resource_spans
            for scope in of_process.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self.spans += received
            self.headers.append({key: str(value) for key, value in headers})
            self._changed.notify_all()
        return pb.ExportTraceServiceResponse()

    def wait_for(self, seen: Callable[[list[Received]], object]):
        """Wait until `seen` returns something true for the spans so far; returns that."""
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while not (outcome := seen(self.spans)):
                left_s = deadline - time.monotonic()
                assert left_s > 0, [(span.name, span.service) for span in self.spans]
                self._changed.wait(left_s)
            return outcome


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector at `endpoint`, for the block."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(1).wait()


@contextmanager
def collecting_by_http() -> Iterator[Collector]:
    """The same by HTTP."""
    collector = Collector()

    class Traces(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces", self.path
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = pb.ExportTraceServiceRequest.FromString(body)
            answer = collector.take(request, self.headers.items())
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(answer.SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Traces) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _values(attributes) -> dict[str, object]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> object:
    return getattr(value, value.WhichOneof("value"))
