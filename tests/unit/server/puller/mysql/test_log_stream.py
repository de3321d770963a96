"""How the log's stream hands out what arrives: at once after a silence, else together."""

import socket
import struct
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

from server.puller.mysql.log import stream
from server.puller.mysql.log.packets import Packets
from server.puller.mysql.log.stream import LogStream
from storage.mysql.event import PACKET_BYTES_MAX

HEARTBEAT = 27
"""An event type that says nothing of rows."""


def packet(number: int, size: int = 0) -> bytes:
    """One event as the server sends it."""
    body = b"x" * size
    event = struct.pack("<IBIIIH", 0, HEARTBEAT, 1, 19 + len(body), number, 0) + body
    payload = b"\0" + event
    return struct.pack("<I", len(payload) | (number % 256) << 24) + payload


@contextmanager
def opened():
    """A stream, and the server's end of its connection."""
    ours, theirs = socket.socketpair()
    session = SimpleNamespace(raw_socket=lambda: ours, close=ours.close)
    log = LogStream(session, Packets(checksums=False, verify=False), 60.0)
    try:
        yield log, theirs
    finally:
        theirs.close()
        log.close()


def arrived(log: LogStream, size: int) -> None:
    """Wait until so many bytes are in the queue."""
    deadline = time.monotonic() + 60
    while log._bytes < size:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def taken(log: LogStream) -> int:
    return sum(len(events) for events in log.take(60))


def test_after_a_silence_nothing_waits(monkeypatch):
    monkeypatch.setattr(stream, "GATHER_S", 3600.0)
    with opened() as (log, server):
        log._taken_at = time.monotonic() - 7200
        server.sendall(packet(0))
        assert taken(log) == 1


def test_events_that_come_one_by_one_are_taken_together(monkeypatch):
    monkeypatch.setattr(stream, "GATHER_S", 0.3)
    with opened() as (log, server):
        server.sendall(packet(0))
        assert taken(log) == 1
        sent = [packet(number) for number in range(1, 4)]
        threads = [
            threading.Timer(0.01 * at, server.sendall, [data]) for at, data in enumerate(sent)
        ]
        for thread in threads:
            thread.start()
        found = taken(log)
        for thread in threads:
            thread.join()
        assert found + (taken(log) if found < 3 else 0) == 3
        assert found > 1


def test_much_is_taken_at_once(monkeypatch):
    monkeypatch.setattr(stream, "GATHER_S", 3600.0)
    with opened() as (log, server):
        log._taken_at = time.monotonic()
        data = packet(0, stream.GATHER_BYTES)
        sender = threading.Thread(target=server.sendall, args=[data])
        sender.start()
        assert taken(log) == 1
        sender.join()


def test_many_small_events_are_taken_once_they_are_worth_it(monkeypatch):
    monkeypatch.setattr(stream, "GATHER_S", 3600.0)
    with opened() as (log, server):
        log._taken_at = time.monotonic()
        size = stream.GATHER_BYTES // 64
        data = [packet(number, size) for number in range(64)]
        sender = threading.Thread(target=lambda: [server.sendall(each) for each in data])
        sender.start()
        # One wake-up that is left out would leave this waiting for an hour.
        found = taken(log)
        sender.join()
        assert 1 <= found <= 64


def test_an_error_does_not_wait(monkeypatch):
    monkeypatch.setattr(stream, "GATHER_S", 3600.0)
    with opened() as (log, server):
        log._taken_at = time.monotonic()
        server.sendall(packet(0))
        arrived(log, len(packet(0)))
        server.close()
        assert taken(log) == 1


def test_a_packet_that_fills_the_queue_is_taken_at_once() -> None:
    event_bytes = PACKET_BYTES_MAX + 1000
    head = b"\0" + struct.pack("<IBIIIH", 0, HEARTBEAT, 1, event_bytes, 0, 0)
    event = head.ljust(1 + event_bytes, b"x")
    parts = [event[:PACKET_BYTES_MAX], event[PACKET_BYTES_MAX:]]
    packets = [
        struct.pack("<I", len(part) | number << 24) + part for number, part in enumerate(parts)
    ]
    # The next event is behind it: what is received last belongs to both, and does not fit.
    data = b"".join([*packets, packet(2, 1 << 20)])
    with opened() as (log, server):
        server.sendall(data[:100])
        assert taken(log) == 0
        sender = threading.Thread(target=server.sendall, args=[data[100:]])
        sender.start()
        began = time.monotonic()
        count = 0
        while count < 2:
            count += taken(log)
        assert time.monotonic() - began < 50, "it waited until `take` gave up"
        sender.join()
