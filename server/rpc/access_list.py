"""The clients of a daemon and their rights: clients with roles, from a TOML file that is read again
when it changes (docs/security.md, *Roles*).

    [[client]]
    name = "dashboard"
    role = "read"
    token-sha256 = "…"            # or common-name = "…", of a certificate by mTLS
    changefeeds = ["shop-*"]      # optional: only these
    expires = 2027-01-01T00:00:00Z  # optional

A client proves who it is by a token, of which the file has the SHA-256 only, or by the common name
of its certificate. Whoever brings a token is judged by it alone: a wrong one is refused, whatever
the certificate says. Without a file every client that the port admits may do everything.
"""

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
from prometheus_client import Counter

from server.rpc.errors import StatusError
from server.rpc.reloaded import Reloaded
from storage.model.errors import InvalidError, TidemarkError

_ACCESS_REFUSED = Counter(
    "tidemark_rpc_access_refused_total",
    "Calls and requests refused to clients: `unauthenticated` if nobody knows who calls, "
    "`unauthorized` if the client's role or changefeeds do not allow it",
    ["reason"],
)
_ACCESS_RELOADS = Counter(
    "tidemark_rpc_access_reloads_total",
    "Changes of the file with the clients: `ok` if it is used, `failed` if it cannot be",
    ["outcome"],
)

FILE_BYTES_MAX: Final = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@ -]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEYS: Final = ("name", "role", "token-sha256", "common-name", "changefeeds", "expires")


class Right(Enum):
    """The rights that calls need, from the least to the highest."""

    SEE = "see"
    """States and positions: no rows."""
    ROWS = "rows"
    """Rows, and to acknowledge them, as a lake job does."""
    OPERATE = "operate"
    """Pause, resume, dump, drain: nothing that names hosts, files or sinks, or discards changes."""
    CLUSTER = "cluster"
    """The calls between a cluster's processes, in PD's, TiKV's, etcd's and Pump's protocols."""
    ADMIN = "admin"
    """All else."""


CLUSTER: Final = "cluster"
"""The role of databases and daemons of the cluster."""
ROLES: Final[Mapping[str, frozenset[Right]]] = {
    "read": frozenset({Right.SEE}),
    "lake": frozenset({Right.SEE, Right.ROWS}),
    "operate": frozenset({Right.SEE, Right.OPERATE}),
    CLUSTER: frozenset({Right.SEE, Right.ROWS, Right.CLUSTER}),
    "admin": frozenset(Right),
}
"""The rights of each role."""


class AccessFileError(InvalidError):
    """The file with the clients cannot be used."""

    code = "ErrAccessFile"


class UnauthenticatedError(StatusError):
    """The caller has no valid token or certificate."""

    code = "ErrUnauthenticated"

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.UNAUTHENTICATED, message)

    __str__ = TidemarkError.__str__


