"""Rows of XA transactions between `XA PREPARE` and their end, bounded in bytes. Pure."""

from typing import Final

from server.puller.mysql.commits import size_of
from server.puller.mysql.errors import XaTooLargeError
from storage.mysql.event import Events

_BYTES_MAX: Final = 512 << 20


class Prepared:
    """By the transaction's id as the log names it."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Events]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._parts)

    def put(self, xid: str, parts: list[Events]) -> None:
        """A transaction is prepared; of one that is told again, the last counts.

        Raises:
            XaTooLargeError: there is no room for its rows.
        """
        self.pop(xid)
        self._bytes += sum(map(size_of, parts))
        if self._bytes > _BYTES_MAX:
            raise XaTooLargeError(
                f"prepared XA transactions hold more than {_BYTES_MAX >> 20} MiB of rows: commit or roll back the "
                "oldest (XA RECOVER on the server), then resume"
            )
        self._parts[xid] = parts

    def pop(self, xid: str) -> list[Events] | None:
        """It has ended; None if it was not prepared here."""
        parts = self._parts.pop(xid, None)
        self._bytes -= sum(map(size_of, parts or ()))
        return parts
