"""What a connection knows of the world around it: who owns it, who is at its other end, what that may have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from server.rpc.http2.request_head import RequestHead

if TYPE_CHECKING:
    from server.rpc.http2.connection import Connection
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


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end."""

    address: str
    """As gRPC writes it: `ipv4:127.0.0.1:1234`."""
    auth: Mapping[str, tuple[bytes, ...]]
    """What TLS knows."""


UNKNOWN_PEER = Peer("unknown", {})
