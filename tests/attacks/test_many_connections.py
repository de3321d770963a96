"""Ten thousand idle connections to each port, from one address and from many: a client that was
there, and a new one, are answered. gRPC's and Flight's own listeners are looked after by
`server.rpc.connection_guard`.
"""

import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from server.rpc.config import MOST_CONNECTIONS, Engine
from server.rpc.http2 import frames
from tests.attacks.peer import remaining
from tests.attacks.target import Target, capture, coordinator, judged, pump, store

MANY = 10_000
FILES = 20_000
"""What the daemon may open: a port takes 8,192 connections then;
3,333 where they are passed on to gRPC's engine.
"""
WITHIN_S = 1.0
WITHIN_GRPC_S = 3.0
"""Where gRPC's C++ accepts: it takes connections in the kernel's order,
so a new client stands behind the others.
"""
OURS = {"coordinator-native", "coordinator-grpcio", "pump-native"}
"""Ports whose accepting is ours, and lets addresses take turns."""

PORTS: dict[str, Callable[[Path], AbstractContextManager[Target]]] = {
    "coordinator-native": partial(coordinator, engine=Engine.NATIVE),
    "coordinator-grpcio": partial(coordinator, engine=Engine.GRPCIO),
    "pump-native": partial(pump, engine=Engine.NATIVE),
    "pump-grpcio": partial(pump, engine=Engine.GRPCIO),
    "store": partial(store, engine=Engine.GRPCIO),
    "capture": partial(capture, engine=Engine.GRPCIO, name="capture"),
    "flight": partial(capture, engine=Engine.GRPCIO, name="flight"),
}
SOURCES = {"one": ["127.0.0.2"], "many": [f"127.0.1.{number}" for number in range(1, 21)]}


@pytest.fixture(autouse=True)
def _files() -> Iterator[None]:
    """The sockets of this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < FILES:
        pytest.skip(f"this user may open {before[1]} files, not {FILES}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module", params=PORTS)
def port(request: pytest.FixtureRequest) -> str:
    """Whose."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def target(port: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with PORTS[port](tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.mark.parametrize("sources", SOURCES)
def test_ten_thousand_idle_connections_leave_room_for_others(
    target: Target, port: str, sources: str
) -> None:
    with judged(target) as verdict, idle(target, SOURCES[sources]) as opened:
        time.sleep(2.0)
        left = remaining(opened, seconds=25, most=MOST_CONNECTIONS)
    print(f"{port} {sources}: {verdict}, {left} left")
    assert left <= MOST_CONNECTIONS
    assert verdict.worst_s <= (WITHIN_S if port in OURS else WITHIN_GRPC_S)


@contextmanager
def idle(target: Target, sources: Sequence[str]) -> Iterator[Sequence[socket.socket]]:
    """As many connections as there may be, and more,
    that introduce themselves and say nothing more.
    """
    opened: list[socket.socket] = []
    try:
        for number in range(MANY):
            source = sources[number % len(sources)]
            with suppress(OSError):
                one = socket.create_connection(
                    target.host_and_port, timeout=30, source_address=(source, 0)
                )
                opened.append(one)
                one.sendall(frames.PREFACE + frames.settings({}))
        yield opened
    finally:
        for one in opened:
            one.close()
