"""What makes a changefeed's record invalid."""

from storage.model.errors import InvalidError


class ChangefeedIdInvalidError(InvalidError):
    """The id cannot be a changefeed's."""

    code = "ErrInvalidChangefeedID"


class SinkUriError(InvalidError):
    """The sink URI cannot be used."""

    code = "ErrSinkURIInvalid"