class ForbiddenError(StatusError):
    """The client is known, and has no right to this call."""

    code = "ErrUnauthorized"

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.PERMISSION_DENIED, message)

    __str__ = TidemarkError.__str__


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the access file."""

    name: str
    role: str
    changefeeds: tuple[str, ...] = ()
    """Patterns of ids with `*` and `?`; empty: all changefeeds, and calls that are about none."""
    expires: datetime | None = None

    def may_see(self, changefeed: str) -> bool:
        """Whether the client may see a changefeed."""
        return not self.changefeeds or any(
            fnmatchcase(changefeed, pattern) for pattern in self.changefeeds
        )

    def check(self, right: Right, what: str, changefeed: str | None = None) -> None:
        """Refuse a call, which messages name as `what`, unless the client has the right;
        `changefeed` is the one it is about, None: none in particular.

        Raises:
            ForbiddenError: the client may not.
        """
        self.check_role(right, what)
        if changefeed is None:
            # What is of no changefeed concerns all: a client of some may look at it only.
            if self.changefeeds and right is not Right.SEE:
                raise _forbidden(
                    f"client {self.name!r} is for some changefeeds only, and {what} is of none"
                )
        elif not self.may_see(changefeed):
            raise _forbidden(
                f"client {self.name!r} is for the changefeeds {', '.join(self.changefeeds)}, not "
                f"for {changefeed[:256]!r}"
            )

    def check_role(self, right: Right, what: str) -> None:
        """Refuse a call unless the client's role has the right, whatever changefeed it is about.

        Raises:
            ForbiddenError: the client may not.
        """
        if right not in ROLES[self.role]:
            roles = " or ".join(role for role, rights in ROLES.items() if right in rights)
            raise _forbidden(
                f"client {self.name!r} has the role {self.role}, which may not {what}: that takes "
                f"{roles}"
            )


EVERYBODY: Final = Client("", "admin")
"""The client of a daemon without an access file."""


class Access(Protocol):
    """Finds the client by its token or certificate."""

    def client(self, tokens: Sequence[bytes], names: Iterable[bytes] = ()) -> Client:
        """The client with these tokens, over a connection whose certificate has these common names.

        Raises:
            UnauthenticatedError: nobody who is known.
        """
        ...

    def state(self) -> tuple[int, ...]:
        """A value that changes whenever `client` may answer otherwise."""
        ...


class OpenAccess:
    """Implements `Access` without a file: every client may do everything."""

    def client(self, tokens: Sequence[bytes], names: Iterable[bytes] = ()) -> Client:
        """See `Access`."""
        del tokens, names
        return EVERYBODY

    def state(self) -> tuple[int, ...]:
        """See `Access`."""
        return ()


class AccessFile:
    """Implements `Access` by a file; for any thread. A change that cannot be used changes nothing,
    and the log says so.
    """

    def __init__(self, path: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Read it.

        Raises:
            AccessFileError: it cannot be used.
        """
        self._now = now
        self._clients: Reloaded[Clients] = Reloaded(
            [path], lambda: _read(path), _ACCESS_RELOADS, "the clients' file"
        )

    def client(self, tokens: Sequence[bytes], names: Iterable[bytes] = ()) -> Client:
        """See `Access`."""
        clients = self._clients.current()
        client = clients.of_tokens(tokens) if tokens else clients.of_names(tuple(names))
        if client.expires is not None and client.expires <= self._now():
            raise _unauthenticated(
                f"the access of client {client.name!r} has ended at {client.expires.isoformat()}"
            )
        return client

    def state(self) -> tuple[int, ...]:
        """See `Access`."""
        clients, now = self._clients.current(), self._now()
        listed = (*clients.by_digest.values(), *clients.by_name.values())
        ended = sum(each.expires is not None and each.expires <= now for each in listed)
        return self._clients.version, ended


@cache
def open_access(path: str) -> Access:
    """The clients of a file; without a path, everybody.

    A daemon's ports share what this returns, so that a change of the file is read, logged and
    counted once.

    Raises:
        AccessFileError: the file cannot be used.
    """
    return AccessFile(path) if path else OpenAccess()


def digest(token: bytes) -> str:
    """The SHA-256 of a token, as the file has it."""
    return hashlib.sha256(token).hexdigest()


@dataclass(frozen=True, slots=True)
class Clients:
    """All clients of a file, by token and by certificate."""

    by_digest: Mapping[str, Client]
    by_name: Mapping[bytes, Client]

    def of_tokens(self, tokens: Sequence[bytes]) -> Client:
        """The client that has these tokens; raises UnauthenticatedError."""
        clients = {self.by_digest.get(digest(token)) for token in tokens}
        if len(clients) == 1 and (client := clients.pop()) is not None:
            return client
        raise _unauthenticated(
            "the token is none of this daemon's clients'; see its --access-file, and the token's "
            "own file"
        )

    def of_names(self, names: Sequence[bytes]) -> Client:
        """Return the client whose certificate has these names; raises UnauthenticatedError."""
        # Engines differ in which of several names they call *the* name, so all must be one client.
        clients = {self.by_name.get(name) for name in names}
        if len(clients) == 1 and (client := clients.pop()) is not None:
            return client
        if names:
            shown = b", ".join(names).decode(errors="backslashreplace")[:256]
            raise _unauthenticated(
                f"the common name {shown!r} of your certificate is none of this daemon's clients'; "
                "bring a token (--token-file), or add the name to its --access-file"
            )
        raise _unauthenticated(
            "this daemon answers known clients only: bring a token, as `tidemark cli --token-file "
            "FILE` and `authorization: Bearer TOKEN` do"
        )


