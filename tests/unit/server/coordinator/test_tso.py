"""The timestamp oracle: whatever the clock does, and however often it dies, timestamps grow."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.coordinator.errors import RequestError
from server.coordinator.ledger import Ledger
from server.coordinator.tso import WINDOW_MS, Oracle, TimestampOracle
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.ts import LOGICAL_MAX, compose

STEPS = st.lists(
    st.tuples(
        st.integers(-10_000, 10_000),  # how far the wall clock jumps, ms
        st.integers(1, LOGICAL_MAX),  # timestamps asked for
        st.booleans(),  # whether the process dies after it
    ),
    max_size=60,
)


@given(STEPS)
def test_timestamps_grow_over_clock_jumps_and_restarts(steps: list[tuple[int, int, bool]]) -> None:
    now_ms, saved_ms, last = 1_000_000, 0, 0
    oracle = Oracle(saved_ms)
    for jump_ms, count, dies in steps:
        now_ms = max(0, now_ms + jump_ms)
        while (taken := oracle.take(count, now_ms)) is None:
            saved_ms = oracle.wanted_limit(now_ms)
            oracle.limit_ms = saved_ms
        ts = compose(*taken)
        assert ts - count + 1 > last
        assert taken[0] < saved_ms
        assert taken[1] <= LOGICAL_MAX
        last = ts
        if dies:
            oracle = Oracle(saved_ms)


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_the_limit_to_save_is_ahead_of_clock_and_oracle(limit_ms: int, now_ms: int) -> None:
    assert Oracle(limit_ms).wanted_limit(now_ms) >= max(limit_ms, now_ms) + WINDOW_MS


async def test_the_window_is_saved_before_it_is_used(tmp_path: Path) -> None:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        meta = EtcdMeta(etcd)
        clock = iter([5_000_000_000] * 2 + [90_000_000_000] * 10)
        oracle = await TimestampOracle.load(Ledger(meta), b"/ts", lambda: next(clock))
        physical_ms, _ = await oracle.take(1)
        assert physical_ms == 5000
        physical_ms, _ = await oracle.take(1)
        assert physical_ms == 90_000
        saved = await meta.get(b"/ts")
        assert saved is not None
        assert int.from_bytes(saved.value) == (90_000 + WINDOW_MS) * 1_000_000


async def test_impossible_counts_are_refused_in_pds_words(tmp_path: Path) -> None:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        oracle = await TimestampOracle.load(Ledger(EtcdMeta(etcd)), b"/ts")
        with pytest.raises(RequestError, match="tso count should be positive"):
            await oracle.take(0)
        with pytest.raises(RequestError, match="maximum number of retries exceeded"):
            await oracle.take(1 << 18)


async def test_concurrent_callers_never_share_a_timestamp(tmp_path: Path) -> None:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        oracle = await TimestampOracle.load(Ledger(EtcdMeta(etcd)), b"/ts", lambda: 5_000_000_000)
        taken = await asyncio.gather(*(oracle.take(LOGICAL_MAX // 3) for _ in range(50)))
        assert len(set(taken)) == 50
