"""Whole rounds on real processes: locks of dead clients, dropped ranges, old versions,
and who holds GC back.
"""

import asyncio
import contextlib
import importlib.util
import random
import sys
import urllib.request
from asyncio.subprocess import PIPE
from typing import Any

import grpc
import grpc.aio
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1 import gc_pb2

from storage.model.errors import ConflictError, TidemarkError, UnavailableError
from storage.model.ts import compose, physical_ms

RUN, STATUS = gc_pb2.RunGCRequest(), gc_pb2.GetGCStatusRequest()


async def run(gc: Any) -> gc_pb2.GCRound:
    round_: gc_pb2.GCRound = (await gc.RunGC(RUN)).round
    assert round_.result == "done"
    return round_


def put(key: bytes, value: bytes) -> kvrpcpb.Mutation:
    return kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value)


async def prewrite(cluster: Any, keys: list[bytes], value: bytes) -> int:
    start_ts: int = await cluster.now()
    await cluster.client.kv.prewrite(
        [put(key, value) for key in keys],
        primary=keys[0],
        start_version=start_ts,
        lock_ttl_ms=600_000,
    )
    return start_ts


async def test_orphan_locks_end_as_their_primaries_say(cluster: Any, gc: Any) -> None:
    kv = cluster.client.kv
    committed = await prewrite(cluster, [b"a1", b"h1", b"z1"], b"committed")
    commit_ts = await cluster.now()
    await kv.commit([b"a1"], committed, commit_ts)
    rolled_back = await prewrite(cluster, [b"a2", b"h2", b"z2"], b"rolled back")
    await kv.batch_rollback([b"a2"], rolled_back)
    undecided = await prewrite(cluster, [b"a3", b"h3", b"z3"], b"undecided")
    missing = await cluster.now()
    await kv.prewrite(
        [put(b"h4", b"no primary")], primary=b"a4", start_version=missing, lock_ttl_ms=600_000
    )
    pessimistic = await cluster.now()
    await kv.pessimistic_lock(
        [b"a5", b"z5"],
        primary=b"a5",
        start_version=pessimistic,
        for_update_ts=pessimistic,
        lock_ttl_ms=600_000,
        wait_ms=-1,
    )
    assert len(await cluster.locked_keys()) == 10
    done = await run(gc)
    assert (done.resolved_locks, done.regions, done.phase) == (10, 4, "ended")
    assert done.safe_point > undecided
    assert await cluster.locked_keys() == []
    now = await cluster.now()
    assert dict(await kv.scan(b"", b"", now, 100)) == dict.fromkeys(
        (b"a1", b"h1", b"z1"), b"committed"
    )
    assert await kv.get(b"z1", commit_ts - 1) is None or done.safe_point >= commit_ts


async def test_a_late_commit_of_a_transaction_that_gc_ended_is_refused(
    cluster: Any, gc: Any
) -> None:
    start_ts = await prewrite(cluster, [b"a", b"z"], b"late")
    await run(gc)
    with pytest.raises(Exception, match="TM:Err"):
        await cluster.client.kv.commit([b"a"], start_ts, await cluster.now())
    assert await cluster.client.kv.scan(b"", b"", await cluster.now(), 10) == []


DOOMED_OWN = """
import asyncio, sys
from server.rpc.transaction import TransactionClient

async def main():
    async with TransactionClient.open(sys.argv[1]) as client:
        transaction = await client.begin(pessimistic=True)
        for key in (b"a", b"h", b"p", b"z"):
            await transaction.put(key, b"never")
        print("locked", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
DOOMED_FOREIGN = """
import asyncio, sys
from tikv_client.asynchronous import TransactionClient

async def main():
    client = await TransactionClient.connect([sys.argv[1]])
    transaction = await client.begin(pessimistic=True)
    for key in (b"a", b"h", b"p", b"z"):
        await transaction.put(key, b"never")
    print("locked", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("program", [DOOMED_OWN, DOOMED_FOREIGN], ids=["own", "tikv-client"])
async def test_the_locks_of_a_killed_client_go(cluster: Any, gc: Any, program: str) -> None:
    if program is DOOMED_FOREIGN and importlib.util.find_spec("tikv_client") is None:
        pytest.skip("tikv-client has no wheel for this platform")
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cluster.coordinator, stdout=PIPE
    )
    assert client.stdout is not None
    async with asyncio.timeout(120):
        while (line := await client.stdout.readline()) != b"locked\n":
            assert line, "the client ended before it had its locks"
    client.kill()
    await client.communicate()
    assert sorted(await cluster.locked_keys()) == [b"a", b"h", b"p", b"z"]
    assert (await run(gc)).resolved_locks == 4
    assert await cluster.locked_keys() == []


