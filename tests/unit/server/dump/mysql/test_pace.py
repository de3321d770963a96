"""How a round is paid for: what is allowed is kept on the average,
and a change of it counts at once.
"""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from server.dump.job import Job
from server.dump.mysql.pace import XA_TELL_S, LastRound, Refusals, Refused, XaWait
from storage.model.errors import CorruptError

ROUNDS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**9), st.floats(0, 100)), max_size=20
)


@given(ROUNDS, st.integers(1, 10**6), st.integers(0, 10**9))
def test_no_more_is_read_than_is_allowed(
    rounds: list[tuple[int, int, float]], rows_per_s: int, bytes_per_s: int
) -> None:
    job = Job("j", rows_per_s=rows_per_s, bytes_per_s=bytes_per_s)
    now, paid, rows, size = 0.0, LastRound(), 0, 0
    for more_rows, more_size, took_s in rounds:
        now = max(now, paid.until_s(job))
        paid = LastRound(now, more_rows, more_size, now + took_s)
        rows, size = rows + more_rows, size + more_size
    ended = paid.until_s(job)
    assert rows <= ended * rows_per_s * (1 + 1e-9) + 1e-6
    assert not bytes_per_s or size <= ended * bytes_per_s * (1 + 1e-9) + 1e-6


def test_another_pace_counts_for_the_rest_that_is_left() -> None:
    slow = Job("j", rows_per_s=10)
    paid = LastRound(5.0, 1000, 0, 6.0)
    assert paid.until_s(slow) == 105.0
    assert paid.until_s(replace(slow, rows_per_s=1000)) == 6.0
    assert paid.until_s(replace(slow, rows_per_s=0)) == 6.0


@given(st.integers(64, 65_536), st.integers(0, 10**6), st.integers(1, 16))
def test_a_round_takes_no_more_than_a_second_allows_or_the_least(
    rows: int, rows_per_s: int, parallel: int
) -> None:
    job = Job("j", rows_per_s=rows_per_s, parallel=parallel)
    assert job.rows_at_once(rows) <= rows
    assert not rows_per_s or job.rows_at_once(rows) * parallel <= max(rows_per_s, 64 * parallel)
    assert rows_per_s or job.rows_at_once(rows) == rows


def test_a_table_is_refused_for_good_the_third_time_in_a_row_in_one_version():
    refusals, error = Refusals(), CorruptError("why")
    of = [
        Refused(7, 0, error),
        Refused(7, 0, error),
        Refused(8, 0, error),
    ]  # two ranges of one table in one round
    assert refusals.last(of) == refusals.last(of) == []
    refusals.over(8)
    assert refusals.last(of) == [of[1]]
    assert refusals.last([Refused(7, 1, error)]) == [], "it is another table now"
    assert refusals.last(of[2:]) == []
    assert refusals.last(of[2:]) == [of[2]]
    refusals.clear()
    assert refusals.last(of) == []


def test_an_xa_transaction_that_does_not_end_is_told_and_slows_rounds_down() -> None:
    wait = XaWait()
    wait.note_waiting(frozenset({"78,", "7879,ff"}), 10.0)
    assert (wait.note(10.0), wait.rest_s(10.0)) == ("", 0.0)
    wait.note_waiting(frozenset({"78,", "7879,ff"}), 10.0 + XA_TELL_S)
    note = wait.note(10.0 + XA_TELL_S)
    assert "XA transaction X'78',X'' and 1 more is prepared" in note
    assert 0 < wait.rest_s(10.0 + XA_TELL_S) <= wait.rest_s(1000.0) == 1.0
    wait.note_waiting(frozenset(), 1000.0)
    assert (wait.note(1000.0), wait.rest_s(1000.0)) == ("", 0.0)
