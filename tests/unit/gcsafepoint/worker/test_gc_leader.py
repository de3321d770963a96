"""Whole rounds: the order of phases, what holds the safepoint back, what is skipped,
where a lost lease stops.
"""

import asyncio
from typing import Any

import pytest

from gcsafepoint.worker.cluster import SafePointDecreasesError
from gcsafepoint.worker.config import BOUNDS, UNBOUND, format_instant
from gcsafepoint.worker.delete_ranges import DeleteRange, load, register
from gcsafepoint.worker.election import LeaseLostError
from gcsafepoint.worker.gc_leader import (
    GCDisabledError,
    SettingsChangedError,
    Stage,
    make_plan,
)
from gcsafepoint.worker.records import (
    COLLECTED_TS,
    DO_GC,
    LAST_RUN_TIME,
    LEADER_LEASE,
    LEADER_UUID,
    PENDING,
    RUNNING,
    SAFE_POINT,
    SAFE_POINT_TS,
    write_config,
)
from gcsafepoint.worker.round import GCRunningError, Result
from storage.model.errors import CorruptError, TidemarkError
from storage.model.ts import compose, physical_ms

LIFE_MS = 600_000
FEED = "the service ticdc-default-feed"


async def configure(bench: Any, **variables: str) -> None:
    await write_config(
        bench.records, {f"tikv_gc_{name}": text for name, text in variables.items()}, UNBOUND
    )


async def test_a_round_goes_through_its_phases_in_order_and_saves_the_safepoint_first(
    bench: Any,
) -> None:
    bench.cluster.lock(b"a", 5)
    await register(bench.records, DeleteRange(1, 1, b"t1", b"t2", 9))
    ended = await bench.run_round()
    safe_point = compose(physical_ms(ended.id) - LIFE_MS)
    assert (ended.result, ended.safe_point, ended.blocker) == (Result.DONE, safe_point, "")
    assert (ended.resolved_locks, ended.deleted_ranges, ended.regions) == (1, 1, 4)
    assert list(ended.phase_ms) == ["prepare", "resolve locks", "delete ranges", "do gc"]
    kinds = [request.split()[0] for request in bench.cluster.diary]
    assert kinds[0] == "hold"
    assert kinds[-1] == "publish"
    assert max(i for i, kind in enumerate(kinds) if kind == "resolve") < kinds.index("destroy")
    assert bench.diary.stages == [stage for stage in Stage if stage is not Stage.DO_GC]
    assert bench.records.held[SAFE_POINT].value == format_instant(physical_ms(safe_point))
    assert bench.records.held[LAST_RUN_TIME].value == format_instant(physical_ms(ended.id))
    assert (
        bench.records.held[COLLECTED_TS].value
        == bench.records.held[SAFE_POINT_TS].value
        == str(safe_point)
    )
    assert bench.cluster.published == safe_point


async def test_the_safepoint_is_saved_even_if_the_round_then_fails_and_the_next_does_the_work(
    bench: Any, unavailable: Any
) -> None:
    bench.cluster.service_min = 77
    bench.cluster.lock(b"a", 5)
    bench.cluster.failing = {"scan": unavailable}
    with pytest.raises(TidemarkError, match="the store is away"):
        await bench.run_round()
    assert bench.records.held[SAFE_POINT_TS].value == "77"
    assert bench.cluster.published == 0
    assert (bench.diary.ended[0].result, bench.diary.ended[0].error) == (
        Result.FAILED,
        str(unavailable),
    )
    bench.cluster.failing = {}
    assert (await bench.run_round()).result == Result.DONE  # although the safepoint did not move
    assert (bench.cluster.published, bench.cluster.locks) == (77, {})
    assert (await bench.run_round()).result == Result.NOTHING_NEW


async def test_another_services_safepoint_holds_the_round_back_and_is_named(bench: Any) -> None:
    bench.cluster.service_min = 77
    bench.cluster.lock(b"a", 77)
    await register(bench.records, DeleteRange(1, 1, b"t1", b"t2", 77))
    ended = await bench.run_round()
    assert (ended.safe_point, ended.resolved_locks, ended.deleted_ranges, ended.blocker) == (
        77,
        0,
        0,
        FEED,
    )
    assert bench.cluster.published == 77
    again = await bench.run_round()
    assert (again.result, again.safe_point, again.blocker) == (Result.NOTHING_NEW, 77, FEED)
    assert bench.diary.blockers == [(FEED, True), (FEED, False)]


