"""Clocks that jump: a small C library in front of a process's calls for the time of day.

Kernels have no namespaces for the time of day. Go programs do not ask libc, so etcd keeps its time.
"""

import os
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")
_OFFSET = struct.Struct("<q")


def can_jump() -> bool:
    """Whether there is a compiler."""
    return shutil.which("cc") is not None


class Clock:
    """The time of day of one node."""

    def __init__(self, directory: Path, name: str) -> None:
        self._library = directory / "clock.so"
        self._file = directory / f"{name}.clock"
        self.set(0.0)
        if not self._library.exists():
            command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(self._library), str(_SOURCE)]
            subprocess.run([*command, "-ldl"], check=True, capture_output=True)

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that has this clock."""
        return {"LD_PRELOAD": str(self._library), "TIDEMARK_CHAOS_CLOCK": str(self._file)}

    def set(self, offset_s: float) -> None:
        """Let it be wrong by so much, from now on."""
        # Written in place: processes have the file mapped.
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(file, _OFFSET.pack(int(offset_s * 1e9)), 0)
        finally:
            os.close(file)
