"""Binlog events in a byte buffer: where each one lies, and what its header says,
as arrays over all of them.

    event = timestamp u32, type u8, server_id u32, size u32, next_position u32, flags u16,
            body, crc32 u32?

All numbers are little-endian; `size` counts the whole event. Source: MySQL's libbinlogevents,
MariaDB's log_event.h.
"""

import enum
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from storage.model.errors import CorruptError, InvalidError
from storage.mysql.buffer import Buffer, Bytes, Offsets, reading

HEADER_BYTES: Final = 19
CHECKSUM_BYTES: Final = 4
PACKET_PREFIX_BYTES: Final = 5
PACKET_BYTES_MAX: Final = 0xFFFFFF
_FLAGS_AT = 17
_IN_USE = 1
_SIZE = struct.Struct("<9xI")
_PACKET = struct.Struct("<IB")
_U32 = struct.Struct("<I")


class EventUnsupportedError(InvalidError):
    """The log holds an event whose rows cannot be known from it."""

    code = "ErrBinlogEventUnsupported"


class EventChecksumError(CorruptError):
    """An event's CRC32 is not that of its bytes."""

    code = "ErrBinlogChecksum"


class EventType(enum.IntEnum):
    """The types of events that are looked at, or must be refused."""

    QUERY = 2
    STOP = 3
    ROTATE = 4
    INTVAR = 5
    SLAVE = 7
    APPEND_BLOCK = 9
    DELETE_FILE = 11
    RAND = 13
    USER_VAR = 14
    FORMAT_DESCRIPTION = 15
    XID = 16
    BEGIN_LOAD_QUERY = 17
    EXECUTE_LOAD_QUERY = 18
    TABLE_MAP = 19
    WRITE_ROWS_V1 = 23
    UPDATE_ROWS_V1 = 24
    DELETE_ROWS_V1 = 25
    INCIDENT = 26
    HEARTBEAT = 27
    IGNORABLE = 28
    ROWS_QUERY = 29
    WRITE_ROWS = 30
    UPDATE_ROWS = 31
    DELETE_ROWS = 32
    GTID = 33
    ANONYMOUS_GTID = 34
    PREVIOUS_GTIDS = 35
    TRANSACTION_CONTEXT = 36
    VIEW_CHANGE = 37
    XA_PREPARE = 38
    PARTIAL_UPDATE_ROWS = 39
    TRANSACTION_PAYLOAD = 40
    HEARTBEAT_V2 = 41
    GTID_TAGGED = 42
    MARIADB_ANNOTATE_ROWS = 160
    MARIADB_BINLOG_CHECKPOINT = 161
    MARIADB_GTID = 162
    MARIADB_GTID_LIST = 163
    MARIADB_START_ENCRYPTION = 164
    MARIADB_QUERY_COMPRESSED = 165
    MARIADB_WRITE_ROWS_COMPRESSED_V1 = 166
    MARIADB_UPDATE_ROWS_COMPRESSED_V1 = 167
    MARIADB_DELETE_ROWS_COMPRESSED_V1 = 168
    MARIADB_WRITE_ROWS_COMPRESSED = 169
    MARIADB_UPDATE_ROWS_COMPRESSED = 170
    MARIADB_DELETE_ROWS_COMPRESSED = 171


WRITE_ROWS: Final = frozenset({EventType.WRITE_ROWS_V1, EventType.WRITE_ROWS})
UPDATE_ROWS: Final = frozenset({EventType.UPDATE_ROWS_V1, EventType.UPDATE_ROWS})
DELETE_ROWS: Final = frozenset({EventType.DELETE_ROWS_V1, EventType.DELETE_ROWS})
ROWS: Final = WRITE_ROWS | UPDATE_ROWS | DELETE_ROWS


def _table(types: Iterable[EventType]) -> npt.NDArray[np.bool_]:
    is_member = np.zeros(256, np.bool_)
    is_member[list(types)] = True
    return is_member


_IS_ROWS = _table(ROWS)
_IS_KNOWN = _table(set(EventType) - {EventType.SLAVE})
_IGNORABLE = 0x80


@dataclass(frozen=True, slots=True)
class Events:
    """Events in log order; `begin` is where each header begins in `data`,
    `end` where its body ends.
    """

    data: Bytes
    begin: Offsets
    end: Offsets

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, part: slice) -> "Events":
        return Events(self.data, self.begin[part], self.end[part])

    @property
    def types(self) -> npt.NDArray[np.uint8]:
        """Each event's type, a number of `EventType` or one that is unknown."""
        return self.data.u8(self.begin + 4)

    @property
    def timestamps(self) -> npt.NDArray[np.uint32]:
        """The time in each event's header, in seconds since the Unix epoch;
        0 for events made for one reader only.
        """
        seconds: npt.NDArray[np.uint32] = self.data.number(self.begin, 4)
        return seconds

    @property
    def next_positions(self) -> npt.NDArray[np.uint32]:
        """The offset in the log file after each event; 0 where it has none."""
        positions: npt.NDArray[np.uint32] = self.data.number(self.begin + 13, 4)
        return positions

    @property
    def flags(self) -> npt.NDArray[np.uint16]:
        """The flags of each header."""
        flags: npt.NDArray[np.uint16] = self.data.number(self.begin + 17, 2)
        return flags

    def check_known(self) -> None:
        """Check that what each event does is known, or that its writer says it may be left out.

        Raises:
            EventUnsupportedError: one is not known; the old events of LOAD DATA, before MySQL
                5.0.3, are among them.
        """
        types = self.types
        unknown = np.flatnonzero(~_IS_KNOWN[types])
        for number in unknown.tolist():
            if not int.from_bytes(self.header(number)[17:19], "little") & _IGNORABLE:
                raise EventUnsupportedError(
                    f"the log has an event of type {types[number]}, which is not known, so what "
                    "it does to rows is not "
                    "known either: create the changefeed anew behind it, with a dump"
                )

    @property
    def rows(self) -> Offsets:
        """The numbers of the row events."""
        return np.flatnonzero(_IS_ROWS[self.types])

    def of(self, kind: EventType) -> Offsets:
        """The numbers of the events of one type."""
        return np.flatnonzero(self.types == kind)

    def body(self, number: int) -> bytes:
        """Return the bytes behind the header of one event."""
        return self.data.u8s[self.begin[number] + HEADER_BYTES : self.end[number]].tobytes()

    def header(self, number: int) -> bytes:
        """The header of one event."""
        return self.data.u8s[self.begin[number] : self.begin[number] + HEADER_BYTES].tobytes()


