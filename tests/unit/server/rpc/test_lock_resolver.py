"""How an async-commit transaction ends, from what its secondaries say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.lock_resolver import async_commit_ts

Answer = kvrpcpb.CheckSecondaryLocksResponse


def lock(min_commit_ts: int, *, async_commit: bool = True) -> kvrpcpb.LockInfo:
    return kvrpcpb.LockInfo(use_async_commit=async_commit, min_commit_ts=min_commit_ts)


@given(st.integers(1, 99), st.lists(st.lists(st.integers(1, 99), min_size=1), max_size=4))
def test_all_locked_is_committed_at_the_largest_min_commit_ts(primary: int, regions: list[list[int]]) -> None:
    answers = [([b"k"] * len(region), Answer(locks=[lock(ts) for ts in region])) for region in regions]
    assert async_commit_ts(primary, answers) == max([primary, *(ts for region in regions for ts in region)])


@pytest.mark.parametrize("commit_ts", [0, 77])
def test_a_secondary_without_lock_has_decided_already(commit_ts: int) -> None:
    answers = [([b"a"], Answer(locks=[lock(5)])), ([b"b", b"c"], Answer(locks=[lock(6)], commit_ts=commit_ts))]
    assert async_commit_ts(4, answers) == commit_ts


def test_a_secondary_with_an_ordinary_lock_means_an_ordinary_commit() -> None:
    assert async_commit_ts(4, [([b"a"], Answer(locks=[lock(5, async_commit=False)]))]) is None
