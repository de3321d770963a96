"""What can be wrong with a dump."""

from storage.model.errors import ConflictError, InvalidError, NotFoundError


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