def _read(path: str) -> Clients:
    try:
        with Path(path).open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as err:
        raise AccessFileError(
            f"cannot read the access file {path}: {err.strerror}; see --access-file"
        ) from None
    if len(text) > FILE_BYTES_MAX:
        raise AccessFileError(f"the access file {path} has more than {FILE_BYTES_MAX} bytes")
    try:
        return clients_of(text.decode(), path)
    except UnicodeDecodeError as err:
        raise AccessFileError(f"the access file {path} is not TOML: {err}") from None


def clients_of(text: str, path: str) -> Clients:
    """The clients of a file's text; `path` is for messages.

    Raises:
        AccessFileError: all that is wrong with it.
    """
    try:
        return _parsed(tomllib.loads(text))
    except (ValueError, RecursionError) as err:
        raise AccessFileError(f"the access file {path} is not TOML: {err}") from None
    except AccessFileError as err:
        raise AccessFileError(f"the access file {path} cannot be used: {err.message}") from None


def _parsed(document: dict[str, Any]) -> Clients:
    entries = document.pop("client", [])
    faults = [f"{key!r} is unknown: clients are [[client]]" for key in document]
    if not isinstance(entries, list) or not entries:
        raise AccessFileError("; ".join([*faults, "it has no [[client]], so nobody could call"]))
    by_digest: dict[str, Client] = {}
    by_name: dict[bytes, Client] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        wrong = _faults(entry)
        if not wrong:
            client = _client(entry)
            wrong += [f"there are two clients {client.name!r}"] if client.name in names else []
            names.add(client.name)
            wrong += _added(client, entry, by_digest, by_name)
        faults += [f"client {number}: {fault}" for fault in wrong]
    if faults:
        raise AccessFileError("; ".join(faults))
    return Clients(by_digest, by_name)


def _added(
    client: Client,
    entry: Mapping[str, Any],
    by_digest: dict[str, Client],
    by_name: dict[bytes, Client],
) -> list[str]:
    """Add a client to the list; returns the faults of its entry."""
    if "token-sha256" in entry:
        first = by_digest.setdefault(entry["token-sha256"], client)
    else:
        first = by_name.setdefault(entry["common-name"].encode(), client)
    return (
        []
        if first is client
        else [f"{first.name!r} and {client.name!r} have the same token or common name"]
    )


def _client(entry: Mapping[str, Any]) -> Client:
    return Client(
        entry["name"], entry["role"], tuple(entry.get("changefeeds", ())), entry.get("expires")
    )


def _faults(entry: Any) -> list[str]:
    """The faults of one [[client]]; no digest of a token is shown, though it is no secret."""
    if not isinstance(entry, dict):
        return ["it is no table"]
    faults = [f"{key!r} is none of {', '.join(_KEYS)}" for key in entry if key not in _KEYS]
    if not isinstance(name := entry.get("name"), str) or not _NAME.fullmatch(name):
        faults.append("name is 1 to 128 letters, digits, blanks or _.@-")
    if not isinstance(role := entry.get("role"), str) or role not in ROLES:
        faults.append(f"role is one of {', '.join(ROLES)}")
    if ("token-sha256" in entry) == ("common-name" in entry):
        faults.append("it has either token-sha256 or common-name")
    sha256, common_name = entry.get("token-sha256", "0" * 64), entry.get("common-name", "x")
    if not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256):
        faults.append("token-sha256 is 64 hexadecimal digits in lower case, of `sha256sum`")
    if not isinstance(common_name, str) or not common_name:
        faults.append("common-name is the name in a certificate")
    patterns = entry.get("changefeeds", ["*"])
    if (
        not isinstance(patterns, list)
        or not patterns
        or not all(isinstance(each, str) and each for each in patterns)
    ):
        faults.append("changefeeds is a list of ids or patterns; leave it out for all")
    expires = entry.get("expires", datetime.now(UTC))
    if not isinstance(expires, datetime) or expires.tzinfo is None:
        faults.append("expires is a time with its zone, such as 2027-01-01T00:00:00Z")
    return faults


def count_unauthenticated() -> None:
    """Count a call or request that is refused as nobody knows who makes it."""
    _ACCESS_REFUSED.labels("unauthenticated").inc()


def _unauthenticated(message: str) -> UnauthenticatedError:
    count_unauthenticated()
    return UnauthenticatedError(message)


def _forbidden(message: str) -> ForbiddenError:
    _ACCESS_REFUSED.labels("unauthorized").inc()
    return ForbiddenError(message)
