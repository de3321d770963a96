"""What a process and all of its descendants cost: CPU, also of those that have ended,
and memory.
"""

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PPID, _UTIME, _STIME, _CSTIME = 1, 11, 12, 15  # fields of /proc/PID/stat after the name


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


def cpu_s(pid: int) -> float:
    """CPU seconds of the tree so far."""
    stats = [_stat(one) for one in tree(pid)]
    return sum(int(ticks) for fields in stats for ticks in fields[_UTIME : _CSTIME + 1]) / _TICKS


def parts(job: int) -> dict[str, list[int]]:
    """The processes of a lake job: its driver, the JVM, and Python workers; the latter two may be
    none.
    """
    found: dict[str, list[int]] = {"driver": [job], "jvm": [], "workers": []}
    for pid in tree(job)[1:]:
        found["jvm" if _name(pid) == "java" else "workers"].append(pid)
    return found


def own_cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    return sum(int(ticks) for ticks in _stat(pid)[_UTIME : _CSTIME + 1]) / _TICKS


def alone_cpu_s(pid: int) -> float:
    """CPU seconds of a process without its children."""
    return sum(int(ticks) for ticks in _stat(pid)[_UTIME : _STIME + 1]) / _TICKS


def rss_mb(pid: int) -> float:
    """Resident memory of the tree now, pages that are shared counted for each."""
    found = 0
    for one in tree(pid):
        try:
            status = Path(f"/proc/{one}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        found += sum(
            int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")
        )
    return found / 1024


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
