"""Where the captures' records lie in the metadata. Pure."""

from typing import Final

_ROOT: Final = "/tidemark/default"
OWNER: Final = f"{_ROOT}/owner".encode()
CAPTURES: Final = f"{_ROOT}/capture/".encode()
INFOS: Final = f"{_ROOT}/changefeed/info/".encode()
STATUSES: Final = f"{_ROOT}/changefeed/status/".encode()


def capture(capture_id: str) -> bytes:
    """One capture's record, alive as long as its lease."""
    return CAPTURES + capture_id.encode()


def info(changefeed: str) -> bytes:
    """One changefeed's record."""
    return INFOS + changefeed.encode()


def status(changefeed: str) -> bytes:
    """One changefeed's checkpoint."""
    return STATUSES + changefeed.encode()
