"""The safepoint service over real metadata: one transaction for many, and etcd as the only truth."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from gcsafepoint.record import GcKeys, SafePointRecordError
from gcsafepoint.rules import GC_WORKER, NEVER_S, SafePointRequestError, SafePoints, ServiceSafePoint
from gcsafepoint.service import SafePointService, ServiceUpdate
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import MetaUnavailableError
from storage.meta.meta import Compare, Op, TxnResult

KEYS = GcKeys(b"/pd/7/gc/")


class CountedMeta(EtcdMeta):
    """Counts transactions, and fails on demand, before or after the write happened."""

    transactions = 0
    fails: str = ""

    async def txn(self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        self.transactions += 1
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


async def opened(meta: EtcdMeta, now_s: float = 1000.0) -> SafePointService:
    service = SafePointService(meta, KEYS, lambda: now_s)
    await service.load()
    return service


def update(service_id: str, safe_point: int, ttl_s: int = 60) -> ServiceUpdate:
    return ServiceUpdate(service_id, ttl_s, safe_point)


async def test_what_is_stored_is_what_pd_stores(meta: CountedMeta) -> None:
    service = await opened(meta)
    await service.update_services([update("ticdc-0", 470606398860820488), update(GC_WORKER, 500, NEVER_S)])
    await service.update_gc_safe_point(100)
    stored = {pair.key: pair.value for pair in await meta.get_prefix(b"/")}
    assert json.loads(stored.pop(b"/pd/7/gc/safe_point/service/ticdc-0")) == {
        "service_id": "ticdc-0",
        "expired_at": 1060,
        "safe_point": 470606398860820488,
    }
    assert b'"expired_at":9223372036854775807' in stored.pop(b"/pd/7/gc/safe_point/service/gc_worker")
    assert stored == {
        b"/pd/7/gc/safe_point": b"64",
        b"/pd/7/gc/gc_state_revision": b"2",
        b"/tidb/store/gcworker/saved_safe_point": b"500",
    }


async def test_a_batch_shares_transactions_and_one_bad_update_fails_alone(meta: CountedMeta) -> None:
    service = await opened(meta)
    updates = [update(f"s{number}", 10) for number in range(200)] + [update("", 5), update("s0", 11)]
    outcomes = await service.update_services(updates)
    assert len(outcomes) == 202
    assert isinstance(outcomes[200], SafePointRequestError)
    assert meta.transactions == 3
    assert len((await (await opened(meta)).load()).services) == 200


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
        *(writer.update_services([update(name, 60)]) for writer, name in ((one, "b"), (two, "c"), (one, "d")))
    )
    (minimum,) = await (await opened(meta)).update_services([update("a", 0, 0)])
    assert minimum == ServiceSafePoint("b", 1060, 60)


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_after_an_uncertain_write_the_state_is_read_again(meta: CountedMeta, fails: str) -> None:
    service = await opened(meta)
    await service.update_gc_safe_point(10)
    meta.fails = fails
    with pytest.raises(MetaUnavailableError):
        await service.update_gc_safe_point(20)
    held = await service.update_gc_safe_point(0)
    assert held == (20 if fails == "after" else 10)
    assert service.gc_safe_point == held


async def test_an_unreadable_record_stops_the_start(meta: CountedMeta) -> None:
    await meta.put(KEYS.service("broken"), b"{")
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
    await service.update_services([update("b", 70), update("a", 50), update(GC_WORKER, 80, NEVER_S)])
    view = await service.view()
    await service.update_services([update("a", 90)])
    assert [service.service_id for service in view.services] == ["a", "b"]
    assert (view.now_s, view.gc_safe_point, view.txn_safe_point) == (1000, 0, 50)
    assert (view.minimum, view.gc_worker.safe_point) == (ServiceSafePoint("a", 1060, 50), 80)
    assert not view.minimum.expired(1060)
    assert view.minimum.expired(1061)


class ToldService(SafePointService):
    """Tells when it has read the state again."""

    def __init__(self, meta: EtcdMeta) -> None:
        super().__init__(meta, KEYS, lambda: 1000.0)
        self.loads: asyncio.Queue[SafePoints] = asyncio.Queue()

    async def load(self) -> SafePoints:
        state = await super().load()
        self.loads.put_nowait(state)
        return state


async def test_what_an_operator_writes_by_hand_is_heard(meta: CountedMeta) -> None:
    service = ToldService(meta)
    await service.update_services([update("a", 50), update(GC_WORKER, 80, NEVER_S)])
    await service.loads.get()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(5):
        following = tasks.create_task(service.run())
        await meta.put(KEYS.gc_safe_point, b"28")
        await service.loads.get()
        assert service.gc_safe_point == 40
        await meta.delete(KEYS.service("a"))
        assert "a" not in (await service.loads.get()).services
        await service.update_gc_safe_point(60)
        following.cancel()
    assert service.gc_safe_point == 60
    assert service.loads.empty()
