"""Secrets of URIs. A URI says where a password is, `password-file=/path` or `password-env=NAME`,
and never holds one: such references are checked and read here, and text that may hold a secret is
masked.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from pyspark_tidemark.errors import SourceError

SECRET_VARIABLE = "TIDEMARK_SECRET_"  # noqa: S105 - a name begins so
"""Environment variables that a URI may name begin like this:
no other secret of a process can be sent to a host.
"""
_MASK = "***"
_REFERENCE = re.compile(r"(?i).*[-_](file|env|path)")
_SECRET = re.compile(
    r"(?i).*(pass|pwd|secret|token|credential|signature|(api|access|account|private)[-_]?key).*"
    r"|(.*[-_.])?(pw|psw|authorization|bearer|jwt|jaas|sig|sas|hmac|otp|pin)([-_.].*)?"
)
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_COLON = re.compile(r":|%3a", re.I)
_OPTION = re.compile(r"(?P<name>[^/?&;#=@]+)=")
_PASSWORD_BYTES_MAX = 1024


def masked(text: str) -> str:
    """Any URI, valid or not, with `***` wherever a secret may be;
    rather too much of it than too little.

    A password may itself hold `/`, `?`, `@` and `&`: what follows the first colon is hidden up to
    the last `@`, and what follows the first option that can be a secret up to the end.
    """
    scheme = SCHEME.match(text)
    begin = scheme.end() if scheme else 0
    rest = text[begin:]
    colon, at = _COLON.search(rest), rest.rfind("@")
    if colon is not None and colon.start() < at:
        rest = f"{rest[: colon.start()]}:{_MASK}{rest[at:]}"
    option = secret_option(rest)
    if option is not None:
        rest = f"{rest[: option.end()]}{_MASK}"
    return text[:begin] + rest


def secret_option(text: str) -> re.Match[str] | None:
    """The first option that may hold a secret, wherever it stands."""
    return next(
        (option for option in _OPTION.finditer(text) if is_secret(unquote(option["name"]))), None
    )


def is_secret(option: str) -> bool:
    """Whether an option of that name may hold a secret, not only say where it is."""
    return bool(_SECRET.fullmatch(option)) and not _REFERENCE.fullmatch(option)


def check_reference(options: Mapping[str, str]) -> None:
    """Check that a password is named in one way, and that a variable is one that URIs may name.

    Raises:
        SourceError: ErrTargetInvalid.
    """
    variable = options.get("password-env")
    if variable is None:
        return
    if "password-file" in options:
        raise SourceError(
            "ErrTargetInvalid",
            "password-file and password-env are two ways to one password: give one of them",
        )
    if not re.fullmatch(rf"{SECRET_VARIABLE}[A-Za-z0-9_]+", variable):
        raise SourceError(
            "ErrTargetInvalid",
            f"password-env={variable[:80]!r}: a URI may only name environment variables that "
            f"begin with {SECRET_VARIABLE}, as {SECRET_VARIABLE}LAKE",
        )


def read_secret(options: Mapping[str, str]) -> str:
    """The password that a URI names, without the line's end; empty if it names none. Not pure.

    Raises:
        SourceError: ErrCredentials.
    """
    if (variable := options.get("password-env")) is not None:
        check_reference(options)
        if variable not in os.environ:
            raise SourceError(
                "ErrCredentials",
                f"the environment variable {variable}, with the password, is not set",
            )
        return os.environ[variable]
    path = options.get("password-file", "")
    if not path:
        return ""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_PASSWORD_BYTES_MAX + 1).decode().rstrip("\r\n")
    except (OSError, ValueError) as err:
        cause = getattr(err, "strerror", None) or "it is no UTF-8 text"
        raise SourceError(
            "ErrCredentials", f"cannot read the password file {path}: {cause}"
        ) from None
    if len(content.encode()) > _PASSWORD_BYTES_MAX - 2 or "\n" in content:
        raise SourceError(
            "ErrCredentials",
            f"the password file {path} must hold one line with the password, no more",
        )
    return content
