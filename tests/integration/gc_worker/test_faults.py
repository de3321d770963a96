"""Workers killed and stopped in every phase that talks to stores: the next round finishes,
the old worker is still.
"""

import asyncio
import signal
import urllib.request
from functools import partial
from typing import Any

import grpc.aio
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.delete_ranges import KEPT_MS, DeleteRange
from gcsafepoint.worker.records import DONE, RUNNING
from storage.model.errors import TidemarkError
from storage.model.ts import physical_ms
from tests.integration.gc_worker.conftest import SHORT_LEASE_S
from tests.ports import free_port

RUN = gc_pb2.RunGCRequest()
PHASES = {
    "KvResolveLock": "resolve locks",
    "UnsafeDestroyRange": "delete ranges",
    "KvGC": "do gc",
}


def put(key: bytes, value: bytes) -> kvrpcpb.Mutation:
    return kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value)


async def prewrite(cluster: Any, keys: list[bytes], value: bytes, **more: Any) -> int:
    """What a client leaves that dies after its prewrite."""
    start_ts: int = await cluster.now()
    answers = await cluster.client.kv.router.fan_out(
        keys,
        lambda store: store.KvPrewrite,
        lambda part: kvrpcpb.PrewriteRequest(
            mutations=[put(key, value) for key in part],
            primary_lock=keys[0],
            start_version=start_ts,
            lock_ttl=600_000,
            txn_size=len(keys),
            min_commit_ts=start_ts + 1,
            **more,
        ),
    )
    assert not [error for _, answer in answers for error in answer.errors]
    return start_ts


class Litter:
    """Everything a round has to do, under keys that end in `number`;
    and what must be left of it.
    """

    def __init__(self, cluster: Any, number: int) -> None:
        self.cluster, self.kv = cluster, cluster.client.kv
        self.a, self.h, self.p, self.z = (b"%c%d" % (letter, number) for letter in b"ahpz")
        self.dropped, self.end = b"hd%d" % number, b"hd%d\xff" % number
        self.number = number

    async def spread(self, gc: Any) -> None:
        self.old = await self.cluster.put((self.p, b"old"), (self.dropped, b"dropped"))
        self.new = await self.cluster.put((self.p, b"new"))
        committed = await prewrite(self.cluster, [self.a, self.h, self.z], b"committed")
        await self.kv.commit([self.a], committed, await self.cluster.now())
        await prewrite(self.cluster, [self.a + b"x", self.z + b"x"], b"never")
        drop_ts = await self.cluster.now()
        request = gc_pb2.RegisterDeleteRangeRequest(
            job_id=self.number, element_id=1, start_key=self.dropped, end_key=self.end, ts=drop_ts
        )
        await gc.RegisterDeleteRange(request)

    async def is_gone(self) -> bool:
        """Every lock ended as its primary says, the range and the old version are gone,
        all else is there.
        """
        now = await self.cluster.now()
        locked = await self.cluster.locked_keys()
        old = [await self.kv.get(self.p, self.old), await self.kv.get(self.dropped, self.old)]
        kept = await self.kv.batch_get(
            [self.a, self.h, self.z, self.p, self.a + b"x", self.z + b"x"], now
        )
        assert (
            kept == dict.fromkeys((self.a, self.h, self.z), b"committed") | {self.p: b"new"}
            or locked
        )
        return not locked and old == [None, None]


async def configure(gc: Any, **variables: str) -> None:
    texts = {f"tikv_gc_{name}": text for name, text in variables.items()}
    await gc.SetGCConfig(gc_pb2.SetGCConfigRequest(variables=texts))


async def test_a_worker_killed_in_any_phase_leaves_nothing_that_the_next_round_does_not_finish(
    proxied: Any, until: Any
) -> None:
    cluster, proxy = proxied
    worker, gc = await cluster.leader(SHORT_LEASE_S)
    for number, (method, phase) in enumerate(PHASES.items()):
        await configure(gc, mode="central" if method == "KvGC" else "distributed")
        litter = Litter(cluster, number)
        await litter.spread(gc)
        proxy.watched = {worker.process.pid}
        held = proxy.hold(method, after=number % 2 == 1)
        broken = (await gc.RunGC(gc_pb2.RunGCRequest(no_wait=True))).round
        async with asyncio.timeout(60):
            await held.reached.wait()
        if phase != "do gc":
            assert (
                await refusal(gc) == "[TM:ErrGCRunning] there's already a gc job running, skipped"
            )
        await worker.kill()
        held.go_on.set()
        worker, gc = await cluster.leader(SHORT_LEASE_S)
        assert (await gc.RunGC(RUN)).round.result == "done"
        await until(litter.is_gone)
        rounds = {it.id: it for it in (await gc.ListRounds(gc_pb2.ListRoundsRequest())).rounds}
        assert (rounds[broken.id].result, rounds[broken.id].worker) == ("abandoned", broken.worker)
        assert f"in the phase {phase}" in rounds[broken.id].error


