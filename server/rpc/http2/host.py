"""What a connection knows of the world around it: who owns it, who is at its other end, what that may have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from server.rpc.http2.request_head import RequestHead

if TYPE_CHECKING:
    from server.rpc.http2.connection import Connection
    from server.rpc.http2.handled import HandledCall
    from server.rpc.http2.stream import Stream


class Host(Protocol):
    """Whoever owns connections."""

    def open(self, connection: "Connection", number: int, head: RequestHead, timeout_s: float | None) -> "Stream":
        """The stream of a new call.

        Raises:
            StatusError: it is refused.
        """

    def released(self) -> None:
        """A stream that `open` gave has ended."""

    def report_error(self, connection: "Connection", err: Exception) -> None:
        """Log and count an unexpected exception that ended a connection. Must not raise."""

    def begin(self, call: "HandledCall") -> None:
        """Let a unary call's handler start, now or when its turn comes: see `HandlerStarts`."""

    def go_on(self, connection: "Connection") -> None:
        """The peer has read answers: handlers of its calls that wait in `connection.starting` may start."""

    def turn_s(self) -> float:
        """How long one connection may handle what it received before the others have their turn."""

    def fall_behind(self, change: int) -> None:
        """One connection more (1) or less (-1) has received more than it handled in its turn."""

    def buffer(self, change: int) -> None:
        """So many more bytes wait for a peer to read them, or for their connection's turn."""

    def hold(self, change: int) -> bool:
        """So many more bytes of requests wait for their rest, or to be read; False: that is too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one peer may have."""

    metadata_bytes: int
    streams: int
    pings: int
    """In a burst, while it is sent nothing."""
    pings_per_s: float
    unsent_bytes: int = 64 << 20
    """Of answers that wait for it; one that would let more wait is not kept, and its call says so."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end."""

    address: str
    """As gRPC writes it: `ipv4:127.0.0.1:1234`."""
    auth: Mapping[str, tuple[bytes, ...]]
    """What TLS knows."""


UNKNOWN_PEER = Peer("unknown", {})
