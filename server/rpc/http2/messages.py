"""gRPC's framing inside of DATA: one byte that says whether a message is compressed,
four of length, the message.
"""

import zlib

import grpc

from server.rpc.errors import StatusError

PREFIX_BYTES = 5
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
_MAX_INFLATED_BYTES = 64 << 20
_TURN_BYTES = 256 << 10
"""The most that one call of `feed` decompresses; about a millisecond."""
_PIECE_BYTES = 16 << 10


class MessageError(StatusError):
    """Bytes that are no messages, or one that is too large; it ends its call."""


class MessageReader:
    """The messages of one call, from DATA cut anywhere; holds at most one unfinished message.

    A compressed message is decompressed in slices, one in each call of `feed`: a few kilobytes may
    become gigabytes. While `pending`, the caller calls `feed(b"")` again in a later turn of its
    loop.
    """

    __slots__ = ("_buffer", "_encoding", "_inflating", "_max_bytes")

    def __init__(self, max_bytes: int, encoding: bytes) -> None:
        self._max_bytes = max_bytes
        self._encoding = encoding
        self._buffer = bytearray()
        self._inflating: _Inflating | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes of unfinished messages, compressed and decompressed."""
        return len(self._buffer) + (self._inflating.buffered_bytes if self._inflating else 0)

    @property
    def pending(self) -> bool:
        """Whether more of the received bytes can be decompressed."""
        return self._inflating is not None

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with `data`.

        Raises:
            MessageError: a length beyond the bound, before the bytes themselves; or what cannot be
                decompressed.
        """
        buffer = self._buffer
        buffer += data
        messages: list[bytes] = []
        left = _TURN_BYTES
        if self._inflating is not None:
            left = self._inflate(left, messages)
        at = 0
        while self._inflating is None and len(buffer) - at >= PREFIX_BYTES:
            size = int.from_bytes(buffer[at + 1 : at + PREFIX_BYTES])
            # Refused by its announced size, before its bytes come and take memory.
            self._check(buffer[at], size)
            end = at + PREFIX_BYTES + size
            if end > len(buffer):
                break
            body = bytes(buffer[at + PREFIX_BYTES : end])
            if buffer[at]:
                self._inflating = self._begin(body)
                left = self._inflate(left, messages)
            else:
                messages.append(body)
            at = end
        del buffer[:at]
        return messages

    def _check(self, flag: int, size: int) -> None:
        if flag > 1:
            raise MessageError(
                grpc.StatusCode.INTERNAL, f"grpc: received unexpected payload format {flag}"
            )
        if size > self._max_bytes:
            raise _too_large(size, self._max_bytes)

    def _begin(self, body: bytes) -> "_Inflating":
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise MessageError(
                grpc.StatusCode.UNIMPLEMENTED,
                "grpc: a message is compressed with "
                f"{self._encoding.decode(errors='replace') or 'nothing'}; "
                "use gzip, deflate or identity",
            )
        return _Inflating(body, bits, min(self._max_bytes, _MAX_INFLATED_BYTES))

    def _inflate(self, left: int, messages: list[bytes]) -> int:
        """Decompress more of the message, up to `left` bytes; returns the rest of the limit."""
        assert self._inflating is not None
        left -= self._inflating.go_on(left)
        if self._inflating.done:
            messages.append(bytes(self._inflating.plain))
            self._inflating = None
        return left


class _Inflating:
    """One compressed message that is being decompressed, slice by slice."""

    __slots__ = ("_at", "_body", "_inflate", "_max_bytes", "_tail", "done", "plain")

    def __init__(self, body: bytes, window_bits: int, max_bytes: int) -> None:
        self.plain = bytearray()
        self.done = False
        self._body = body
        self._at = 0
        self._tail = b""
        self._max_bytes = max_bytes
        self._inflate = zlib.decompressobj(window_bits)

    @property
    def buffered_bytes(self) -> int:
        return len(self._body) + len(self.plain)

    def go_on(self, left: int) -> int:
        """Decompress up to `left` bytes; returns how many there were."""
        before = len(self.plain)
        while left > 0 and not self.done:
            piece = self._tail or self._body[self._at : self._at + _PIECE_BYTES]
            if not self._tail:
                self._at += len(piece)
            try:
                # Bounded output: a few kilobytes may unpack to gigabytes, and the loop stands still
                # meanwhile.
                part = self._inflate.decompress(piece, left)
            except zlib.error as err:
                raise MessageError(
                    grpc.StatusCode.INTERNAL, f"grpc: failed to decompress the message: {err}"
                ) from err
            self._tail = self._inflate.unconsumed_tail
            self.plain += part
            left -= len(part)
            if len(self.plain) > self._max_bytes:
                raise _too_large(len(self.plain), self._max_bytes)
            self.done = self._inflate.eof
            if not (piece or part or self.done):
                raise MessageError(
                    grpc.StatusCode.INTERNAL,
                    "grpc: failed to decompress the message: it is cut off",
                )
        return len(self.plain) - before


def _too_large(size: int, max_bytes: int) -> MessageError:
    text = f"grpc: received message larger than max ({size} vs. {max_bytes})"
    return MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
