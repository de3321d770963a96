"""Frames of HTTP/2 (RFC 9113 §4 and §6): their numbers, how they are written,
and the faults they may have.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
(
    DATA,
    HEADERS,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    PUSH_PROMISE,
    PING,
    GOAWAY,
    WINDOW_UPDATE,
    CONTINUATION,
) = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20

HEADER_BYTES = 9
MAX_FRAME_BYTES = 16_384
"""The limit of frames that we receive: the default, so that no peer has to learn it. Greater ones
would spare next to nothing.
"""
MAX_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = 65_535

HEADER = struct.Struct(">IBI")
"""A frame's header: 24 bits of length and the type as one number, flags, stream."""


class ErrorCode(IntEnum):
    """RFC 9113 §7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFault(Exception):  # noqa: N818 - the RFC's connection error, which is an event here
    """The peer broke the protocol; the connection ends with GOAWAY."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class StreamFault(Exception):  # noqa: N818 - the RFC's stream error
    """The peer broke the protocol on one stream, which ends with RST_STREAM."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return HEADER.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """Our SETTINGS."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in values.items()))


def window_update(stream: int, increment: int) -> bytes:
    """More room for DATA of a stream, or of all of them (stream 0)."""
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4))


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    """The end of a stream."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4))


def goaway(last_stream: int, code: ErrorCode, text: str = "") -> bytes:
    """The end of a connection; streams above `last_stream` were not looked at."""
    return frame(GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + text.encode()[:256])


def header_block(stream: int, block: bytes, *, end_stream: bool) -> bytes:
    """HEADERS, and CONTINUATION frames where the block is larger than a frame that every peer
    takes.
    """
    flags = END_STREAM if end_stream else 0
    if len(block) <= MAX_FRAME_BYTES:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    parts = [block[at : at + MAX_FRAME_BYTES] for at in range(0, len(block), MAX_FRAME_BYTES)]
    frames = [frame(HEADERS, flags, stream, parts[0])]
    frames += [frame(CONTINUATION, 0, stream, part) for part in parts[1:-1]]
    return b"".join([*frames, frame(CONTINUATION, END_HEADERS, stream, parts[-1])])


def setting_pairs(payload: bytes) -> Iterator[tuple[int, int]]:
    """The settings in a SETTINGS frame.

    Raises:
        ConnectionFault: the length is wrong.
    """
    if len(payload) % 6:
        raise ConnectionFault(
            ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a length that no settings have"
        )
    return struct.iter_unpack(">HI", payload)


def unpadded(payload: bytes, flags: int) -> bytes:
    """DATA or HEADERS without their padding.

    Raises:
        ConnectionFault: there is more padding than frame.
    """
    if not flags & PADDED:
        return payload
    if not payload:
        raise ConnectionFault(
            ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the length of its padding"
        )
    if payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding as long as its frame")
    return payload[1 : len(payload) - payload[0]]


def prioritized(stream: int, payload: bytes, flags: int) -> bytes:
    """HEADERS (or PRIORITY) without the five bytes of a priority, which means nothing any more.

    Raises:
        ConnectionFault: they are not there, or the stream depends on itself.
    """
    if not flags & PRIORITIZED:
        return payload
    if len(payload) < 5:
        raise ConnectionFault(
            ErrorCode.FRAME_SIZE_ERROR, "a frame with priority that is too short for one"
        )
    if int.from_bytes(payload[:4]) & MAX_WINDOW == stream:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {stream} depends on itself")
    return payload[5:]
