"""The peer of a connection, and its limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from server.rpc.http2.frames import ConnectionFault, ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of one peer."""

    metadata_bytes: int
    streams: int
    pings: int
    """Pings in a burst, while it is sent nothing."""
    pings_per_s: float
    unsent_bytes: int = 64 << 20
    """The limit of unsent answers; a call whose answer would exceed it ends with an error."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The peer's address and its TLS identity."""

    address: str
    """The address as gRPC writes it: `ipv4:127.0.0.1:1234`."""
    auth: Mapping[str, tuple[bytes, ...]]
    """The properties of its TLS certificate."""


UNKNOWN_PEER = Peer("unknown", {})


class TokenBucket:
    """Limits the frames that cost work and carry nothing: one peer may send `burst` at once, then
    `per_s` each second.
    """

    __slots__ = ("_burst", "_clock", "_last_s", "_left", "_per_s", "_text")

    def __init__(self, text: str, burst: float, per_s: float, clock: Callable[[], float]) -> None:
        """`text` is the error for the peer and the log."""
        self._text = text
        self._burst = self._left = burst
        self._per_s = per_s
        self._clock = clock
        self._last_s = clock()

    def spend(self) -> None:
        """Take one token.

        Raises:
            ConnectionFault: none is left.
        """
        if self._left < 1:
            now_s = self._clock()
            self._left = min(self._burst, self._left + (now_s - self._last_s) * self._per_s)
            self._last_s = now_s
            if self._left < 1:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, self._text)
        self._left -= 1

    def refill(self) -> None:
        """Fill the bucket again: the peer did something useful meanwhile."""
        self._left = self._burst