async def test_a_leader_stopped_past_its_lease_in_any_phase_sends_nothing_more_when_it_goes_on(
    proxied: Any, until: Any
) -> None:
    cluster, proxy = proxied
    old, old_gc = await cluster.leader(SHORT_LEASE_S)
    for number, method in enumerate(PHASES):
        await configure(old_gc, mode="central" if method == "KvGC" else "distributed")
        litter = Litter(cluster, number)
        await litter.spread(old_gc)
        proxy.watched = {old.process.pid}
        held = proxy.hold(method, after=True)
        await old_gc.RunGC(gc_pb2.RunGCRequest(no_wait=True))
        async with asyncio.timeout(60):
            await held.reached.wait()
        old.process.send_signal(signal.SIGSTOP)
        new, new_gc = await cluster.leader(SHORT_LEASE_S)
        assert (await new_gc.RunGC(RUN)).round.result == "done"
        await until(litter.is_gone)
        sent = proxy.of(old.process.pid)
        held.go_on.set()  # the answer waits for the stopped one before it goes on
        await asyncio.sleep(0.1)
        old.process.send_signal(signal.SIGCONT)
        await until(partial(lost_its_lease, old))
        assert proxy.of(old.process.pid) == sent
        assert (await new_gc.GetGCStatus(gc_pb2.GetGCStatusRequest())).leader.is_self
        assert await litter.is_gone()
        old.process.terminate()
        await old.process.wait()
        old, old_gc = new, new_gc


async def lost_its_lease(worker: Any) -> bool:
    """Whether the worker's round ended because of its lease, as its metrics say."""
    url = f"http://{worker.endpoints['http']}/metrics"
    with await asyncio.to_thread(urllib.request.urlopen, url) as answer:
        return b'tidemark_gc_rounds_total{result="lost the lease"} 1.0' in answer.read()


