"""Rows lost between the sorter and the reader are noticed,
at the latest where a counted place is handed out.
"""

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sink.errors import SinkRowsLostError
from sink.mounts import CheckedMount
from sink.staging import RowCounts
from storage.model.event import DELETE, INSERT, UPDATE, raw_batch

NAMES = {DELETE: "delete", UPDATE: "update", INSERT: "insert"}


def raw(ops: list[int]) -> pa.RecordBatch:
    count = len(ops)
    return raw_batch(
        range(1, count + 1), [0] * count, ops, [b"k"] * count, [b"v"] * count, [None] * count
    )


def mounted(rows: list[tuple[int, str]]) -> pa.RecordBatch:
    return pa.record_batch(
        {"_commit_ts": [ts for ts, _ in rows], "_op": pa.array([op for _, op in rows], pa.string())}
    )


def split(ops: list[int], changed: set[int]) -> list[tuple[int, str]]:
    """The rows of the mounter, with the updates of `changed` as delete and insert."""
    rows = []
    for number, op in enumerate(ops):
        names = ["delete", "insert"] if op == UPDATE and number in changed else [NAMES[op]]
        rows += [(number + 1, name) for name in names]
    return rows


ops = st.lists(st.sampled_from([DELETE, UPDATE, INSERT]), min_size=1, max_size=8)


@given(ops, st.sets(st.integers(0, 7)))
def test_an_update_may_become_two_rows_and_nothing_else_may_change(
    ops: list[int], changed: set[int]
) -> None:
    batch = mounted(split(ops, changed))
    assert CheckedMount(1, lambda _: batch)(raw(ops)) is batch


@given(ops, st.sets(st.integers(0, 7)), st.data())
def test_a_row_the_mounter_loses_or_doubles_is_an_error_with_table_and_range(
    ops, changed, data
) -> None:
    rows = split(ops, changed)
    at = data.draw(st.integers(0, len(rows) - 1))
    wrong = (
        rows[:at] + rows[at + 1 :]
        if data.draw(st.booleans())
        else [*rows[:at], rows[at], *rows[at:]]
    )
    with pytest.raises(SinkRowsLostError, match=rf"table 7, commit_ts 1 to {len(ops)}") as lost:
        CheckedMount(7, lambda _: mounted(wrong))(raw(ops))
    assert (lost.value.table_id, lost.value.lower_ts, lost.value.upper_ts) == (7, 1, len(ops))


parts = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=6)


def booked(gaps: list[list[int]]) -> tuple[RowCounts, list[int], int]:
    """A ledger with its rows' commit_ts, and where it ends."""
    ledger, rows, ts = RowCounts(3, 0), [], 0
    for part in gaps:
        for gap in part:
            ts += gap
            rows.append(max(ts, 1))
        ts = max(ts, 1)
        ledger.read(len(part))
        ledger.complete(ts)
        ts += 1
    return ledger, rows, ts - 1


@given(
    parts,
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12),
    st.integers(0, 20),
)
def test_ranges_that_have_their_rows_are_handed_out_however_often(gaps, ranges, dropped) -> None:
    ledger, rows, end = booked(gaps)
    for number, (first, length) in enumerate(ranges):
        if number == len(ranges) // 2:
            ledger.drop_up_to(min(dropped, end))
        kept = min(dropped, end) if number >= len(ranges) // 2 else 0
        start_ts = max(min(first, end), kept)
        end_ts = max(min(start_ts + length, end), start_ts)
        ledger.hand_out(start_ts, end_ts, sum(start_ts < ts <= end_ts for ts in rows))


@given(parts, st.integers(1, 6), st.data())
def test_reading_on_to_the_end_notices_every_lost_row(gaps, step, data) -> None:
    ledger, rows, end = booked(gaps)
    if not rows:
        return
    del rows[data.draw(st.integers(0, len(rows) - 1))]
    ends = [*range(0, end, step), end]
    with pytest.raises(SinkRowsLostError, match="table 3"):
        hand_out_all(ledger, rows, ends)


def hand_out_all(ledger: RowCounts, rows: list[int], ends: list[int]) -> None:
    for start_ts, end_ts in pairwise(ends):
        ledger.hand_out(start_ts, end_ts, sum(start_ts < ts <= end_ts for ts in rows))
