"""Connections that wait to be set up: addresses in turn, and never too many."""

import socket
from collections.abc import Iterator

import pytest

from server.rpc.listener import Waiting


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
