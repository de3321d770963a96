"""The HTTP port of every daemon: `/metrics` for Prometheus, `/healthz` (alive), `/readyz` (serving)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from server.config import ConfigError
from storage.model.errors import UnavailableError


class HttpPortError(UnavailableError):
    """The HTTP address cannot be listened on."""

    code = "ErrPortInUse"


@contextmanager
def listen(addr: str, *, ready: Callable[[], bool], registry: CollectorRegistry = REGISTRY) -> Iterator[str]:
    """Serve for the block in a thread of its own; yields the bound `host:port`.

    Raises:
        HttpPortError: the address is taken or not ours.
        ConfigError: it is no address.
    """
    host, _, port = addr.rpartition(":")
    try:
        server = ThreadingHTTPServer((host, int(port)), _handler(ready, registry))
    except (ValueError, OverflowError) as err:
        raise ConfigError(f"--http-addr is host:port with a port from 0 to 65535, not {addr!r}") from err
    except OSError as err:
        raise HttpPortError(f"cannot listen on {addr} for HTTP: {err.strerror}; choose another --http-addr") from err
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(ready: Callable[[], bool], registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif self.path == "/healthz":
                self._answer(200, b"ok\n")
            elif self.path == "/readyz":
                self._answer(*((200, b"ready\n") if ready() else (503, b"starting or stopping\n")))
            else:
                self._answer(404, b"try /metrics, /healthz or /readyz\n")

        def _answer(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Scrapes are not news."""

    return Handler
