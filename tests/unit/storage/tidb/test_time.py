from datetime import UTC, date, datetime, timedelta

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage.model.errors import InvalidError
from storage.tidb.time import CoreTime, duration_text, parse_duration, unpack_days, unpack_micros
from tests.unit.storage.tidb.values import CORE_TIMES

EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - MySQL's calendar has no time zone


@given(CORE_TIMES)
def test_a_packed_time_gives_back_its_fields(time: CoreTime) -> None:
    assert CoreTime.unpack(time.pack()) == time
    assert CoreTime.parse(time.text(6)) == time


@given(CORE_TIMES, CORE_TIMES)
def test_packed_times_sort_as_the_times(one: CoreTime, other: CoreTime) -> None:
    assert (one < other) == (one.pack() < other.pack())


@given(st.lists(CORE_TIMES))
@example(
    [
        CoreTime(),
        CoreTime(2023, 0, 1),
        CoreTime(2023, 2, 29),
        CoreTime(2024, 2, 29),
        CoreTime(1, 1, 1),
        CoreTime(0, 1, 1),
    ]
)
def test_a_batch_unpacks_like_one_by_one(times: list[CoreTime]) -> None:
    packed = np.array([time.pack() for time in times], np.uint64)
    days, day_known = unpack_days(packed)
    micros, known = unpack_micros(packed)
    expected = [time.to_datetime() for time in times]
    assert known.tolist() == day_known.tolist() == [moment is not None for moment in expected]
    for moment, day, micro in zip(expected, days.tolist(), micros.tolist(), strict=True):
        if moment is not None:
            assert date(1970, 1, 1) + timedelta(day) == moment.date()
            assert (moment - EPOCH) // timedelta(microseconds=1) == micro


@given(st.datetimes())
def test_a_datetime_gives_back_itself(moment: datetime) -> None:
    assert CoreTime.of(moment.replace(tzinfo=UTC)).to_datetime() == moment


@given(st.integers(-3_020_399_000_000, 3_020_399_000_000))
def test_a_duration_gives_back_its_text(micros: int) -> None:
    assert parse_duration(duration_text(micros * 1000, 6)) == micros * 1000


def test_durations_read_as_mysql_prints_them() -> None:
    assert duration_text(-3_020_398_999_999_000, 6) == "-838:59:58.999999"
    assert duration_text(0, 0) == "00:00:00"
    assert duration_text(1_500_000_000, 3) == "00:00:01.500"


@pytest.mark.parametrize("text", ["", "2023", "2023-1-2", "12:00", "now"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidError):
        CoreTime.parse(text)
    with pytest.raises(InvalidError):
        parse_duration(text)