async def refusal(gc: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gc.RunGC(RUN)
    return caught.value.details() or ""


async def test_async_commit_transactions_of_dead_clients_end_as_all_their_locks_say(
    cluster: Any, gc: Any
) -> None:
    kv = cluster.client.kv
    whole = await prewrite(
        cluster, [b"a1", b"h1", b"z1"], b"whole", use_async_commit=True, secondaries=[b"h1", b"z1"]
    )
    partly = await cluster.now()
    await kv.router.call(
        b"a2",
        lambda store: store.KvPrewrite,
        kvrpcpb.PrewriteRequest(
            mutations=[put(b"a2", b"partly")],
            primary_lock=b"a2",
            start_version=partly,
            lock_ttl=600_000,
            txn_size=2,
            min_commit_ts=partly + 1,
            use_async_commit=True,
            secondaries=[b"z2"],
        ),
    )
    assert sorted(await cluster.locked_keys()) == [b"a1", b"a2", b"h1", b"z1"]
    done = (await gc.RunGC(RUN)).round
    assert (done.result, done.resolved_locks) == ("done", 4)
    assert await cluster.locked_keys() == []
    now = await cluster.now()
    assert dict(await kv.scan(b"", b"", now, 10)) == dict.fromkeys((b"a1", b"h1", b"z1"), b"whole")
    with pytest.raises(TidemarkError, match="TM:Err"):
        await kv.commit([b"a2"], partly, now)
    assert await kv.get(b"a1", whole) is None


async def test_a_transaction_longer_than_life_time_keeps_its_snapshot_and_may_still_commit(
    cluster: Any, gc: Any, until: Any
) -> None:
    before = await cluster.put((b"a", b"1"), (b"z", b"1"))
    long = await cluster.client.begin()
    await cluster.records.write({f"{RUNNING}tidb-7": str(long.start_ts)}, {})  # as TiDB reports it
    await cluster.put((b"a", b"2"))
    kept = (await gc.RunGC(RUN)).round
    assert (kept.result, kept.safe_point) == ("done", long.start_ts)
    assert kept.blocker == f"the transaction {long.start_ts} of TiDB server tidb-7"
    assert physical_ms(await cluster.now()) - physical_ms(long.start_ts) > 1  # older than life_time
    assert (await gc.RunGC(RUN)).round.result == "no new safepoint"
    assert [await long.get(key) for key in (b"a", b"z")] == [b"1", b"1"]
    await long.put(b"z", b"late")
    assert await long.commit()
    await cluster.records.write({f"{RUNNING}tidb-7": None}, {})
    assert (await gc.RunGC(RUN)).round.safe_point > long.start_ts

    async def collected() -> bool:
        return await cluster.client.kv.get(b"a", before) is None

    await until(collected)


async def test_a_destroyed_range_is_destroyed_once_more_after_a_day_and_then_forgotten(
    cluster: Any, gc: Any
) -> None:
    await cluster.put((b"f1", b"v"))
    it = DeleteRange(1, 1, b"f", b"g", await cluster.now())
    await gc.RegisterDeleteRange(
        gc_pb2.RegisterDeleteRangeRequest(
            job_id=1, element_id=1, start_key=it.start_key, end_key=it.end_key, ts=it.ts
        )
    )
    assert (await gc.RunGC(RUN)).round.deleted_ranges == 1
    await cluster.put((b"f2", b"a store that was away brought it back"))
    assert (await gc.RunGC(RUN)).round.deleted_ranges == 0
    [listed] = (await gc.ListDeleteRanges(gc_pb2.ListDeleteRangesRequest())).ranges
    assert (listed.state, listed.attempts, listed.redo_ms - listed.done_ms) == ("done", 1, KEPT_MS)
    yesterday = it.destroyed(listed.done_ms - KEPT_MS).to_json()
    await cluster.records.write({DONE + it.name: yesterday}, {})
    assert (await gc.RunGC(RUN)).round.deleted_ranges == 1
    assert await cluster.client.kv.get(b"f2", await cluster.now()) is None
    assert not (await gc.ListDeleteRanges(gc_pb2.ListDeleteRangesRequest())).ranges


async def test_a_safepoint_that_a_dead_leader_asked_for_but_did_not_save_makes_no_round_fail(
    cluster: Any, gc: Any
) -> None:
    asked = await cluster.now()
    await cluster.client.pd.update_service_gc_safe_point("gc_worker", (1 << 63) - 1, asked)
    await configure(gc, life_time="1m")
    held = (await gc.RunGC(RUN)).round
    assert held.result in (
        "done",
        "no new safepoint",
    )  # our coordinator lets it back as far as GC has not gone yet
    assert held.safe_point < asked
    await configure(gc, life_time="1ms")
    assert (await gc.RunGC(RUN)).round.safe_point > asked


async def test_a_store_that_is_away_fails_its_ranges_only_and_gets_them_when_it_is_back(
    cluster: Any, gc: Any, until: Any
) -> None:
    second = await cluster.second_store(f"127.0.0.1:{free_port()}")
    await cluster.put((b"f1", b"v"), (b"h1", b"v"))
    drop_ts = await cluster.now()
    request = gc_pb2.RegisterDeleteRangeRequest(
        job_id=1, element_id=1, start_key=b"f", end_key=b"g", ts=drop_ts
    )
    await gc.RegisterDeleteRange(request)
    await second.kill()
    done = (await gc.RunGC(RUN)).round
    assert (done.result, done.deleted_ranges, done.failed_ranges) == ("done", 0, 1)
    [failed] = (await gc.ListDeleteRanges(gc_pb2.ListDeleteRangesRequest())).ranges
    assert (failed.state, failed.attempts) == ("failed", 1)
    assert second.endpoints["store"] in failed.last_error
    await cluster.second_store(second.endpoints["store"])

    async def destroyed() -> (
        bool
    ):  # the worker's channel may still be waiting before it connects again
        return bool((await gc.RunGC(RUN)).round.deleted_ranges)

    await until(destroyed)
    [done] = (await gc.ListDeleteRanges(gc_pb2.ListDeleteRangesRequest())).ranges
    assert (done.state, done.attempts >= 2, done.last_error) == ("done", True, "")
