"""A server's log as it arrives: one thread reads the socket into a queue bounded in bytes,
the puller takes from it.

A reader registers with a server id of its own, leased in the metadata. The server counts as gone
when it is silent for three heartbeats. Nothing is acknowledged to it (no semi-sync): it never waits
for us. A stream that ended with an error is closed and another one opened at the last complete
transaction.
"""

import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from server.puller import metrics
from server.puller.mysql.log import packets
from server.puller.mysql.log.packets import Packets
from server.puller.mysql.session.connection import Session, answers
from server.puller.mysql.session.errors import (
    MySqlLoginError,
    MySqlPrivilegeError,
    MySqlUnavailableError,
    of_packet,
)
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.meta import Compare, Meta, Put
from storage.mysql.event import Events

QUEUE_BYTES: Final = 16 << 20
TAKE_BYTES: Final = 4 << 20
GATHER_S: Final = 0.05
"""The time between two takes of few bytes: each take costs as much as a thousand rows, in here, in
the sorter and in the sink. What comes after a silence is taken at once.
"""
GATHER_BYTES: Final = 256 << 10
"""So many bytes are taken at once, however short ago the last take was."""
RECEIVE_PAUSE_S: Final = 0.005
"""The time between two receives of few bytes: small transactions arrive one by one, and to wake up
for each costs more than to decode it.
"""
_RECEIVE_BYTES = 1 << 20
_LITTLE_BYTES = 16 << 10
_SILENT_HEARTBEATS = 3
_SILENT_S = 2.0
_MARIADB_CAPABILITY = 4
SERVER_IDS: Final = b"/tidemark/default/mysql/server-id/"
_SERVER_ID_TTL_S: Final = 30
_SERVER_ID_RANGE: Final = (1 << 31, (1 << 32) - 2)
"""The upper half of all ids. The ids of real servers are not in the metadata, and installations do
not use ids this large.
"""


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where in the log to begin: after a set of GTIDs,
    or at an offset of a file where the server has no GTIDs.
    """

    gtids: str = ""
    file: str = ""
    position: int = 4
    gtid_block: bytes = b""
    """The set in MySQL's binary form."""


