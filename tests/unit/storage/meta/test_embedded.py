"""The embedded server over a store that crashes: what was answered is there again,
and nobody saw what is not.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from etcdpb import rpc_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.kv import WriteBatch
from storage.meta import embedded
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.errors import (
    MetaRequestError,
    MetaUnavailableError,
    NoSpaceError,
    TooManyRequestsError,
)
from storage.meta.store.state import Retention
from storage.meta.store.watchers import Watchers
from storage.model.errors import UnavailableError
from tests.memory_kv import MemoryKV

WHOLE = rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0")


class CrashingKV(MemoryKV):
    """Fails from its `nth` synced write on (from 1); that one reaches the disk or not,
    as in a real crash.
    """

    def __init__(self, nth: int, *, reached: bool, pairs: dict[bytes, bytes] | None = None) -> None:
        super().__init__(pairs)
        self.left = nth
        self._reached = reached

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        self.left -= 1
        if self.left > 0 or (self.left == 0 and self._reached):
            super().write(batch, sync=sync)
        if self.left <= 0:
            raise UnavailableError("the disk is gone")

    def after(self) -> MemoryKV:
        return MemoryKV(self._pairs)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def serving(etcd: EmbeddedEtcd) -> AsyncIterator[EmbeddedEtcd]:
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(etcd.run())
            yield etcd
            running.cancel()
    finally:
        etcd.close()


def put(key: bytes, value: bytes = b"", lease: int = 0) -> rpc_pb2.PutRequest:
    return rpc_pb2.PutRequest(key=key, value=value, lease=lease)


async def keys_of(kv: MemoryKV) -> dict[bytes, bytes]:
    async with serving(EmbeddedEtcd(kv)) as etcd:
        return {pair.key: pair.value for pair in (await etcd.read(WHOLE)).kvs}


steps = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([b"a", b"b", b"c"])),
    st.tuples(st.just("delete"), st.sampled_from([b"a", b"b", b"c"])),
    st.tuples(st.just("compact"), st.sampled_from([1, 2, 3])),
)


@given(
    st.lists(st.lists(steps, min_size=1, max_size=4), min_size=1, max_size=6),
    st.integers(1, 7),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_what_was_answered_survives_a_crash_at_any_write(
    groups: list[list[Any]], nth: int, reached: bool
) -> None:
    kv = CrashingKV(nth, reached=reached)
    answered, asked = asyncio.run(_until_crash(kv, groups))
    found = asyncio.run(keys_of(kv.after()))
    assert found in (answered, asked), (
        "neither the answered state nor the one that was being written"
    )


async def _until_crash(
    kv: MemoryKV, groups: list[list[Any]]
) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """Each group is asked at once; returns the pairs after the last answered group,
    and after the one that failed.
    """
    pairs = dict[bytes, bytes]()
    for number, group in enumerate(groups):
        etcd, before = EmbeddedEtcd(kv), dict(pairs)
        if not await _all_answered(
            etcd, [_call(etcd, *step, b"%d" % number, pairs) for step in group]
        ):
            return before, pairs
    return pairs, pairs


async def _all_answered(etcd: EmbeddedEtcd, calls: list[Any]) -> bool:
    try:
        async with serving(etcd):
            answers = await asyncio.gather(*calls, return_exceptions=True)
    except ExceptionGroup:
        return False
    return not any(isinstance(answer, MetaUnavailableError) for answer in answers)


def _call(
    etcd: EmbeddedEtcd, kind: str, target: Any, value: bytes, pairs: dict[bytes, bytes]
) -> Any:
    if kind == "put":
        pairs[target] = value
        return etcd.put(put(target, value))
    if kind == "delete":
        pairs.pop(target, None)
        return etcd.delete_range(rpc_pb2.DeleteRangeRequest(key=target))
    return etcd.compact(rpc_pb2.CompactionRequest(revision=etcd.revision + target))


async def test_a_compaction_in_the_same_group_loses_no_write() -> None:
    kv = MemoryKV()
    async with serving(EmbeddedEtcd(kv)) as etcd, asyncio.TaskGroup() as tasks:
        tasks.create_task(etcd.put(put(b"a", b"1")))
        tasks.create_task(etcd.put(put(b"b", b"2")))
        tasks.create_task(etcd.compact(rpc_pb2.CompactionRequest(revision=3)))
    assert await keys_of(kv) == {b"a": b"1", b"b": b"2"}


async def test_watchers_see_only_what_is_durable() -> None:
    kv = CrashingKV(2, reached=False)
    etcd = EmbeddedEtcd(kv)
    assert not await _all_answered(etcd, [_one_after_the_other(etcd)])
    assert etcd.revision == 2
    with etcd.watching() as (watchers, _):
        watchers.handle(
            rpc_pb2.WatchRequest(
                create_request={"key": b"a", "range_end": b"z", "start_revision": 1}
            ),
            2,
        )
        seen = [
            event.kv.key
            for answer in watchers.responses(lambda: etcd.revision)
            for event in answer.events
        ]
    assert seen == [b"a"]


async def _one_after_the_other(etcd: EmbeddedEtcd) -> None:
    await etcd.put(put(b"a"))
    await etcd.put(put(b"b"))


async def test_a_change_wakes_only_those_whose_watches_it_is_for() -> None:
    async with serving(EmbeddedEtcd(MemoryKV())) as etcd:
        with etcd.watching() as (one, first), etcd.watching() as (other, second):
            one.handle(rpc_pb2.WatchRequest(create_request={"key": b"a"}), etcd.revision)
            other.handle(
                rpc_pb2.WatchRequest(create_request={"key": b"b", "range_end": b"d"}), etcd.revision
            )
            await etcd.put(put(b"a"))
            assert (first.is_set(), second.is_set()) == (True, False)
            first.clear()
            await etcd.put(put(b"c"))
            assert (first.is_set(), second.is_set()) == (False, True)


async def test_a_change_that_is_compacted_with_its_group_ends_the_watches_it_was_for() -> None:
    async with serving(EmbeddedEtcd(MemoryKV())) as etcd:
        with etcd.watching() as (watchers, woken), etcd.watching() as (others, calm):
            watchers.handle(rpc_pb2.WatchRequest(create_request={"key": b"a"}), etcd.revision)
            others.handle(rpc_pb2.WatchRequest(create_request={"key": b"c"}), etcd.revision)
            assert len([*answers(watchers, etcd), *answers(others, etcd)]) == 2
            compaction = rpc_pb2.CompactionRequest(revision=3)
            await asyncio.gather(etcd.put(put(b"a")), etcd.put(put(b"b")), etcd.compact(compaction))
            assert (woken.is_set(), calm.is_set()) == (True, False)
            (ended,) = answers(watchers, etcd)
            assert ended.compact_revision == 3
            assert not answers(others, etcd)


def answers(watchers: Watchers, etcd: EmbeddedEtcd) -> list[rpc_pb2.WatchResponse]:
    return list(watchers.responses(lambda: etcd.revision))


async def test_a_malformed_request_is_refused_and_the_server_goes_on() -> None:
    async with serving(EmbeddedEtcd(MemoryKV())) as etcd:
        test = rpc_pb2.Compare(key=b"a")
        test.result = 9  # type: ignore[assignment]  # what a client of a later version may send
        with pytest.raises(MetaRequestError):
            await etcd.txn(rpc_pb2.TxnRequest(compare=[test]))
        await etcd.put(put(b"a"))


async def test_beyond_the_quota_puts_are_refused_until_the_alarm_is_taken_back_and_after_a_restart() -> (
    None
):
    kv, small = MemoryKV(), Retention(quota_bytes=1000)
    async with serving(EmbeddedEtcd(kv, retention=small)) as etcd:
        await etcd.put(put(b"a", bytes(600)))
        with pytest.raises(NoSpaceError):
            await etcd.put(put(b"b", bytes(600)))
        with pytest.raises(NoSpaceError):
            await etcd.put(put(b"c"))
    async with serving(EmbeddedEtcd(kv, retention=small)) as etcd:
        with pytest.raises(NoSpaceError):
            await etcd.lease_grant(rpc_pb2.LeaseGrantRequest(TTL=5))
        await etcd.delete_range(rpc_pb2.DeleteRangeRequest(key=b"a"))
        await etcd.set_alarms(set())
        await etcd.put(put(b"b", bytes(600)))


async def test_requests_wait_in_a_queue_of_bounded_bytes_and_go_in_groups_of_bounded_bytes() -> (
    None
):
    group = embedded.GroupCommit(MemoryKV(), lambda _: None, lambda: None)
    batches: list[WriteBatch] = []
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(group.submit(batches.append, 1 << 20)) for _ in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequestsError):
            await group.submit(lambda _: None)
        running = tasks.create_task(group.run())
        await asyncio.wait(asked)
        running.cancel()
    group.close()
    assert [batches.count(batch) for batch in batches] == [4] * 64


async def test_a_request_after_the_end_is_refused() -> None:
    group = embedded.GroupCommit(MemoryKV(), lambda _: None, lambda: None)
    group.close()
    with pytest.raises(MetaUnavailableError, match="stopping"):
        await asyncio.wait_for(group.submit(lambda _: None), 10)


async def test_a_defect_amid_a_group_leaves_no_request_without_an_answer() -> None:
    def fail_half_way(batch: WriteBatch) -> None:
        batch.put(b"a", b"1")
        raise ZeroDivisionError

    async def refused(change: Callable[[WriteBatch], None]) -> None:
        with pytest.raises(MetaUnavailableError, match="stopped while this was written"):
            await group.submit(change)

    group = embedded.GroupCommit(MemoryKV(), lambda _: None, lambda: None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for change in (lambda _: None, fail_half_way):
            tasks.create_task(refused(change))
        await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError):
            await group.run()
    group.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_EXPIRY_SECONDS", 0.001)


async def leased(etcd: EmbeddedEtcd, key: bytes) -> int:
    lease = (await etcd.lease_grant(rpc_pb2.LeaseGrantRequest(TTL=5))).ID
    await etcd.put(put(key, lease=lease))
    return lease


@pytest.mark.usefixtures("quick")
async def test_leases_that_are_over_end_together_and_one_their_owner_ends_meanwhile_is_no_fault() -> (
    None
):
    clock = Clock()
    etcd = EmbeddedEtcd(MemoryKV(), clock)
    async with serving(etcd), asyncio.TaskGroup() as tasks:
        leases = [await leased(etcd, key) for key in (b"a", b"b", b"c")]
        clock.now = 6.0
        expiring = tasks.create_task(etcd.run_expiry())
        tasks.create_task(etcd.lease_revoke(rpc_pb2.LeaseRevokeRequest(ID=leases[0])))
        async for response in etcd.watch(
            rpc_pb2.WatchCreateRequest(key=b"c", start_revision=etcd.revision + 1)
        ):
            if response.events:
                break
        expiring.cancel()
        assert not (await etcd.read(WHOLE)).kvs
    assert etcd.revision == 7


@pytest.mark.usefixtures("quick")
async def test_a_full_queue_only_delays_the_end_of_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    etcd = EmbeddedEtcd(MemoryKV(), clock)
    async with serving(etcd), asyncio.TaskGroup() as tasks:
        await leased(etcd, b"a")
        clock.now = 6.0
        monkeypatch.setattr(embedded, "MAX_WAITING", 0)
        expiring = tasks.create_task(etcd.run_expiry())
        await asyncio.sleep(0.01)
        monkeypatch.setattr(embedded, "MAX_WAITING", 10)
        async for response in etcd.watch(rpc_pb2.WatchCreateRequest(key=b"a")):
            if response.events:
                break
        expiring.cancel()


@pytest.mark.usefixtures("quick")
async def test_time_in_which_the_process_could_hear_no_renewal_does_not_count() -> None:
    clock = Clock()
    etcd = EmbeddedEtcd(MemoryKV(), clock)
    async with serving(etcd), asyncio.TaskGroup() as tasks:
        lease = await leased(etcd, b"a")
        expiring = tasks.create_task(etcd.run_expiry())
        await asyncio.sleep(0)
        clock.now = 100.0  # stopped, and continued
        await asyncio.sleep(0.01)
        assert await etcd.keep_alive(lease) == 5
        expiring.cancel()


async def test_leases_have_their_whole_ttl_after_a_restart() -> None:
    kv, clock = MemoryKV(), Clock()
    async with serving(EmbeddedEtcd(kv, clock)) as etcd:
        lease = (await etcd.lease_grant(rpc_pb2.LeaseGrantRequest(TTL=5))).ID
        await etcd.put(put(b"a", lease=lease))
        clock.now = 4.5
    async with serving(EmbeddedEtcd(kv, clock)) as etcd:
        left = await etcd.lease_time_to_live(rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True))
        assert (left.TTL, left.grantedTTL, list(left.keys)) == (5, 5, [b"a"])


def bytes_in(directory: Path) -> int:
    total = 0
    for file in directory.iterdir():
        with suppress(
            FileNotFoundError
        ):  # LevelDB removes what it has compacted, in a thread of its own
            total += file.stat().st_size
    return total


async def test_history_is_bounded_and_its_space_comes_back(tmp_path: Path) -> None:
    bounded = Retention(log_bytes=1 << 20, revisions=0, age_s=0)
    async with EmbeddedEtcd.open(tmp_path, bounded) as etcd:
        for number in range(400):
            await etcd.put(put(b"key", b"%d" % number + bytes(64 << 10)))
        written = 400 * 3 * (64 << 10)
        await etcd.defragment()
        async with asyncio.timeout(60):
            while bytes_in(tmp_path) >= written / 4:  # noqa: ASYNC110 - the disk has no event for this
                await asyncio.sleep(0.01)
        assert etcd.statistics().live_bytes < 100 << 10
        assert etcd.statistics().log_bytes <= bounded.log_bytes
    async with EmbeddedEtcd.open(tmp_path, bounded) as etcd:
        assert (await etcd.read(rpc_pb2.RangeRequest(key=b"key"))).kvs[0].version == 400
