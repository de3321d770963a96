"""What can go wrong in the sink manager, by what the caller does next."""

from sorter.errors import NotResolvedError, RangeCleanedError, TableExistsError, TableNotFoundError
from storage.model.errors import ClosedError, InvalidError, UnavailableError

__all__ = [
    "AckAboveResolvedError",
    "NotResolvedError",
    "QuotaClosedError",
    "RangeCleanedError",
    "RangeError",
    "TableExistsError",
    "TableNotFoundError",
]


class RangeError(InvalidError):
    """The range ends before it starts."""

    code = "ErrRangeInvalid"


class AckAboveResolvedError(UnavailableError):
    """Somebody acknowledges what this capture has not seen complete yet, as after a restart."""

    code = "ErrAckAboveResolved"


class QuotaClosedError(ClosedError):
    """The memory quota was closed while waiting for room."""

    code = "ErrQuotaClosed"
