"""Delete Ranges: due only before the safepoint, on every store, each by itself,
remembered for a day.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.worker.delete_ranges import (
    KEPT_MS,
    DeleteRange,
    DeleteRangeError,
    delete_again,
    delete_first,
    due,
    due_again,
    load,
    load_due,
    register,
    withdraw,
)
from gcsafepoint.worker.election import LeaseLostError
from gcsafepoint.worker.records import DONE, PENDING, SAFE_POINT_TS
from storage.model.errors import CorruptError, TidemarkError

ranges = st.builds(
    DeleteRange,
    job_id=st.integers(0, 2**62),
    element_id=st.integers(-(2**62), 2**62),
    start_key=st.binary(max_size=12),
    end_key=st.binary(max_size=12),
    ts=st.integers(1, 2**63),
    done_ms=st.integers(0, 2**45),
    attempts=st.integers(0, 9),
    error=st.text(max_size=9),
)


def table(number: int, *, ts: int = 50) -> DeleteRange:
    return DeleteRange(number, 1, b"t%d" % number, b"t%d" % (number + 1), ts)


async def run(
    cluster: Any, records: Any, safe_point: int = 100, fence: Any = dict
) -> list[tuple[int, bool]]:
    seen: list[tuple[int, bool]] = []

    def report(it: DeleteRange, err: TidemarkError | None) -> None:
        seen.append((it.job_id, err is None))

    ranges = await load_due(records, safe_point, cluster.now_ms)
    await delete_first(cluster, records, fence, ranges.first, cluster.now_ms, report)
    await delete_again(cluster, records, fence, ranges.again, report)
    return seen


@given(ranges)
def test_a_record_reads_back_the_same(it: DeleteRange) -> None:
    assert DeleteRange.from_json(it.to_json()) == it


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"start_key": "zz", "end_key": ""}', '{"start_key":"","end_key":""}']
)
def test_a_foreign_record_is_corruption(text: str) -> None:
    with pytest.raises(CorruptError, match="cannot be read"):
        DeleteRange.from_json(text)


@given(st.lists(ranges), st.integers(1, 2**63))
def test_due_is_all_that_was_dropped_before_the_safepoint_oldest_first(
    some: list[DeleteRange], safe_point: int
) -> None:
    chosen = due(some, safe_point)
    assert all(it.ts < safe_point for it in chosen)
    assert len(chosen) == sum(it.ts < safe_point for it in some)
    assert [it.ts for it in chosen] == sorted(it.ts for it in chosen)


@given(st.lists(ranges), st.integers(0, 2**45))
def test_due_again_is_what_was_done_a_day_ago(done: list[DeleteRange], now_ms: int) -> None:
    assert due_again(done, now_ms) == [it for it in done if it.done_ms + KEPT_MS <= now_ms]


async def test_a_due_range_goes_to_every_store_and_then_to_done(cluster: Any, records: Any) -> None:
    await register(records, table(1))
    await register(records, table(2, ts=100))
    assert await run(cluster, records) == [(1, True)]
    assert sorted(cluster.diary) == ["destroy on one b't1'", "destroy on two b't1'"]
    assert [it.job_id for it in await load(records, PENDING)] == [2]
    assert [(it.job_id, it.done_ms) for it in await load(records, DONE)] == [(1, cluster.now_ms)]


async def test_a_range_that_fails_stays_and_does_not_hold_up_the_others(
    cluster: Any, records: Any, unavailable: Any
) -> None:
    for number in (1, 2):
        await register(records, table(number))
    destroy = cluster.destroy_range

    async def fails_for_one(address: str, within: Any) -> None:
        if within.start_key == b"t1":
            raise unavailable
        await destroy(address, within)

    cluster.destroy_range = fails_for_one
    for attempts in (1, 2):
        assert (1, False) in await run(cluster, records)
        [left] = await load(records, PENDING)
        assert (left.job_id, left.attempts, left.error) == (1, attempts, str(unavailable))
    cluster.destroy_range = destroy
    assert await run(cluster, records) == [(1, True)]
    assert {it.job_id: (it.attempts, it.error) for it in await load(records, DONE)} == {
        1: (3, ""),
        2: (1, ""),
    }


async def test_a_store_that_is_down_does_not_keep_the_others_from_destroying(
    cluster: Any, records: Any, unavailable: Any
) -> None:
    await register(records, table(1))
    destroyed: list[str] = []

    async def destroy(address: str, within: Any) -> None:
        if address == "one":
            raise unavailable
        await asyncio.sleep(0.01)
        destroyed.append(address)

    cluster.destroy_range = destroy
    assert await run(cluster, records) == [(1, False)]
    assert destroyed == ["two"]
    [left] = await load(records, PENDING)
    assert (left.attempts, left.error) == (1, str(unavailable))


async def test_a_redo_that_fails_is_seen_and_tried_again(
    cluster: Any, records: Any, unavailable: Any
) -> None:
    await register(records, table(1))
    await run(cluster, records)
    cluster.now_ms += KEPT_MS
    cluster.failing = {"destroy on two": unavailable}
    assert await run(cluster, records) == [(1, False)]
    [left] = await load(records, DONE)
    assert (left.attempts, left.error) == (2, str(unavailable))
    cluster.failing = {}
    assert await run(cluster, records) == [(1, True)]
    assert await load(records, DONE) == []


async def test_a_record_that_cannot_be_read_is_shown_and_never_due(
    cluster: Any, records: Any
) -> None:
    await register(records, table(1))
    await records.write({f"{PENDING}7/-8": "garbage", f"{DONE}x": "{}"}, {})
    cluster.now_ms += KEPT_MS
    assert await run(cluster, records) == [(1, True)]
    [left] = await load(records, PENDING)
    assert (left.job_id, left.element_id) == (7, -8)
    assert "cannot be read: 'garbage'" in left.error


async def test_after_a_day_it_is_destroyed_once_more_and_forgotten(
    cluster: Any, records: Any
) -> None:
    await register(records, table(1))
    await run(cluster, records)
    assert await run(cluster, records) == []
    cluster.now_ms += KEPT_MS
    assert await run(cluster, records) == [(1, True)]
    assert await load(records, DONE) == []


async def test_losing_the_lease_stops_before_the_next_range(cluster: Any, records: Any) -> None:
    for number in (1, 2):
        await register(records, table(number))
    cluster.failing = {"destroy on one": LeaseLostError("gone")}
    with pytest.raises(LeaseLostError):
        await run(cluster, records)
    assert len(await load(records, PENDING)) == 2


async def test_a_fenced_leader_moves_no_record_and_touches_no_further_range(
    cluster: Any, records: Any, unavailable: Any
) -> None:
    for number in range(10, 30):
        await register(records, table(number))
    for cluster.failing in ({}, {"destroy on one": unavailable}):
        cluster.diary.clear()
        with pytest.raises(LeaseLostError, match="another worker became GC leader"):
            await run(cluster, records, fence=lambda: {"leader": 7})
        assert len(await load(records, PENDING)) == 20
        # four at once, on two stores
        assert len(cluster.diary) <= 8


async def test_a_fenced_leader_forgets_no_range_that_was_destroyed_again(
    cluster: Any, records: Any
) -> None:
    await register(records, table(1))
    await run(cluster, records)
    cluster.now_ms += KEPT_MS
    with pytest.raises(LeaseLostError, match="another worker became GC leader"):
        await run(cluster, records, fence=lambda: {"leader": 7})
    assert len(await load(records, DONE)) == 1


async def test_registering_twice_is_once_but_another_range_is_refused(records: Any) -> None:
    await register(records, table(1))
    await register(records, table(1))
    with pytest.raises(DeleteRangeError, match="another range already"):
        await register(records, DeleteRange(1, 1, b"x", b"y", 50))


async def test_a_range_that_waits_is_taken_back_and_no_other_one(records: Any) -> None:
    for number in (1, 11):
        await register(records, table(number))
    assert await withdraw(records, 1, 1, dry_run=True) == table(1)
    assert len(await load(records, PENDING)) == 2
    assert await withdraw(records, 1, 1) == table(1)
    assert await load(records, PENDING) == [table(11)]
    with pytest.raises(DeleteRangeError, match="job 1 element 1 has no range"):
        await withdraw(records, 1, 1)


async def test_a_range_that_a_round_may_have_destroyed_is_not_taken_back(
    cluster: Any, records: Any
) -> None:
    await register(records, table(1, ts=50))
    await records.write({SAFE_POINT_TS: "51"}, {})
    for dry_run in (True, False):
        with pytest.raises(DeleteRangeError, match="is due: its ts 50 is before the safepoint 51"):
            await withdraw(records, 1, 1, dry_run=dry_run)
    await run(cluster, records, safe_point=51)
    with pytest.raises(DeleteRangeError, match="was destroyed"):
        await withdraw(records, 1, 1)


async def test_a_safepoint_that_moves_meanwhile_is_seen(
    records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register(records, table(1, ts=50))
    await records.write({SAFE_POINT_TS: "50"}, {})
    write = records.write

    async def moved_before(changes: Any, expect: Any) -> int:
        await write({SAFE_POINT_TS: "51"}, {})
        return await write(changes, expect)

    monkeypatch.setattr(records, "write", moved_before)
    with pytest.raises(DeleteRangeError, match="is due"):
        await withdraw(records, 1, 1)
    assert await load(records, PENDING) == [table(1, ts=50)]


async def test_a_record_that_cannot_be_read_can_be_taken_back(records: Any) -> None:
    await records.write({f"{PENDING}7/-8": "garbage", SAFE_POINT_TS: "100"}, {})
    await withdraw(records, 7, -8)
    assert await load(records, PENDING) == []


async def test_a_range_already_done_is_not_registered_again(cluster: Any, records: Any) -> None:
    await register(records, table(1))
    await run(cluster, records)
    await register(records, table(1))
    assert await load(records, PENDING) == []


@pytest.mark.parametrize(
    ("start", "end", "ts", "reason"),
    [
        (b"", b"", 1, "is empty or has no end"),
        (b"b", b"a", 1, "is empty or has no end"),
        (b"a", b"a", 1, "is empty or has no end"),
        (b"a", b"b", 0, "needs the timestamp of its drop"),
        (b"a", b"b" * 8193, 1, "at most 8192 bytes"),
        (b"b" * 8192, b"a", 1, "is empty or has no end"),
    ],
)
def test_empty_endless_undated_and_oversized_ranges_are_refused(
    records: Any, start: bytes, end: bytes, ts: int, reason: str
) -> None:
    with pytest.raises(DeleteRangeError, match=reason) as caught:
        asyncio.run(register(records, DeleteRange(1, 1, start, end, ts)))
    assert len(caught.value.message) < 300
