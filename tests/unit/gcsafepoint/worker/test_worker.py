"""Whole rounds: the order of phases, what holds the safepoint back, what is skipped, where a lost lease stops."""

import asyncio
from typing import Any

import pytest

from gcsafepoint.worker.delete_ranges import DeleteRange, register
from gcsafepoint.worker.election import Election, LeaseLostError
from gcsafepoint.worker.records import LAST_RUN_TIME, RUNNING, SAFE_POINT, write_config
from gcsafepoint.worker.round import GCRunningError, Phase, Round
from gcsafepoint.worker.times import format_instant
from gcsafepoint.worker.worker import DONE, NOTHING_NEW, GCWorker, WorkerStoppedError
from storage.model.errors import TidemarkError
from storage.model.ts import compose

LIFE_MS = 600_000


class Diary:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.skipped: list[str] = []
        self.failed: list[str] = []
        self.ended: list[tuple[Round, str]] = []
        self.phases: list[Phase] = []
        self.first_ended = asyncio.Event()

    def led(self, *, leads: bool) -> None: ...

    def tick_failed(self, err: TidemarkError) -> None:
        self.failed.append(err.code)

    def round_skipped(self, err: TidemarkError) -> None:
        self.skipped.append(err.message)

    def phase_ended(self, phase: Phase, seconds: float) -> None:
        self.phases.append(phase)

    def range_deleted(self, it: DeleteRange, err: TidemarkError | None) -> None: ...

    def locks_resolved(self, locks: int) -> None: ...

    def round_ended(self, it: Round, outcome: str, err: TidemarkError | None) -> None:
        self.ended.append((it, outcome))
        self.first_ended.set()


class Bench:
    """A worker, and all that it stands on."""

    def __init__(self, cluster: Any, records: Any) -> None:
        self.cluster, self.records, self.diary = cluster, records, Diary()
        self.election = Election(records, uuid="me", desc="", lease_ms=120_000, monotonic_s=self.monotonic_s)
        self.worker = GCWorker(cluster, records, self.election, self.diary, monotonic_s=self.monotonic_s)

    def monotonic_s(self) -> float:
        return float(self.cluster.now_ms) / 1000


@pytest.fixture
async def bench(cluster: Any, records: Any) -> Bench:
    made = Bench(cluster, records)
    assert await made.worker.tick()
    return made


async def test_a_round_goes_through_its_phases_in_order_and_saves_the_safepoint_first(bench: Bench) -> None:
    safe_point = compose(bench.cluster.now_ms - LIFE_MS)
    bench.cluster.lock(b"a", 5)
    await register(bench.records, DeleteRange(1, 1, b"t1", b"t2", 9))
    ended = await bench.worker.run_round()
    assert (ended.result, ended.safe_point) == (DONE, safe_point)
    assert (ended.resolved_locks, ended.deleted_ranges, ended.regions) == (1, 1, 4)
    kinds = [request.split()[0] for request in bench.cluster.diary]
    assert kinds[0] == "hold"
    assert kinds[-1] == "publish"
    assert max(i for i, kind in enumerate(kinds) if kind == "resolve") < kinds.index("destroy")
    assert bench.diary.phases == [Phase.PREPARE, Phase.RESOLVE_LOCKS, Phase.DELETE_RANGES, Phase.DO_GC]
    assert bench.records.held[SAFE_POINT].value == format_instant(bench.cluster.now_ms - LIFE_MS)
    assert bench.records.held[LAST_RUN_TIME].value == format_instant(bench.cluster.now_ms)
    assert bench.cluster.published == safe_point


async def test_the_safepoint_is_saved_even_if_the_round_then_fails(bench: Bench, unavailable: Any) -> None:
    bench.cluster.failing = {"regions": unavailable}
    with pytest.raises(TidemarkError, match="the store is away"):
        await bench.worker.run_round()
    assert SAFE_POINT in bench.records.held
    assert bench.cluster.published == 0
    assert bench.diary.ended[0][1] == "failed"
    bench.cluster.failing = {}
    bench.cluster.now_ms += 1000
    assert (await bench.worker.run_round()).result == DONE


async def test_another_services_safepoint_holds_the_round_back(bench: Bench) -> None:
    bench.cluster.service_min = 77
    bench.cluster.lock(b"a", 78)
    await register(bench.records, DeleteRange(1, 1, b"t1", b"t2", 77))
    ended = await bench.worker.run_round()
    assert (ended.safe_point, ended.resolved_locks, ended.deleted_ranges) == (77, 0, 0)
    assert bench.cluster.published == 77


async def test_a_running_transaction_holds_the_round_back(bench: Bench) -> None:
    await bench.records.write({f"{RUNNING}tidb-0": "500", f"{RUNNING}tidb-1": "400"}, {})
    assert (await bench.worker.run_round()).safe_point == 399


