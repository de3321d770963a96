"""The salt with which columns are hashed: a file that every capture has, and `verify`.

Only its path is kept, and a check value, so that a file with another salt is noticed before
a value has two hashes. The salt itself is in no record, log, message or argument.
"""

import hmac
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from sink.masking import HASH
from storage.model.errors import InvalidError, UnavailableError

BYTES_MIN: Final = 16
BYTES_MAX: Final = 4096
_CHECKED: Final = b"tidemark: the check value of a salt"
_CHECK_DIGITS: Final = 16


class SaltFileError(InvalidError):
    """The file of the salt cannot be used."""

    code = "ErrSaltFileInvalid"


class SaltUnavailableError(UnavailableError):
    """The salt of a changefeed cannot be read here, or is another one than at its creation."""

    code = "ErrSaltUnavailable"


@dataclass(frozen=True, slots=True)
class Salt:
    """The path of a salt and its check value."""

    path: str
    check: str

    @classmethod
    def read(cls, path: str) -> "Salt":
        """The salt of a new changefeed.

        Raises:
            SaltFileError: the file cannot be read, or is too short to be a secret.
        """
        if not path.startswith("/"):
            raise SaltFileError(f"--salt-file {path!r}: give the whole path, as captures see it")
        try:
            return cls(path, _check_value(_content(path)))
        except OSError as err:
            raise SaltFileError(
                f"the capture cannot read the salt file {path}: {err.strerror or err}; put the same "
                "file on every capture, for the user that runs it"
            ) from None

    @classmethod
    def parse(cls, document: dict[str, Any]) -> "Salt":
        """Read what `to_document` made; raises KeyError."""
        return cls(document["file"], document["check"])

    def to_document(self) -> dict[str, Any]:
        """The file's path and the check value, as a table's record holds them."""
        return {"file": self.path, "check": self.check}

    def secret(self) -> bytes:
        """The salt; read once a process.

        Raises:
            SaltUnavailableError: it is not there, or another one.
        """
        return _secret(self.path, self.check)


@cache
def _secret(path: str, check: str) -> bytes:
    # An error is not kept: a file that is put there is found by the next attempt.
    try:
        content = _content(path)
    except (OSError, SaltFileError) as err:
        reason = err.message if isinstance(err, SaltFileError) else err.strerror or str(err)
        raise SaltUnavailableError(
            f"{HASH} needs the salt file {path}, which cannot be read here: {reason}. Put the file "
            "there, with the salt that the changefeed was created with"
        ) from None
    if not hmac.compare_digest(_check_value(content), check):
        raise SaltUnavailableError(
            f"the salt file {path} has another salt than when the changefeed was created: values "
            "would have other hashes than those at the target. Put the old one back, or create "
            "another changefeed with a new target"
        )
    return content


def _content(path: str) -> bytes:
    with Path(path).open("rb") as file:
        content = file.read(BYTES_MAX + 3).removesuffix(b"\n").removesuffix(b"\r")
    if not BYTES_MIN <= len(content) <= BYTES_MAX:
        raise SaltFileError(
            f"the salt file {path} must hold {BYTES_MIN} to {BYTES_MAX} bytes that nobody "
            "can guess, such as what `openssl rand -hex 32` prints"
        )
    return content


def _check_value(salt: bytes) -> str:
    return hmac.digest(salt, _CHECKED, "sha256").hex()[:_CHECK_DIGITS]
