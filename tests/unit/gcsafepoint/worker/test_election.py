"""Leadership: at most one, kept by renewing, lost by standing still,
taken over when the lease has run out.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.worker.config import format_instant
from gcsafepoint.worker.election import (
    Election,
    Leader,
    LeaseLostError,
    Move,
    next_move,
    read_leader,
)
from gcsafepoint.worker.records import LEADER_DESC, LEADER_LEASE, LEADER_UUID, Record

LEASE_MS = 120_000


class Clock:
    """The coordinator's clock and a worker's monotonic one, which share their pace."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def monotonic_s(self) -> float:
        return self.ms / 1000


def worker(records: Any, clock: Clock, name: str) -> Election:
    return Election(
        records, uuid=name, desc=f"host:{name}", lease_ms=LEASE_MS, monotonic_s=clock.monotonic_s
    )


async def tick(election: Election, clock: Clock) -> bool:
    return await election.tick(clock.monotonic_s(), clock.ms)


@pytest.mark.parametrize(
    ("uuid", "lease", "move"),
    [
        ("me", format_instant(2000), Move.RENEW),
        ("me", format_instant(0), Move.CLAIM),
        ("other", format_instant(2000), Move.FOLLOW),
        ("other", format_instant(0), Move.CLAIM),
        ("other", "nonsense", Move.CLAIM),
    ],
)
def test_what_is_done_about_a_leader(uuid: str, lease: str, move: Move) -> None:
    assert next_move(Leader(uuid, "", lease, {}), "me", 1500) is move


async def test_the_first_to_tick_leads_and_is_recorded_as_in_mysql_tidb(records: Any) -> None:
    clock = Clock()
    one, two = worker(records, clock, "one"), worker(records, clock, "two")
    assert await tick(one, clock)
    assert not await tick(two, clock)
    assert records.held[LEADER_UUID].value == "one"
    assert records.held[LEADER_DESC].value == "host:one"
    assert records.held[LEADER_LEASE].value == format_instant(clock.ms + LEASE_MS)
    with pytest.raises(LeaseLostError, match="not the GC leader"):
        two.check()


async def test_renewing_keeps_the_leadership_and_its_fence(records: Any) -> None:
    clock = Clock()
    one, two = worker(records, clock, "one"), worker(records, clock, "two")
    assert await tick(one, clock)
    fence = one.fence
    for _ in range(5):
        clock.ms += 60_000
        assert await tick(one, clock)
        assert not await tick(two, clock)
    assert one.fence == fence


async def test_a_stopped_leader_finds_out_by_itself_and_is_succeeded(records: Any) -> None:
    clock = Clock()
    one, two = worker(records, clock, "one"), worker(records, clock, "two")
    assert await tick(one, clock)
    clock.ms += LEASE_MS + 1000
    assert not one.leads
    with pytest.raises(LeaseLostError):
        one.check()
    assert await tick(two, clock)
    assert not await records.write({"key": "late"}, one.fence)
    assert not await tick(one, clock)


async def test_resigning_lets_the_next_worker_in_at_once(records: Any) -> None:
    clock = Clock()
    one, two = worker(records, clock, "one"), worker(records, clock, "two")
    assert await tick(one, clock)
    await one.resign()
    assert not one.leads
    assert await tick(two, clock)
    await one.resign()
    assert records.held[LEADER_UUID].value == "two"


async def test_of_two_who_see_the_same_expired_lease_one_gets_it(
    records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    gone, one, two = (worker(records, clock, name) for name in ("gone", "one", "two"))
    assert await tick(gone, clock)
    clock.ms += LEASE_MS + 1000
    seen = dict(records.held)
    assert await tick(one, clock)

    async def as_seen(prefix: str) -> dict[str, Record]:
        return {key: record for key, record in seen.items() if key.startswith(prefix)}

    # the read that came before the other's claim
    monkeypatch.setattr(records, "read", as_seen)
    assert not await tick(two, clock)
    assert records.held[LEADER_UUID].value == "one"


@pytest.mark.parametrize("deleted", [(LEADER_UUID,), (LEADER_UUID, LEADER_DESC), (LEADER_LEASE,)])
async def test_a_record_that_somebody_deleted_in_part_is_claimed_when_its_lease_is_over(
    records: Any, deleted: tuple[str, ...]
) -> None:
    clock = Clock()
    one, two = worker(records, clock, "one"), worker(records, clock, "two")
    assert await tick(one, clock)
    await records.write(dict.fromkeys(deleted), {})
    if LEADER_UUID in deleted:
        assert await read_leader(records) is None
        # the one that led may do so by its own clock until the lease ends
        assert not await tick(two, clock)
    clock.ms += LEASE_MS + 1000
    assert await tick(two, clock)
    assert records.held[LEADER_UUID].value == "two"


steps = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 90_000), st.integers(0, 90_000)), max_size=40
)


@given(steps)
def test_never_two_leaders_however_they_tick_and_stall(
    memory_records: Any, plan: list[tuple[int, int, int]]
) -> None:
    async def run() -> None:
        records, clock = memory_records(), Clock()
        workers = [worker(records, clock, name) for name in ("one", "two", "three")]
        for who, before_ms, stall_ms in plan:
            clock.ms += before_ms
            marked_s, now_ms = clock.monotonic_s(), clock.ms
            clock.ms += stall_ms  # between asking for the time and writing the record
            await workers[who].tick(marked_s, now_ms)
            assert sum(election.leads for election in workers) <= 1

    asyncio.run(run())


async def test_what_runs_under_the_lease_ends_with_it_and_renewing_gives_it_more_time(
    records: Any,
) -> None:
    clock = Clock()
    one = Election(records, uuid="one", desc="", lease_ms=2000, monotonic_s=clock.monotonic_s)
    with pytest.raises(LeaseLostError, match="not the GC leader"):
        async with one.while_leading():
            pytest.fail("nobody leads")
    assert await tick(one, clock)
    renewed, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with one.while_leading():
            await renewed.wait()
            await asyncio.Event().wait()

    async def until_lost() -> None:
        with pytest.raises(LeaseLostError, match="ran out in the middle"):
            await work()
        ended.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(until_lost())
        clock.ms += 1000
        assert await tick(one, clock)
        renewed.set()
        clock.ms += 1000
        assert one.leads
        await asyncio.sleep(0)
        assert not ended.is_set()
        clock.ms += 2000  # as a process that was stopped finds its clock
        two = worker(records, clock, "two")
        assert await tick(two, clock)
        assert not await tick(one, clock)
    assert ended.is_set()


async def test_a_timeout_of_the_work_itself_is_not_taken_for_a_lost_lease(records: Any) -> None:
    clock = Clock()
    one = worker(records, clock, "one")
    assert await tick(one, clock)
    with pytest.raises(TimeoutError):
        async with one.while_leading():
            raise TimeoutError
