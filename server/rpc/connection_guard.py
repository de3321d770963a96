"""Bounds the connections of listeners that accept in C++ (gRPC's and Flight's), which do not show
their connections to Python.

The guard finds them among the process's open files. Several times a second it counts these, and
inspects them if there are enough for a bound to be exceeded. Connections of an address beyond its
share, and of all addresses beyond the listener's bound, are shut down; the listener takes that for
a client that disconnects.

The guard knows no calls. Of the addresses with the most connections it shuts down those on which
neither side has sent anything for the longest time. An eighth of the listener's bound is kept free
for connections that come between two looks.
"""

import asyncio
import errno
import os
import resource
import socket
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import structlog

from server.rpc.config import Limits
from server.rpc.listener import EVICTED, client_address

_LOOK_EVERY_S = 0.1
_MOST_OF_TIME = 0.1
"""The greatest part of one core that looking takes, however many connections there are."""
_LOOK_ANYWAY_S = 5.0
"""The greatest time between two counts of the files that are no sockets: a database may have closed
many of them since.
"""
_NEWCOMERS_PART = 8
"""1 / this of the listener's bound is kept free for connections that come between two looks."""
_FILES = "/proc/self/fd"
_TCP_INFO_BYTES, _LAST_SENT, _LAST_RECEIVED = 104, 44, 52
"""Offsets in Linux's `struct tcp_info` of two u32: milliseconds since data was sent,
and received.
"""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """An open connection of a listener: its file, the socket's inode, and its client."""

    file: int
    inode: int
    address: str


def allowed_each(counts: Sequence[int], most: int, share: int) -> int:
    """The number of connections that each address may keep: the greatest one, at most `share`, with
    which all addresses have at most `most` (max-min fairness).

    Addresses with fewer keep all of theirs. It is at least 1, so with more than `most` addresses
    there are more than `most` connections.
    """
    unassigned = most
    for number, count in enumerate(sorted(counts)):
        fair = unassigned // (len(counts) - number)
        if count > fair:
            return max(1, min(fair, share))
        unassigned -= count
    return share


class ConnectionGuard:
    """Guards one listener of this process; `run` it as a task beside the server."""

    def __init__(self, port: int, limits: Limits) -> None:
        self._port = port
        self._share = limits.most_connections_per_address
        most = limits.most_connections
        self._most = most - most // _NEWCOMERS_PART
        self._known: dict[int, tuple[int, Accepted | None]] = {}
        """Each socket by its file: its inode, and what it is if it is an open connection of the
        listener.
        """
        self._warned: set[str] = set()
        self._other_files = 0
        self._looked_s = 0.0

    async def run(self) -> None:
        """Look until cancelled; returns at once, with a warning, where the system is not Linux."""
        if not sys.platform.startswith("linux"):
            _log.warning(
                "connections of one address are not bounded here: this is not Linux",
                port=self._port,
            )
            return
        while True:
            took_s = 0.0
            if self._may_be_too_many(_count_open_files()):
                # In a thread: thousands of system calls, and the loop serves meanwhile.
                took_s = await asyncio.to_thread(self._timed_look)
            await asyncio.sleep(max(_LOOK_EVERY_S, took_s / _MOST_OF_TIME))

    def _may_be_too_many(self, files: int) -> bool:
        bound = min(self._share, self._most)
        if files <= bound:
            return False
        return (
            files - self._other_files > bound or time.monotonic() - self._looked_s > _LOOK_ANYWAY_S
        )

    def look(self) -> int:
        """Shut down the connections beyond the bounds; returns how many."""
        self._looked_s = time.monotonic()
        by_address: defaultdict[str, list[Accepted]] = defaultdict(list)
        accepted = self._accepted()
        for one in accepted:
            by_address[one.address].append(one)
        by_address.pop("", None)
        allowed = allowed_each([len(ones) for ones in by_address.values()], self._most, self._share)
        ended = 0
        for address, ones in by_address.items():
            if len(ones) > allowed:
                self._warn(address, allowed)
                ended += sum(map(_end, _most_silent(ones, len(ones) - allowed)))
        EVICTED.labels("guard").inc(ended)
        return ended

    def _timed_look(self) -> float:
        """CPU seconds of a look."""
        began_s = time.thread_time()
        self.look()
        return time.thread_time() - began_s

    def _accepted(self) -> list[Accepted]:
        """The listener's open connections; only sockets that are new since the last look are
        inspected.

        Sockets that are no open connections do not count as other files: many of them are closed by
        the next look, and as many new connections would go unnoticed.
        """
        inspected, self._known = self._known, {}
        self._other_files = 0
        for file in _open_files():
            with suppress(OSError):  # it may be closed meanwhile
                status = os.fstat(file)
                if not stat.S_ISSOCK(status.st_mode):
                    self._other_files += 1
                    continue
                inode = status.st_ino
                before = inspected.get(file)
                same = before is not None and before[0] == inode
                self._known[file] = (
                    before if same and before else (inode, self._inspected(file, inode))
                )
        return [one for _, one in self._known.values() if one is not None]

    def _inspected(self, file: int, inode: int) -> Accepted | None:
        try:
            with _borrowed(file) as connection:
                name = connection.getsockname()
                if not isinstance(name, tuple) or name[1] != self._port:
                    return None
                return Accepted(file, inode, client_address(connection.getpeername()))
        except OSError:
            return None  # a listening one, or one that is closed

    def _warn(self, address: str, allowed: int) -> None:
        if address not in self._warned:
            self._warned.add(address)
            _log.warning(
                "an address has more connections than it may have", address=address, allowed=allowed
            )


def _most_silent(connections: Sequence[Accepted], count: int) -> list[Accepted]:
    return sorted(connections, key=_silent_ms, reverse=True)[:count]


def _silent_ms(connection: Accepted) -> int:
    """Return for how many milliseconds neither side has sent anything; -1: the connection is
    closed.
    """
    try:
        with _borrowed(connection.file) as one:
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return -1
    sent, received = (
        int.from_bytes(info[at : at + 4], sys.byteorder) for at in (_LAST_SENT, _LAST_RECEIVED)
    )
    return min(sent, received)


def _end(connection: Accepted) -> bool:
    """Shut it down, if its file is still what it was."""
    # The file number may have been reused since it was looked at, so the duplicate's inode is
    # compared before it is shut down; shutting down is all we may do, since the file belongs to the
    # C library.
    with suppress(OSError), _duplicate(connection.file) as one:
        if os.fstat(one.fileno()).st_ino == connection.inode:
            one.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _count_open_files() -> int:
    # Linux since 6.2 says it as the directory's size, a hundred times as fast as by its names.
    with suppress(OSError):
        if count := os.stat(_FILES).st_size:  # noqa: PTH116 - ten times a second
            return count
    return len(_open_files())


def _open_files() -> Sequence[int]:
    try:
        return [int(name) for name in os.listdir(_FILES)]  # noqa: PTH208 - thousands of them, as names only
    except OSError:  # out of files: none is left to look with
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


@contextmanager
def _borrowed(file: int) -> Iterator[socket.socket]:
    """A socket object for a file that the C library owns, to read its options; it is detached, not
    closed, at the end.
    """
    connection = socket.socket(fileno=file)
    try:
        yield connection
    finally:
        connection.detach()


def _duplicate(file: int) -> AbstractContextManager[socket.socket]:
    """A socket object for a duplicate of the file: the owner may close its own at any time, and the
    number may be used for another file. Without a free file number it is the owner's.
    """
    try:
        return socket.socket(fileno=os.dup(file))
    except OSError as err:
        if err.errno == errno.EMFILE:
            return _borrowed(file)
        raise
