"""What handlers are given beside their requests: gRPC's own interface, over one of our calls."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from server.rpc.http2.request_head import Metadata

if TYPE_CHECKING:
    from server.rpc.http2.handled import HandledCall

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs


class Context(grpc.aio.ServicerContext[Any, Any]):
    """As `grpc.aio.ServicerContext` says; answers are never compressed."""

    def __init__(self, call: "HandledCall") -> None:
        self._call = call
        self._code: Any = None
        self._details = ""
        self._trailing: Metadata = ()

    async def read(self) -> Any:
        """The next request, or `grpc.aio.EOF`."""
        return await self._call.read()

    async def write(self, message: Any) -> None:
        """Send one answer; waits while the peer does not take them."""
        await self._call.write(message)

    async def send_initial_metadata(self, initial_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Send the headers now, with these."""
        self._call.send_head(tuple(initial_metadata or ()))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        """End the call with this status, and the handler with an exception."""
        self._code, self._details = code, details
        if trailing_metadata:
            self._trailing = tuple(trailing_metadata)
        raise grpc.aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: Any) -> NoReturn:
        """As `abort`."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def invocation_metadata(self) -> Any:
        """What the client sent beside its requests."""
        return self._call.head.invocation_metadata

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """What follows the status."""
        self._trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Any:
        """What was set."""
        return self._trailing

    def set_code(self, code: grpc.StatusCode) -> None:
        """The status of the call when its handler returns or fails."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Its text."""
        self._details = details

    def code(self) -> Any:
        """What was set; None: nothing."""
        return self._code

    def details(self) -> str:
        """What was set."""
        return self._details

    def peer(self) -> str:
        """As gRPC writes addresses: `ipv4:127.0.0.1:1234`."""
        return self._call.connection.peer.address

    def peer_identities(self) -> Iterable[bytes] | None:
        """The names in the client's certificate."""
        return self._call.connection.peer.auth.get("x509_subject_alternative_name") or None

    def peer_identity_key(self) -> str | None:
        """Which kind of names they are."""
        return "x509_subject_alternative_name" if self.peer_identities() else None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """What TLS knows of the client."""
        return self._call.connection.peer.auth

    def time_remaining(self) -> Any:
        """Seconds until the client gives up; None: never."""
        return self._call.time_remaining()

    def cancelled(self) -> bool:
        """Whether the client gave up."""
        return self._call.given_up

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._call.closed

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call it with this context when the handler has ended."""
        self._call.callbacks.append(lambda: callback(self))

    def set_compression(self, compression: grpc.Compression) -> None:
        """Does nothing."""

    def disable_next_message_compression(self) -> None:
        """Does nothing."""
