"""Errors of changefeeds; named as TiCDC's where TiCDC has the same one."""

from typing import Self

from server.changefeed.info import ChangefeedIdInvalidError, SinkUriError
from server.changefeed.source import SourceUriError
from server.changefeed.table import TableIneligibleError
from sink.flight.feeds import ChangefeedNotExistsError
from storage.model.errors import ConflictError, InvalidError, NotFoundError, UnavailableError

__all__ = [
    "ChangefeedExistsError",
    "ChangefeedFailedError",
    "ChangefeedIdInvalidError",
    "ChangefeedNotExistsError",
    "ChangefeedNotRunningError",
    "ChangefeedStateError",
    "GcTtlExceededError",
    "NotOwnerError",
    "ParameterError",
    "RenamedIntoFilterError",
    "SinkUriError",
    "SnapshotLostError",
    "SourceUriError",
    "StartTsBeforeGcError",
    "StartTsInFutureError",
    "TableIneligibleError",
    "TargetTsError",
]


class ChangefeedExistsError(ConflictError):
    """The id is taken."""

    code = "ErrChangeFeedAlreadyExists"


class ChangefeedStateError(ConflictError):
    """The changefeed's state does not allow it."""

    code = "ErrChangefeedUpdateRefused"


class ChangefeedUnreadableError(ConflictError):
    """The changefeed's records cannot be read by this version: it can only be removed."""

    code = "ErrChangefeedUnreadable"


class ChangefeedNotRunningError(UnavailableError):
    """The changefeed exists but no rows are pulled for it at this moment."""

    code = "ErrChangefeedNotRunning"


class TableMoveError(ConflictError):
    """The table cannot move; it stays where it is."""

    code = "ErrTableMoveRefused"


class ChangefeedFailedError(InvalidError):
    """The changefeed has failed for good: somebody must look at it."""

    code = "ErrChangefeedFailed"


class CaptureUnknownError(NotFoundError):
    """No capture has that id."""

    code = "ErrCaptureNotExist"


class CaptureAddressTakenError(ConflictError):
    """Another capture answers at the address that this one is to be reached by."""

    code = "ErrCaptureAddressTaken"


class LastCaptureError(ConflictError):
    """No other capture could take its place."""

    code = "ErrCaptureCannotDrain"


class NotOwnerError(UnavailableError):
    """Another capture owns the changefeeds, or none does yet."""

    code = "ErrNotOwner"


class ChangeInterruptedError(UnavailableError):
    """No answer says whether a change is in force: the capture lost the changefeed while it changed
    it, or the metadata did not answer.
    """

    code = "ErrChangeInterrupted"

    @classmethod
    def by_metadata(cls, changefeed: str, err: UnavailableError) -> Self:
        """The metadata gave no answer to the change, but `err`."""
        return cls(
            f"whether changefeed {changefeed} is changed, or made, is not known, as the metadata "
            f"gave no answer ({err.message}): see `tidemark cli changefeed query -c {changefeed}`, "
            "or send the same request with the same request_id again"
        )


class AuditUnsupportedError(InvalidError):
    """An audit was requested where nothing can be compared."""

    code = "ErrAuditUnsupported"


class ParameterError(InvalidError):
    """A parameter of the request cannot be used."""

    code = "ErrAPIInvalidParam"


class RenamedIntoFilterError(InvalidError):
    """A table whose earlier rows were not replicated gets a name that is."""

    code = "ErrSyncRenameTableFailed"


class StartTsBeforeGcError(InvalidError):
    """The history after start_ts may be collected already."""

    code = "ErrStartTsBeforeGC"


class StartTsInFutureError(InvalidError):
    """start_ts has not been given out yet."""

    code = "ErrStartTsInFuture"


class SnapshotLostError(InvalidError):
    """GC has passed the checkpoint: changes that were not read yet are gone."""

    code = "ErrSnapshotLostByGC"


class TargetInRereadError(InvalidError):
    """The changefeed would end where a table is read again, and is not complete."""

    code = "ErrTargetInReread"


class GcTtlExceededError(SnapshotLostError):
    """The changefeed has failed for so long that its history is no longer kept for it."""

    code = "ErrGCTTLExceeded"


class TargetTsError(InvalidError):
    """target_ts is not after start_ts."""

    code = "ErrTargetTsBeforeStartTs"
