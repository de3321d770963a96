"""Packets of a log connection: the commands that ask a server for its log, and the events that
arrive. Pure.

Events arrive in parts. A packet of 16 MB - 1 goes on in the next one, which has no status byte:
such an event is joined and given by itself.

Source: MySQL's client/server protocol (COM_REGISTER_SLAVE, COM_BINLOG_DUMP, COM_BINLOG_DUMP_GTID).
"""

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from server.puller.mysql.session.errors import LogDamagedError, of_packet
from storage.mysql.buffer import PAD_BYTES
from storage.mysql.event import (
    PACKET_BYTES_MAX,
    Events,
    EventType,
    check_events,
    split_events,
    split_packets,
)

_HEAD = struct.Struct("<I")
_OK, _END, _ERROR = 0x00, 0xFE, 0xFF
_END_BYTES_MAX = 9
_CRC_AND_ALGORITHM_BYTES = 5
EVENT_BYTES_MAX: Final = (1 << 30) + (1 << 20)
"""MySQL's largest max_allowed_packet, and room for the event's own fields."""


@dataclass(slots=True)
class Packets:
    """Splits the bytes that have arrived into events; `checksums` says whether a CRC32 follows each
    event: as was agreed with the server, and behind each FORMAT_DESCRIPTION as that says of its
    file, whatever was agreed.
    """

    checksums: bool
    verify: bool = False
    """Compare each event with its checksum: half of the CPU of reading a log of small
    transactions.
    """
    ended: bool = False
    """The server has sent all it has, as it was asked to."""
    _rest: bytes = b""
    _waiting: list[bytes] | None = None
    """Parts of an event of 16 MB and more."""

    @property
    def is_between_events(self) -> bool:
        """Whether nothing of an event has arrived that is not whole yet."""
        return not self._rest and self._waiting is None

    @property
    def wanted(self) -> int:
        """How many bytes must arrive at least before `take` can give anything."""
        if len(self._rest) < _HEAD.size:
            return _HEAD.size - len(self._rest)
        return _HEAD.size + _size(self._rest, 0) - len(self._rest)

    def take(self, arrived: bytes) -> list[Events]:
        """The events that are whole by now, in order, in one or more buffers.

        Raises:
            CorruptError: the bytes are no packets of events, or not those that the server wrote.
            TidemarkError: the server sent an error; what it means.
        """
        data = b"".join((self._rest, arrived, bytes(PAD_BYTES)))
        end, at = len(data) - PAD_BYTES, 0
        batches: list[Events] = []
        while True:
            if self._waiting is None:
                events, at = self._split(data, at, end)
                batches += events
            if end - at < _HEAD.size or at + _HEAD.size + _size(data, at) > end:
                self._rest = data[at:end]
                return batches
            body = data[at + _HEAD.size : at + _HEAD.size + _size(data, at)]
            at += _HEAD.size + len(body)
            batches += self._unusual(body)

    def _split(self, data: bytes, at: int, end: int) -> tuple[list[Events], int]:
        """The whole events from a place on, and where they end."""
        batches: list[Events] = []
        while True:
            events, stop = split_packets(data, checksums=self.checksums, begin=at, end=end)
            change = self._change_of_checksums(events)
            part = events if change is None else events[: change + 1]
            if len(part):
                batches.append(self._checked(part))
            if change is None:
                return batches, stop
            self.checksums = not self.checksums
            at = int(events.begin[change]) + _event_bytes(data, int(events.begin[change]))

    def _change_of_checksums(self, events: Events) -> int | None:
        """The first event behind which CRC32s follow where none did, or no more do:
        binlog_checksum was set, and another file begins.
        """
        for number in map(int, events.of(EventType.FORMAT_DESCRIPTION)):
            begin = int(events.begin[number])
            # it ends with a CRC32 in any case
            data = events.data.u8s
            algorithm = data[begin + _event_bytes(data, begin) - _CRC_AND_ALGORITHM_BYTES]
            if bool(algorithm) != self.checksums:
                return number
        return None

    def _unusual(self, body: bytes) -> list[Events]:
        """A packet that is no whole event."""
        goes_on = len(body) == PACKET_BYTES_MAX
        if self._waiting is None:
            if not self._begins(body, goes_on=goes_on):
                return []
            self._waiting, body = [], body[1:]
        self._waiting.append(body)
        if sum(map(len, self._waiting)) > EVENT_BYTES_MAX:
            raise LogDamagedError(f"an event of the log has more than {EVENT_BYTES_MAX} bytes")
        return [] if goes_on else [self._checked(self._joined())]

    def _checked(self, events: Events) -> Events:
        if self.checksums and self.verify:
            check_events(events)
        return events

    def _begins(self, body: bytes, *, goes_on: bool) -> bool:
        """Whether a long event begins, or the log ends; anything else is an error."""
        status = body[0] if body else _ERROR
        if status == _ERROR:
            raise of_packet(body, "reading the log")
        if status == _END and len(body) < _END_BYTES_MAX:
            self.ended = True
            return False
        if status != _OK or not goes_on:
            raise LogDamagedError(f"a packet of the log begins with {status:#x}, which is no event")
        return True

    def _joined(self) -> Events:
        assert self._waiting is not None
        data = b"".join((*self._waiting, bytes(PAD_BYTES)))
        self._waiting = None
        end = len(data) - PAD_BYTES
        events, rest = split_events(data, checksums=self.checksums, end=end)
        if len(events) != 1 or rest != end:
            raise LogDamagedError("an event of 16 MB and more does not have the size that it says")
        return events


def _event_bytes(data: bytes | npt.NDArray[np.uint8], begin: int) -> int:
    """How long an event is, by its header."""
    return int.from_bytes(bytes(data[begin + 9 : begin + 13]), "little")


def _size(data: bytes, at: int) -> int:
    size: int = _HEAD.unpack_from(data, at)[0] & PACKET_BYTES_MAX
    return size


COM_BINLOG_DUMP: Final = 0x12
COM_REGISTER_SLAVE: Final = 0x15
COM_BINLOG_DUMP_GTID: Final = 0x1E
NON_BLOCK: Final = 0x01
"""The server ends its answer at the end of its log."""
_THROUGH_GTID = 0x04
_FIRST_POSITION = 4


def packet(payload: bytes, number: int = 0) -> bytes:
    """A packet with its header; a payload is below 16 MB."""
    assert len(payload) < 0xFFFFFF
    return struct.pack("<I", len(payload) | number << 24) + payload


def register(server_id: int, name: str = "") -> bytes:
    """Say who is going to read, so that `SHOW SLAVE HOSTS` lists us;
    the answer is OK or an error.
    """
    host = name.encode()[:60]
    head = struct.pack("<BIB", COM_REGISTER_SLAVE, server_id, len(host)) + host
    return packet(head + struct.pack("<BBHII", 0, 0, 0, 0, 0))


def dump(server_id: int, file: str = "", position: int = _FIRST_POSITION, flags: int = 0) -> bytes:
    """Ask for events from a place in a file; MariaDB takes the place from `@slave_connect_state`
    where that is set.
    """
    return packet(struct.pack("<BIHI", COM_BINLOG_DUMP, position, flags, server_id) + file.encode())


def dump_gtid(server_id: int, gtids: bytes, flags: int = 0) -> bytes:
    """Ask a MySQL server for all transactions that are not in a set, given in its binary form."""
    head = struct.pack("<BHII", COM_BINLOG_DUMP_GTID, flags | _THROUGH_GTID, server_id, 0)
    return packet(head + struct.pack("<QI", _FIRST_POSITION, len(gtids)) + gtids)
