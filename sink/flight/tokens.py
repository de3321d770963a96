"""Tokens of readers: read from a file, found in a call's headers, and checked.

A token is in no message, log or repr of ours.
"""

import hashlib
import hmac
from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from storage.model.errors import InvalidError

MayRead: TypeAlias = Callable[[str], None]
"""Refuses a changefeed that a reader may not read; raises `ReaderRefusedError`."""


class TokenFileError(InvalidError):
    """The file with a token cannot be used."""

    code = "ErrTokenFile"


class ReaderUnknownError(Exception):
    """Nobody knows who calls; the text says what to do."""


class ReaderRefusedError(Exception):
    """It is known who calls, and this reader may not; the text says why."""


class Readers(Protocol):
    """Those who may read."""

    def admit(self, tokens: Sequence[bytes]) -> MayRead:
        """The rights of the reader that brings these tokens.

        Raises:
            ReaderUnknownError: it is nobody who is known.
        """
        ...


class OneToken:
    """Implements `Readers`: whoever has the token may read all. It keeps a digest only."""

    def __init__(self, token: str) -> None:
        # Digests have one length: what is compared tells nothing of the token's.
        self._digest = _digest(token.encode())

    def admit(self, tokens: Sequence[bytes]) -> MayRead:
        """See `Readers`."""
        if not tokens:
            raise ReaderUnknownError(
                "this capture wants a token; give its file as option tokenFile"
            )
        if not any(hmac.compare_digest(self._digest, _digest(token)) for token in tokens):
            raise ReaderUnknownError(
                "the token is not the one of this capture; compare tokenFile with its "
                "--flight-token-file"
            )
        return _everything


def read_token(path: str) -> str:
    """The token of a file, without white space around it.

    Raises:
        TokenFileError: it cannot be read, or holds none that a header can carry.
    """
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        why = err.strerror if isinstance(err, OSError) else "it is not ASCII text"
        raise TokenFileError(f"cannot read the token file {path}: {why}") from None
    if not token or not token.isprintable() or " " in token:
        raise TokenFileError(
            f"the token file {path} must hold one line of printable characters without spaces"
        )
    return token


def tokens_of(authorization: Iterable[str | bytes], *, basic: bool = False) -> list[bytes]:
    """The tokens in the values of `authorization` headers, `Bearer TOKEN`; with `basic` also the
    password of `Basic`, by which browsers and curl's `-u` bring one. All else is a wrong token.
    """
    return [_token(value, basic=basic) for value in authorization]


def _token(value: str | bytes, *, basic: bool) -> bytes:
    text = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    scheme, _, rest = text.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if basic and scheme.lower() == b"basic":
        try:
            return b64decode(rest.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""


def _everything(_changefeed: str) -> None:
    """Admits everybody."""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
