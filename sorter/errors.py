"""The sorter's errors; their kinds say what the caller does next."""

from storage.model.errors import (
    ClosedError,
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    TidemarkError,
    UnavailableError,
)


class TableNotFoundError(NotFoundError):
    """The span was never added, or it was removed."""

    code = "ErrTableNotFound"


class TableExistsError(ConflictError):
    """The span is already being sorted."""

    code = "ErrTableExists"


class EventBatchError(InvalidError):
    """The batch does not have RAW_SCHEMA, or holds nulls where it must not."""

    code = "ErrEventBatchInvalid"


class EventBelowResolvedError(TidemarkError):
    """A row is at or below the resolved_ts: `resolve` had promised that no such row follows."""

    code = "ErrEventBelowResolved"


class ResolvedRegressedError(InvalidError):
    """The resolved_ts went back."""

    code = "ErrResolvedTsRegressed"


class NotResolvedError(UnavailableError):
    """The range ends above the resolved_ts: its rows are not complete yet."""

    code = "ErrNotResolved"


class RangeCleanedError(InvalidError):
    """The range starts at or below the position up to which the table was cleaned."""

    code = "ErrRangeCleaned"


class TableDamagedError(CorruptError):
    """Rows of one table cannot be trusted; the upstream has them:
    add the table again from its checkpoint.
    """

    code = "ErrSorterTableDamaged"

    def __init__(self, message: str, table_id: int, lower_ts: int, upper_ts: int) -> None:
        """Name the damaged data of a table, and its range of commit_ts (both ends included)."""
        super().__init__(message)
        self.table_id, self.lower_ts, self.upper_ts = table_id, lower_ts, upper_ts


class BlockCorruptError(TableDamagedError):
    """A block on disk is damaged."""

    code = "ErrSorterBlockCorrupt"


class RowsLostError(TableDamagedError):
    """The rows read from a range are not those that were added to it."""

    code = "ErrSorterRowsLost"


class SorterDiskError(UnavailableError):
    """The disk refuses writes (it is full, or broken); no row was lost."""

    code = "ErrSorterDisk"


class IndexLostError(UnavailableError):
    """The index, which many tables share, is damaged: open the sorter again,
    and pull from the checkpoint.
    """

    code = "ErrSorterIndexLost"


class SorterClosedError(ClosedError):
    """The sorter was closed."""

    code = "ErrSorterClosed"
