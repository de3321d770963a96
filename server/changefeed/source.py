"""Kinds of sources, and the source URI by which a changefeed names its source. Pure.

Each kind has one record, `SourceKind`, in one table, `KINDS`. A source is made of rooms that stand
above each other: its puller, its dump, its mounter, its composition in `server.capture.source` and
its upstream in `server.verify`. The record names what the other rooms need as `module:name`, like
the entry points of a Python package, and `load` imports it when it is used: a capture without MySQL
sources loads no SQL parser. What `cli source check` asks of a source is a list of `Check`s,
whatever its kind.

A source URI is `scheme://[user@]host[:port][,host[:port]…][/path][?option=value&…]`; an empty one
means the cluster that the capture belongs to. It is shown wherever a changefeed is, so it never
holds a secret, only the name of the file or variable with it.
"""

import difflib
import importlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.uri_secrets import check_reference, is_secret, masked, secret_option

from storage.model.errors import InvalidError
from storage.model.system_schemas import OF_MYSQL, OF_TIDB

ON_UNCLEAR_DDL: Final = "on-unclear-ddl"
FORCE_REPLICATE: Final = "force-replicate"
"""Options of source URIs that `changefeed create` has flags for."""


class SourceUriError(InvalidError):
    """The source URI cannot be used."""

    code = "ErrSourceURIInvalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind:
    """One kind of source; the fields that end with `_at` are entry points."""

    scheme: str
    """The scheme of its URIs; empty for the change feed of the capture's own cluster."""
    source_at: str
    """Its `server.puller.source.SourceFactory`."""
    table_at: str
    """Reads a `TableRecord` as a `SourceTable`; where `FORCE_REPLICATE` is among `flags`, it has an
    argument `force_replicate`, which takes tables without a key.
    """
    upstream_at: str
    """Its `server.verify.upstream.OpenUpstream`."""
    check_at: str = ""
    """Its `RunChecks`, for `cli source check`; empty: there is no check."""
    dumps_by_sql: bool = False
    """Whether its dump uses SQL, so that it takes conditions and can compute sums of rows."""
    flags: frozenset[str] = frozenset()
    """Options of its URI that flags of the command line set."""
    system_schemas: frozenset[str] = frozenset()
    """Schemas that no changefeed takes, in lower case."""
    of_cluster: bool = False
    """Whether its tables and timestamps are those of the capture's own cluster."""

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return f"{self.scheme}://" if self.scheme else "the cluster's own change feed"


KINDS: Final = {
    kind.scheme: kind
    for kind in (
        SourceKind(
            scheme="",
            source_at="server.capture.source.tidb:tidb_source",
            table_at="server.puller.tidb.table:tidb_table",
            upstream_at="server.verify.upstream:open_store",
            system_schemas=OF_TIDB,
            of_cluster=True,
        ),
        SourceKind(
            scheme="pump",
            source_at="server.capture.source.pump:PumpSource",
            table_at="server.puller.tidb.table:tidb_table",
            upstream_at="server.verify.upstream:open_store",
            system_schemas=OF_TIDB,
            of_cluster=True,
        ),
        SourceKind(
            scheme="mysql",
            source_at="server.capture.source.mysql:mysql_source",
            table_at="server.capture.source.mysql:mysql_table",
            upstream_at="server.verify.mysql_upstream:open_mysql",
            check_at="server.capture.source.mysql:check_mysql",
            dumps_by_sql=True,
            flags=frozenset({ON_UNCLEAR_DDL, FORCE_REPLICATE}),
            system_schemas=OF_MYSQL,
        ),
    )
}


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


def load(entry_point: str) -> Any:
    """Import the object that `module:name` names."""
    module, _, name = entry_point.partition(":")
    return getattr(importlib.import_module(module), name)


OK: Final = "ok"
WARNING: Final = "warning"
FAILURE: Final = "failure"


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer; `fix` is SQL or a line of configuration where that helps."""

    name: str
    state: str
    """A failure would make a target wrong or stop a changefeed; a warning is for the operator."""
    found: str
    why: str = ""
    fix: str = ""


class RunChecks(Protocol):
    """Looks at an upstream before a changefeed is created."""

    def __call__(
        self,
        uri: "SourceUri",
        rules: tuple[str, ...],
        read: Callable[[Any], object],
        *,
        target: str,
        write: bool,
    ) -> Iterator[Check]:
        """Yield the checks of tables that `rules` take; `read` raises an InvalidError if a
        `TableRecord` cannot be replicated to a sink of the format `target`. Only with `write` may a
        check leave rows at the upstream. Blocks; called in a thread.
        """


def scheme_of(text: str) -> str:
    """The scheme of a source URI, valid or not; empty: the cluster's own change feed."""
    return text.partition("://")[0]


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
        except ValueError:
            # Its text may hold what was taken for a host, a part of a password.
            raise SourceUriError(
                "the source URI cannot be read; write scheme://user@host:port?option=value"
            ) from None
        login, _, servers = parts.netloc.rpartition("@")
        # urlsplit ends the authority at the first `/`. A password with one would land in the
        # path, and the messages below would print it: look for a login in both.
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

    def check_options(self, option_names: Collection[str]) -> None:
        """Refuse options that the source does not know.

        Raises:
            SourceUriError: with those that it does.
        """
        unknown = sorted(self.options.keys() - set(option_names))
        if unknown:
            near = difflib.get_close_matches(unknown[0], option_names, n=1)
            meant = f", did you mean {near[0]}?" if near else "."
            raise SourceUriError(
                f"{self.scheme}:// sources have no option {', '.join(unknown)}{meant} They have "
                f"{', '.join(sorted(option_names))}"
            )


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


def takes_keyless(text: str) -> bool:
    """Whether a source URI also requests tables without a key.

    Raises:
        SourceUriError: it cannot be read.
    """
    return SourceUri.parse(text).options.get(FORCE_REPLICATE) == "true"


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
    # `%` may stand in the zone of an IPv6 address only, as in [fe80::1%eth0]: hosts are not
    # unquoted, so an escape elsewhere would name a host that does not exist.
    is_odd = server.endswith(":") or ("%" in server and not server.startswith("["))
    if not host or is_odd or (port and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise SourceUriError(f"{masked(server + '@')[:-1]!r} in the source URI is not host:port")
    return Address(host.removeprefix("[").removesuffix("]"), int(port or 0))
