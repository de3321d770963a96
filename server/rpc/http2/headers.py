"""Header blocks of HTTP/2 (RFC 7541): those of requests decoded and understood,
those of answers written.

`HeaderDecoder` caches the blocks it has decoded, since clients send the same few again and again;
`read_head` makes a gRPC call of the fields, or says why they are none; `response_head` and
`trailers` write the blocks of an answer.

Invariants:
1. The cache is never wrong: the meaning of a block depends on its bytes and on the dynamic table
   only. The cache is emptied when the table changes, and a block that changes the table is not
   cached.
2. Every block is decoded, also of a request that is refused: it may change the table.
3. Answers are literals that enter no dynamic table, so our side has no encoder state that could get
   out of step with the peer.

The table, Huffman codes and integers are those of the library `hpack`; its decoding loop is not
used, as it takes 21 to 34 us for one call.
"""

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import grpc
from hpack.exceptions import HPACKError
from hpack.hpack import decode_integer, encode_integer
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from server.rpc.errors import StatusError
from server.rpc.http2.frames import ConnectionFault, ErrorCode, StreamFault

T = TypeVar("T")
Field = tuple[bytes, bytes]

MAX_TABLE_BYTES = 4096
_MAX_KNOWN, _MAX_KNOWN_BYTES = 256, 32 << 10
"""The bounds of one connection's cache: header blocks, and bytes of their fields."""
_FIELD_BYTES = 32  # the overhead of a field by RFC 7541 §4.1
Metadata = tuple[tuple[str, str | bytes], ...]
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}
_NEEDED = (b":method", b":scheme", b":path")
_CONNECTION = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_NO_METADATA = {b"content-type", b"te"}
_TIMEOUT = b"grpc-timeout"
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_GRPC = b"application/grpc"
_STATUS_200 = b"\x88"
_PLAIN_BYTES = frozenset(range(0x20, 0x7F)) - {ord("%")}
_MAX_TEXT = 4096  # clients refuse more than 8 KiB of trailers as a whole


class OversizedHeadersError(Exception):
    """The fields of one block are larger than allowed; the block was decoded all the same."""


class HeaderDecoder(Generic[T]):
    """The decoder of one connection; `max_bytes` bounds the fields of one block,
    as the RFC counts them.
    """

    def __init__(self, max_bytes: int, read: Callable[[tuple[Field, ...]], T]) -> None:
        """`read` turns a request's fields into the result of `request`, which is cached."""
        self._max_bytes = max_bytes
        self._read = read
        self._table = HeaderTable()
        self._changed = False
        self._known: dict[bytes, T] = {}
        self._known_bytes = 0

    def request(self, block: bytes) -> T:
        """Decode one whole block and `read` its fields; raises what `read` and `fields` raise."""
        # Same bytes, same table: the same meaning, at 0.1 us instead of 7.
        cached = self._known.get(block)
        if cached is not None:
            return cached
        fields = self.fields(block)
        value = self._read(fields)
        # A block that has put fields into the table means something else the second time.
        if not self._changed:
            size = len(block) + _size(fields)
            if len(self._known) < _MAX_KNOWN and self._known_bytes + size <= _MAX_KNOWN_BYTES:
                self._known_bytes += size
                self._known[block] = value
        return value

    def fields(self, block: bytes) -> tuple[Field, ...]:
        """The fields of one whole block, names and values as they came.

        Raises:
            ConnectionFault: it cannot be decoded; nor can any later one.
            OversizedHeadersError: it is too large.
        """
        self._changed = False
        try:
            fields = self._decoded(block)
        except (HPACKError, IndexError) as err:
            raise ConnectionFault(
                ErrorCode.COMPRESSION_ERROR, f"a header block cannot be decoded: {err}"
            ) from err
        finally:
            if self._changed:
                self._known.clear()
                self._known_bytes = 0
        # Only after decoding: the table has to see every block, even one that is refused.
        if _size(fields) > self._max_bytes:
            raise OversizedHeadersError
        return fields

    def _decoded(self, block: bytes) -> tuple[Field, ...]:
        fields: list[Field] = []
        at, entry = 0, self._table.get_by_index
        while at < len(block):
            first = block[at]
            # An indexed field of one byte, which nearly all are. 0x80 would be index 0, which is an
            # error, and 0xFF begins a longer number.
            if 0x80 < first < 0xFF:
                fields.append(entry(first & 0x7F))
                at += 1
            elif first >= 0x80:
                index, at = _integer(block, at, 7)
                fields.append(entry(index))
            elif first & 0x40:
                field, at = self._literal(block, at, 6)
                self._table.add(*field)
                self._changed = True
                fields.append(field)
            elif first & 0x20:
                at = self._resize(block, at, after_fields=bool(fields))
            else:
                field, at = self._literal(block, at, 4)
                fields.append(field)
        return tuple(fields)

    def _literal(self, block: bytes, at: int, prefix_bits: int) -> tuple[Field, int]:
        index, at = _integer(block, at, prefix_bits)
        if index:
            name = self._table.get_by_index(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        return (name, value), at

    def _resize(self, block: bytes, at: int, *, after_fields: bool) -> int:
        size, at = _integer(block, at, 5)
        # RFC 7541 §4.2: a change of the table's size comes before the first field of a block.
        if size > MAX_TABLE_BYTES or after_fields:
            raise ConnectionFault(
                ErrorCode.COMPRESSION_ERROR, "a table size that is too large, or in the wrong place"
            )
        self._table.maxsize = size
        self._changed = True
        return at


def _size(fields: tuple[Field, ...]) -> int:
    return sum(len(name) + len(value) + _FIELD_BYTES for name, value in fields)


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    number = block[at] & ((1 << prefix_bits) - 1)
    if number < (1 << prefix_bits) - 1:
        return number, at + 1
    number, size = decode_integer(block[at : at + 6], prefix_bits)
    return number, at + size


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    huffman = block[at] & 0x80
    size, at = _integer(block, at, 7)
    end = at + size
    if end > len(block):
        raise ConnectionFault(
            ErrorCode.COMPRESSION_ERROR, "a string that is longer than its header block"
        )
    return (decode_huffman(block[at:end]) if huffman else block[at:end]), end


class HttpRefusalError(Exception):
    """A request that is no gRPC call: it is answered with an HTTP status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A call as described by its client; it serves as the `HandlerCallDetails` of
    gRPC's handlers.
    """

    method: str
    """`/package.Service/Method`."""
    invocation_metadata: Metadata
    encoding: bytes
    """The encoding of compressed messages; empty: there are none."""


def read_head(fields: tuple[Field, ...]) -> tuple[RequestHead, float | None]:
    """The head of a call, and its timeout in seconds (None: none). The head, which most calls of a
    client share, is cached.

    Raises:
        StreamFault: the request is malformed (RFC 9113 §8.1.1).
        HttpRefusalError: it is not gRPC.
        StatusError: it is gRPC, but cannot be served.
    """
    timeout_s = None
    for place, (name, value) in enumerate(fields):
        # Cut out, so that the cache below hits: each call of a Go client with a deadline has
        # another timeout.
        if name == _TIMEOUT:
            timeout_s = _timeout_s(value)
            fields = fields[:place] + fields[place + 1 :]
            break
    return _head(fields), timeout_s


@lru_cache(512)
def _head(fields: tuple[Field, ...]) -> RequestHead:
    pseudo = _pseudo(fields)
    regular = fields[len(pseudo) :]
    for name, value in regular:
        _check(name, value)
    named = dict(regular)
    if pseudo[b":method"] != b"POST":
        raise HttpRefusalError(405)
    if not named.get(b"content-type", b"").startswith(_GRPC):
        raise HttpRefusalError(415)
    return RequestHead(
        _text(pseudo[b":path"]), _metadata(regular), named.get(b"grpc-encoding", b"")
    )


def _pseudo(fields: Sequence[Field]) -> dict[bytes, bytes]:
    pseudo: dict[bytes, bytes] = {}
    for name, value in fields:
        if not name.startswith(b":"):
            break
        if name in pseudo or name not in _PSEUDO:
            raise StreamFault(
                ErrorCode.PROTOCOL_ERROR, "a pseudo-header that is unknown, or there twice"
            )
        pseudo[name] = value
    if not all(pseudo.get(name) for name in _NEEDED):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a request without method, scheme or path")
    return pseudo


def _check(name: bytes, value: bytes) -> None:
    if not name or name != name.lower() or name.startswith(b":") or name in _CONNECTION:
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a header field that HTTP/2 does not have")
    if name == b"te" and value != b"trailers":
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "te says something other than trailers")
    if any(byte in value for byte in b"\0\r\n"):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a header value with a line break in it")


