"""What can be wrong with a dump."""

from storage.model.errors import ConflictError, InvalidError, NotFoundError, UnavailableError


class DumpNotFoundError(NotFoundError):
    """The changefeed has no dump."""

    code = "ErrDumpNotExists"


class DumpStateError(ConflictError):
    """The dump's state does not allow it."""

    code = "ErrDumpStateRefused"


class DumpInvalidError(InvalidError):
    """The dump cannot be as it is asked for."""

    code = "ErrDumpInvalid"


class DumpUnsupportedError(InvalidError):
    """This way of replicating cannot be dumped as it is asked for."""

    code = "ErrDumpUnsupported"


class ChunkLostError(UnavailableError):
    """GC was faster than a chunk; it is read again by itself."""

    code = "ErrDumpSnapshotLost"


class RereadFailedError(UnavailableError):
    """A table that must be read again cannot be; cuts wait until it can."""

    code = "ErrDumpRereadFailed"


class TableDiffersError(InvalidError):
    """A table on the server is not the one that the log has told of so far; its chunk is read again
    when the log is further.
    """

    code = "ErrDumpTableDiffers"


class TableAwayError(UnavailableError):
    """A table is not pulled here now, or was pulled anew while it was read;
    its chunk is read again by itself.
    """

    code = "ErrDumpTableAway"
