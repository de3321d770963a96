"""Events that hold others in compressed form, made into plain ones before anybody looks at them.

MariaDB (log_bin_compress=ON) compresses a statement, or the rows of an event, with zlib behind
`0x80 | size_bytes u8, size u8 * size_bytes big-endian`. MySQL (binlog_transaction_compression=ON)
packs a transaction into one TRANSACTION_PAYLOAD event, whose fields stand before the payload; its
events have no checksums, and no place in the log but that of the payload, which they get. It is
unpacked as a stream: a transaction may be larger than memory.

    field    = kind n, size n, value
    kind     = 0: the fields end, the payload follows; 1: its size;
               2: its compression (0 zstd, 255 none); 3: its size without
    n        = length-encoded number
"""

import zlib
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from storage.model.errors import CorruptError
from storage.mysql.buffer import PAD_BYTES, Reader
from storage.mysql.event import (
    HEADER_BYTES,
    Events,
    EventType,
    EventUnsupportedError,
    join_events,
    split_events,
)

PAYLOAD_BYTES_MAX: Final = 1 << 30
"""The size limit of an event that a server allows; an event that claims more is refused unread."""
PIECE_BYTES: Final = 4 << 20
_READ_BYTES: Final = 1 << 20

_PLAIN: Final = {
    EventType.MARIADB_QUERY_COMPRESSED: EventType.QUERY,
    EventType.MARIADB_WRITE_ROWS_COMPRESSED_V1: EventType.WRITE_ROWS_V1,
    EventType.MARIADB_UPDATE_ROWS_COMPRESSED_V1: EventType.UPDATE_ROWS_V1,
    EventType.MARIADB_DELETE_ROWS_COMPRESSED_V1: EventType.DELETE_ROWS_V1,
    EventType.MARIADB_WRITE_ROWS_COMPRESSED: EventType.WRITE_ROWS,
    EventType.MARIADB_UPDATE_ROWS_COMPRESSED: EventType.UPDATE_ROWS,
    EventType.MARIADB_DELETE_ROWS_COMPRESSED: EventType.DELETE_ROWS,
}
_IS_COMPRESSED = np.isin(np.arange(256), [*_PLAIN, EventType.TRANSACTION_PAYLOAD])
_V2 = frozenset({EventType.WRITE_ROWS, EventType.UPDATE_ROWS, EventType.DELETE_ROWS})
_UPDATES = frozenset({EventType.UPDATE_ROWS_V1, EventType.UPDATE_ROWS})
_QUERY_HEAD_BYTES = 13
_ROWS_HEAD_BYTES = 8
_ZSTD, _NONE = 0, 255
_PAYLOAD_BYTES, _COMPRESSION, _PLAIN_BYTES = 1, 2, 3


def expanded(events: Events, piece_bytes: int = PIECE_BYTES) -> Iterator[Events]:
    """The same events in the same order, compressed ones replaced by what they hold;
    without any, the very same.

    They come in pieces that end with the event which reaches `piece_bytes`, so that little is
    unpacked at a time.

    Raises:
        CorruptError: what is compressed cannot be read; the pieces before it were right.
        EventUnsupportedError: it is compressed in a way that is not known.
    """
    if not bool(_IS_COMPRESSED[events.types].any()):
        yield events
        return
    piece: list[bytes] = []
    size = 0
    for event in _plain_events(events):
        piece.append(event)
        size += len(event)
        if size >= piece_bytes:
            yield join_events(piece)
            piece, size = [], 0
    if piece:
        yield join_events(piece)


def _plain_events(events: Events) -> Iterator[bytes]:
    for number, kind in enumerate(events.types.tolist()):
        header, body = events.header(number), events.body(number)
        if kind == EventType.TRANSACTION_PAYLOAD:
            yield from (event[:13] + header[13:17] + event[17:] for event in _inner_events(body))
        elif _IS_COMPRESSED[kind]:
            plain = _PLAIN[EventType(kind)]
            yield header[:4] + bytes((plain,)) + header[5:] + _plain_body(plain, body)
        else:
            yield header + body


