"""Commit fences and batch ids: a commit_ts is complete only when nothing with it can follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sink.progress import Acquire, ResolvedTs, acquire_mode, advance_to
from storage.model.event import Position


@pytest.mark.parametrize(
    ("txn_finished", "split_txn", "mode"),
    [
        (True, True, Acquire.TRY),
        (True, False, Acquire.TRY),
        (False, False, Acquire.FORCE),
        (False, True, Acquire.BLOCK),
    ],
)
def test_memory_is_asked_for_by_the_rules_of_the_seed(
    txn_finished: bool, split_txn: bool, mode: Acquire
) -> None:
    assert acquire_mode(txn_finished=txn_finished, split_txn=split_txn) is mode


def test_a_commit_fence_completes_its_commit_ts() -> None:
    resolved = advance_to(
        last=Position.fence(9),
        current_commit_ts=9,
        previous_commit_ts=5,
        batch_id=1,
        split_txn=False,
    )
    assert resolved == ResolvedTs(9)
    assert resolved.mark == 9


def test_a_finished_transaction_does_not_complete_a_commit_ts_others_may_share() -> None:
    resolved = advance_to(
        last=Position(9, 3), current_commit_ts=9, previous_commit_ts=5, batch_id=7, split_txn=False
    )
    assert resolved == ResolvedTs(9, 7)
    assert resolved.mark == 8


def test_an_unfinished_transaction_goes_in_parts_only_when_it_may_be_split() -> None:
    half = {"last": Position(5, 1), "current_commit_ts": 9, "previous_commit_ts": 5, "batch_id": 7}
    assert advance_to(**half, split_txn=True) == ResolvedTs(9, 7)
    assert advance_to(**half, split_txn=False) == ResolvedTs(5)
    assert advance_to(**{**half, "previous_commit_ts": 0}, split_txn=False) is None


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9) | st.none()), min_size=2, max_size=2)
)
def test_batches_of_a_commit_ts_come_before_its_end_and_after_everything_below(pair) -> None:
    (ts, batch), (other_ts, other_batch) = pair
    left = ResolvedTs(ts) if batch is None else ResolvedTs(ts, batch)
    right = ResolvedTs(other_ts) if other_batch is None else ResolvedTs(other_ts, other_batch)
    assert (left < right) == ((ts, batch or 10) < (other_ts, other_batch or 10))
