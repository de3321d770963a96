"""The timestamp oracle: whatever the clock does, and however often it dies, timestamps grow."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.coordinator.errors import RequestError
from server.coordinator.leadership.leadership import FencedMetadata, Leadership
from server.coordinator.tso import WINDOW_MS, Needed, Oracle, TimestampOracle
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import MetaUnavailableError
from storage.meta.meta import TxnResult
from storage.model.ts import LOGICAL_MAX, compose

STEPS = st.lists(
    st.tuples(
        st.integers(-10_000, 10_000),  # how far the wall clock jumps, ms
        st.integers(1, LOGICAL_MAX),  # timestamps asked for
        st.booleans(),  # whether the process dies after it
    ),
    max_size=60,
)


class Late(FencedMetadata):
    """Loses the answer of a write, which arrives later."""

    def __init__(self, meta: EtcdMeta) -> None:
        super().__init__(meta, Leadership())
        self.delays = False
        self._delayed: list[tuple[Any, Any, Any]] = []

    async def txn(self, compares: Any, success: Any, failure: Any = ()) -> TxnResult:
        if not self.delays:
            return await super().txn(compares, success, failure)
        self._delayed.append((compares, success, failure))
        raise MetaUnavailableError("no answer in time")

    async def arrive(self) -> None:
        for delayed in self._delayed:
            await super().txn(*delayed)


@given(STEPS)
def test_timestamps_grow_over_clock_jumps_and_restarts(steps: list[tuple[int, int, bool]]) -> None:
    now_ms, saved_ms, last = 1_000_000, 0, 0
    oracle = Oracle(saved_ms)
    for jump_ms, count, dies in steps:
        now_ms = max(0, now_ms + jump_ms)
        while isinstance(taken := oracle.take(count, now_ms), Needed):
            if taken is Needed.MILLISECOND:
                oracle.step(oracle.physical_ms)
                continue
            saved_ms = oracle.next_limit(now_ms)
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
    assert Oracle(limit_ms).next_limit(now_ms) >= max(limit_ms, now_ms) + WINDOW_MS


async def test_the_window_is_saved_before_it_is_used(tmp_path: Path) -> None:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        meta = EtcdMeta(etcd)
        clock = iter([5_000_000_000] * 3 + [90_000_000_000] * 10)
        oracle = await TimestampOracle.load(
            FencedMetadata(meta, Leadership()), b"/ts", lambda: next(clock)
        )
        physical_ms, _ = await oracle.take(1)
        assert physical_ms == 5000
        physical_ms, _ = await oracle.take(1)
        assert physical_ms == 90_000
        saved = await meta.get(b"/ts")
        assert saved is not None
        assert int.from_bytes(saved.value) == (90_000 + WINDOW_MS) * 1_000_000


async def test_a_used_up_millisecond_is_waited_for_and_time_is_not_outrun(tmp_path: Path) -> None:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        oracle = await TimestampOracle.load(
            FencedMetadata(EtcdMeta(etcd), Leadership()), b"/ts", lambda: 5_000_000_000
        )
        began_s = time.monotonic()
        taken = [await oracle.take(LOGICAL_MAX) for _ in range(20)]
        assert [physical_ms for physical_ms, _ in taken] == list(range(5000, 5020))
        assert time.monotonic() - began_s >= 0.019


async def test_a_window_that_was_given_up_for_lost_and_comes_late_undoes_nothing(
    tmp_path: Path,
) -> None:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        meta = EtcdMeta(etcd)
        clock_ns = 5_000_000_000
        metadata = Late(meta)
        oracle = await TimestampOracle.load(metadata, b"/ts", lambda: clock_ns)
        clock_ns += 10_000_000_000
        metadata.delays = True
        with pytest.raises(MetaUnavailableError):
            await oracle.take(1)
        metadata.delays = False
        clock_ns += 10_000_000_000
        last = compose(*await oracle.take(1))
        await metadata.arrive()
        again = await TimestampOracle.load(FencedMetadata(meta, Leadership()), b"/ts", lambda: 0)
        assert compose(*await again.take(1)) > last


async def test_impossible_counts_are_refused_in_pds_words(tmp_path: Path) -> None:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        oracle = await TimestampOracle.load(FencedMetadata(EtcdMeta(etcd), Leadership()), b"/ts")
        with pytest.raises(RequestError, match="tso count should be positive"):
            await oracle.take(0)
        with pytest.raises(RequestError, match="maximum number of retries exceeded"):
            await oracle.take(1 << 18)


async def test_concurrent_callers_never_share_a_timestamp(tmp_path: Path) -> None:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        oracle = await TimestampOracle.load(
            FencedMetadata(EtcdMeta(etcd), Leadership()), b"/ts", lambda: 5_000_000_000
        )
        taken = await asyncio.gather(*(oracle.take(LOGICAL_MAX // 3) for _ in range(50)))
        assert len(set(taken)) == 50
