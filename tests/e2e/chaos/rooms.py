"""A network of its own for each node, with one bridge between them, and disks that can be filled.

The harness starts itself again in namespaces of network, mounts and processes: nothing of the
machine is touched, and whatever kills the harness ends all that it has started. Where such
namespaces cannot be made, nodes share the machine's loopback, each with an address of its own.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.integration.coordinator.namespaces import namespace, run

_NET = "10.77.0"
_BRIDGE = "chaos"
_INSIDE = "TIDEMARK_CHAOS_INSIDE"
_LIFE_S = 86_400
_NOBODY = "02:00:00:00:00:ff"
"""An Ethernet address that no wire has: what is sent to it is lost without a word."""
_BALLAST = "ballast"
_MIB = bytes(1 << 20)
# netem loses packets at random; a kernel without it has a queue that is soon full, which loses
# whole bursts.
_SLOW = (
    ("netem", "delay", "40ms", "20ms", "loss", "15%"),
    ("tbf", "rate", "256kbit", "burst", "4kb", "limit", "9000"),
)


def enter_namespaces() -> None:
    """Go on inside, in a process that takes this one's place; return where that cannot be, or is
    done already.
    """
    if _INSIDE in os.environ or not _can_unshare():
        return
    command = [*_unshare(), sys.executable, "-m", "tests.e2e.chaos", *sys.argv[1:]]
    os.execvpe(command[0], command, os.environ | {_INSIDE: "1"})


def _unshare() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    kinds = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *as_root, *kinds]


def _can_unshare() -> bool:
    probe = "ip link add probe type veth peer name other && mount -t tmpfs tmpfs /mnt"
    try:
        done = subprocess.run(
            [*_unshare(), "sh", "-c", probe], capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


class Room:
    """Where one node runs."""

    def __init__(self, address: str, inside: Sequence[str] = (), wire: str = "") -> None:
        self.address = address
        self.inside = inside
        """What is put in front of a command, so that it runs there."""
        self._wire = wire

    def cut(self) -> None:
        """Nothing gets in or out any more, and nobody is told."""
        run("bridge", "link", "set", "dev", self._wire, "state", "0")

    def mend(self) -> None:
        """End `cut` and `slow`."""
        run("bridge", "link", "set", "dev", self._wire, "state", "3")
        for inside, wire in ((self.inside, "eth0"), ((), self._wire)):
            with contextlib.suppress(subprocess.CalledProcessError):
                run(*inside, "tc", "qdisc", "del", "dev", wire, "root")

    def slow(self) -> None:
        """Packets to and from it are late, and some are lost."""
        for inside, wire in ((self.inside, "eth0"), ((), self._wire)):
            _slow(inside, wire)

    def stop_sending_to(self, other: "Room") -> None:
        """What it sends to another room is lost; the other way stays as it is."""
        _neighbour(self, "replace", other, "lladdr", _NOBODY, "nud", "permanent")

    def send_to(self, other: "Room") -> None:
        """End `stop_sending_to`."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _neighbour(self, "del", other)


def _slow(inside: Sequence[str], wire: str) -> None:
    for discipline in _SLOW:
        with contextlib.suppress(subprocess.CalledProcessError):
            run(*inside, "tc", "qdisc", "replace", "dev", wire, "root", *discipline)
            return


def _neighbour(room: Room, verb: str, other: Room, *more: str) -> None:
    run(*room.inside, "ip", "neighbour", verb, other.address, *more, "dev", "eth0")


class Disk:
    """A small file system of its own over a directory."""

    def __init__(self, directory: Path, size_mib: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(directory))
        self._directory = directory
        self._ballast = directory / _BALLAST

    def fill(self) -> None:
        """Leave no room in it."""
        with (
            contextlib.suppress(OSError),
            self._ballast.open("ab", buffering=0) as file,
        ):
            while True:
                file.write(_MIB)

    def free(self) -> None:
        """End `fill`."""
        self._ballast.unlink(missing_ok=True)

    def close(self, *, keep: bool) -> None:
        """Unmount it; with `keep`, what is in it stays in the directory."""
        kept = self._directory.with_suffix(".kept")
        if keep:
            run("cp", "--archive", str(self._directory), str(kept))  # sockets, too
        run("umount", "--lazy", str(self._directory))
        if keep:
            self._directory.rmdir()
            kept.rename(self._directory)


class Rooms:
    """All rooms of one run."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._count = 0
        self.keep_disks = True
        """Whether somebody will want to see what is on them."""
        self.isolated = _INSIDE in os.environ
        """Whether rooms have networks and disks of their own."""
        if self.isolated:
            run("ip", "link", "set", "lo", "up")
            run("ip", "link", "add", _BRIDGE, "type", "bridge")
            run("ip", "addr", "add", f"{_NET}.1/24", "dev", _BRIDGE)
            run("ip", "link", "set", _BRIDGE, "up")

    def add(self) -> Room:
        """One more room, with an address that no other has."""
        self._count += 1
        if not self.isolated:
            return Room(f"127.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}.{self._count}")
        space = self._stack.enter_context(namespace("net", _LIFE_S))
        wire, address = f"wire{self._count}", f"{_NET}.{self._count + 9}"
        peer = ("peer", "name", "eth0", "netns", str(space.pid))
        run("ip", "link", "add", wire, "type", "veth", *peer)
        run("ip", "link", "set", wire, "master", _BRIDGE, "up")
        space.run("ip", "link", "set", "lo", "up")
        space.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        space.run("ip", "link", "set", "eth0", "up")
        return Room(address, space.inside, wire)

    def add_disk(self, directory: Path, size_mib: int) -> Disk:
        """A small one over a directory, for as long as the rooms are there."""
        disk = Disk(directory, size_mib)
        self._stack.callback(lambda: disk.close(keep=self.keep_disks))
        return disk
