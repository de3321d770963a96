"""Why binlogs cannot be followed any further.

In each case the feed stops before it would lose a row.
"""

from storage.model.errors import CorruptError, InvalidError


class BinlogInvalidError(CorruptError):
    """A pump sent something that is no committed transaction."""

    code = "ErrBinlogInvalid"


class PrewriteMissingError(CorruptError):
    """A transaction is committed, but its rows are not to be had."""

    code = "ErrBinlogPrewriteMissing"


class TableUnknownError(CorruptError):
    """A binlog has rows of a table that no schema change brought."""

    code = "ErrBinlogTableUnknown"


class BinlogPurgedError(InvalidError):
    """A pump's GC has removed what was not read yet."""

    code = "ErrBinlogPurged"


class PumpClusterError(InvalidError):
    """A registered pump serves another cluster."""

    code = "ErrClusterIDMismatch"


class PumpOfflineError(InvalidError):
    """A pump went offline with binlogs that were not read."""

    code = "ErrPumpOfflineUnread"
