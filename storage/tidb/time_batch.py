"""Many packed dates at once: the integers of DATE, DATETIME and TIMESTAMP as days or microseconds since 1970."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from storage.tidb.binary import Mask
from storage.tidb.time import CoreTime

_MICROS_PER_SECOND = 1_000_000
_SECONDS_PER_DAY = 86_400
_MONTHS_BEFORE_1970 = 1970 * 12


def unpack_days(packed: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], Mask]:
    """Days since 1970-01-01, and which ones are days of the calendar: 0000-00-00 and 2023-00-10 are not."""
    date = (packed >> np.uint64(41)).astype(np.int64)
    day, months = date & 31, date >> 5
    year, month = months // 13, months % 13
    begin = _month_begin(year * 12 + month - 1)
    length = _month_begin(year * 12 + month) - begin
    known = (year >= 1) & (year <= 9999) & (month >= 1) & (day >= 1) & (day <= length)
    return begin + day - 1, known


def unpack_micros(packed: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], Mask]:
    """Microseconds since 1970-01-01 00:00:00, and which ones are moments of the calendar."""
    days, known = unpack_days(packed)
    clock = (packed >> np.uint64(24)).astype(np.int64)
    hour, minute, second = clock >> 12 & 31, clock >> 6 & 63, clock & 63
    micros = (packed & np.uint64(0xFFFFFF)).astype(np.int64)
    known &= (hour < 24) & (minute < 60) & (second < 60) & (micros < _MICROS_PER_SECOND)
    seconds = days * _SECONDS_PER_DAY + (hour * 60 + minute) * 60 + second
    return seconds * _MICROS_PER_SECOND + micros, known


def pack_micros(micros: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The packed form of microseconds since 1970, as `unpack_micros` reads it; 0 is 0000-00-00 00:00:00."""
    seconds, fraction = np.divmod(micros, _MICROS_PER_SECOND)
    days, clock = np.divmod(seconds, _SECONDS_PER_DAY)
    date = days.astype("datetime64[D]")
    months = date.astype("datetime64[M]")
    day = (date - months.astype("datetime64[D]")).astype(np.int64) + 1
    year, month = np.divmod(months.astype(np.int64) + _MONTHS_BEFORE_1970, 12)
    ymd = (year * 13 + month + 1) << 5 | day
    hms = clock // 3600 << 12 | clock // 60 % 60 << 6 | clock % 60
    packed: npt.NDArray[np.uint64] = np.where(micros == 0, 0, (ymd << 17 | hms) << 24 | fraction).astype(np.uint64)
    return packed


def moment_texts(packed: Iterable[int], digits: int, *, is_date: bool) -> list[str]:
    """As MySQL prints them, dates that no calendar has, too."""
    moments = map(CoreTime.unpack, packed)
    return [moment.date_text() if is_date else moment.text(digits) for moment in moments]


def _month_begin(months: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Days since 1970-01-01 of the first day of the month that follows that many months after year 0."""
    return (months - _MONTHS_BEFORE_1970).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
