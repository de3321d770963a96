"""Source URIs: `scheme://[user@]host[:port][,host[:port]…][/path][?option=value&…]`; an empty one is the cluster. Pure.

A source URI is shown wherever a changefeed is: it never holds a secret, only the name of the file that does.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from storage.model.errors import InvalidError

_SECRET_OPTIONS: Final = ("password", "passwd", "pwd", "secret", "token")


class SourceUriError(InvalidError):
    """The source URI cannot be used."""

    code = "ErrSourceURIInvalid"


@dataclass(frozen=True, slots=True)
class Address:
    """One server; `port` 0 is the default of its kind. An IPv6 host has no brackets here."""

    host: str
    port: int = 0


@dataclass(frozen=True, slots=True)
class SourceUri:
    """The parts of a source URI; `scheme` is empty for the cluster's own change feed."""

    text: str
    scheme: str = ""
    user: str = ""
    addresses: tuple[Address, ...] = ()
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a source URI; no message of an error repeats a password.

        Raises:
            SourceUriError: it is none, or holds a password.
        """
        if not text:
            return cls("")
        try:
            parts = urlsplit(text)
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError as err:
            raise SourceUriError("the source URI cannot be read; write scheme://user@host:port?option=value") from err
        login, _, servers = parts.netloc.rpartition("@")
        _check_secrets(login, options)
        if not parts.scheme or not text.lower().startswith(f"{parts.scheme}://"):
            raise SourceUriError(f"the source URI {text!r} has no scheme; write one such as mysql://user@host:3306")
        if parts.fragment:
            raise SourceUriError("a source URI has no fragment; write # as %23")
        addresses = tuple(_address(server) for server in servers.split(",") if server)
        return cls(text, parts.scheme, unquote(login), addresses, unquote(parts.path), options)

    def check_options(self, known: Collection[str]) -> None:
        """Refuse options that the source does not know.

        Raises:
            SourceUriError: with those that it does.
        """
        unknown = sorted(self.options.keys() - set(known))
        if unknown:
            raise SourceUriError(
                f"{self.scheme}:// sources have no option {', '.join(unknown)}; they have {', '.join(sorted(known))}"
            )


def _check_secrets(login: str, options: Mapping[str, str]) -> None:
    if ":" in login or any(option.lower() in _SECRET_OPTIONS for option in options):
        raise SourceUriError(
            "a source URI holds no password, as it is shown and stored: write the password into a file that only the "
            "capture's user may read, on each capture, and name it with the option password-file=/path"
        )


def _address(server: str) -> Address:
    host, colon, port = server.rpartition(":")
    if not colon or port.endswith("]"):  # an IPv6 address without a port
        host, port = server, ""
    if not host or (port and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise SourceUriError(f"{server!r} in the source URI is not host:port")
    return Address(host.removeprefix("[").removesuffix("]"), int(port or 0))
