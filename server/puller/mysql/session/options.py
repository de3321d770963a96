"""How a `mysql://` source is reached: servers, login, TLS, and how its log is read. Pure.

    mysql://user@host[:port][,host[:port]…]?password-file=/path&tls=verify&ca=/path&cert=/path&key=/path
        &server-id=1700000000&heartbeat-ms=1000&connect-timeout-s=10&idle-row-ms=3000&checksum=verify
        &on-unclear-ddl=reread&max-clock-skew=10m

With several hosts the first that answers is read; all must have the same history (GTIDs).
"""

import re
from dataclasses import dataclass
from typing import Final, Self

from server.changefeed.source import Address, SourceUri, SourceUriError

DEFAULT_PORT: Final = 3306
_TLS = ("off", "require", "verify-ca", "verify")
_OPTIONS = (
    "password-file",
    "password-env",
    "tls",
    "ca",
    "cert",
    "key",
    "server-id",
    "heartbeat-ms",
    "connect-timeout-s",
    "idle-row-ms",
    "catalogue-check-s",
    "checksum",
    "on-unclear-ddl",
    "force-replicate",
    "max-clock-skew",
)
_DURATION = re.compile(r"(\d{1,9})(s|m|h|d)")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SKEW_MAX_MS = 36_500 * _UNIT_MS["d"]
_SERVER_ID_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MySqlOptions:
    """`server_id` 0: one is leased; `idle_row_ms` 0:
    no heartbeat rows are written while the server is idle.
    """

    addresses: tuple[Address, ...]
    user: str
    password_file: str = ""
    password_env: str = ""
    """The environment variable that holds the password, where there is no file."""
    tls: str = "off"
    ca: str = ""
    cert: str = ""
    key: str = ""
    server_id: int = 0
    heartbeat_ms: int = 1000
    """How often an idle server shows that it lives; three of them missing end the connection."""
    connect_timeout_s: float = 10.0
    checksum: str = "verify"
    """`trust` leaves the comparing of events with their checksums out,
    which takes half of the CPU.
    """
    on_unclear_ddl: str = "reread"
    """What becomes of a table whose stored values a DDL changes, which no event tells: its rows are
    read again by a dump that begins by itself, or (`stop`) the changefeed stops.
    """
    force_replicate: bool = False
    """Whether tables without a key are taken, as changelogs: each update is a delete and an insert,
    and what they held before is not dumped.
    """
    max_clock_skew_ms: int = 600_000
    """A transaction whose time in the log is later than the present by more than this does not move
    commit_ts on. In the URI a number with its unit: `10m` (the default), `30s`, `2h`, `7d`; from 1s
    to 36500d.
    """
    idle_row_ms: int = 3000
    """After so long without any transaction a heartbeat row is written, so that cuts move on."""

    catalogue_check_s: int = 60
    """How often the tables that were followed are compared with the server's catalogue, while the
    log stands still; 0: never.
    """

    @classmethod
    def of(cls, uri: SourceUri) -> Self:
        """Read a source URI.

        Raises:
            SourceUriError: it names no server or user, or an option is unknown or out of range.
        """
        uri.check_options(_OPTIONS)
        if not uri.addresses or not uri.user:
            raise SourceUriError(
                "a mysql:// source needs a user and a server: mysql://user@host:3306"
            )
        if uri.path.strip("/"):
            raise SourceUriError(
                "a mysql:// source has no path; choose tables by --filter 'schema.*'"
            )
        tls = _one_of(uri, "tls", _TLS[::-1] if "ca" in uri.options else _TLS)
        if tls.startswith("verify") and "ca" not in uri.options:
            raise SourceUriError(
                f"tls={tls} needs ca=/path, the certificates to check the server against"
            )
        if ("cert" in uri.options) != ("key" in uri.options):
            raise SourceUriError("cert and key in the source URI belong together")
        return cls(
            addresses=tuple(
                Address(server.host, server.port or DEFAULT_PORT) for server in uri.addresses
            ),
            user=uri.user,
            password_file=uri.options.get("password-file", ""),
            password_env=uri.options.get("password-env", ""),
            tls=tls,
            ca=uri.options.get("ca", ""),
            cert=uri.options.get("cert", ""),
            key=uri.options.get("key", ""),
            checksum=_one_of(uri, "checksum", ("verify", "trust")),
            on_unclear_ddl=_one_of(uri, "on-unclear-ddl", ("reread", "stop")),
            force_replicate=_one_of(uri, "force-replicate", ("false", "true")) == "true",
            max_clock_skew_ms=_duration_ms(uri, "max-clock-skew", "10m"),
            server_id=_number(uri, "server-id", 0, 1, _SERVER_ID_MAX),
            heartbeat_ms=_number(uri, "heartbeat-ms", 1000, 50, 60_000),
            connect_timeout_s=_number(uri, "connect-timeout-s", 10, 1, 600),
            idle_row_ms=_number(uri, "idle-row-ms", 3000, 0, 3_600_000),
            catalogue_check_s=_number(uri, "catalogue-check-s", 60, 0, 86_400),
        )


def _one_of(uri: SourceUri, name: str, choices: tuple[str, ...]) -> str:
    """The option, by default the first of the known values."""
    text = uri.options.get(name, choices[0])
    if text not in choices:
        raise SourceUriError(
            f"{name}={text!r} in the source URI: it is one of {', '.join(choices)}"
        )
    return text


def _number(uri: SourceUri, name: str, default: int, least: int, most: int) -> int:
    text = uri.options.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        raise SourceUriError(
            f"{name}={text!r} in the source URI: it is a whole number from {least} to {most}"
        )
    return int(text)


def _duration_ms(uri: SourceUri, name: str, default: str) -> int:
    text = uri.options.get(name, default)
    parts = _DURATION.fullmatch(text)
    duration_ms = int(parts[1]) * _UNIT_MS[parts[2]] if parts else 0
    if not 1000 <= duration_ms <= _SKEW_MAX_MS:
        raise SourceUriError(
            f"{name}={text!r} in the source URI: it is a number with its unit, as 30s, 10m, 2h or "
            "7d"
        )
    return duration_ms
