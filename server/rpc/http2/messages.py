"""gRPC's framing inside of DATA: one byte that says whether a message is compressed, four of length, the message."""

import zlib

import grpc

from server.rpc.errors import StatusError

PREFIX_BYTES = 5
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}


class MessageError(StatusError):
    """Bytes that are no messages, or one that is too large; it ends its call."""


class MessageReader:
    """The messages of one call, from DATA cut anywhere; holds at most one unfinished message."""

    __slots__ = ("_buffer", "_encoding", "_max_bytes")

    def __init__(self, max_bytes: int, encoding: bytes) -> None:
        self._max_bytes = max_bytes
        self._encoding = encoding
        self._buffer = bytearray()

    @property
    def held(self) -> int:
        """Bytes of the unfinished message."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with `data`.

        Raises:
            MessageError: a length beyond the bound, before the bytes themselves; or what cannot be decompressed.
        """
        buffer = self._buffer
        buffer += data
        messages: list[bytes] = []
        at = 0
        while len(buffer) - at >= PREFIX_BYTES:
            size = int.from_bytes(buffer[at + 1 : at + PREFIX_BYTES])
            self._check(buffer[at], size)
            end = at + PREFIX_BYTES + size
            if end > len(buffer):
                break
            body = bytes(buffer[at + PREFIX_BYTES : end])
            messages.append(self._decompressed(body) if buffer[at] else body)
            at = end
        del buffer[:at]
        return messages

    def _check(self, flag: int, size: int) -> None:
        if flag > 1:
            raise MessageError(grpc.StatusCode.INTERNAL, f"grpc: received unexpected payload format {flag}")
        if size > self._max_bytes:
            raise self._too_large(size)

    def _decompressed(self, body: bytes) -> bytes:
        if self._encoding not in _WINDOW_BITS:
            raise MessageError(
                grpc.StatusCode.UNIMPLEMENTED,
                f"grpc: a message is compressed with {self._encoding.decode(errors='replace') or 'nothing'}; "
                "use gzip, deflate or identity",
            )
        inflate = zlib.decompressobj(_WINDOW_BITS[self._encoding])
        try:
            plain = inflate.decompress(body, self._max_bytes + 1)
        except zlib.error as err:
            raise MessageError(grpc.StatusCode.INTERNAL, f"grpc: failed to decompress the message: {err}") from err
        if len(plain) > self._max_bytes:
            raise self._too_large(len(plain))
        if not inflate.eof:
            raise MessageError(grpc.StatusCode.INTERNAL, "grpc: failed to decompress the message: it is cut off")
        return plain

    def _too_large(self, size: int) -> MessageError:
        text = f"grpc: received message larger than max ({size} vs. {self._max_bytes})"
        return MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