async def test_without_a_new_safepoint_nothing_is_asked_of_the_stores(bench: Bench) -> None:
    await bench.worker.run_round()
    bench.cluster.diary.clear()
    await write_config(bench.records, {"tikv_gc_life_time": "2h"})
    assert (await bench.worker.run_round()).result == NOTHING_NEW
    assert bench.cluster.diary == []


async def test_a_round_in_its_first_phases_makes_the_next_one_skip(bench: Bench) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    regions = bench.cluster.ranges_by_store

    async def slow() -> Any:
        reached.set()
        await go_on.wait()
        return await regions()

    bench.cluster.ranges_by_store = slow
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(bench.worker.run_round())
        await reached.wait()
        with pytest.raises(GCRunningError, match="there's already a gc job running, skipped"):
            await bench.worker.run_round()
        go_on.set()
    assert first.result().result == DONE


async def test_central_mode_walks_every_region(bench: Bench) -> None:
    await write_config(bench.records, {"tikv_gc_mode": "central"})
    safe_point = (await bench.worker.run_round()).safe_point
    walked = [request for request in bench.cluster.diary if request.startswith("collect")]
    assert walked == [f"collect {start} {safe_point}" for start in (b"", b"g", b"n", b"t")]


async def test_a_central_round_in_do_gc_gives_way_to_the_next(bench: Bench) -> None:
    await write_config(bench.records, {"tikv_gc_mode": "central"})
    reached, go_on = asyncio.Event(), asyncio.Event()
    collect = bench.cluster.collect

    async def slow(start_key: bytes, safe_point: int) -> Any:
        if not reached.is_set():
            reached.set()
            await go_on.wait()
        return await collect(start_key, safe_point)

    bench.cluster.collect = slow
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(bench.worker.run_round())
        await reached.wait()
        bench.cluster.now_ms += 1000
        second = await bench.worker.run_round()
        go_on.set()
    old = [request for request in bench.cluster.diary if request.endswith(f" {first.result().safe_point}")]
    assert [request.split()[0] for request in old] == ["hold", "publish", "collect"]
    assert second.result == DONE


async def test_a_lost_lease_stops_before_the_next_request(bench: Bench) -> None:
    scan = bench.cluster.scan_locks
    asked = 0

    async def stalls(within: Any, safe_point: int) -> Any:
        nonlocal asked
        asked += 1
        bench.cluster.now_ms += 121_000
        return await scan(within, safe_point)

    bench.cluster.scan_locks = stalls
    with pytest.raises(LeaseLostError):
        await bench.worker.run_round()
    assert asked == 1
    assert bench.diary.ended[0][1] == "lost the lease"
    assert bench.cluster.published == 0


async def test_a_follower_runs_no_round(cluster: Any, records: Any, bench: Bench) -> None:
    other = Bench(cluster, records)
    other.election.uuid = "other"
    assert not await other.worker.tick()
    with pytest.raises(LeaseLostError):
        await other.worker.run_round()


async def test_rounds_are_due_by_the_interval_and_only_if_enabled(bench: Bench) -> None:
    await bench.worker.run_round()
    bench.cluster.now_ms += 60_000
    assert not await bench.worker.tick()
    await write_config(bench.records, {"tikv_gc_run_interval": "30s"})
    assert await bench.worker.tick()
    await write_config(bench.records, {"tikv_gc_enable": "false"})
    assert not await bench.worker.tick()


async def test_a_tick_that_fails_is_told_and_not_fatal(bench: Bench, unavailable: Any) -> None:
    async def away() -> int:
        raise unavailable

    bench.cluster.now_ts = away
    assert not await bench.worker.tick()
    assert bench.diary.failed == ["ErrUnavailable"]


async def test_a_running_worker_collects_by_itself_and_on_demand_and_resigns_when_stopped(bench: Bench) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(bench.worker.run(3600))
        await bench.diary.first_ended.wait()
        bench.cluster.now_ms += 1000
        assert (await bench.worker.demand_round()).result == DONE
        assert (await bench.worker.demand_round()).result == NOTHING_NEW
        running.cancel()
    assert len(bench.diary.ended) == 3
    assert await bench.election.leader() is None


async def test_a_round_on_demand_is_answered_even_if_the_worker_is_stopped_in_it(bench: Bench) -> None:
    with pytest.raises(WorkerStoppedError):
        await bench.worker.demand_round()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(bench.worker.run(3600))
        await bench.diary.first_ended.wait()
        bench.cluster.now_ms += 1000
        reached = asyncio.Event()

        async def never() -> Any:
            reached.set()
            await asyncio.Event().wait()

        bench.cluster.ranges_by_store = never
        demanded = tasks.create_task(stopped(bench.worker))
        await reached.wait()
        running.cancel()
    assert demanded.result()
    assert [outcome for _, outcome in bench.diary.ended] == ["done", "stopped"]


async def stopped(worker: GCWorker) -> bool:
    with pytest.raises(WorkerStoppedError, match="ask again"):
        await worker.demand_round()
    return True
