"""What can go wrong in the sink manager, by what the caller does next."""

from sorter.errors import NotResolvedError, RangeCleanedError, RowsLostError, TableExistsError, TableNotFoundError
from storage.model.errors import ClosedError, CorruptError, InvalidError, UnavailableError

__all__ = [
    "AckAboveResolvedError",
    "NotResolvedError",
    "QuotaClosedError",
    "RangeCleanedError",
    "RangeError",
    "RowsLostError",
    "SinkRowsLostError",
    "TableExistsError",
    "TableNotFoundError",
]


class RangeError(InvalidError):
    """The range ends before it starts."""

    code = "ErrRangeInvalid"


class AckAboveResolvedError(UnavailableError):
    """Somebody acknowledges what this capture has not seen complete yet, as after a restart."""

    code = "ErrAckAboveResolved"


class SinkRowsLostError(CorruptError):
    """What is mounted or handed out of a range is not what was read from the sorter, or the sorter itself lost rows.

    The upstream has them: add the table again from its checkpoint.
    """

    code = "ErrSinkRowsLost"

    def __init__(self, message: str, table_id: int, lower_ts: int, upper_ts: int) -> None:
        """Say what happened, to which table, and between which commit_ts (both included)."""
        super().__init__(message)
        self.table_id, self.lower_ts, self.upper_ts = table_id, lower_ts, upper_ts


class QuotaClosedError(ClosedError):
    """The memory quota was closed while waiting for room."""

    code = "ErrQuotaClosed"
