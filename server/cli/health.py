"""`tidemark health ROLE`: whether the daemon of that role on this machine is ready.

Containers and service managers run it every few seconds, so it imports no daemon.
"""

import argparse
import http.client
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.cli.arguments import Parser
from server.config import HTTP_ADDRS, ConfigError, load, read_document, setting
from server.exit_status import EXIT_OK
from storage.model.errors import UnavailableError

ROLES: Final = tuple(HTTP_ADDRS)


class NotReadyError(UnavailableError):
    """A daemon does not serve."""

    code = "ErrDaemonNotReady"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listener:
    """The one setting of a daemon that matters here."""

    http_addr: str = setting("", "host:port of the daemon's /readyz")


def run(argv: Sequence[str]) -> int:
    """Ask the daemon's /readyz.

    Raises:
        NotReadyError: it does not answer, or says why it is not ready.
        ConfigError: its port is not known.
    """
    arguments = health_parser().parse_args(list(argv))
    address = _address(arguments)
    status, text = _readyz(address, float(arguments.timeout))
    if status != http.client.OK:
        raise NotReadyError(f"{arguments.role} at {address} is not ready: {text}")
    print(f"{arguments.role} at {address} is ready")
    return EXIT_OK


def health_parser() -> Parser:
    """The arguments of `tidemark health`."""
    parser = Parser(
        prog="tidemark health",
        epilog="The address is the http-addr that the daemon itself takes from --config, its "
        "TIDEMARK_…_HTTP_ADDR or its default. Status 0: ready; 1: not.",
    )
    parser.add_argument("role", choices=ROLES, help="the daemon; spark-keep is `spark keep`")
    parser.add_argument("--http-addr", default=None, help="host:port of its /readyz")
    parser.add_argument("--config", default=None, help="the daemon's configuration file")
    parser.add_argument(
        "--timeout",
        type=float,
        default=3.0,
        metavar="SECONDS",
        help="wait for at most this long (default: 3)",
    )
    return parser


def _address(arguments: argparse.Namespace) -> str:
    """Return the address to call; a daemon that listens on all addresses is called on loopback.

    Raises:
        ConfigError: the setting is no host and port, or the kernel chose the port.
    """
    configured = _configured(arguments)
    host, _, port = configured.rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"http-addr is host:port, not {configured!r}")
    if int(port) == 0:
        raise ConfigError(
            f"{arguments.role} listens on a port that the kernel chose; give it a fixed http-addr, "
            "and name it here by --http-addr"
        )
    return f"{_reachable(host)}:{port}"


def _configured(arguments: argparse.Namespace) -> str:
    role = arguments.role
    section = load(
        _Listener,
        role,
        document={role: _of_file(arguments.config, role)},
        environ=os.environ,
        flags={"http_addr": arguments.http_addr},
    )
    return section.http_addr or HTTP_ADDRS[role]


def _of_file(path: str | None, role: str) -> dict[str, Any]:
    if path is None:
        return {}
    from server.cli.daemon import SECTIONS

    section = read_document(path, SECTIONS).get(role, {})
    return {key: value for key, value in section.items() if key == "http-addr"}


def _reachable(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host  # a name
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host


def _readyz(address: str, timeout_s: float) -> tuple[int, str]:
    # Plain HTTP even where the daemon has a certificate: its port answers probes without one.
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as err:
        raise NotReadyError(f"nothing answers at {address}: {err}; does it run?") from err
    finally:
        connection.close()
