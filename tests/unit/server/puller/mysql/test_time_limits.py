"""Odd times move nothing, and each transaction gets the same commit_ts whenever,
and from wherever, it is read.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.changefeed.source import SourceUri, SourceUriError
from server.puller.mysql.log.position import STEP, TimeLimit, TimeLimits
from server.puller.mysql.session.options import MySqlOptions
from storage.model.errors import CorruptError
from storage.model.ts import compose, physical_ms

SKEW_MS = 600
NOW_MS = 1_700_000_000_000


@dataclass
class Reader:
    """Reads transactions with time limits that are kept, at a present that goes on."""

    time_limits: TimeLimits = field(default_factory=lambda: TimeLimits.accepting(0))
    saved: bytes = b""
    odd: int = 0

    def read(self, previous_ts: int, times: list[int], present_ms: int) -> list[int]:
        array = np.array(times, np.int64)
        ts, undecided = self.time_limits.commit_timestamps(previous_ts, array)
        if undecided is not None:
            before = int(ts[undecided - 1]) if undecided else previous_ts
            decision = self.time_limits.decide(before, array[undecided:], present_ms + SKEW_MS)
            self.odd += len(decision.odd_ms)
            self.saved = decision.time_limits.to_json()
            self.time_limits = TimeLimits.from_json(self.saved)
            ts, undecided = self.time_limits.commit_timestamps(previous_ts, array)
            assert undecided is None
        return ts.tolist()


@st.composite
def transactions(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Times in the log, and when each transaction was committed."""
    now_ms, found = NOW_MS, []
    for _ in range(draw(st.integers(1, 40))):
        now_ms += draw(st.sampled_from([0, 1, 50, 400, 700, 5000]))
        off_ms = draw(st.sampled_from([0, 0, 0, 0, -3_600_000, 300, 599, 601, 900, 1500, 10**12]))
        found.append((now_ms + off_ms, now_ms))
    return found


@given(transactions(), st.lists(st.integers(0, 40), max_size=6), st.data())
def test_a_transaction_has_the_same_commit_ts_whenever_it_is_read(
    log: list[tuple[int, int]], cuts: list[int], data: st.DataObject
) -> None:
    """First as it is written; then again from any transaction on, in other pieces,
    at any later present.
    """
    reader = Reader()
    first: list[int] = []
    start_ts = compose(NOW_MS - 1)
    for time_ms, now_ms in log:
        delay_ms = data.draw(st.sampled_from([0, 0, 300, 2000]))
        first += reader.read(first[-1] if first else start_ts, [time_ms], now_ms + delay_ms)
    assert first == sorted(set(first))
    kept = TimeLimits.from_json(reader.saved)
    for begin in sorted({0, *(cut % len(log) for cut in cuts)}):
        again = Reader(kept)
        later_ms = log[-1][1] + data.draw(st.sampled_from([0, 500, 10**9]))
        split = data.draw(st.integers(begin, len(log)))
        seen: list[int] = []
        for piece in (log[begin:split], log[split:]):
            before = (seen or first[:begin] or [start_ts])[-1]
            seen += again.read(before, [time_ms for time_ms, _ in piece], later_ms)
        assert seen == first[begin:]
        assert again.time_limits.limits == kept.limits, "nothing was decided anew"


@given(transactions())
def test_commit_ts_are_never_further_ahead_than_the_skew(log: list[tuple[int, int]]) -> None:
    reader = Reader()
    ts = compose(NOW_MS - 1)
    for time_ms, now_ms in log:
        (ts,) = reader.read(ts, [time_ms], now_ms)
        assert physical_ms(ts) <= now_ms + SKEW_MS


def test_transactions_behind_an_odd_one_have_their_own_times() -> None:
    reader = Reader()
    ts = reader.read(
        compose(NOW_MS), [NOW_MS + 1, NOW_MS + 10**12, NOW_MS + 10**12, NOW_MS + 2], NOW_MS + 3
    )
    assert ts == [
        compose(NOW_MS + 1),
        compose(NOW_MS + 1) + STEP,
        compose(NOW_MS + 1) + 2 * STEP,
        compose(NOW_MS + 2),
    ]
    assert reader.odd == 2


def test_a_log_that_is_read_hours_late_needs_one_judgement() -> None:
    """A replica's log has the primary's times; times of the past are believed,
    the order of the log is kept.
    """
    reader = Reader()
    times = [NOW_MS - 7_200_000 + 1000 * number for number in range(7200)]
    ts = reader.read(0, times, NOW_MS)
    assert ts == [compose(time_ms) for time_ms in times]
    assert (reader.odd, len(reader.time_limits.limits)) == (0, 1)


def test_a_clock_that_jumps_back_an_hour_stands_until_it_has_caught_up() -> None:
    reader = Reader()
    ahead = reader.read(0, [NOW_MS], NOW_MS)[0]
    behind = reader.read(ahead, [NOW_MS - 3_600_000, NOW_MS - 3_599_000], NOW_MS - 3_599_000)
    assert behind == [ahead + STEP, ahead + 2 * STEP]
    assert reader.odd == 0


def test_a_time_that_was_odd_stays_odd_when_the_present_has_come_to_it() -> None:
    reader = Reader()
    first = reader.read(0, [NOW_MS, NOW_MS + SKEW_MS + 100], NOW_MS)
    reader.read(first[-1], [NOW_MS + SKEW_MS + 200], NOW_MS + SKEW_MS + 200)
    assert len(reader.time_limits.limits) == 2
    assert (
        Reader(reader.time_limits).read(0, [NOW_MS, NOW_MS + SKEW_MS + 100], NOW_MS + 10**9)
        == first
    )


def test_the_clock_is_read_as_it_was_written_and_nothing_else_is() -> None:
    time_limits = TimeLimits([TimeLimit(0, 5, 7), TimeLimit(9, 10)])
    assert time_limits.to_json() == b'{"horizons":[[0,5,7],[9,10,-1]]}'
    assert TimeLimits.from_json(time_limits.to_json()).limits == time_limits.limits
    for damaged in (
        b"",
        b"[]",
        b"{}",
        b'{"horizons":[]}',
        b'{"horizons":[[1,2]]}',
        b'{"horizons":7}',
    ):
        with pytest.raises(CorruptError):
            TimeLimits.from_json(damaged)


@pytest.mark.parametrize(
    ("text", "skew_ms"),
    [("1s", 1000), ("10m", 600_000), ("2h", 7_200_000), ("36500d", 3153600000000)],
)
def test_the_skew_is_an_option_of_the_source(text: str, skew_ms: int) -> None:
    uri = SourceUri.parse(f"mysql://u@h?max-clock-skew={text}")
    assert MySqlOptions.of(uri).max_clock_skew_ms == skew_ms


@pytest.mark.parametrize("text", ["", "10", "0s", "m", "-1m", "36501d", "1w", "1.5h"])
def test_a_skew_without_a_unit_or_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(SourceUriError, match="max-clock-skew"):
        MySqlOptions.of(SourceUri.parse(f"mysql://u@h?max-clock-skew={text}"))
