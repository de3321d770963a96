"""Sockets that get stuck: peers that break the protocol, say nothing,
or take nothing are let go in time.
"""

import asyncio
from typing import Any

from server.rpc.config import Limits
from server.rpc.http2 import frames
from server.rpc.http2.link import ServerProtocol
from server.rpc.http2.server import NativeServer
from tests.unit.server.rpc.http2.wire import BOUNDS, EchoHost


class Stuck(asyncio.Transport):
    """A socket whose peer takes nothing: closing it never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = self.aborted = self.paused = False

    def write(self, data: Any) -> None:
        assert not self.closing
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def connected(host: EchoHost | None = None) -> tuple[ServerProtocol, Stuck]:
    link, transport = ServerProtocol(host or EchoHost(), BOUNDS, set()), Stuck()
    link.connection_made(transport)
    return link, transport


async def test_a_peer_that_breaks_the_protocol_and_takes_nothing_is_cut_off() -> None:
    link, transport = connected()
    link.data_received(b"GET / HTTP/1.1\r\n\r\n")
    assert transport.closing
    link.data_received(b"more")
    link.flush()
    link.tick(link._closing_s + 9)
    assert not transport.aborted
    link.tick(link._closing_s + 11)
    assert transport.aborted


async def test_a_peer_that_does_not_introduce_itself_is_cut_off() -> None:
    link, transport = connected()
    link.tick(link._began_s + 9)
    assert not transport.aborted
    link.tick(link._began_s + 11)
    assert transport.aborted


async def test_a_silent_peer_is_pinged_and_then_cut_off() -> None:
    link, transport = connected()
    link.data_received(frames.PREFACE + frames.settings({}))
    transport.written = b""
    link.tick(link._heard_s + 29)
    assert not transport.written
    link.tick(link._heard_s + 31)
    await asyncio.sleep(0)
    assert transport.written == frames.frame(frames.PING, 0, 0, bytes(8))
    link.data_received(frames.frame(frames.PING, frames.ACK, 0, bytes(8)))
    link.tick(link._heard_s + 31)
    link.tick(link._heard_s + 42)
    assert transport.aborted


async def test_a_connection_without_calls_is_closed_in_time() -> None:
    link, transport = connected()
    link.data_received(frames.PREFACE + frames.settings({}))
    link.tick(link._began_s + 1801)
    assert transport.closing
    assert transport.written.endswith(frames.goaway(frames.MAX_WINDOW, frames.ErrorCode.NO_ERROR))


async def test_what_a_peer_does_not_take_stops_the_reading() -> None:
    link, transport = connected()
    link.pause_writing()
    assert transport.paused
    assert link.connection.congested
    link.resume_writing()
    assert not transport.paused
    assert not link.connection.congested


class Unread(asyncio.Transport):
    """A socket whose peer reads nothing, and that tells its end in a later turn of the loop."""

    def __init__(self, link: ServerProtocol) -> None:
        super().__init__()
        self._link = link
        self._waiting_bytes = 0

    def write(self, data: Any) -> None:
        self._waiting_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        return self._waiting_bytes

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self._waiting_bytes = 0
        # two turns, as over TLS
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._link.connection_lost, None)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Megabyte(Limits):
    buffered_bytes = 1_000_000


async def test_bytes_in_sockets_close_only_the_connections_that_have_the_most() -> None:
    server = NativeServer(Megabyte())
    links: list[ServerProtocol] = []
    for number in range(15):
        link = ServerProtocol(server, BOUNDS, server._links)
        link.connection_made(Unread(link))
        link.connection.send(bytes(number * 10_000))
        links.append(link)
        link.flush()
    innocent = ServerProtocol(server, BOUNDS, server._links)
    for turn in range(6):
        # the answers of others go on meanwhile
        links[2].connection.send(bytes(10 * turn))
        await asyncio.sleep(0)
    assert server._links == {innocent, *links[:-3]}
    assert server._buffered == sum(link.buffered_bytes for link in server._links) <= 750_000


async def test_a_connection_that_keeps_nothing_waiting_is_never_closed_for_others() -> None:
    server = NativeServer(Megabyte())
    link = ServerProtocol(server, BOUNDS, server._links)
    link.connection_made(Stuck())
    server.count_buffered_bytes(2_000_000)
    await asyncio.sleep(0)
    assert server._links == {link}
    assert not link.connection.failed