async def test_a_dropped_range_is_destroyed_only_once_it_is_before_the_safepoint(
    cluster: Any, gc: Any
) -> None:
    await cluster.put((b"f1", b"v"), (b"h1", b"v"), (b"h2", b"v"), (b"z", b"v"))
    await cluster.put((b"h1", b"w"))
    dropped = await cluster.now()
    later = compose(physical_ms(dropped) + 3_600_000)
    ranges = [(1, b"f", b"h2", dropped), (2, b"h2", b"zz", later)]
    for job_id, start, end, ts in ranges:
        request = gc_pb2.RegisterDeleteRangeRequest(
            job_id=job_id, element_id=1, start_key=start, end_key=end, ts=ts
        )
        await gc.RegisterDeleteRange(request)
    assert (await run(gc)).deleted_ranges == 1
    left = dict(await cluster.client.kv.scan(b"", b"", await cluster.now(), 10))
    assert left == {b"h2": b"v", b"z": b"v"}
    assert await cluster.client.kv.get(b"h1", dropped) is None
    assert (await run(gc)).deleted_ranges == 0


async def test_old_versions_go_and_what_a_snapshot_at_the_safepoint_reads_stays(
    cluster: Any, gc: Any, until: Any
) -> None:
    first = await cluster.put((b"a", b"1"), (b"gone", b"1"), (b"z", b"1"))
    await cluster.put((b"a", b"2"))
    await cluster.put((b"gone", None))
    done = await run(gc)
    after = await cluster.put((b"a", b"3"))
    kv = cluster.client.kv

    async def collected() -> bool:
        return await kv.get(b"a", first) is None and await kv.get(b"gone", first) is None

    await until(collected)
    at_safe_point = {b"a": b"2", b"z": b"1"}
    assert dict(await kv.scan(b"", b"", done.safe_point, 10)) == at_safe_point
    assert dict(await kv.scan(b"", b"", after, 10)) == at_safe_point | {b"a": b"3"}


async def test_a_changefeeds_safepoint_holds_gc_back_and_the_round_uses_it(
    cluster: Any, gc: Any
) -> None:
    pd = cluster.client.pd
    before = await cluster.put((b"a", b"1"))
    held = await cluster.now()
    assert (
        await pd.update_service_gc_safe_point("ticdc-default-feed", 600, held)
    ).safe_point <= held
    await cluster.put((b"a", b"2"))
    young = await prewrite(cluster, [b"h"], b"young")
    done = await run(gc)
    assert done.safe_point == held
    assert await pd.gc_safe_point() == held
    assert await cluster.locked_keys() == [b"h"]
    assert await cluster.client.kv.get(b"a", held) == b"1"
    await pd.update_service_gc_safe_point("ticdc-default-feed", 0, held)
    assert (await run(gc)).safe_point > young > before
    assert await cluster.locked_keys() == []


async def test_rounds_without_pause_break_neither_a_pinned_snapshot_nor_the_banks_total(
    cluster: Any, gc: Any
) -> None:
    client, accounts, stop = cluster.client, [b"a", b"h", b"p", b"z"], asyncio.Event()
    pinned = await cluster.put(*((account, b"100") for account in accounts))
    await client.pd.update_service_gc_safe_point("ticdc-default-pin", 600, pinned)
    await gc.SetGCConfig(gc_pb2.SetGCConfigRequest(variables={"tikv_gc_life_time": "500ms"}))

    async def teller(seed: int) -> int:
        chosen, committed = random.Random(seed), 0
        while not stop.is_set():
            transaction = await client.begin(pessimistic=True)
            try:
                for account, change in zip(
                    sorted(chosen.sample(accounts, 2)), (-1, 1), strict=True
                ):
                    balance = int(await transaction.get_for_update(account) or b"0")
                    await transaction.put(account, b"%d" % (balance + change))
                committed += bool(await transaction.commit())
            except (
                ConflictError,
                UnavailableError,
            ):  # somebody was faster, perhaps again and again
                with contextlib.suppress(TidemarkError):
                    await transaction.rollback()
        return committed

    async def rounds(least: int, reaching: int) -> int:
        safe_point = done = 0
        while done < least or safe_point < reaching:
            it = (await gc.RunGC(RUN)).round
            done += it.result == "done"
            safe_point = max(safe_point, it.safe_point)
            balances = await client.snapshot(await cluster.now()).scan(b"", b"", 10)
            assert sum(int(balance) for _, balance in balances) == 400
        return safe_point

    async with asyncio.TaskGroup() as tasks:
        tellers = [tasks.create_task(teller(seed)) for seed in range(3)]
        assert await rounds(3, pinned) == pinned
        assert dict(await client.kv.scan(b"", b"", pinned, 10)) == dict.fromkeys(accounts, b"100")
        await client.pd.update_service_gc_safe_point("ticdc-default-pin", 0, pinned)
        assert await rounds(3, pinned + 1) > pinned
        stop.set()
    assert sum(task.result() for task in tellers) > 0


