"""Connections that wait to be set up: addresses in turn, and never too many; and which ports other
machines can reach.
"""

import socket
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from server.rpc.listener import Waiting, warn_if_open


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    ones = [socket.socket() for _ in range(6)]
    yield ones
    for one in ones:
        one.close()


def test_addresses_take_turns(sockets: list[socket.socket]) -> None:
    waiting = Waiting(most=10)
    for one, address in zip(sockets, "aaaabc", strict=True):
        assert waiting.add(address, one) is None
    order = [waiting.next() for _ in range(len(waiting))]
    assert [address for address, _ in order] == list("abcaaa")
    assert [one for address, one in order if address == "a"] == sockets[:4]


def test_the_longest_queue_loses_where_too_many_wait(sockets: list[socket.socket]) -> None:
    waiting = Waiting(most=4)
    dropped = [waiting.add(address, one) for one, address in zip(sockets, "aaabab", strict=True)]
    assert dropped == [None, None, None, None, sockets[4], sockets[2]]
    assert [waiting.next()[0] for _ in range(len(waiting))] == list("abab")


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "", "192.0.2.7", "[2001:db8::7]", "a..b"])
def test_a_port_that_other_machines_reach_without_tls_is_warned_of(host: str) -> None:
    with capture_logs() as logs:
        warn_if_open(f"{host}:8300", has_tls=False)
        warn_if_open(f"{host}:8300", has_tls=True)
    assert [line["address"] for line in logs] == [f"{host}:8300"]


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:8300", "[::1]:8300", "unix:/run/s"])
def test_a_port_of_this_machine_is_not_warned_of(address: str) -> None:
    with capture_logs() as logs:
        warn_if_open(address, has_tls=False)
    assert logs == []
