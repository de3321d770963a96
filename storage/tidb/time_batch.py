"""Many packed dates at once: the integers of DATE, DATETIME and TIMESTAMP as days or microseconds since 1970."""

import numpy as np
import numpy.typing as npt

from storage.tidb.binary import Mask

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


def _month_begin(months: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Days since 1970-01-01 of the first day of the month that follows that many months after year 0."""
    return (months - _MONTHS_BEFORE_1970).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