async def leads(service: Any) -> bool:
    return bool((await service.GetGCStatus(STATUS)).leader.is_self)


async def test_mode_central_asks_every_region(cluster: Any, gc: Any) -> None:
    first = await cluster.put((b"a", b"1"), (b"z", b"1"))
    await cluster.put((b"a", b"2"), (b"z", b"2"))
    await gc.SetGCConfig(gc_pb2.SetGCConfigRequest(variables={"tikv_gc_mode": "central"}))
    await run(gc)
    assert await cluster.client.kv.get(b"a", first) is None
    assert await cluster.client.kv.get(b"z", first) is None
    assert await cluster.client.kv.get(b"z", await cluster.now()) == b"2"


async def test_the_status_shows_what_mysql_tidb_would_and_bad_variables_change_nothing(
    cluster: Any, gc: Any
) -> None:
    await run(gc)
    status = await gc.GetGCStatus(STATUS)
    assert (status.config.life_time, status.config.run_interval, status.config.mode) == (
        "1ms",
        "24h0m0s",
        "distributed",
    )
    assert status.leader.is_self
    assert status.leader.desc.startswith("host:")
    assert status.leader.lease.endswith(" +0000")
    assert (
        status.safe_point == status.last_round.safe_point == await cluster.client.pd.gc_safe_point()
    )
    variables = {"tikv_gc_life_time": "10", "tikv_gc_mod": "central", "tikv_gc_concurrency": "3"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gc.SetGCConfig(gc_pb2.SetGCConfigRequest(variables=variables))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith("[TM:ErrGCConfig] ")
    assert (await gc.GetGCStatus(STATUS)).config.concurrency == 2


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return bytes(answer.read())


async def test_metrics_count_rounds_locks_and_phases(cluster: Any) -> None:
    worker = await cluster.worker()
    service = await cluster.service(worker)
    await service.SetGCConfig(gc_pb2.SetGCConfigRequest(variables={"tikv_gc_life_time": "1ms"}))
    await prewrite(cluster, [b"a", b"z"], b"never")
    while (await service.GetGCStatus(STATUS)).last_round.resolved_locks < 2:
        with contextlib.suppress(grpc.aio.AioRpcError):  # until it leads
            await service.RunGC(RUN)
    metrics = await asyncio.to_thread(fetch, f"http://{worker.endpoints['http']}/metrics")
    for line in (
        b"tidemark_gc_resolved_locks_total 2.0",
        b"tidemark_gc_leader 1.0",
        b'tidemark_gc_rounds_total{result="done"}',
        b'tidb_tikvclient_gc_seconds_count{stage="resolve_locks"}',
        b'tidb_tikvclient_gc_worker_actions_total{type="run_job"}',
        b'tidb_tikvclient_gc_config{type="tikv_gc_life_time"} 0.001',
        b"tidb_tikvclient_gc_region_too_many_locks 0.0",
    ):
        assert line in metrics


async def test_a_killed_leader_is_succeeded_after_its_lease(cluster: Any, until: Any) -> None:
    leading = await cluster.worker(10.0)
    first = await cluster.service(leading)

    await until(lambda: leads(first))
    second = await cluster.service(await cluster.worker())
    assert not await leads(second)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.RunGC(RUN)
    assert (caught.value.code(), "ErrGCLeaseLost" in (caught.value.details() or "")) == (
        grpc.StatusCode.ABORTED,
        True,
    )
    await leading.kill()
    await until(lambda: leads(second))
    await run(second)


async def test_a_leader_that_is_told_to_stop_lets_the_next_one_in_at_once(
    cluster: Any, until: Any
) -> None:
    leaving = await cluster.worker()
    first = await cluster.service(leaving)

    await until(lambda: leads(first))
    leaving.process.terminate()
    assert await leaving.process.wait() == 0
    second = await cluster.service(await cluster.worker())
    await until(lambda: leads(second))  # its lease is longer than that