class LogStream:
    """The events from a place on; `take` and `close` may be called by different threads."""

    def __init__(self, session: Session, packets: Packets, silent_s: float) -> None:
        self.session = session
        self._packets = packets
        self._socket = session.raw_socket()
        self._socket.settimeout(silent_s)
        self._silent_s = silent_s
        self._arrived: deque[bytes] = deque()
        self._bytes = 0
        self._awaited_bytes = 0
        """What the one who waits in `take` needs; it is not woken for less."""
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._closed = False
        self._taken_at = 0.0
        self._thread = threading.Thread(target=self._receive, name="mysql log", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """The server has sent all it had; only for streams that were opened with `follow=False`."""
        return self._packets.ended

    @property
    def is_between_events(self) -> bool:
        """Whether nothing has arrived that was not taken; for the thread that takes."""
        return not self._bytes and self._packets.is_between_events

    def take(self, timeout_s: float) -> list[Events]:
        """The events that have arrived by now, waiting for the first of them at most `timeout_s`;
        where they arrive one by one, those of `GATHER_S` together.

        Raises:
            MySqlUnavailableError: the connection broke, the server is silent, or `close` was
                called.
            CorruptError, TidemarkError: see `Packets.take`.
        """
        with self._changed:
            # No more than is in a queue that is full: the thread waits for room while what it has
            # received does not fit, which may be before a packet of 16 MB is whole.
            wanted_bytes = min(self._packets.wanted, QUEUE_BYTES - _RECEIVE_BYTES)
            self._wait_for_bytes(wanted_bytes, timeout_s)
            gathers_s = self._taken_at + GATHER_S - time.monotonic()
            if self._bytes and gathers_s > 0:
                self._wait_for_bytes(GATHER_BYTES, gathers_s)
            if not self._bytes and self._error is not None:
                raise self._error
            data = self._pop()
            self._taken_at = time.monotonic()
        metrics.BYTES.inc(len(data))
        return self._packets.take(data)

    def close(self) -> None:
        """End the connection; a thread that waits in `take` gets an error."""
        self._closed = True
        with suppress(OSError):  # it may be gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._bytes = 0
            self._arrived.clear()
            self._changed.notify_all()
        self._thread.join()
        self.session.close()

    def _wait_for_bytes(self, size: int, timeout_s: float) -> None:
        self._awaited_bytes = size
        self._changed.wait_for(lambda: self._bytes >= size or self._error is not None, timeout_s)

    def _pop(self) -> bytes:
        """Take events for one turn, which makes room for the thread."""
        parts: list[bytes] = []
        size = 0
        while self._arrived and (
            not parts or size + len(self._arrived[0]) <= TAKE_BYTES + self._packets.wanted
        ):
            parts.append(self._arrived.popleft())
            size += len(parts[-1])
        self._bytes -= size
        self._changed.notify_all()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _receive(self) -> None:
        room = bytearray(_RECEIVE_BYTES)
        view = memoryview(room)
        error: Exception
        try:
            while size := self._socket.recv_into(room):
                self._put(bytes(view[:size]))
                # Only while `take` gathers: whoever waits for the rest of a transaction after a
                # silence gets it at once.
                if size < _LITTLE_BYTES and time.monotonic() < self._taken_at + GATHER_S:
                    time.sleep(RECEIVE_PAUSE_S)
            error = MySqlUnavailableError("the server has closed the log connection")
        except TimeoutError:
            error = MySqlUnavailableError(
                f"the server was silent for {self._silent_s:.1f} s, in spite of heartbeats"
            )
        except OSError as err:
            error = MySqlUnavailableError(f"the log connection broke: {err}")
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _put(self, data: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._bytes + len(data) <= QUEUE_BYTES or self._closed)
            if not self._closed:
                self._arrived.append(data)
                self._bytes += len(data)
                if self._bytes >= self._awaited_bytes:
                    self._changed.notify_all()


def open_stream(
    session: Session, place: LogPlace, options: MySqlOptions, server_id: int, *, follow: bool = True
) -> LogStream:
    """Turn a session into a stream of its server's log;
    without `follow` it ends at the end of the log.

    The session is the stream's from here on, and closed when this raises. A `server_id` of 0 reads
    without being registered, as tools do; no other reader is evicted.

    Raises:
        LogPurgedError, LogBehindError, ServerIdTakenError, …: the server refuses; also later, by
        `take`.
    """
    try:
        return _ask_for(session, place, options, server_id, follow=follow)
    except BaseException:
        session.close()
        raise


def _ask_for(
    session: Session, place: LogPlace, options: MySqlOptions, server_id: int, *, follow: bool
) -> LogStream:
    checksums = _prepare(session, place, options)
    flags = 0 if follow else packets.NON_BLOCK
    if place.gtid_block:
        request = packets.dump_gtid(server_id, place.gtid_block, flags)
    elif place.gtids:
        request = packets.dump(server_id, flags=flags)
    else:
        request = packets.dump(server_id, place.file, place.position, flags)
    raw = session.raw_socket()
    with answers("asking for the log"):
        if server_id:
            raw.sendall(packets.register(server_id, "tidemark"))
            _check_answer(raw)
        raw.sendall(request)
    silent_s = max(_SILENT_S, _SILENT_HEARTBEATS * options.heartbeat_ms / 1000)
    return LogStream(
        session, Packets(checksums=checksums, verify=options.checksum == "verify"), silent_s
    )


def _prepare(session: Session, place: LogPlace, options: MySqlOptions) -> bool:
    """Agree on how events are sent; returns whether checksums follow them."""
    ((checksum,),) = session.execute("SELECT @@global.binlog_checksum")
    session.execute(
        "SET @master_binlog_checksum=%s, @source_binlog_checksum=%s", (checksum, checksum)
    )
    period_ns = options.heartbeat_ms * 1_000_000
    session.execute(
        "SET @master_heartbeat_period=%s, @source_heartbeat_period=%s", (period_ns, period_ns)
    )
    session.execute("SET SESSION net_write_timeout=3600")
    if session.flavor.is_mariadb:
        session.execute("SET @mariadb_slave_capability=%s", (_MARIADB_CAPABILITY,))
        if place.gtids or not place.file:
            session.execute(
                "SET @slave_connect_state=%s, @slave_gtid_strict_mode=1", (place.gtids,)
            )
            session.execute("SET @slave_gtid_ignore_duplicates=0")
    else:
        session.execute("SET @slave_uuid=UUID(), @replica_uuid=UUID()")
    return str(checksum).upper() != "NONE"


def _check_answer(raw: socket.socket) -> None:
    head = _exactly(raw, 4)
    (size,) = struct.unpack("<I", head)
    body = _exactly(raw, size & 0xFFFFFF)
    if body[:1] == b"\xff":
        refused = of_packet(body, "registering as a reader of the log")
        # we are in: it is about what the user may do
        if isinstance(refused, MySqlLoginError):
            raise MySqlPrivilegeError(
                f"{refused.message}: GRANT REPLICATION SLAVE ON *.* TO the user"
            )
        raise refused


def _exactly(raw: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = raw.recv(size - len(data))
        if not part:
            raise MySqlUnavailableError("the server closed the connection")
        data += part
    return data


def random_server_id() -> int:
    """A server id that probably no other reader of the log has."""
    return random.randint(*_SERVER_ID_RANGE)  # noqa: S311 - it keeps nothing secret


@asynccontextmanager
async def leased_server_id(meta: Meta, changefeed: str, fixed: int = 0) -> AsyncIterator[int]:
    """Lease a server id for the block; `fixed` is the one the operator chose, 0 for any.

    A server ends the connection of a reader when another one comes with the same id (error 4052),
    so two readers with one id would evict each other for ever.

    Raises:
        MetaUnavailableError: the metadata store does not answer.
    """
    if fixed:
        yield fixed
        return
    async with await meta.grant_lease(_SERVER_ID_TTL_S) as lease:
        while True:
            number = random_server_id()
            key = SERVER_IDS + b"%010d" % number
            if (
                await meta.txn([Compare.absent(key)], [Put(key, changefeed.encode(), lease.id)])
            ).succeeded:
                yield number
                return
