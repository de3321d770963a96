"""The worker's life: ticks, rounds that are due or demanded,
and what becomes of them when it is stopped.
"""

import asyncio
from typing import Any

import pytest

from gcsafepoint.worker.config import UNBOUND
from gcsafepoint.worker.election import LeaseLostError, read_leader
from gcsafepoint.worker.records import LAST_RUN_TIME, write_config
from gcsafepoint.worker.round import Result
from gcsafepoint.worker.worker import WorkerStoppedError


async def test_a_follower_runs_no_round(
    cluster: Any, records: Any, bench: Any, bench_of: Any
) -> None:
    other = bench_of(cluster, records, "other")
    assert not await other.worker.tick()
    with pytest.raises(LeaseLostError):
        await other.worker.begin_round()


async def test_rounds_are_due_by_the_interval_and_only_if_enabled(bench: Any) -> None:
    await bench.run_round()
    bench.cluster.now_ms += 60_000
    assert not await bench.worker.tick()
    await write_config(bench.records, {"tikv_gc_run_interval": "30s"}, UNBOUND)
    assert await bench.worker.tick()
    await write_config(bench.records, {"tikv_gc_enable": "false"})
    assert not await bench.worker.tick()


async def test_a_last_run_time_that_nobody_can_read_makes_a_round_due(bench: Any) -> None:
    await bench.run_round()
    await bench.records.write({LAST_RUN_TIME: "yesterday"}, {})
    assert await bench.worker.tick()


async def test_a_tick_that_fails_is_told_and_not_fatal(bench: Any, unavailable: Any) -> None:
    async def away() -> int:
        raise unavailable

    bench.cluster.now_ts = away
    assert not await bench.worker.tick()
    assert bench.diary.failed == ["ErrUnavailable"]


async def test_a_leader_that_is_cut_off_leads_until_its_lease_ends_and_says_so_then(
    bench: Any, unavailable: Any
) -> None:
    async def away() -> int:
        raise unavailable

    answers = bench.cluster.now_ts
    bench.cluster.now_ts = away
    bench.diary.leads.clear()
    await bench.worker.tick()
    assert bench.diary.leads == []
    bench.cluster.now_ms += 3_600_000
    await bench.worker.tick()
    assert bench.diary.leads == [False]
    bench.cluster.now_ts = answers
    await bench.worker.tick()
    assert bench.diary.leads == [False, True]


async def test_a_running_worker_collects_by_itself_and_on_demand_and_resigns_when_stopped(
    bench: Any,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(bench.worker.run(3600))
        await bench.diary.first_ended.wait()
        bench.cluster.now_ms += 1000
        assert (await bench.worker.run_round_now()).result == Result.DONE
        bench.cluster.service_min = 5
        assert (await bench.worker.run_round_now()).result == Result.NOTHING_NEW
        running.cancel()
    assert len(bench.diary.ended) == 3
    assert await read_leader(bench.records) is None


async def test_a_round_that_is_due_while_one_runs_is_skipped_with_tidbs_words(bench: Any) -> None:
    reached = asyncio.Event()

    async def never() -> Any:
        reached.set()
        await asyncio.Event().wait()

    bench.cluster.ranges_by_store = never
    await write_config(bench.records, {"tikv_gc_run_interval": "1ms"}, UNBOUND)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(bench.worker.run(0.001))
        await reached.wait()
        while not bench.diary.skipped:
            bench.cluster.now_ms += 1000  # past the second that mysql.tidb's instants are cut to
            await asyncio.sleep(0.001)
        running.cancel()
    assert set(bench.diary.skipped) == {"there's already a gc job running, skipped"}


async def test_a_round_on_demand_is_answered_even_if_the_worker_is_stopped_in_it(
    bench: Any,
) -> None:
    with pytest.raises(WorkerStoppedError):
        await bench.worker.run_round_now()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(bench.worker.run(3600))
        await bench.diary.first_ended.wait()
        bench.cluster.now_ms += 1000
        reached = asyncio.Event()

        async def never() -> Any:
            reached.set()
            await asyncio.Event().wait()

        bench.cluster.ranges_by_store = never
        demanded = tasks.create_task(stopped(bench))
        await reached.wait()
        running.cancel()
    assert demanded.result()
    assert [it.result for it in bench.diary.ended] == [Result.DONE, Result.STOPPED]


async def stopped(bench: Any) -> bool:
    with pytest.raises(WorkerStoppedError, match="ask again"):
        await bench.worker.run_round_now()
    return True


async def test_a_write_rate_is_brought_to_every_store_once_per_change_until_it_arrives(
    bench: Any, unavailable: Any
) -> None:
    def told() -> list[str]:
        notes = [note for note in bench.cluster.diary if note.startswith("limit")]
        bench.cluster.diary.clear()
        return notes

    await bench.worker.tick()
    assert told() == []  # nobody ever set it: the stores' own settings hold
    bench.cluster.failing = {"limit two": unavailable}
    await write_config(bench.records, {"gc.max-write-bytes-per-sec": "10MB"})
    await bench.worker.settings_changed()
    assert told() == ["limit one 10485760", "limit two 10485760"]
    assert bench.diary.failed == ["two ErrUnavailable"]
    bench.cluster.failing = {}
    await bench.worker.tick()
    assert told() == ["limit two 10485760"]
    await bench.worker.tick()
    assert told() == []
    await write_config(bench.records, {"gc.max-write-bytes-per-sec": "0"})
    await bench.worker.tick()
    assert told() == ["limit one 0", "limit two 0"]
