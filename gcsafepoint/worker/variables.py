"""How the text of one variable is read, shown and refused (pure). Source: TiDB's mysql.tidb, TiKV's readable sizes."""

import re
from dataclasses import dataclass
from typing import Final

from gcsafepoint.worker.times import format_duration_ns, parse_duration_ns
from storage.model.errors import InvalidError

DISTRIBUTED: Final = "distributed"
CENTRAL: Final = "central"
_MAX_CONCURRENCY = 128
_MS_NS = 10**6
_YEAR_MS = 365 * 24 * 3600 * 1000
_NUMBER = re.compile("[0-9]{1,3}")
_SIZE = re.compile(r"([0-9]{1,15})\s*([KMG]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MAX_BYTES = 1 << 40


class GCConfigError(InvalidError):
    """GC cannot be configured so; the message lists every fault."""

    code = "ErrGCConfig"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Life time and run interval as TiDB bounds them: from 10 minutes to a year."""

    least_ms: int = 600_000
    most_ms: int = _YEAR_MS

    def milliseconds(self, text: str) -> int:
        """The duration `text`.

        Raises:
            DurationError: it is none.
            GCConfigError: it is out of bounds.
        """
        duration_ms = parse_duration_ns(text) // _MS_NS
        if not self.least_ms <= duration_ms <= self.most_ms:
            raise GCConfigError(
                f"{text[:40]!r} must be at least {shown(self.least_ms)} and at most {shown(self.most_ms)}"
            )
        return duration_ms


BOUNDS: Final = Bounds()
UNBOUND: Final = Bounds(least_ms=1)


def shown(duration_ms: int) -> str:
    """A duration as Go shows it."""
    return format_duration_ns(duration_ms * _MS_NS)


def boolean(text: str) -> bool:
    """True or false, also 1 or 0; raises GCConfigError."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise GCConfigError(f"{text[:40]!r} is neither true nor false")
    return text.lower() in ("true", "1")


def mode(text: str) -> str:
    """One of the two modes; raises GCConfigError."""
    if text.lower() not in (DISTRIBUTED, CENTRAL):
        raise GCConfigError(f"{text[:40]!r} is neither {DISTRIBUTED} nor {CENTRAL}")
    return text.lower()


def concurrency(text: str) -> int:
    """1 to 128; raises GCConfigError."""
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= _MAX_CONCURRENCY:
        raise GCConfigError(f"{text[:40]!r} is not a number from 1 to {_MAX_CONCURRENCY}")
    return int(text)


def size_bytes(text: str) -> int:
    """Bytes of "10MB" or "512KiB", powers of 1024 either way, as TiKV reads them; raises GCConfigError."""
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _UNITS[found[2].upper()] if found else -1
    if not 0 <= size <= _MAX_BYTES:
        raise GCConfigError(f"{text[:40]!r} is no size up to 1TiB; write it like 10MB, 512KB, or 0 for no limit")
    return size


def shown_size(size: int) -> str:
    """The size in the largest unit that divides it: "10MiB", "0"."""
    unit = next((name for name in ("G", "M", "K") if size and size % _UNITS[name] == 0), "")
    return f"{size // _UNITS[unit]}{unit}iB" if unit else str(size)
