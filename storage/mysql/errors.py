"""What can be wrong with a log of MySQL or MariaDB, beyond damaged bytes (`CorruptError`)."""

from storage.model.errors import CorruptError, InvalidError


class RowImageError(InvalidError):
    """A row event does not hold all columns of its rows."""

    code = "ErrRowImageNotFull"


class EventUnsupportedError(InvalidError):
    """The log holds an event whose rows cannot be known from it."""

    code = "ErrBinlogEventUnsupported"


class ColumnUnsupportedError(InvalidError):
    """A column's type, or its character set, is not one we can read."""

    code = "ErrColumnUnsupported"


class RowMetadataError(InvalidError):
    """A TABLE_MAP event does not tell the names, signs and key of its columns."""

    code = "ErrRowMetadataNotFull"


class EventChecksumError(CorruptError):
    """An event's CRC32 is not that of its bytes."""

    code = "ErrBinlogChecksum"