def _plain_body(kind: EventType, body: bytes) -> bytes:
    at = _query_at(body) if kind is EventType.QUERY else _rows_at(kind, body)
    return body[:at] + _inflate(body[at:])


def _query_at(body: bytes) -> int:
    """Return where the statement begins: behind the status variables, the default schema and a
    zero.
    """
    head = Reader(body).take(_QUERY_HEAD_BYTES)
    return _QUERY_HEAD_BYTES + int.from_bytes(head[11:], "little") + head[8] + 1


def _rows_at(kind: EventType, body: bytes) -> int:
    """Return where the rows begin: behind the width and the bitmaps of the present columns."""
    reader = Reader(body, _ROWS_HEAD_BYTES)
    if kind in _V2:
        reader.take(reader.number(2) - 2)  # the size of the extra part counts itself
    width = reader.packed()
    return reader.at + (width + 7) // 8 * (2 if kind in _UPDATES else 1)


def _inflate(data: bytes) -> bytes:
    head = data[0] if data else 0
    size_bytes = head & 7
    if head & 0xF8 != 0x80 or not 1 <= size_bytes <= 4:
        raise EventUnsupportedError(
            f"an event is compressed in a way ({head:#x}) that is not known; turn "
            "log_bin_compress off"
        )
    size = int.from_bytes(data[1 : 1 + size_bytes], "big")
    # One byte more than claimed is asked for: an event that holds more than it says is damaged.
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data[1 + size_bytes :], min(size, PAYLOAD_BYTES_MAX) + 1)
    except zlib.error as err:
        raise CorruptError(f"a compressed event cannot be read: {err}") from err
    if len(plain) != size:
        raise CorruptError(f"a compressed event holds {len(plain)} bytes, not {size}")
    return plain


def _inner_events(body: bytes) -> Iterator[bytes]:
    """The events in a payload, unpacked as they are taken."""
    reader = Reader(body)
    fields: dict[int, bytes] = {}
    while kind := reader.packed():
        fields[kind] = reader.string()
    size, compression, plain_size = (
        _field(fields, kind) for kind in (_PAYLOAD_BYTES, _COMPRESSION, _PLAIN_BYTES)
    )
    stream = _unpacking(reader.take(size), compression)
    rest, left = b"", plain_size
    while data := _read(stream, min(max(_READ_BYTES, _lacking(rest)), left + 1)):
        left -= len(data)
        if left < 0:
            break
        plain = rest + data
        events, end = split_events(plain + bytes(PAD_BYTES), checksums=False, end=len(plain))
        yield from (events.header(number) + events.body(number) for number in range(len(events)))
        rest = plain[end:]
    if left:
        raise CorruptError(
            f"a transaction's payload does not hold the {plain_size} bytes that it claims to hold"
        )
    if rest:
        raise CorruptError("a transaction's payload ends within an event")


def _lacking(begun: bytes) -> int:
    """Return how many bytes of an event are missing; 0 if its length is not known yet."""
    size = int.from_bytes(begun[9:13], "little") if len(begun) >= HEADER_BYTES else 0
    return min(size, PAYLOAD_BYTES_MAX) - len(begun) if size else 0


def _field(fields: dict[int, bytes], kind: int) -> int:
    if kind not in fields:
        raise CorruptError(f"a transaction's payload lacks its field {kind}")
    return Reader(fields[kind]).packed()


def _unpacking(payload: bytes, compression: int) -> pa.NativeFile:
    if compression == _NONE:
        return pa.BufferReader(payload)
    if compression != _ZSTD:
        raise EventUnsupportedError(
            f"a transaction is compressed in a way ({compression}) that is not known; "
            "turn binlog_transaction_compression off"
        )
    return pa.CompressedInputStream(pa.BufferReader(payload), "zstd")


def _read(stream: pa.NativeFile, size: int) -> bytes:
    """Read at most `size` bytes; none at the end."""
    try:
        data: bytes = stream.read(size)
    except (OSError, ValueError) as err:
        raise CorruptError(f"a compressed transaction cannot be read: {err}") from err
    return data
