"""What can go wrong between Spark and a capture;
messages have the form `[TM:ErrName] what to do`.
"""

import re

MOVED_BACK = "ErrChangefeedMovedBack"
"""The changefeed's checkpoint was moved back after the reader began."""
UNKNOWN = "ErrFlight"
"""Whatever a connection says that no capture has said."""
_TAGGED = re.compile(
    r"\[TM:(?P<code>\w+)\] (?P<message>.*?)(?:\. (?:gRPC client debug context|Client context|Detail)\b|$)",
    re.S,
)


class SourceError(Exception):
    """An error with a stable code; `retryable` says that the same request may succeed later."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(f"[TM:{code}] {message}")
        self.code = code
        self.message = message
        self.retryable = retryable

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (self.code, self.message, self.retryable)


def _rebuilt(code: str, message: str, retryable: bool) -> SourceError:  # noqa: FBT001 - called by pickle
    return SourceError(code, message, retryable=retryable)


def from_text(text: str, *, retryable: bool) -> SourceError:
    """The error a capture sent, cut out of the text Flight wraps around it."""
    match = _TAGGED.search(text)
    if match is None:
        return SourceError(UNKNOWN, text, retryable=retryable)
    return SourceError(match["code"], match["message"].strip(), retryable=retryable)