async def test_a_running_transaction_holds_the_round_back_and_keeps_its_own_locks(
    bench: Any,
) -> None:
    await bench.records.write(
        {
            f"{RUNNING}tidb-0": "500",
            f"{RUNNING}tidb-1": "400",
            f"{RUNNING}idle": "0",
            f"{RUNNING}odd": "x",
        },
        {},
    )
    bench.cluster.lock(b"a", 399)
    bench.cluster.lock(b"b", 400)
    ended = await bench.run_round()
    assert (ended.safe_point, ended.blocker) == (400, "the transaction 400 of TiDB server tidb-1")
    assert list(bench.cluster.locks) == [b"b"]


async def test_without_a_new_safepoint_nothing_is_asked_of_the_stores(bench: Any) -> None:
    await bench.run_round()
    bench.cluster.diary.clear()
    await configure(bench, life_time="2h")
    assert (await bench.run_round()).result == Result.NOTHING_NEW
    assert bench.cluster.diary == []


async def test_ranges_that_failed_are_tried_again_while_the_safepoint_stands_still(
    bench: Any, unavailable: Any
) -> None:
    bench.cluster.service_min = 77
    await register(bench.records, DeleteRange(1, 1, b"t1", b"t2", 9))
    bench.cluster.failing = {"destroy on one": unavailable}
    ended = await bench.run_round()
    assert (ended.result, ended.failed_ranges) == (Result.DONE, 1)
    bench.cluster.failing = {}
    bench.cluster.diary.clear()
    ended = await bench.run_round()
    assert (ended.result, ended.deleted_ranges) == (Result.NOTHING_NEW, 1)
    assert [request.split()[0] for request in bench.cluster.diary] == ["hold", "destroy", "destroy"]


async def test_no_range_is_destroyed_at_a_safepoint_whose_locks_were_not_resolved(
    bench: Any, unavailable: Any
) -> None:
    bench.cluster.failing = {"scan": unavailable}
    await register(bench.records, DeleteRange(1, 1, b"t1", b"t2", 9))
    with pytest.raises(TidemarkError):
        await bench.run_round()
    bench.cluster.failing = {}
    await configure(bench, life_time="2h")
    assert (await bench.run_round()).result == Result.NOTHING_NEW
    assert len(await load(bench.records, PENDING)) == 1


async def test_a_round_in_its_first_phases_makes_the_next_one_skip(bench: Any) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    regions = bench.cluster.ranges_by_store

    async def slow() -> Any:
        reached.set()
        await go_on.wait()
        return await regions()

    bench.cluster.ranges_by_store = slow
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(bench.run_round())
        await reached.wait()
        with pytest.raises(GCRunningError) as caught:
            await bench.run_round()
        assert caught.value.message == "there's already a gc job running, skipped"
        go_on.set()
    assert first.result().result == Result.DONE


async def test_a_safepoint_that_a_dead_leader_asked_for_and_did_not_save_is_waited_for(
    bench: Any,
) -> None:
    hold = bench.cluster.hold_safe_point

    async def decreases(safe_point: int) -> Any:
        raise SafePointDecreasesError(f"current value: {safe_point + 1}, given: {safe_point}")

    bench.cluster.hold_safe_point = decreases
    assert (await bench.run_round()).result == Result.NOTHING_NEW
    assert SAFE_POINT_TS not in bench.records.held
    bench.cluster.hold_safe_point = hold
    assert (await bench.run_round()).result == Result.DONE


async def test_gc_that_is_switched_off_runs_no_round(bench: Any) -> None:
    await configure(bench, enable="false")
    with pytest.raises(GCDisabledError, match="set tikv_gc_enable to true"):
        await bench.run_round()
    assert bench.cluster.diary == []
    assert LAST_RUN_TIME not in bench.records.held


async def test_a_setting_that_changes_while_a_round_begins_counts_for_that_round(
    bench: Any,
) -> None:
    write, changes = bench.records.write, iter([{"life_time": "20m"}, {"life_time": "30m"}])

    async def meanwhile(texts: Any, expect: Any) -> int:
        if LAST_RUN_TIME in texts and (change := next(changes, None)):
            bench.records.write = write
            await configure(bench, **change)
            bench.records.write = meanwhile
        return int(await write(texts, expect))

    bench.records.write = meanwhile
    ended = await bench.run_round()
    assert physical_ms(ended.id) - physical_ms(ended.safe_point) == 3 * LIFE_MS
    assert bench.cluster.held == ended.safe_point

    async def always(texts: Any, expect: Any) -> int:
        return 0 if LAST_RUN_TIME in texts else int(await write(texts, expect))

    bench.records.write = always
    with pytest.raises(SettingsChangedError):
        await bench.run_round()


async def test_a_life_time_below_the_least_is_raised_to_it(
    cluster: Any, records: Any, bench_of: Any
) -> None:
    await records.write({"/tidemark/default/gc/tikv_gc_life_time": "1m"}, {})
    made = bench_of(cluster, records, bounds=BOUNDS)
    await made.worker.tick()
    ended = await made.run_round()
    assert physical_ms(ended.id) - physical_ms(ended.safe_point) == LIFE_MS
    assert made.diary.raised == [60_000]


