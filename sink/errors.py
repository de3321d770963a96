"""What can go wrong in the sink manager, beside the sorter's errors (`sorter.errors`)."""

from sorter.errors import TableDamagedError
from storage.model.errors import ClosedError, InvalidError, TidemarkError, UnavailableError


class RangeError(InvalidError):
    """The range ends before it starts."""

    code = "ErrRangeInvalid"


class AckAboveResolvedError(UnavailableError):
    """Somebody acknowledges what this capture has not seen complete yet, as after a restart."""

    code = "ErrAckAboveResolved"


class SinkRowsLostError(TableDamagedError):
    """What is mounted or handed out of a range is not what was read from the sorter,
    or the sorter itself lost rows.
    """

    code = "ErrSinkRowsLost"


class QuotaClosedError(ClosedError):
    """The memory quota was closed while waiting for room."""

    code = "ErrQuotaClosed"


class RangeCrossesDdlError(InvalidError):
    """A range begins before a DDL of the table and ends after it,
    so no one schema is that of its rows.
    """

    code = "ErrRangeCrossesDdl"


class RangeHeldError(InvalidError):
    """A range ends where no cut does any more: tables that are read again are not complete
    there.
    """

    code = "ErrRangeHeld"


class DdlOrderError(TidemarkError):
    """A source told a DDL out of order."""

    code = "ErrDdlOrder"
