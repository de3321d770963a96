"""Ports for servers that tests start, kill and start again:
none that the kernel gives to others in the meantime.

A port of 0 is good for a server that listens once. One that comes back at its old port may find it
taken by then: by a client's connection, or by another server that asked for any. So these lie below
the range that the kernel chooses from, each process of pytest-xdist has its own, and none is given
twice before all were.
"""

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

_KERNELS_CHOICE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _LAST, _SHARES = 11_000, 19_999, 8


def free_port() -> int:
    """A port that nobody listens on now."""
    return next(_free)


def free_ports(count: int) -> list[int]:
    """So many, all different."""
    return [next(_free) for _ in range(count)]


def _free_ports() -> Iterator[int]:
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SHARES
    ports = range(_FIRST + share, _last() + 1, _SHARES)
    start = random.SystemRandom().randrange(len(ports))  # another session may run beside this one
    while True:
        yield from filter(_is_free, ports[start:])
        start = 0


def _last() -> int:
    """The range's end; where the kernel chooses from nearly all ports, there is no better one."""
    lowest = int(_KERNELS_CHOICE.read_text().split()[0]) if _KERNELS_CHOICE.exists() else _LAST + 1
    return min(_LAST, lowest - 1) if lowest > _FIRST + 1000 else _LAST


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


_free = _free_ports()
