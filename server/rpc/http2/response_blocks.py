"""The header blocks of answers: literals that no table remembers,
so that a connection has no state of ours.
"""

import base64
from collections.abc import Iterable
from functools import lru_cache

import grpc
from hpack.hpack import encode_integer

_STATUS_200 = b"\x88"
_PLAIN_BYTES = frozenset(range(0x20, 0x7F)) - {ord("%")}
_MAX_TEXT = 4096  # clients refuse more than 8 KiB of trailers as a whole


def _literal(name: bytes, value: bytes) -> bytes:
    return b"".join(
        (b"\0", encode_integer(len(name), 7), name, encode_integer(len(value), 7), value)
    )


_CONTENT_TYPE = _literal(b"content-type", b"application/grpc")
_ENCODINGS = _literal(b"grpc-accept-encoding", b"identity, deflate, gzip")

HEAD = _STATUS_200 + _CONTENT_TYPE
"""What comes before the first message of a call that has no metadata of its own."""
TRAILERS_OK = _literal(b"grpc-status", b"0")


def head(metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """The headers of an answer."""
    return HEAD + _fields(metadata)


def trailers(
    status: grpc.StatusCode, text: str, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> bytes:
    """What follows the last message; or, after `head`, all there is."""
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
    return b"".join(
        bytes((byte,)) if byte in _PLAIN_BYTES else b"%%%02X" % byte for byte in text.encode()
    )


def _fields(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    return b"".join(_literal(key.lower().encode(), _value(key, value)) for key, value in metadata)


def _value(key: str, value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(raw).rstrip(b"=") if key.endswith("-bin") else raw
