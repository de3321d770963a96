"""Namespaces without a name and without a mount of ours:
each lives as long as the process that holds it.
"""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


class Namespace:
    """A network (`net`) or the mounts (`mnt`) of its own."""

    def __init__(self, kind: str, holder: subprocess.Popen[bytes]) -> None:
        self.pid = holder.pid
        self.inside: Sequence[str] = ("nsenter", f"--{_FLAGS[kind]}=/proc/{self.pid}/ns/{kind}")

    def run(self, *command: str) -> None:
        """Run a command inside."""
        run(*self.inside, *command)


_FLAGS = {"net": "net", "mnt": "mount"}


@contextmanager
def namespace(kind: str, life_s: int = 1800) -> Iterator[Namespace]:
    """A new namespace for the block, which is not longer than `life_s`."""
    ours = Path(f"/proc/self/ns/{kind}").readlink()
    holder = subprocess.Popen(["unshare", f"--{_FLAGS[kind]}", "sleep", str(life_s)])
    try:
        deadline = time.monotonic() + 60
        while Path(f"/proc/{holder.pid}/ns/{kind}").readlink() == ours:
            if holder.poll() is not None:
                pytest.skip("cannot make namespaces here")
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield Namespace(kind, holder)
    finally:
        holder.kill()
        holder.wait()


def run(*command: str) -> None:
    """Run a command to its end; it must succeed."""
    subprocess.run(command, check=True, capture_output=True, timeout=60)
