"""Source URIs: `scheme://[user@]host[:port][,host[:port]…][/path][?option=value&…]`;
an empty one is the cluster. Pure.

A source URI is shown wherever a changefeed is: it never holds a secret, only the name of the file
or variable with it.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.sink_uri import check_reference, is_secret, masked, secret_option

from server.changefeed.source_kind import KINDS, SourceKind
from storage.model.errors import InvalidError


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
            options = dict(
                parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
            )
        except ValueError as err:
            raise SourceUriError(
                "the source URI cannot be read; write scheme://user@host:port?option=value"
            ) from err
        login, _, servers = parts.netloc.rpartition("@")
        # a password may hold `/`
        _check_secrets(text, f"{parts.netloc}{parts.path}".rpartition("@")[0], options)
        if not parts.scheme or not text.lower().startswith(f"{parts.scheme}://"):
            raise SourceUriError(
                f"the source URI {masked(text)!r} has no scheme; write one such as "
                "mysql://user@host:3306"
            )
        if not all(re.fullmatch("[A-Za-z][A-Za-z0-9-]*", option) for option in options):
            raise SourceUriError(
                "the options of a source URI are option=value, joined by &; write & in a value as "
                "%26"
            )
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
                f"{self.scheme}:// sources have no option {', '.join(unknown)}; they have "
                f"{', '.join(sorted(known))}"
            )


def scheme_of(text: str) -> str:
    """The scheme of a source URI, valid or not; empty: the cluster's own change feed."""
    return text.partition("://")[0]


def find_kind(scheme: str) -> SourceKind:
    """The kind of source that a scheme names.

    Raises:
        SourceUriError: there is none.
    """
    kind = KINDS.get(scheme)
    if kind is None:
        schemes = ", ".join(each.shown for name, each in sorted(KINDS.items()) if name)
        raise SourceUriError(
            f"there are no {scheme}:// sources; leave --source-uri out to replicate from the "
            f"cluster, or use {schemes}"
        )
    return kind


def with_option(text: str, name: str, value: str) -> str:
    """A source URI with an option written anew; as it is, if `value` is empty.

    Raises:
        SourceUriError: it is of a source without such options.
    """
    if not value:
        return text
    kind = KINDS.get(scheme_of(text))
    if kind is None or name not in kind.flags:
        owners = " and ".join(each.shown for each in KINDS.values() if name in each.flags)
        raise SourceUriError(f"{name}={value} is of {owners} sources only; leave it out")
    place, _, query = text.partition("?")
    others = [each for each in query.split("&") if each and each.partition("=")[0] != name]
    return f"{place}?{'&'.join([*others, f'{name}={quote(value)}'])}"


def _check_secrets(text: str, login: str, options: Mapping[str, str]) -> None:
    try:
        check_reference(options)
    except SourceError as err:
        raise SourceUriError(err.message) from None
    if ":" in unquote(login) or secret_option(text) or any(map(is_secret, options)):
        raise SourceUriError(
            "a source URI holds no password, as it is shown and stored: write the password into a "
            "file that only the capture's user may read, on each capture, and name it with the "
            "option password-file=/path, or set an environment variable TIDEMARK_SECRET_… of each "
            "capture and name that with password-env="
        )


def _address(server: str) -> Address:
    host, colon, port = server.rpartition(":")
    if not colon or port.endswith("]"):  # an IPv6 address without a port
        host, port = server, ""
    is_odd = server.endswith(":") or ("%" in server and not server.startswith("["))
    if not host or is_odd or (port and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise SourceUriError(f"{masked(server + '@')[:-1]!r} in the source URI is not host:port")
    return Address(host.removeprefix("[").removesuffix("]"), int(port or 0))