async def test_a_plan_goes_as_far_as_the_round_itself_whatever_life_time_is_written(
    cluster: Any, records: Any, bench_of: Any
) -> None:
    await records.write({"/tidemark/default/gc/tikv_gc_life_time": "1m"}, {})
    made = bench_of(cluster, records, bounds=BOUNDS)
    await made.worker.tick()
    cluster.lock(b"a", 5)
    plan = await make_plan(cluster, records, BOUNDS.least_ms)
    ended = await made.run_round()
    # the clock of the tests goes on by a millisecond between the two
    assert physical_ms(ended.safe_point) - physical_ms(plan.safe_point) == 1
    assert (plan.fresh, plan.regions, plan.locks) == (True, ended.regions, ended.resolved_locks)


async def test_a_recorded_safepoint_that_is_none_fails_the_round_and_says_which_record(
    bench: Any,
) -> None:
    await bench.records.write({SAFE_POINT_TS: "soon"}, {})
    with pytest.raises(CorruptError, match="safe_point_ts holds 'soon'"):
        await bench.run_round()


async def test_central_mode_publishes_the_safepoint_and_then_walks_every_region(bench: Any) -> None:
    await configure(bench, mode="central")
    ended = await bench.run_round()
    published = bench.cluster.diary.index(f"publish {ended.safe_point}")
    walked = [
        request for request in bench.cluster.diary[published:] if request.startswith("collect")
    ]
    assert sorted(walked) == sorted(
        f"collect {start!r} {ended.safe_point}" for start in (b"", b"g", b"n", b"t")
    )
    assert (ended.collected_regions, ended.result, bench.cluster.published) == (
        4,
        Result.DONE,
        ended.safe_point,
    )
    assert DO_GC not in bench.records.held


async def test_a_central_round_in_do_gc_gives_way_to_the_next_which_goes_on_where_it_was(
    bench: Any,
) -> None:
    await configure(bench, mode="central", auto_concurrency="false", concurrency="1")
    reached, go_on = asyncio.Event(), asyncio.Event()
    collect, asked = bench.cluster.collect, 0

    async def slow(within: Any, safe_point: int) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            reached.set()
            await go_on.wait()
        return await collect(within, safe_point)

    bench.cluster.collect = slow
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(bench.run_round())
        await reached.wait()
        bench.cluster.now_ms += 1000
        second = await bench.run_round()
        go_on.set()
    assert (first.result().result, second.result) == (Result.GAVE_WAY, Result.DONE)
    old, new = (
        [
            request.split()[1]
            for request in bench.cluster.diary
            if request.endswith(f" {it.safe_point}") and "coll" in request
        ]
        for it in (first.result(), second)
    )
    assert old == ["b''", "b'n'", "b'g'"]
    assert new == [
        "b'g'",
        "b't'",
        "b'n'",
        "b''",
    ]  # b'g' was the first that was not known to be done
    assert bench.records.held[COLLECTED_TS].value == str(second.safe_point)


async def test_a_lost_lease_stops_before_the_next_request(bench: Any) -> None:
    scan, asked = bench.cluster.scan_locks, 0

    async def stalls(within: Any, safe_point: int) -> Any:
        nonlocal asked
        asked += 1
        bench.cluster.now_ms += 121_000
        return await scan(within, safe_point)

    bench.cluster.scan_locks = stalls
    with pytest.raises(LeaseLostError):
        await bench.run_round()
    assert asked == 1
    assert bench.diary.ended[0].result == Result.LOST
    assert bench.cluster.published == 0


async def test_a_request_that_outlasts_the_lease_is_given_up_unless_the_lease_is_renewed(
    bench: Any,
) -> None:
    reached, answered = asyncio.Event(), asyncio.Event()

    async def hangs() -> Any:
        reached.set()
        await asyncio.Event().wait()
        answered.set()

    bench.cluster.ranges_by_store = hangs
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(refused(bench))
        await reached.wait()
        bench.cluster.now_ms += 60_000
        assert await bench.worker.tick() is False  # renewed; nothing is due
        await asyncio.sleep(0)
        assert not running.done()
        other = {LEADER_UUID: "other", LEADER_LEASE: format_instant(bench.cluster.now_ms + LIFE_MS)}
        await bench.records.write(other, {})
        await bench.worker.tick()
    assert running.result()
    assert not answered.is_set()


async def refused(bench: Any) -> bool:
    with pytest.raises(LeaseLostError, match="ran out in the middle"):
        await bench.run_round()
    return True
