"""DATE, DATETIME and TIMESTAMP as TiDB packs them into one unsigned integer, and TIME as signed nanoseconds.

MySQL allows dates no calendar has (month or day zero, and 0000-00-00), so a date here is seven numbers, not a
`datetime`. A TIMESTAMP in a row is UTC. Source: Time.ToPackedUint; CoreTime's bit fields (inside binary JSON).
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from storage.model.errors import InvalidError

NANOS_PER_MICRO: Final = 1000
NULL_DATES: Final = "null"
SHOWN_DATES: Final = (NULL_DATES, "key-text", "text")
"""How a changefeed shows dates that no calendar has: as null, where one in a key stops it; or columns of dates, those
of keys or all of them, are text."""
ZERO_DATES: Final = "tidemark_zero_dates"
"""A member of a table's document that is ours: which of its columns of dates are text (`dates_as_text`)."""
_MICROS_PER_SECOND = 1_000_000
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})(?:[ T](\d{2}):(\d{2}):(\d{2})(?:\.(\d{1,6}))?)?")
_DURATION = re.compile(r"(-?)(\d{1,3}):(\d{2}):(\d{2})(?:\.(\d{1,6}))?")


@dataclass(frozen=True, slots=True, order=True)
class CoreTime:
    """A point on MySQL's calendar, which knows no time zone."""

    year: int = 0
    month: int = 0
    day: int = 0
    hour: int = 0
    minute: int = 0
    second: int = 0
    microsecond: int = 0

    @classmethod
    def unpack(cls, packed: int) -> "CoreTime":
        """Read a row's packed unsigned integer."""
        ymdhms, microsecond = packed >> 24, packed & 0xFFFFFF
        ymd, hms = ymdhms >> 17, ymdhms & 0x1FFFF
        year, month = divmod(ymd >> 5, 13)
        return cls(year, month, ymd & 31, hms >> 12, hms >> 6 & 63, hms & 63, microsecond)

    @classmethod
    def from_bits(cls, bits: int) -> "CoreTime":
        """Read the in-memory bit fields that binary JSON stores."""
        date = (bits >> 50, bits >> 46 & 15, bits >> 41 & 31)
        return cls(*date, bits >> 36 & 31, bits >> 30 & 63, bits >> 24 & 63, bits >> 4 & 0xFFFFF)

    @classmethod
    def parse(cls, text: str) -> "CoreTime":
        """Read `YYYY-MM-DD[ hh:mm:ss[.ffffff]]`.

        Raises:
            InvalidError: the text has another form.
        """
        match = _DATE.fullmatch(text)
        if match is None:
            raise InvalidError(f"{text!r} is not a date of the form YYYY-MM-DD[ hh:mm:ss[.ffffff]]")
        *parts, fraction = match.groups()
        year, month, day, hour, minute, second = (int(part or 0) for part in parts)
        return cls(year, month, day, hour, minute, second, int((fraction or "").ljust(6, "0")))

    @classmethod
    def of(cls, moment: datetime) -> "CoreTime":
        """The fields of `moment`, whose time zone is not looked at."""
        date = (moment.year, moment.month, moment.day)
        return cls(*date, moment.hour, moment.minute, moment.second, moment.microsecond)

    def pack(self) -> int:
        """The unsigned integer a row holds."""
        ymd = (self.year * 13 + self.month) << 5 | self.day
        hms = self.hour << 12 | self.minute << 6 | self.second
        return (ymd << 17 | hms) << 24 | self.microsecond

    def to_datetime(self) -> datetime | None:
        """The same moment without time zone; None for a date no calendar has."""
        try:
            return datetime(  # noqa: DTZ001 - DATETIME has no time zone; TIMESTAMP's caller adds UTC
                self.year, self.month, self.day, self.hour, self.minute, self.second, self.microsecond
            )
        except ValueError:
            return None

    def date_text(self) -> str:
        """`YYYY-MM-DD`."""
        return f"{self.year:04d}-{self.month:02d}-{self.day:02d}"

    def text(self, fsp: int) -> str:
        """`YYYY-MM-DD hh:mm:ss` with `fsp` digits of the second's fraction."""
        clock = f"{self.hour:02d}:{self.minute:02d}:{self.second:02d}"
        return f"{self.date_text()} {clock}{_fraction(self.microsecond, fsp)}"


def dates_as_text(setting: Any, *, in_key: bool) -> bool:
    """Whether a DATE, DATETIME or TIMESTAMP is text, so that 0000-00-00 and 2024-02-31 are values of it.

    `setting` is one of `SHOWN_DATES`, or None for the first.
    """
    return setting == "text" or (setting == "key-text" and in_key)


def duration_text(nanos: int, fsp: int) -> str:
    """TIME as MySQL prints it: `[-]hh:mm:ss` with `fsp` digits of the second's fraction."""
    seconds, micros = divmod(abs(nanos) // NANOS_PER_MICRO, _MICROS_PER_SECOND)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{'-' if nanos < 0 else ''}{hour:02d}:{minute:02d}:{second:02d}{_fraction(micros, fsp)}"


def parse_duration(text: str) -> int:
    """Nanoseconds of a TIME in the form `duration_text` gives.

    Raises:
        InvalidError: the text has another form.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidError(f"{text!r} is not a time of the form [-]hh:mm:ss[.ffffff]")
    sign, hour, minute, second, fraction = match.groups()
    seconds = (int(hour) * 60 + int(minute)) * 60 + int(second)
    micros = seconds * _MICROS_PER_SECOND + int((fraction or "").ljust(6, "0"))
    return (-micros if sign else micros) * NANOS_PER_MICRO


def _fraction(micros: int, fsp: int) -> str:
    return f".{micros:06d}"[: fsp + 1] if fsp > 0 else ""
