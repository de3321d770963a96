"""The readers' token: each call brings `authorization: Bearer <token>`,
compared in constant time, beside TLS.

The token is in no message, log or repr of ours.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow.flight as fl

from storage.model.errors import InvalidError

_HEADER: Final = "authorization"
_SCHEME: Final = "bearer"


class TokenFileError(InvalidError):
    """The file with the readers' token cannot be used."""

    code = "ErrTokenFile"


class TokenGuard(fl.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow is untyped
    """Lets calls with the token pass; keeps a digest of it only."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._digest = _digest(token.encode())

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str | bytes]]) -> None:  # noqa: ARG002 - the base's
        """Refuse a call without the token.

        Raises:
            FlightUnauthenticatedError: there is none, or another one.
        """
        sent = [
            value for name, values in headers.items() if name.lower() == _HEADER for value in values
        ]
        if not sent:
            raise _refused("this capture wants a token; give its file as option tokenFile")
        if not any(hmac.compare_digest(self._digest, _digest(_token(value))) for value in sent):
            raise _refused(
                "the token is not the one of this capture; compare tokenFile with its "
                "--flight-token-file"
            )


def read_token(path: str) -> str:
    """The token of a file, without white space around it.

    Raises:
        TokenFileError: it cannot be read, or holds none that a header can carry.
    """
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        why = err.strerror if isinstance(err, OSError) else "it is not ASCII text"
        raise TokenFileError(
            f"cannot read the token file {path}: {why}; see --flight-token-file"
        ) from None
    if not token or not token.isprintable() or " " in token:
        raise TokenFileError(
            f"the token file {path} must hold one line of printable characters without spaces"
        )
    return token


def _token(value: str | bytes) -> bytes:
    text = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    scheme, _, token = text.partition(b" ")
    return token.strip() if scheme.lower() == _SCHEME.encode() else b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _refused(why: str) -> Exception:
    refused: Exception = fl.FlightUnauthenticatedError(f"[TM:ErrUnauthenticated] {why}")
    return refused
