"""What the headers of a gRPC call say: its method, metadata, deadline and encoding;
or why it is none.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import grpc

from server.rpc.errors import StatusError
from server.rpc.http2.frames import ErrorCode, StreamFault
from server.rpc.http2.header_blocks import Field

Metadata = tuple[tuple[str, str | bytes], ...]

_PSEUDO = {b":method", b":scheme", b":path", b":authority"}
_NEEDED = (b":method", b":scheme", b":path")
_CONNECTION = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_NO_METADATA = {b"content-type", b"te"}
_TIMEOUT = b"grpc-timeout"
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_GRPC = b"application/grpc"


class HttpRefusalError(Exception):
    """A request that is no gRPC call: it is answered with an HTTP status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A call as its client described it; also the `HandlerCallDetails` that gRPC's handlers are
    asked with.
    """

    method: str
    """`/package.Service/Method`."""
    invocation_metadata: Metadata
    encoding: bytes
    """Of compressed messages; empty: there are none."""


def read_head(fields: tuple[Field, ...]) -> tuple[RequestHead, float | None]:
    """The head and the timeout in seconds; all but the timeout is the same for most calls,
    and looked up.

    Raises:
        StreamFault: the request is malformed (RFC 9113 §8.1.1).
        HttpRefusalError: it is not gRPC.
        StatusError: it is gRPC, but cannot be served.
    """
    timeout_s = None
    for place, (name, value) in enumerate(fields):
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
    """Base64, with or without its padding; values joined by a comma stay apart for nobody we know
    of.
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
