"""Listening sockets for an address as gRPC's users write it: `host:port`,
`[::]:port`, `localhost:0`, `unix:path`.
"""

import socket
from collections.abc import Sequence
from pathlib import Path

_BACKLOG = 4096


def listening(address: str) -> Sequence[socket.socket]:
    """One socket for each address the host has, all with the same port;
    a path that is a socket is taken over.

    Raises:
        OSError: one of them cannot be listened on; none is left open.
    """
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        if path.is_socket():
            path.unlink()
        return [_bound(socket.AF_UNIX, str(path), alone=False)]
    host, _, port = address.rpartition(":")
    sockets: list[socket.socket] = []
    try:
        number = int(port)
        for family, _, _, _, sockaddr in socket.getaddrinfo(
            host.strip("[]") or None, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sockets.append(
                _bound(family, (sockaddr[0], number, *sockaddr[2:]), alone=host != "[::]")
            )
            number = sockets[0].getsockname()[1]
            if host == "[::]":
                break
    except (OSError, ValueError) as err:
        for one in sockets:
            one.close()
        raise OSError(f"{address}: {err}") from err
    return sockets


def close(listener: socket.socket) -> None:
    """Listen no more; a path goes with its socket."""
    name = listener.getsockname()
    listener.close()
    if isinstance(name, str):
        Path(name).unlink(missing_ok=True)


def _bound(
    family: socket.AddressFamily, address: tuple[object, ...] | str, *, alone: bool
) -> socket.socket:
    """`alone`: an IPv6 address takes no IPv4 connections."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            # accepted ones inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, alone)
        bound.setblocking(False)  # noqa: FBT003 - positional in the library
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound
