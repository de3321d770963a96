"""The GC variables of mysql.tidb: names, defaults, bounds,
and how their texts are read and shown (pure).

`GCConfig` is what an operator may set. `GCConfig.updated` takes variables by their names, reads
each text with a `parse_…` function, and reports all faults at once; `GCConfig.variables` shows the
values again. The leader reads the settings at every round. The other variables (`STATE_VARIABLES`)
are the worker's own.

Durations are Go's, "1h30m0s", within `Bounds`; instants are written "20190715-12:12:14 +0000";
sizes as TiKV reads them.

Source: TiDB 3.0's GC configuration and GCTimeFormat, Go time.ParseDuration and Duration.String;
`gc.max-write-bytes-per-sec` is TiKV's.
"""

import datetime as dt
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from storage.model.errors import InvalidError

DISTRIBUTED: Final = "distributed"
CENTRAL: Final = "central"
VARIABLE_PREFIX: Final = "tikv_gc_"
MAX_WRITE_BYTES: Final = "gc.max-write-bytes-per-sec"
STATE_VARIABLES: Final = (
    "tikv_gc_leader_uuid",
    "tikv_gc_leader_desc",
    "tikv_gc_leader_lease",
    "tikv_gc_last_run_time",
    "tikv_gc_safe_point",
)
COMMENTS: Final = {
    "tikv_gc_leader_uuid": "who is GC leader; kept by the workers, not for setting",
    "tikv_gc_leader_desc": "host, process and start of the GC leader; not for setting",
    "tikv_gc_leader_lease": "until when the GC leader leads unless it renews; not for setting",
    "tikv_gc_enable": "whether rounds run at all",
    "tikv_gc_run_interval": "from the start of one round to the start of the next; a Go duration, at least 10m",
    "tikv_gc_life_time": "how long old versions are kept; a Go duration, at least 10m",
    "tikv_gc_last_run_time": "when the last round began; not for setting",
    "tikv_gc_safe_point": "snapshots from here on can be read; not for setting",
    "tikv_gc_auto_concurrency": "take the number of stores as the concurrency",
    "tikv_gc_mode": f"who drives Do GC: each store ({DISTRIBUTED}), or the GC leader ({CENTRAL}, legacy)",
    "tikv_gc_concurrency": "stores worked on at a time when that is not automatic; 1 to 128",
    MAX_WRITE_BYTES: "bytes a second that Do GC may write at each store; 0: no limit",
}
"""The purpose of each variable, in the order in which they are shown."""
_MAX_CONCURRENCY = 128
_MS_NS = 10**6
_YEAR_MS = 365 * 24 * 3600 * 1000
_NUMBER = re.compile("[0-9]{1,3}")
_SIZE = re.compile(r"([0-9]{1,15})\s*([KMG]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_BYTES_OF_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MAX_BYTES = 1 << 40
_NS_OF_UNIT = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_DURATION_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION_MAX_CHARACTERS = 128
_DURATION_MAX_NS = 2**63 - 1


class GCConfigError(InvalidError):
    """GC cannot be configured so; the message lists every fault."""

    code = "ErrGCConfig"


class DurationError(InvalidError):
    """The text is no Go duration."""

    code = "ErrDuration"


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
            least, most = format_duration_ms(self.least_ms), format_duration_ms(self.most_ms)
            raise GCConfigError(f"{text[:40]!r} must be at least {least} and at most {most}")
        return duration_ms


BOUNDS: Final = Bounds()
UNBOUND: Final = Bounds(least_ms=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GCConfig:
    """The settings of GC that an operator may change; the defaults are TiDB's."""

    enable: bool = True
    """Whether rounds run at all."""
    run_interval_ms: int = 600_000
    """The time from the start of one round to the start of the next."""
    life_time_ms: int = 600_000
    """The time for which overwritten versions are kept."""
    mode: str = DISTRIBUTED
    """The driver of Do GC: each store by itself, or this worker region by region."""
    auto_concurrency: bool = True
    """Take the number of stores as the concurrency."""
    concurrency: int = 2
    """Stores worked on at a time when it is not automatic; never more than one worker a store."""
    max_write_bytes_per_s: int = 0
    """The bytes that Do GC may write at each store in a second, for the stores to read; 0: no
    limit.
    """

    def variables(self) -> dict[str, str]:
        """The values as mysql.tidb shows them."""
        return {
            "tikv_gc_enable": str(self.enable).lower(),
            "tikv_gc_run_interval": format_duration_ms(self.run_interval_ms),
            "tikv_gc_life_time": format_duration_ms(self.life_time_ms),
            "tikv_gc_mode": self.mode,
            "tikv_gc_auto_concurrency": str(self.auto_concurrency).lower(),
            "tikv_gc_concurrency": str(self.concurrency),
            MAX_WRITE_BYTES: format_size(self.max_write_bytes_per_s),
        }

    def stored(self) -> dict[str, str]:
        """The values as the metadata store keeps them: as shown, but sizes in plain bytes, for
        other programs.
        """
        return self.variables() | {MAX_WRITE_BYTES: str(self.max_write_bytes_per_s)}

    def updated(self, variables: Mapping[str, str], bounds: Bounds = BOUNDS) -> "GCConfig":
        """This configuration with `variables` set.

        Raises:
            GCConfigError: unknown names (with the nearest known one), state that is not for
                setting, bad values.
        """
        faults: list[str] = []
        values: dict[str, Any] = {}
        for name, text in variables.items():
            try:
                field, parse = _field(name, bounds)
                values[field] = parse(text)
            except (GCConfigError, DurationError) as err:
                faults.append(f"{name[:40]}: {err.message}")
        if faults:
            raise GCConfigError("; ".join(faults))
        return replace(self, **values)

    def workers(self, stores: int) -> int:
        """The number of stores that are worked on at the same time."""
        return stores if self.auto_concurrency else min(self.concurrency, stores)


def _field(name: str, bounds: Bounds) -> tuple[str, Callable[[str], Any]]:
    if name in STATE_VARIABLES:
        raise GCConfigError("this is the worker's own record and not for setting")
    fields: dict[str, tuple[str, Callable[[str], Any]]] = {
        "tikv_gc_enable": ("enable", parse_boolean),
        "tikv_gc_run_interval": ("run_interval_ms", bounds.milliseconds),
        "tikv_gc_life_time": ("life_time_ms", bounds.milliseconds),
        "tikv_gc_mode": ("mode", parse_mode),
        "tikv_gc_auto_concurrency": ("auto_concurrency", parse_boolean),
        "tikv_gc_concurrency": ("concurrency", parse_concurrency),
        MAX_WRITE_BYTES: ("max_write_bytes_per_s", parse_size),
    }
    if name not in fields:
        raise GCConfigError(f"no such variable, did you mean {nearest(name, fields)}?")
    return fields[name]


def nearest(name: str, names: Iterable[str]) -> str:
    """The known name that looks most like `name`."""
    return difflib.get_close_matches(name, list(names), n=1, cutoff=0.0)[0]


def parse_boolean(text: str) -> bool:
    """True or false, also 1 or 0; raises GCConfigError."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise GCConfigError(f"{text[:40]!r} is neither true nor false")
    return text.lower() in ("true", "1")


def parse_mode(text: str) -> str:
    """One of the two modes; raises GCConfigError."""
    if text.lower() not in (DISTRIBUTED, CENTRAL):
        raise GCConfigError(f"{text[:40]!r} is neither {DISTRIBUTED} nor {CENTRAL}")
    return text.lower()


def parse_concurrency(text: str) -> int:
    """1 to 128; raises GCConfigError."""
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= _MAX_CONCURRENCY:
        raise GCConfigError(f"{text[:40]!r} is not a number from 1 to {_MAX_CONCURRENCY}")
    return int(text)


def parse_size(text: str) -> int:
    """Bytes of "10MB" or "512KiB", powers of 1024 either way, as TiKV reads them;
    raises GCConfigError.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _BYTES_OF_UNIT[match[2].upper()] if match else -1
    if not 0 <= size <= _MAX_BYTES:
        raise GCConfigError(
            f"{text[:40]!r} is no size up to 1TiB; write it like 10MB, 512KB, or 0 for no limit"
        )
    return size


def format_size(size: int) -> str:
    """The size in the largest unit that divides it: "10MiB", "0"."""
    unit = next((name for name in ("G", "M", "K") if size and size % _BYTES_OF_UNIT[name] == 0), "")
    return f"{size // _BYTES_OF_UNIT[unit]}{unit}iB" if unit else str(size)


def format_duration_ms(duration_ms: int) -> str:
    """A duration as Go shows it."""
    return format_duration_ns(duration_ms * _MS_NS)


def parse_duration_ns(text: str) -> int:
    """Nanoseconds of a Go duration such as "1h30m", "1.5s" or "0".

    Raises:
        DurationError: it is not one, or longer than Go can hold (292 years).
    """
    sign = -1 if text.startswith("-") else 1
    body = text[1:] if text[:1] in ("-", "+") else text
    if body == "0":
        return 0
    total, end = Fraction(0), 0
    for part in _DURATION_PART.finditer(body[:_DURATION_MAX_CHARACTERS]):
        if part.start() != end:
            break
        total += Fraction(part[1].rstrip(".")) * _NS_OF_UNIT[part[2]]
        end = part.end()
    if not body or end != len(body) or len(text) > _DURATION_MAX_CHARACTERS:
        raise DurationError(f"{text[:40]!r} is not a duration; write it like 10m, 1h30m or 1.5s")
    if total > _DURATION_MAX_NS:
        raise DurationError(f"{text[:40]!r} is longer than 292 years")
    return sign * int(total)


def format_duration_ns(ns: int) -> str:
    """A duration as Go prints it: "10m0s", "1.5s", "100ms", "0s"."""
    if ns < 0:
        return "-" + format_duration_ns(-ns)
    if ns < _NS_OF_UNIT["s"]:
        unit = "ms" if ns >= _NS_OF_UNIT["ms"] else "µs" if ns >= _NS_OF_UNIT["us"] else "ns"
        return _decimal(ns, _NS_OF_UNIT[unit]) + unit if ns else "0s"
    minutes, rest = divmod(ns, _NS_OF_UNIT["m"])
    hours, minutes = divmod(minutes, 60)
    front = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{front}{_decimal(rest, _NS_OF_UNIT['s'])}s"


def format_instant(unix_ms: int) -> str:
    """A moment in UTC, to the second."""
    return dt.datetime.fromtimestamp(unix_ms // 1000, dt.UTC).strftime("%Y%m%d-%H:%M:%S %z")


def parse_instant_ms(text: str) -> int:
    """Milliseconds since the Unix epoch of what `format_instant` wrote.

    Raises:
        DurationError: it is not one.
    """
    try:
        return int(dt.datetime.strptime(text, "%Y%m%d-%H:%M:%S %z").timestamp()) * 1000
    except ValueError as err:
        raise DurationError(
            f"{text[:40]!r} is not an instant; it looks like 20190715-12:12:14 +0000"
        ) from err


def _decimal(ns: int, unit_ns: int) -> str:
    whole, rest = divmod(ns, unit_ns)
    fraction = str(rest).zfill(len(str(unit_ns)) - 1).rstrip("0") if rest else ""
    return f"{whole}.{fraction}" if fraction else str(whole)
