"""The safepoint service over real metadata: one transaction for many,
and etcd as the only truth.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import pytest

from gcsafepoint.state.compat import Compat, CompatError, ServiceUpdate
from gcsafepoint.state.errors import KeyspaceNotFoundError, SafePointRequestError
from gcsafepoint.state.records import GcKeys, SafePointRecordError
from gcsafepoint.state.rules import GC_WORKER, NEVER_S, ServiceSafePoint
from gcsafepoint.state.service import GcStateManager
from gcsafepoint.state.states import NULL_KEYSPACE, GcStates, Keyspace
from gcsafepoint.state.stored import StoredStates
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import CompactedError, MetaUnavailableError
from storage.meta.meta import Compare, KeyValue, Op, TxnResult, WatchEvent

KEYS = GcKeys(b"/pd/7/gc/")


class CountedMeta(EtcdMeta):
    """Counts transactions, and fails on demand, before or after the write happened."""

    transactions = 0
    fails: str = ""
    after = 0
    """How many more transactions succeed first."""

    async def txn(
        self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()
    ) -> TxnResult:
        self.transactions += 1
        fails = ""
        if self.after:
            self.after -= 1
        else:
            fails, self.fails = self.fails, ""
        if fails == "before":
            raise MetaUnavailableError("cut off")
        result = await super().txn(compares, success, failure)
        if fails == "after":
            raise MetaUnavailableError("cut off")
        return result


@pytest.fixture
async def meta(tmp_path: Path) -> AsyncIterator[CountedMeta]:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        yield CountedMeta(etcd)


async def opened(meta: EtcdMeta, now_s: float = 1000.0) -> GcStateManager:
    service = GcStateManager(meta, KEYS, lambda: now_s)
    await service.load()
    return service


def update(service_id: str, safe_point: int, ttl_s: int = 60) -> ServiceUpdate:
    return ServiceUpdate(service_id, ttl_s, safe_point)


async def test_what_is_stored_is_what_pd_stores(meta: CountedMeta) -> None:
    service = await opened(meta)
    await service.update_services(
        [update("ticdc-0", 470606398860820488), update(GC_WORKER, 500, NEVER_S)]
    )
    await service.update_gc_safe_point(100)
    stored = {pair.key: pair.value for pair in await meta.get_prefix(b"/")}
    assert stored.pop(KEYS.clock) == b"1000"
    assert json.loads(stored.pop(b"/pd/7/gc/safe_point/service/ticdc-0")) == {
        "service_id": "ticdc-0",
        "expired_at": 1060,
        "safe_point": 470606398860820488,
    }
    assert b'"expired_at":9223372036854775807' in stored.pop(
        b"/pd/7/gc/safe_point/service/gc_worker"
    )
    assert stored == {
        b"/pd/7/gc/safe_point": b"64",
        b"/pd/7/gc/gc_state_revision": b"3",
        b"/tidb/store/gcworker/saved_safe_point": b"500",
    }


async def test_a_batch_shares_transactions_and_one_bad_update_fails_alone(
    meta: CountedMeta,
) -> None:
    service = await opened(meta)
    updates = [update(f"s{number}", 10) for number in range(200)] + [
        update("", 5),
        update("s0", 11),
    ]
    outcomes = await service.update_services(updates)
    assert len(outcomes) == 202
    assert isinstance(outcomes[200], SafePointRequestError)
    assert meta.transactions == 3
    assert len((await (await opened(meta)).view()).services) == 200


async def test_a_refused_update_writes_nothing(meta: CountedMeta) -> None:
    service = await opened(meta)
    await service.update_services([update("a", 50), update(GC_WORKER, 80, NEVER_S)])
    before = meta.transactions
    assert await service.update_services([update("late", 20)]) == [ServiceSafePoint("a", 1060, 50)]
    assert meta.transactions == before


async def test_two_writers_never_overwrite_each_other(meta: CountedMeta) -> None:
    one, two = await opened(meta), await opened(meta)
    await one.update_services([update("a", 50), update(GC_WORKER, 80, NEVER_S)])
    assert (await two.update_services([update("late", 20)])) == [ServiceSafePoint("a", 1060, 50)]
    await asyncio.gather(
        *(
            writer.update_services([update(name, 60)])
            for writer, name in ((one, "b"), (two, "c"), (one, "d"))
        )
    )
    (minimum,) = await (await opened(meta)).update_services([update("a", 0, 0)])
    assert minimum == ServiceSafePoint("b", 1060, 60)


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_after_an_uncertain_write_the_state_is_read_again(
    meta: CountedMeta, fails: str
) -> None:
    service = await opened(meta)
    await service.update_gc_safe_point(10)
    meta.fails = fails
    with pytest.raises(MetaUnavailableError):
        await service.update_gc_safe_point(20)
    held = await service.update_gc_safe_point(0)
    assert held == (20 if fails == "after" else 10)
    assert service.gc_safe_point == held


async def test_an_unreadable_record_stops_the_start(meta: CountedMeta) -> None:
    await meta.put(KEYS.null.service("broken"), b"{")
    with pytest.raises(SafePointRecordError, match="correct it with etcdctl"):
        await opened(meta)


async def test_the_state_survives_a_restart(meta: CountedMeta) -> None:
    service = await opened(meta)
    await service.update_services([update("a", 50), update(GC_WORKER, 80, NEVER_S)])
    await service.update_gc_safe_point(70)
    again = await opened(meta)
    assert again.gc_safe_point == 50
    assert await again.update_services([update("b", 40)]) == [ServiceSafePoint("a", 1060, 50)]


async def test_a_view_is_frozen_and_has_the_lowest_first(meta: CountedMeta) -> None:
    service = await opened(meta)
    await service.update_services(
        [update("b", 70), update("a", 50), update(GC_WORKER, 80, NEVER_S)]
    )
    view = await service.view()
    await service.update_services([update("a", 90)])
    assert [service.service_id for service in view.services] == ["a", "b"]
    assert (view.now_s, view.gc_safe_point, view.txn_safe_point) == (1000, 0, 50)
    assert (view.minimum, view.gc_worker.safe_point) == (ServiceSafePoint("a", 1060, 50), 80)
    assert not view.minimum.is_expired(1060)
    assert view.minimum.is_expired(1061)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[GcStates]:
    """Filled whenever states are read again."""
    queue: asyncio.Queue[GcStates] = asyncio.Queue()
    load = StoredStates.load

    async def told(self: StoredStates) -> GcStates:
        states = await load(self)
        queue.put_nowait(states)
        return states

    monkeypatch.setattr(StoredStates, "load", told)
    return queue


async def test_what_an_operator_writes_by_hand_is_heard(
    meta: CountedMeta, loads: asyncio.Queue[GcStates]
) -> None:
    service = await opened(meta)
    await service.update_services([update("a", 50), update(GC_WORKER, 80, NEVER_S)])
    await loads.get()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
        following = tasks.create_task(service.run())
        await meta.put(KEYS.null.gc_safe_point, b"28")
        await loads.get()
        assert service.gc_safe_point == 40
        await meta.delete(KEYS.null.service("a"))
        assert (await loads.get()).null.barriers.get("a") is None
        await service.update_gc_safe_point(60)
        following.cancel()
    assert service.gc_safe_point == 60
    assert loads.empty()


async def test_an_edit_just_before_a_write_of_ours_is_heard(
    meta: CountedMeta, loads: asyncio.Queue[GcStates]
) -> None:
    service = await opened(meta)
    await service.update_services([update("a", 50)])
    await meta.put(
        KEYS.null.service("by-hand"), b'{"service_id":"by-hand","expired_at":0,"safe_point":30}'
    )
    await service.update_services([update("a", 60)])
    await loads.get()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
        following = tasks.create_task(service.run())
        await loads.get()
        following.cancel()
    assert (await service.advance_txn_safe_point(NULL_KEYSPACE, 100)).new == 30
    assert loads.empty()


class CompactedMeta(EtcdMeta):
    """The history that a watch of the safepoints wants is gone; then so many reads fail at once."""

    compacted_at = 0
    failing_reads = 0

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        if self.failing_reads:
            self.failing_reads -= 1
            raise MetaUnavailableError("cut off")
        return await super().get_prefix(prefix)

    async def watch(
        self, prefix: bytes, start_revision: int = 0
    ) -> AsyncGenerator[list[WatchEvent], None]:
        if prefix == KEYS.prefix and self.compacted_at:
            revision, self.compacted_at = self.compacted_at, 0
            raise CompactedError(revision)
        async for events in super().watch(prefix, start_revision):
            yield events


async def test_what_was_compacted_is_read_although_the_metadata_is_away_just_then(
    tmp_path: Path, loads: asyncio.Queue[GcStates]
) -> None:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        meta = CompactedMeta(etcd)
        service = await opened(meta)
        await service.update_services([update(GC_WORKER, 80, NEVER_S)])
        await loads.get()
        revision = await meta.put(KEYS.null.gc_safe_point, b"28")
        meta.compacted_at, meta.failing_reads = revision + 1, 2
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            following = tasks.create_task(service.run())
            await loads.get()
            following.cancel()
        assert service.gc_safe_point == 40


async def test_tidbs_oldest_transactions_are_read_before_an_advance(meta: CountedMeta) -> None:
    service = await opened(meta)
    await meta.put(b"/tidb/server/minstartts/tidb-1:10080", b"60")
    advance = await service.advance_txn_safe_point(NULL_KEYSPACE, 100)
    assert (advance.new, advance.blocker and advance.blocker.description) == (
        60,
        'TiDBMinStartTS { Key: "tidb-1:10080", MinStartTS: 60 }',
    )
    assert [
        (running.owner, running.start_ts) for running in (await service.view()).min_start_ts
    ] == [("tidb-1:10080", 60)]
    await meta.delete(b"/tidb/server/minstartts/tidb-1:10080")
    assert (await service.advance_txn_safe_point(NULL_KEYSPACE, 100)).new == 100


async def test_an_unreadable_min_start_ts_stops_the_advance_and_nothing_else(
    meta: CountedMeta,
) -> None:
    service = await opened(meta)
    await meta.put(b"/tidb/server/minstartts/tidb-1", b"soon")
    with pytest.raises(SafePointRecordError, match=r"tidb-1.*correct it with etcdctl"):
        await service.advance_txn_safe_point(NULL_KEYSPACE, 100)
    assert await service.set_barrier(NULL_KEYSPACE, "a", 50, 60) == ServiceSafePoint("a", 1060, 50)


async def test_what_stops_gc_worker_stops_no_service_beside_it(meta: CountedMeta) -> None:
    service = await opened(meta)
    await meta.put(b"/tidb/server/minstartts/tidb-1", b"soon")
    outcomes = await service.update_services(
        [update("a", 50), update(GC_WORKER, 80, NEVER_S), update("b", 60)]
    )
    assert [type(outcome) for outcome in outcomes] == [
        ServiceSafePoint,
        SafePointRecordError,
        ServiceSafePoint,
    ]
    assert [barrier.service_id for barrier in await barriers_of(service)] == ["a", "b"]


async def test_a_record_that_gets_unreadable_stops_the_calls_about_gc_until_it_is_corrected(
    meta: CountedMeta, loads: asyncio.Queue[GcStates]
) -> None:
    service = await opened(meta)
    await service.update_services([update(GC_WORKER, 80, NEVER_S)])
    await service.update_gc_safe_point(70)
    await loads.get()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
        following = tasks.create_task(service.run())
        await meta.put(KEYS.null.service("a"), b"{")
        while True:
            try:
                await service.set_barrier(NULL_KEYSPACE, "b", 90, 60)
            except SafePointRecordError:
                break
        assert service.gc_safe_point == 70
        await meta.put(
            KEYS.null.service("a"), b'{"service_id":"a","expired_at":1060,"safe_point":85}'
        )
        await loads.get()
        assert (await service.advance_txn_safe_point(NULL_KEYSPACE, 100)).new == 85
        following.cancel()


async def barriers_of(service: GcStateManager) -> tuple[ServiceSafePoint, ...]:
    return (await service.gc_state(NULL_KEYSPACE, with_barriers=True))[0].barriers


async def test_more_services_than_a_transaction_takes_expire_at_once(meta: CountedMeta) -> None:
    now = [1000.0]
    service = GcStateManager(meta, KEYS, lambda: now[0])
    await service.update_services([update(f"s{number}", 10) for number in range(300)])
    now[0] = 1061.5
    await service.update_services([update("new", 20)])
    assert [
        barrier.service_id for barrier in (await (await opened(meta, 1061.5)).view()).services
    ] == ["new"]


@pytest.mark.parametrize("jump_s", [-900, 86_400])
async def test_no_jump_of_the_clock_between_two_leaders_expires_a_live_service(
    meta: CountedMeta, jump_s: int
) -> None:
    first = await opened(meta)
    await first.update_services([update(f"s{number}", 50) for number in range(200)])
    after = 1003.0 + jump_s
    second = await opened(meta, after)
    assert {barrier.expired_at for barrier in (await second.view()).services} == {int(after) + 60}
    assert (await second.advance_txn_safe_point(NULL_KEYSPACE, 100)).new == 50
    third = await opened(meta, after + 61)
    assert (await third.advance_txn_safe_point(NULL_KEYSPACE, 100)).new == 50, (
        "the outage's seconds do not count"
    )


async def test_what_is_put_off_is_put_off_once_even_after_a_crash_in_the_middle(
    meta: CountedMeta,
) -> None:
    first = await opened(meta)
    await first.update_services([update(f"s{number:03}", 50) for number in range(200)])
    second = GcStateManager(meta, KEYS, lambda: 1100.0)
    meta.after, meta.fails = 1, "before"
    with pytest.raises(MetaUnavailableError):
        await second.load()
    third = await opened(meta, 1100.0)
    assert {barrier.expired_at for barrier in (await third.view()).services} == {1160}


async def test_keyspaces_with_gc_of_their_own_have_their_own_records(meta: CountedMeta) -> None:
    await meta.put(KEYS.keyspace_metas + b"00000007", b"seven")
    service = GcStateManager(
        meta, KEYS, lambda: 1000.0, keyspace_of=lambda _: Keyspace(7, "seven", level_gc=True)
    )
    await service.load()
    await service.set_barrier(7, "a", 50, 60)
    await service.advance_txn_safe_point(7, 100)
    await service.advance_gc_safe_point(7, 40)
    stored = {pair.key: pair.value for pair in await meta.get_prefix(b"/")}
    assert stored[b"/pd/7/keyspaces/service_safe_point/00000007/a"] == (
        b'{"service_id":"a","expired_at":1060,"safe_point":50,"keyspace_id":7}'
    )
    assert stored[b"/pd/7/keyspaces/gc_safe_point/00000007"] == b'{"keyspace_id":7,"safe_point":40}'
    assert stored[b"/keyspaces/tidb/7/tidb/store/gcworker/saved_safe_point"] == b"50"
    assert KEYS.null.txn_safe_point not in stored
    await service.load()
    assert (await service.gc_state(7, with_barriers=True))[0].gc_safe_point == 40
    with pytest.raises(KeyspaceNotFoundError):
        await service.gc_state(8, with_barriers=False)


def test_the_compatibility_is_one_of_two() -> None:
    assert CompatError.check("pd-9") is Compat.PD_9
    with pytest.raises(CompatError, match="'pd-8' must be one of classic, pd-9"):
        CompatError.check("pd-8")
