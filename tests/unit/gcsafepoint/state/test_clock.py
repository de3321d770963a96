"""What an outage or a jump between two leaders does to TTLs (gcsafepoint/state/records.py)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.state.records import Outage
from gcsafepoint.state.rules import NEVER_S
from gcsafepoint.state.service import steady_clock
from storage.meta.meta import KeyValue

SECONDS = st.integers(1, 1 << 33)


def reading(value: bytes, revision: int = 5) -> KeyValue:
    return KeyValue(b"clock", value, 1, revision, 1)


@given(SECONDS, st.integers(0, 1 << 43).map(lambda milli: milli / 1024), st.integers(1, 1 << 33))
def test_what_was_left_at_the_last_reading_is_left_now(
    read_at_s: int, now_s: float, left_s: int
) -> None:
    outage = Outage.since(reading(b"%d" % read_at_s), now_s)
    put_off = outage.put_off(read_at_s + left_s, 5)
    assert now_s + left_s <= put_off < now_s + left_s + 1


@pytest.mark.parametrize("expired_at", [NEVER_S, 0, -7])
def test_never_stays_never(expired_at: int) -> None:
    assert Outage(5, -100).put_off(expired_at, 1) == NEVER_S


def test_what_was_written_after_the_last_reading_stands() -> None:
    assert Outage(5, 100).put_off(1000, 6) == 1000
    assert Outage(5, 100).put_off(1000, 5) == 1100


def test_without_a_reading_there_was_no_outage() -> None:
    assert Outage.since(None, 1000.0).put_off(10, 1) == 10


def test_the_clock_of_a_leader_does_not_follow_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = steady_clock()
    before = clock()
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert before <= clock() < before + 60
