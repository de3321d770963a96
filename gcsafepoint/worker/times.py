"""Durations and instants as mysql.tidb writes them (pure):
Go's "1h30m0s" and "20190715-12:12:14 +0000".

Source: Go time.ParseDuration and Duration.String; TiDB gcworker's GCTimeFormat.
"""

import datetime as dt
import re
from fractions import Fraction

from storage.model.errors import InvalidError

_UNITS_NS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_MAX_CHARACTERS = 128
_MAX_NS = 2**63 - 1


class DurationError(InvalidError):
    """The text is no Go duration."""

    code = "ErrDuration"


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
    for part in _PART.finditer(body[:_MAX_CHARACTERS]):
        if part.start() != end:
            break
        total += Fraction(part[1].rstrip(".")) * _UNITS_NS[part[2]]
        end = part.end()
    if not body or end != len(body) or len(text) > _MAX_CHARACTERS:
        raise DurationError(f"{text[:40]!r} is not a duration; write it like 10m, 1h30m or 1.5s")
    if total > _MAX_NS:
        raise DurationError(f"{text[:40]!r} is longer than 292 years")
    return sign * int(total)


def format_duration_ns(ns: int) -> str:
    """How Go prints a duration: "10m0s", "1.5s", "100ms", "0s"."""
    if ns < 0:
        return "-" + format_duration_ns(-ns)
    if ns < _UNITS_NS["s"]:
        unit = "ms" if ns >= _UNITS_NS["ms"] else "µs" if ns >= _UNITS_NS["us"] else "ns"
        return _decimal(ns, _UNITS_NS[unit]) + unit if ns else "0s"
    minutes, rest = divmod(ns, _UNITS_NS["m"])
    hours, minutes = divmod(minutes, 60)
    front = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{front}{_decimal(rest, _UNITS_NS['s'])}s"


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
