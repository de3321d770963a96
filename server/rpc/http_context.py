"""What stands for a gRPC context where a service is called in this process."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final


class HttpContext:
    """Of a call that came by HTTP, with the client's header and the names in its certificate."""

    def __init__(self, authorization: str = "", common_names: Sequence[bytes] = ()) -> None:
        self._metadata = (("authorization", authorization),) if authorization else ()
        self._common_names = tuple(common_names)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The header `authorization`, if there is one."""
        return self._metadata

    def peer(self) -> str:
        """What stands in the audit log for whoever sent the HTTP request."""
        return "http"

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """As gRPC has it."""
        return {"x509_common_name": self._common_names} if self._common_names else {}


LOCAL: Final = HttpContext()
"""Of a call that the process makes for itself: nobody is asked who makes it."""
