"""How an async-commit transaction ends, from what its secondaries say."""

from collections.abc import Iterable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.lock_resolver import LockResolver, async_commit_ts
from server.rpc.tikv import BypassedLocks, KvClient
from storage.model.ts import compose

Answer = kvrpcpb.CheckSecondaryLocksResponse


def lock(min_commit_ts: int, *, async_commit: bool = True) -> kvrpcpb.LockInfo:
    return kvrpcpb.LockInfo(use_async_commit=async_commit, min_commit_ts=min_commit_ts)


@given(st.integers(1, 99), st.lists(st.lists(st.integers(1, 99), min_size=1), max_size=4))
def test_all_locked_is_committed_at_the_largest_min_commit_ts(
    primary: int, regions: list[list[int]]
) -> None:
    answers = [
        ([b"k"] * len(region), Answer(locks=[lock(ts) for ts in region])) for region in regions
    ]
    assert async_commit_ts(primary, answers) == max(
        [primary, *(ts for region in regions for ts in region)]
    )


@pytest.mark.parametrize("commit_ts", [0, 77])
def test_a_secondary_without_lock_has_decided_already(commit_ts: int) -> None:
    answers = [
        ([b"a"], Answer(locks=[lock(5)])),
        ([b"b", b"c"], Answer(locks=[lock(6)], commit_ts=commit_ts)),
    ]
    assert async_commit_ts(4, answers) == commit_ts


def test_a_secondary_with_an_ordinary_lock_means_an_ordinary_commit() -> None:
    assert async_commit_ts(4, [([b"a"], Answer(locks=[lock(5, async_commit=False)]))]) is None


class Clock:
    async def tso(self, count: int = 1) -> int:
        return NOW + count


class Answers:
    """Stands in for the stores: one transaction's status each, and what was resolved."""

    def __init__(self, by_start_ts: dict[int, kvrpcpb.CheckTxnStatusResponse]) -> None:
        self.by_start_ts = by_start_ts
        self.resolved: list[tuple[int, int]] = []

    async def check_txn_status(
        self, request: kvrpcpb.CheckTxnStatusRequest
    ) -> kvrpcpb.CheckTxnStatusResponse:
        return self.by_start_ts[request.lock_ts]

    async def resolve_lock(
        self, _: Iterable[bytes], start_version: int, commit_version: int
    ) -> None:
        self.resolved.append((start_version, commit_version))


Status = kvrpcpb.CheckTxnStatusResponse
NOW = compose(1000)


async def test_a_reader_passes_what_commits_later_or_never_and_waits_for_the_rest_only() -> None:
    kv = Answers(
        {
            NOW + 1: Status(commit_version=NOW + 50),
            NOW + 2: Status(commit_version=NOW + 51),
            NOW + 3: Status(),
            NOW + 4: Status(lock_ttl=9000, action=kvrpcpb.MinCommitTSPushed),
            NOW + 5: Status(lock_ttl=2000),
        }
    )
    locks = [
        kvrpcpb.LockInfo(lock_version=start_ts, key=b"k", primary_lock=b"p")
        for start_ts in kv.by_start_ts
    ]
    resolver = LockResolver(Clock(), cast("KvClient", kv))
    passing, wait_s = await resolver.resolve_for_read(locks, NOW + 50)
    assert passing == BypassedLocks(frozenset({NOW + 2, NOW + 3, NOW + 4}), frozenset({NOW + 1}))
    assert wait_s == pytest.approx(2.0)
    assert kv.resolved == [(NOW + 1, NOW + 50), (NOW + 2, NOW + 51), (NOW + 3, 0)]
    assert await resolver.resolve(locks, NOW + 50) == pytest.approx(2.0)
