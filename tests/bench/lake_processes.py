"""What a process and all of its descendants cost: CPU, also of those that have ended,
and memory.
"""

import os
import signal
import threading
from pathlib import Path
from typing import NamedTuple, Self

_TICKS = os.sysconf("SC_CLK_TCK")
_PPID, _UTIME, _STIME, _CSTIME, _STARTED = 1, 11, 12, 14, 19  # in /proc/PID/stat, after the name
_LOOK_S = 1.0


def tree(pid: int) -> list[int]:
    """The process and its descendants, as they are now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(entry.name)):
            children.setdefault(int(fields[_PPID]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


class _Process(NamedTuple):
    pid: int
    started: str


class _Cost(NamedTuple):
    ticks: int
    is_forgotten: bool
    """Whether the system forgets it when the process ends, instead of adding it to the parent's."""


class Spent:
    """CPU seconds of a process and all that descend from it, also of those that have ended.

    The system adds what a child took to what its parent's children took, but not where the parent
    ignores that its children end. Spark's Python daemons do, and Spark ends their workers when they
    were idle for a minute. So these count as they were seen last; with `watching` they are seen
    once a second.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._costs: dict[_Process, _Cost] = {}
        self._forgotten_ticks = 0
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()

    @property
    def cpu_s(self) -> float:
        """So far."""
        with self._looking:
            self._look()
            ticks = sum(cost.ticks for cost in self._costs.values())
            return (ticks + self._forgotten_ticks) / _TICKS

    def by_part(self) -> dict[str, float]:
        """The same of a lake job: its driver, the JVM, and the Python workers under it."""
        driver, jvm = own_cpu_s(self.pid), sum(map(alone_cpu_s, _jvms(self.pid)))
        return {"driver": driver, "jvm": jvm, "workers": max(0.0, self.cpu_s - driver - jvm)}

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with self._looking:
                self._look()

    def _look(self) -> None:
        now = {}
        for pid in tree(self.pid):
            if fields := _stat(pid):
                ticks = sum(map(int, fields[_UTIME : _CSTIME + 1]))
                is_forgotten = pid != self.pid and _ignores_children(int(fields[_PPID]))
                now[_Process(pid, fields[_STARTED])] = _Cost(ticks, is_forgotten)
        ended = self._costs.keys() - now.keys()
        forgotten = (self._costs[process] for process in ended)
        self._forgotten_ticks += sum(cost.ticks for cost in forgotten if cost.is_forgotten)
        self._costs = now


def cpu_s(pid: int) -> float:
    """CPU seconds of the tree so far, where all parents wait for their children."""
    return sum(map(own_cpu_s, tree(pid)))


def own_cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    return sum(map(int, _stat(pid)[_UTIME : _CSTIME + 1])) / _TICKS


def alone_cpu_s(pid: int) -> float:
    """CPU seconds of a process without its children."""
    return sum(map(int, _stat(pid)[_UTIME : _STIME + 1])) / _TICKS


def rss_mb(pid: int) -> float:
    """Resident memory of the tree now, pages that are shared counted for each."""
    lines = (line for one in tree(pid) for line in _status(one) if line.startswith("VmRSS"))
    return sum(int(line.split()[1]) for line in lines) / 1024


def _jvms(job: int) -> list[int]:
    return [pid for pid in tree(job)[1:] if "Name:\tjava" in _status(pid)]


def _ignores_children(pid: int) -> bool:
    """Whether a process ignores that its children end."""
    ignored = next((line for line in _status(pid) if line.startswith("SigIgn:")), "SigIgn: 0")
    return bool(int(ignored.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)


def _status(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
