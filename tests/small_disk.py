"""A small disk, to be filled: a tmpfs in a mount namespace of its own, which ends with the test's
process, whatever ends that.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

# until its standard input ends
_MOUNT = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo mounted && exec cat'


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """A file system of `size` (in tmpfs's form) for the block. It is mounted in the namespace of a
    child process, and seen through that process's /proc/PID/root.
    """
    directory.mkdir()
    command = ("unshare", "--mount", "sh", "-c", _MOUNT, "sh", size, str(directory))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            pytest.skip("cannot mount a tmpfs here")
        yield Path(f"/proc/{holder.pid}/root{directory.resolve()}")


def fill(disk: Path) -> Path:
    """Take all that is left of it; the file to remove for room."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    return filler
