"""Ports for servers that tests start, kill and start again: the kernel gives none of them to
anybody else in the meantime.

Port 0 is good for a server that listens once. One that is started again at its old port may find it
taken, by a client's connection or by another server that listens at port 0. So these ports lie
below the range that the kernel chooses from, each process of pytest-xdist has its own, and none is
given twice before all were.

Several test sessions may run at once, in different directories: a port belongs to the process that
has locked its byte of a file which all share, until that process ends. It is not enough to look
whether somebody listens: the server of another test may not have begun yet, or have been killed.
"""

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO

_KERNELS_CHOICE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOCKS = Path(tempfile.gettempdir()) / f"tidemark-test-ports-{os.getuid()}"
_FIRST, _LAST, _SHARES = 11_000, 19_999, 8


def free_port() -> int:
    """A port that nobody listens on now."""
    return next(_free)


def free_ports(count: int) -> list[int]:
    """Several different ports that nobody listens on now."""
    return [next(_free) for _ in range(count)]


def _free_ports() -> Iterator[int]:
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SHARES
    ports = range(_FIRST + share, _last() + 1, _SHARES)
    # Sessions that run beside each other seldom meet.
    start = random.SystemRandom().randrange(len(ports))
    while True:
        given = 0
        for port in ports[start:]:
            if _is_ours(port) and _is_free(port):
                given += 1
                yield port
        if not given and start == 0:
            raise RuntimeError("all ports are taken by sessions that run beside this one")
        start = 0


def _last() -> int:
    """The last port of the range; where the kernel chooses from nearly all ports, the usual one."""
    lowest = int(_KERNELS_CHOICE.read_text().split()[0]) if _KERNELS_CHOICE.exists() else _LAST + 1
    return min(_LAST, lowest - 1) if lowest > _FIRST + 1000 else _LAST


@cache
def _locks() -> IO[bytes]:
    # Opened once, and never closed: the kernel drops all locks of a process on a file when any of
    # its descriptors is closed.
    return _LOCKS.open("ab")


def _is_ours(port: int) -> bool:
    """Whether this process has the lock of the port, or gets it now; it has it until it ends."""
    try:
        fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


_free = _free_ports()
