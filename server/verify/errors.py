"""Why two sides cannot be compared; what differs is no error."""

from storage.model.errors import InvalidError, UnavailableError


class VerifyChangefeedError(InvalidError):
    """There is no such changefeed, or no such table in it at the cut."""

    code = "ErrVerifyNotFound"


class VerifyUnsupportedError(InvalidError):
    """The source has no history to read at a ts, or the sink is no lake that can be read at a cut."""

    code = "ErrVerifyUnsupported"


class VerifyHistoryError(InvalidError):
    """The upstream's GC has passed the cut."""

    code = "ErrVerifyHistoryGone"


class VerifyLakeError(UnavailableError):
    """The lake's reader failed; the message is its own."""

    code = "ErrVerifyLake"
