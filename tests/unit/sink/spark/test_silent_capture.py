"""A capture that is gone without a word, as behind a network that is cut: readers go on at another
one.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from pyspark_tidemark import connection
from pyspark_tidemark.flight import Changefeed, SliceEndpoint
from pyspark_tidemark.options import parse

SCHEMA = pa.schema([("id", pa.int64())])


class Rows(fl.FlightServerBase):
    """One row, and a second one when it may be told."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.may_tell = threading.Event()

    @property
    def uri(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def do_get(self, context, ticket):
        def batches():
            yield pa.record_batch([[1]], schema=SCHEMA)
            self.may_tell.wait()
            yield pa.record_batch([[2]], schema=SCHEMA)

        return fl.GeneratorStream(SCHEMA, batches())


class Wire:
    """A way to a server that can be cut: what is sent then is lost, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_cut = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, too
        self._listener.close()

    def close(self) -> None:
        self.cut()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if not self._is_cut.is_set():
                    other.sendall(data)


@pytest.fixture
def server() -> Iterator[Rows]:
    with Rows() as rows:
        yield rows
        rows.may_tell.set()


@pytest.mark.timeout(60)
def test_a_stream_that_a_silent_capture_began_is_ended_by_another(server, monkeypatch):
    monkeypatch.setattr(connection, "PING_MS", 3000)
    monkeypatch.setattr(connection, "PING_TIMEOUT_MS", 1000)
    wire = Wire(server.port)
    options = {"endpoint": f"{wire.uri},{server.uri}", "changefeed": "any", "cuts": "true"}
    rows = Changefeed(parse(options)).read(SliceEndpoint("db.t", (), b"ticket", 2, 16))
    assert next(rows).to_pydict() == {"id": [1]}
    wire.cut()
    server.may_tell.set()
    assert [batch.to_pydict() for batch in rows] == [{"id": [2]}]
    wire.close()