def split_events(
    data: Buffer, *, checksums: bool, begin: int = 0, end: int | None = None
) -> tuple[Events, int]:
    """Find the whole events that follow one another in `data[begin:end]`, as in a log file.

    Returns them and where the rest begins; `data` needs `PAD_BYTES` more readable bytes behind
    `end`.

    Raises:
        CorruptError: an event is shorter than its header.
    """
    # The one loop over events in plain Python: names are local, and only the size is read.
    stop = len(data) if end is None else end
    offsets: list[int] = []
    unpack, append, at, last = _SIZE.unpack_from, offsets.append, begin, stop - HEADER_BYTES
    shortest = HEADER_BYTES + CHECKSUM_BYTES * checksums
    while at <= last:
        (size,) = unpack(data, at)
        if size < shortest:
            raise CorruptError(f"an event of {size} bytes at offset {at}")
        if at + size > stop:
            break
        append(at)
        at += size
    return _events(data, offsets, checksums=checksums), at


def split_packets(
    data: Buffer, *, checksums: bool, begin: int = 0, end: int | None = None
) -> tuple[Events, int]:
    """Find the whole events in a stream of packets (`size u24, number u8, 0 u8, event`),
    as a server sends them.

    Stops before a packet that has not arrived wholly, one that is not an event (its status byte is
    not 0: an error or the end), and one of `PACKET_BYTES_MAX`, which goes on in the next packet:
    joined without their headers, such packets are for `split_events`. Returns the events and where
    it stopped; padding as in `split_events`.

    Raises:
        CorruptError: a packet's size is not that of its event.
    """
    stop = len(data) if end is None else end
    offsets: list[int] = []
    unpack, append, at = _PACKET.unpack_from, offsets.append, begin
    last = stop - PACKET_PREFIX_BYTES
    while at <= last:
        head, status = unpack(data, at)
        size = head & PACKET_BYTES_MAX
        if status or size == PACKET_BYTES_MAX or at + 4 + size > stop:
            break
        append(at + PACKET_PREFIX_BYTES)
        at += 4 + size
    # The last packet may be too short for a header.
    with reading("a packet with an event"):
        events = _events(data, offsets, checksums=checksums)
    ends = np.append(events.begin[1:] - PACKET_PREFIX_BYTES, at) - CHECKSUM_BYTES * checksums
    # Events behind a change of the checksums are split in vain, and may have no room for one.
    shortest = HEADER_BYTES - CHECKSUM_BYTES * checksums
    if len(events) and not (
        np.array_equal(events.end, ends) and int((events.end - events.begin).min()) >= shortest
    ):
        raise CorruptError("a packet's size is not that of the event in it")
    return events, at


def check_events(events: Events) -> None:
    """Compare the CRC32 that follows each event with its bytes;
    only for events split with `checksums`.

    Raises:
        EventChecksumError: one differs.
    """
    view, crc32, unpack = events.data.u8s.data, zlib.crc32, _U32.unpack_from
    for begin, end in zip(events.begin.tolist(), events.end.tolist(), strict=True):
        if crc32(view[begin:end]) != unpack(view, end)[0] and not _in_use(
            view[begin : end + CHECKSUM_BYTES]
        ):
            raise EventChecksumError(
                f"the event of type {view[begin + 4]} at offset {begin} is damaged: read it again"
            )


def _in_use(event: memoryview) -> bool:
    """Whether only the in-use flag of the FORMAT_DESCRIPTION was set after its CRC32
    was computed.
    """
    plain = bytearray(event)
    plain[_FLAGS_AT] &= ~_IN_USE
    right = zlib.crc32(plain[:-CHECKSUM_BYTES]) == _U32.unpack(plain[-CHECKSUM_BYTES:])[0]
    return right and plain[4] == EventType.FORMAT_DESCRIPTION


def join_events(parts: Sequence[bytes]) -> Events:
    """Whole events without checksums, one after another in a buffer of their own."""
    end = np.cumsum([len(part) for part in parts], dtype=np.int64)
    begin = end - np.array([len(part) for part in parts], np.int64)
    return Events(Bytes.padded(b"".join(parts)), begin, end)


def _events(data: Buffer, offsets: list[int], *, checksums: bool) -> Events:
    content, begin = Bytes(data), np.array(offsets, np.int64)
    end = begin + content.number(begin + 9, 4).astype(np.int64) - CHECKSUM_BYTES * checksums
    return Events(content, begin, end)
