"""DATE, DATETIME and TIMESTAMP as TiDB packs them into one unsigned integer,
and TIME as signed nanoseconds.

`CoreTime` is one of them. The functions on arrays give the same for many: days or microseconds
since 1970, and texts.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import numpy as np
import numpy.typing as npt

from storage.model.errors import InvalidError
from storage.tidb.binary import Mask

NANOS_PER_MICRO: Final = 1000
_MICROS_PER_SECOND = 1_000_000
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})(?:[ T](\d{2}):(\d{2}):(\d{2})(?:\.(\d{1,6}))?)?")
_DURATION = re.compile(r"(-?)(\d{1,3}):(\d{2}):(\d{2})(?:\.(\d{1,6}))?")
_SECONDS_PER_DAY = 86_400
_MONTHS_BEFORE_1970 = 1970 * 12


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
                self.year,
                self.month,
                self.day,
                self.hour,
                self.minute,
                self.second,
                self.microsecond,
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


def unpack_days(packed: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], Mask]:
    """Days since 1970-01-01, and which ones are days of the calendar:
    0000-00-00 and 2023-00-10 are not.
    """
    date = (packed >> np.uint64(41)).astype(np.int64)
    day, months = date & 31, date >> 5
    year, month = months // 13, months % 13
    begin = _month_begin(year * 12 + month - 1)
    length = _month_begin(year * 12 + month) - begin
    is_day = (year >= 1) & (year <= 9999) & (month >= 1) & (day >= 1) & (day <= length)
    return begin + day - 1, is_day


def unpack_micros(packed: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], Mask]:
    """Microseconds since 1970-01-01 00:00:00, and which ones are moments of the calendar."""
    days, is_moment = unpack_days(packed)
    clock = (packed >> np.uint64(24)).astype(np.int64)
    hour, minute, second = clock >> 12 & 31, clock >> 6 & 63, clock & 63
    micros = (packed & np.uint64(0xFFFFFF)).astype(np.int64)
    is_moment &= (hour < 24) & (minute < 60) & (second < 60) & (micros < _MICROS_PER_SECOND)
    seconds = days * _SECONDS_PER_DAY + (hour * 60 + minute) * 60 + second
    return seconds * _MICROS_PER_SECOND + micros, is_moment


def pack_micros(micros: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The packed form of microseconds since 1970, as `unpack_micros` reads it;
    0 is 0000-00-00 00:00:00.
    """
    seconds, fraction = np.divmod(micros, _MICROS_PER_SECOND)
    days, clock = np.divmod(seconds, _SECONDS_PER_DAY)
    date = days.astype("datetime64[D]")
    months = date.astype("datetime64[M]")
    day = (date - months.astype("datetime64[D]")).astype(np.int64) + 1
    year, month = np.divmod(months.astype(np.int64) + _MONTHS_BEFORE_1970, 12)
    ymd = (year * 13 + month + 1) << 5 | day
    hms = clock // 3600 << 12 | clock // 60 % 60 << 6 | clock % 60
    packed: npt.NDArray[np.uint64] = np.where(
        micros == 0, 0, (ymd << 17 | hms) << 24 | fraction
    ).astype(np.uint64)
    return packed


def moment_texts(packed: Iterable[int], digits: int, *, is_date: bool) -> list[str]:
    """Return the texts that MySQL prints, also of dates that no calendar has."""
    moments = map(CoreTime.unpack, packed)
    return [moment.date_text() if is_date else moment.text(digits) for moment in moments]


def _month_begin(months: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Days since 1970-01-01 of the first day of the month that follows that many months after year
    0.
    """
    return (
        (months - _MONTHS_BEFORE_1970)
        .astype("datetime64[M]")
        .astype("datetime64[D]")
        .astype(np.int64)
    )