def _metadata(fields: Sequence[Field]) -> Metadata:
    return tuple(
        (_text(name), _binary(value) if name.endswith(b"-bin") else _text(value))
        for name, value in fields
        if name not in _NO_METADATA and not name.startswith(b"grpc-")
    )


def _text(value: bytes) -> str:
    try:
        return value.decode("ascii")
    except UnicodeDecodeError as err:
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a header that is not ASCII") from err


def _binary(value: bytes) -> bytes:
    """Decode base64, with or without padding; values joined by a comma are not split, as no known
    client joins them.
    """
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except binascii.Error as err:
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "binary metadata that is not base64") from err


def _timeout_s(value: bytes) -> float:
    digits, unit = value[:-1], value[-1:]
    if not (digits.isdigit() and len(digits) <= 8 and unit in _UNITS_S):
        raise StatusError(grpc.StatusCode.INTERNAL, "malformed grpc-timeout")
    return int(digits) * _UNITS_S[unit]


def _literal(name: bytes, value: bytes) -> bytes:
    return b"".join(
        (b"\0", encode_integer(len(name), 7), name, encode_integer(len(value), 7), value)
    )


_CONTENT_TYPE = _literal(b"content-type", b"application/grpc")
_ENCODINGS = _literal(b"grpc-accept-encoding", b"identity, deflate, gzip")

RESPONSE_HEAD = _STATUS_200 + _CONTENT_TYPE
"""The header block before the first message of a call that has no metadata of its own."""
TRAILERS_OK = _literal(b"grpc-status", b"0")


def response_head(metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """The headers of an answer."""
    return RESPONSE_HEAD + _fields(metadata)


def trailers(
    status: grpc.StatusCode, text: str, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> bytes:
    """The header block after the last message; or, after `response_head`, the whole answer."""
    return _status(status, text[:_MAX_TEXT]) + _fields(metadata)


def http_status(status: int) -> bytes:
    """The whole answer to a request that is not gRPC."""
    return _literal(b":status", str(status).encode()) + _literal(b"content-length", b"0")


@lru_cache(256)
def _status(status: grpc.StatusCode, text: str) -> bytes:
    number, _ = status.value
    block = _literal(b"grpc-status", str(number).encode())
    if text:
        block += _literal(b"grpc-message", _percent_encoded(text))
    return block + _ENCODINGS if status is grpc.StatusCode.UNIMPLEMENTED else block


def _percent_encoded(text: str) -> bytes:
    # A lone surrogate, as in the name of a file that is not UTF-8, must not end the connection.
    return b"".join(
        bytes((byte,)) if byte in _PLAIN_BYTES else b"%%%02X" % byte
        for byte in text.encode(errors="replace")
    )


def _fields(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    return b"".join(_literal(key.lower().encode(), _value(key, value)) for key, value in metadata)


def _value(key: str, value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(raw).rstrip(b"=") if key.endswith("-bin") else raw
