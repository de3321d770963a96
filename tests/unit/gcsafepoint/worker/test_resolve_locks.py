"""Resolve Locks against the in-memory cluster: every old lock ends as its primary says,
no young one is touched.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.worker.cluster import Lock, LockPage
from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.resolve_locks import TransactionDecisions, resolve_locks

SAFE_POINT = 100
LETTERS = b"abcdefghijklmnopqrstuvwxyz"


async def resolve(cluster: Any, config: GCConfig | None = None) -> list[int]:
    pages: list[int] = []
    stores = await cluster.ranges_by_store()
    await resolve_locks(
        cluster,
        config or GCConfig(),
        stores,
        SAFE_POINT,
        lambda page: pages.append(len(page.locks)),
    )
    return pages


async def test_committed_locks_are_committed_and_the_others_rolled_back(cluster: Any) -> None:
    cluster.lock(b"a", 10)
    cluster.lock(b"z", 20)
    cluster.decisions = {10: 15}
    await resolve(cluster)
    assert cluster.locks == {}
    assert cluster.committed == {b"a": 15, b"z": 0}


async def test_a_lock_before_the_safepoint_goes_and_one_at_it_stays(cluster: Any) -> None:
    cluster.lock(b"a", SAFE_POINT - 1)
    cluster.lock(b"b", SAFE_POINT)
    await resolve(cluster)
    assert list(cluster.locks) == [b"b"]


async def test_a_pessimistic_lock_goes_without_asking_its_primary(cluster: Any) -> None:
    cluster.lock(b"a", 10, pessimistic=True)
    await resolve(cluster)
    assert cluster.locks == {}
    assert not [request for request in cluster.diary if request.startswith("decide")]


async def test_a_region_that_moves_is_scanned_again_from_the_same_key(cluster: Any) -> None:
    cluster.lock(b"h", 10)
    cluster.moving = 2
    await resolve(cluster)
    assert cluster.locks == {}
    assert cluster.diary.count("scan b'g'") == 3


async def test_a_transaction_is_decided_once_however_many_regions_it_touched(cluster: Any) -> None:
    for key in (b"a", b"b", b"h", b"p", b"z"):
        cluster.lock(key, 10)
    await resolve(cluster)
    assert cluster.diary.count("decide 10") <= 2  # two stores may meet it at the same moment
    assert set(cluster.committed) == {b"a", b"b", b"h", b"p", b"z"}


async def test_what_is_remembered_of_transactions_is_bounded(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcsafepoint.worker.resolve_locks._DECISIONS_KEPT", 3)
    decisions = TransactionDecisions(cluster)
    locks = [Lock(b"%d" % ts, ts, pessimistic=False, token=None) for ts in range(1, 9)]
    for lock in locks:
        assert await decisions.decide_page(LockPage([lock], None, None)) == {lock.start_ts: 0}
    cluster.diary.clear()
    for lock in locks[-3:]:
        await decisions.decide_page(LockPage([lock], None, None))
    assert cluster.diary == []
    assert set(await decisions.decide_page(LockPage(locks, None, None))) == set(range(1, 9))


async def test_stores_are_worked_on_in_parallel_but_each_by_one_worker(cluster: Any) -> None:
    running: dict[int, int] = {1: 0, 2: 0}
    most = 0
    scan = cluster.scan_locks

    async def watched(within: Any, safe_point: int) -> Any:
        nonlocal most
        store = 1 if within.start_key in (b"", b"n") else 2
        running[store] += 1
        assert running[store] == 1
        most = max(most, sum(running.values()))
        await asyncio.sleep(0)
        running[store] -= 1
        return await scan(within, safe_point)

    cluster.scan_locks = watched
    await resolve(cluster)
    assert most == 2
    most = 0
    await resolve(cluster, GCConfig(auto_concurrency=False, concurrency=1))
    assert most == 1


async def test_an_error_ends_the_phase_as_itself(cluster: Any, unavailable: Any) -> None:
    cluster.lock(b"a", 10)
    cluster.failing = {"decide": unavailable}
    with pytest.raises(type(unavailable), match="the store is away"):
        await resolve(cluster)


@given(
    locks=st.dictionaries(
        st.binary(min_size=1, max_size=2).map(
            lambda raw: bytes(LETTERS[byte % 26] for byte in raw)
        ),
        st.tuples(st.integers(1, 200), st.booleans()),
    ),
    decisions=st.dictionaries(st.integers(1, 200), st.integers(0, 300)),
)
def test_whatever_lies_there_exactly_the_old_locks_end_and_as_decided(
    memory_cluster: Any, locks: dict[bytes, tuple[int, bool]], decisions: dict[int, int]
) -> None:
    cluster = memory_cluster()
    cluster.decisions = decisions
    for key, (start_ts, pessimistic) in locks.items():
        cluster.lock(key, start_ts, pessimistic=pessimistic)
    pages = asyncio.run(resolve(cluster))
    old = {key: start_ts for key, (start_ts, _) in locks.items() if start_ts < SAFE_POINT}
    assert set(cluster.locks) == locks.keys() - old.keys()
    assert cluster.committed == {
        key: decisions.get(start_ts, 0) for key, start_ts in old.items() if not locks[key][1]
    }
    assert sum(pages) == len(old)
