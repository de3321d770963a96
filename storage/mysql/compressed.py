"""Events that hold others in compressed form, made into plain ones before anybody looks at them.

MariaDB (log_bin_compress=ON) compresses a statement, or the rows of an event, with zlib behind
`0x80 | size_bytes u8, size u8 * size_bytes big-endian`. MySQL (binlog_transaction_compression=ON) packs a transaction
into one TRANSACTION_PAYLOAD event, whose fields stand before the payload; its events have no checksums, and no place
in the log but that of the payload, which they get.

    field    = kind n, size n, value           kind 0 ends the fields, the payload follows; 1 its size,
                                               2 its compression (0 zstd, 255 none), 3 its size without
    n        = length-encoded number
"""

import zlib
from typing import Final

import numpy as np
import pyarrow as pa

from storage.model.errors import CorruptError
from storage.mysql.errors import EventUnsupportedError
from storage.mysql.event import Events, EventType, join_events, split_events
from storage.mysql.reader import Reader

PAYLOAD_BYTES_MAX: Final = 1 << 30
"""As large as a server allows a message to be: what claims to hold more is refused unread."""

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


def expand(events: Events) -> Events:
    """The same events in the same order, compressed ones replaced by what they hold; without any, the very same.

    Raises:
        CorruptError: what is compressed cannot be read.
        EventUnsupportedError: it is compressed in a way that is not known.
    """
    types = events.types
    if not bool(_IS_COMPRESSED[types].any()):
        return events
    parts: list[bytes] = []
    for number, kind in enumerate(types.tolist()):
        header, body = events.header(number), events.body(number)
        if kind == EventType.TRANSACTION_PAYLOAD:
            parts += [event[:13] + header[13:17] + event[17:] for event in _inner_events(body)]
        elif _IS_COMPRESSED[kind]:
            plain = _PLAIN[EventType(kind)]
            parts.append(header[:4] + bytes((plain,)) + header[5:] + _plain_body(plain, body))
        else:
            parts.append(header + body)
    return join_events(parts)


def _plain_body(kind: EventType, body: bytes) -> bytes:
    at = _query_at(body) if kind is EventType.QUERY else _rows_at(kind, body)
    return body[:at] + _inflate(body[at:])


def _query_at(body: bytes) -> int:
    """Where the statement begins: behind the status variables, the default schema and a zero."""
    head = Reader(body).take(_QUERY_HEAD_BYTES)
    return _QUERY_HEAD_BYTES + int.from_bytes(head[11:], "little") + head[8] + 1


def _rows_at(kind: EventType, body: bytes) -> int:
    """Where the rows begin: behind the width and the bitmaps of the columns present."""
    reader = Reader(body, _ROWS_HEAD_BYTES)
    if kind in _V2:
        reader.take(reader.number(2) - 2)
    width = reader.packed()
    return reader.at + (width + 7) // 8 * (2 if kind in _UPDATES else 1)


def _inflate(data: bytes) -> bytes:
    head = data[0] if data else 0
    size_bytes = head & 7
    if head & 0xF8 != 0x80 or not 1 <= size_bytes <= 4:
        raise EventUnsupportedError(
            f"an event is compressed in a way ({head:#x}) that is not known; turn log_bin_compress off"
        )
    size = int.from_bytes(data[1 : 1 + size_bytes], "big")
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data[1 + size_bytes :], min(size, PAYLOAD_BYTES_MAX) + 1)
    except zlib.error as err:
        raise CorruptError(f"a compressed event cannot be read: {err}") from err
    if len(plain) != size:
        raise CorruptError(f"a compressed event holds {len(plain)} bytes, not {size}")
    return plain


def _inner_events(body: bytes) -> list[bytes]:
    reader = Reader(body)
    fields: dict[int, bytes] = {}
    while kind := reader.packed():
        fields[kind] = reader.string()
    size, compression, plain_size = (_field(fields, kind) for kind in (_PAYLOAD_BYTES, _COMPRESSION, _PLAIN_BYTES))
    plain = _unpacked(reader.take(size), compression, plain_size)
    events, end = split_events(plain + bytes(8), checksums=False, end=len(plain))
    if end != len(plain):
        raise CorruptError("a transaction's payload ends within an event")
    return [events.header(number) + events.body(number) for number in range(len(events))]


def _field(fields: dict[int, bytes], kind: int) -> int:
    if kind not in fields:
        raise CorruptError(f"a transaction's payload lacks its field {kind}")
    return Reader(fields[kind]).packed()


def _unpacked(payload: bytes, compression: int, size: int) -> bytes:
    if compression == _NONE:
        return payload
    if compression != _ZSTD:
        raise EventUnsupportedError(
            f"a transaction is compressed in a way ({compression}) that is not known; "
            "turn binlog_transaction_compression off"
        )
    if size > PAYLOAD_BYTES_MAX:
        raise CorruptError(f"a transaction's payload claims to hold {size} bytes")
    try:
        plain: bytes = pa.decompress(payload, decompressed_size=size, codec="zstd", asbytes=True)
    except (OSError, ValueError) as err:
        raise CorruptError(f"a compressed transaction cannot be read: {err}") from err
    return plain
