"""A disk that is soon full: a tmpfs in a mount namespace of its own, which goes with us,
whatever kills us.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# until its standard input ends
_MOUNT = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo mounted && exec cat'


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """A file system of `size`, as tmpfs takes it, for the block; mounted for its holder only,
    seen through it.
    """
    directory.mkdir()
    command = ("unshare", "--mount", "sh", "-c", _MOUNT, "sh", size, str(directory))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            pytest.skip("cannot mount a tmpfs here")
        yield Path(f"/proc/{holder.pid}/root{directory.resolve()}")
