"""A coordinator whose --metadata names something that is no etcd: the log says what it is,
and etcd may still come.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.rpc.server import RpcServer
from tests.integration.coordinator.clusters import in_thread
from tests.integration.coordinator.processes import Coordinator, Etcd
from tests.ports import free_port, free_ports

WAIT_S = 60


def web_page(connection: socket.socket) -> None:
    connection.recv(1024)
    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    connection.close()


def silence(connection: socket.socket) -> None:
    with connection:
        while connection.recv(1024):
            pass


@contextmanager
def listening(port: int, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """A server that does `serve` with each connection, until it is closed with all of them."""
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", port)) as listener:

        def served(connection: socket.socket) -> None:
            try:
                serve(connection)
            except OSError:
                connection.close()

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connections.append(connection)
                threading.Thread(target=served, args=(connection,), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for connection in connections:
                connection.close()


def wait_logged(coordinator: Coordinator, text: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while text not in coordinator.log:
        assert coordinator.running, coordinator.log
        assert time.monotonic() < deadline, coordinator.log
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (web_page, "is an HTTP/1.1 server and no gRPC server"),
        (silence, "accepts connections and never answers"),
    ],
    ids=["a web server", "a server that never answers"],
)
def test_what_answers_instead_of_etcd_is_logged_and_etcd_is_still_waited_for(
    tmp_path: Path, serve: Callable[[socket.socket], None], said: str
) -> None:
    client, peer = free_ports(2)
    coordinator = Coordinator(
        f"127.0.0.1:{free_port()}", f"etcd://127.0.0.1:{client}", tmp_path / "coordinator.log"
    )
    etcd = Etcd("etcd0", (client, peer), {"etcd0": peer}, tmp_path)
    try:
        with listening(client, serve):
            coordinator.launch()
            wait_logged(coordinator, f"127.0.0.1:{client} {said}")
        etcd.launch()
        wait_logged(coordinator, '"leading"')
    finally:
        coordinator.kill()
        etcd.kill()


async def test_a_grpc_server_that_is_no_etcd_is_named(tmp_path: Path) -> None:
    async with RpcServer().listen("127.0.0.1:0") as bound:
        coordinator = Coordinator(
            f"127.0.0.1:{free_port()}", f"etcd://{bound}", tmp_path / "coordinator.log"
        )
        coordinator.launch()
        try:
            await in_thread(
                wait_logged, coordinator, "unknown method Range for service etcdserverpb.KV"
            )
            assert bound in coordinator.log
            assert coordinator.running
        finally:
            coordinator.kill()
