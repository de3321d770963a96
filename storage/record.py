"""One record of a log file: header, checksum, payload; and a scan that goes on after damaged bytes.

Pure. The value log (`storage.value_log`) writes its segments with it.

Layout, little-endian (docs/format/value-log.md): magic u32 | version u8 | kind u8 | zero u16 |
length u32 | crc u32 | payload. `length` is the payload's. The crc32c covers the record's own offset
in its file, the header and the payload. So the bytes of a record inside another record's payload,
or left over from an older file, are no good record where they are: the scan, which looks for the
next magic after damage, does not take them for one.
"""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import google_crc32c

from storage.model.errors import CorruptError, InvalidError

VERSION = 1
HEADER_BYTES = 16
MAX_PAYLOAD_BYTES = 1 << 30
DATA, FOOTER = 0, 1

_MAGIC = 0x70B1D4A7
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
_HEADER = struct.Struct("<IBBHII")
_CHECKED = struct.Struct("<QBBHI")
_LENGTH, _LENGTH_OFFSET = struct.Struct("<I"), 8
_KIND_OFFSET = 5
_WINDOW_BYTES = 1 << 20

Reader = Callable[[int, int], bytes]
"""Reads up to `size` bytes at `offset`: `read(offset, size)`."""


class RecordCorruptError(CorruptError):
    """The bytes at a pointer are not the record that was written there."""

    code = "ErrRecordCorrupt"


class RecordTooLargeError(InvalidError):
    """A payload is longer than a record may be."""

    code = "ErrRecordTooLarge"


class Record(NamedTuple):
    """A good record at `offset`, `length` bytes long with its header."""

    offset: int
    length: int
    kind: int
    payload: bytes


class Gap(NamedTuple):
    """`length` bytes at `offset` that hold no good record."""

    offset: int
    length: int


def encode(payload: bytes, offset: int, kind: int = DATA) -> bytes:
    """The header of a record whose first byte will stand at `offset`; the payload follows it.

    Raises:
        RecordTooLargeError: the payload is longer than MAX_PAYLOAD_BYTES.
    """
    length = len(payload)
    if length > MAX_PAYLOAD_BYTES:
        raise RecordTooLargeError(f"a record of {length} bytes; the most is {MAX_PAYLOAD_BYTES}")
    return _HEADER.pack(_MAGIC, VERSION, kind, 0, length, _checksum(payload, offset, kind))


def decode(data: bytes, offset: int) -> Record:
    """The record whose bytes, read at `offset`, are exactly `data`.

    Raises:
        RecordCorruptError: it is not a good record of that length.
    """
    payload = payload_at(data, 0, len(data), offset)
    return Record(offset, len(data), data[_KIND_OFFSET], payload)


def payload_at(data: bytes, at: int, length: int, offset: int) -> bytes:
    """The payload of the record `data[at : at + length]`, which stands at `offset` in its file.

    Raises:
        RecordCorruptError: it is not a good record of that length.
    """
    if length >= HEADER_BYTES and at + length <= len(data):
        magic, version, kind, zero, size, crc = _HEADER.unpack_from(data, at)
        payload = data[at + HEADER_BYTES : at + length]
        is_header = magic == _MAGIC and version == VERSION and zero == 0 and size == len(payload)
        if is_header and _checksum(payload, offset, kind) == crc:
            return payload
    raise RecordCorruptError(f"no good record of {length} bytes at offset {offset}")


def scan(read: Reader, start: int, end: int) -> Iterator[Record | Gap]:
    """The good records in `[start, end)` in order, and the gaps between them.

    A last gap that reaches `end` is a torn tail or damage: the scan cannot tell which.
    """
    window = _Window(read, end)
    good_until = offset = start
    while offset < end:
        record = _record_at(window, offset)
        if record is None:
            # Damage may have hit the length, too, so it is not stepped over: the next record is
            # found by its magic, and a false one is refused by its checksum.
            offset = window.find_magic(offset + 1)
            continue
        if offset > good_until:
            yield Gap(good_until, offset - good_until)
        yield record
        good_until = offset = offset + record.length
    if end > good_until:
        yield Gap(good_until, end - good_until)


def _record_at(window: "_Window", offset: int) -> Record | None:
    header = window.read(offset, HEADER_BYTES)
    if not header.startswith(_MAGIC_BYTES) or len(header) < HEADER_BYTES:
        return None
    length = _LENGTH.unpack_from(header, _LENGTH_OFFSET)[0]
    if length > min(MAX_PAYLOAD_BYTES, window.end - offset - HEADER_BYTES):
        return None
    return _good(header, window.read(offset + HEADER_BYTES, length), offset)


def _good(header: bytes, payload: bytes, offset: int) -> Record | None:
    """Return the record of these parts, if it was written at `offset`."""
    if len(header) < HEADER_BYTES:
        return None
    magic, version, kind, zero, length, crc = _HEADER.unpack(header)
    if magic != _MAGIC or version != VERSION or zero != 0 or length != len(payload):
        return None
    if _checksum(payload, offset, kind) != crc:
        return None
    return Record(offset, HEADER_BYTES + length, kind, payload)


def _checksum(payload: bytes, offset: int, kind: int) -> int:
    seed = google_crc32c.value(_CHECKED.pack(offset, VERSION, kind, 0, len(payload)))
    return int(google_crc32c.extend(seed, payload))


class _Window:
    """Reads a file front to back through one large buffer."""

    def __init__(self, read: Reader, end: int) -> None:
        self.end = end
        self._read = read
        self._start = 0
        self._data = b""

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes at `offset`, never beyond the end."""
        size = min(size, self.end - offset)
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            self._start, at = offset, 0
            self._data = self._read(offset, min(max(size, _WINDOW_BYTES), self.end - offset))
        return self._data[at : at + size]

    def find_magic(self, offset: int) -> int:
        """The next place at or after `offset` where a record may begin, else the end."""
        while self.end - offset >= HEADER_BYTES:
            data = self.read(offset, _WINDOW_BYTES)
            place = data.find(_MAGIC_BYTES)
            if place >= 0:
                return offset + place
            if len(data) < len(_MAGIC_BYTES):
                break
            # The magic may begin in this window and end in the next one.
            offset += len(data) - len(_MAGIC_BYTES) + 1
        return self.end
