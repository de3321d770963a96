"""Reasons for which two sides cannot be compared; a difference is not an error."""

from storage.model.errors import InvalidError, UnavailableError


class VerifyChangefeedError(InvalidError):
    """The changefeed does not exist, or has no such table at the cut."""

    code = "ErrVerifyNotFound"


class VerifyUnsupportedError(InvalidError):
    """The request cannot be carried out, at that cut or at all."""

    code = "ErrVerifyUnsupported"


class VerifyHistoryError(InvalidError):
    """The upstream's history at the cut is gone, or too long to be undone."""

    code = "ErrVerifyHistoryGone"


class VerifyMovedError(UnavailableError):
    """One side has passed a schema change that the other one has not."""

    code = "ErrVerifySchemaMoved"


class VerifyBehindError(UnavailableError):
    """The server that answers does not have everything that the lake has yet."""

    code = "ErrVerifyUpstreamBehind"


class VerifyLakeError(UnavailableError):
    """The lake's reader failed; the message is its own."""

    code = "ErrVerifyLake"


class VerifyTimeoutError(UnavailableError):
    """There was no result within the time limit."""

    code = "ErrVerifyTimeout"
