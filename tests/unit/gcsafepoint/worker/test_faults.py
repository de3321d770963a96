"""A worker dies or stalls at any of its requests: the next one finishes the work,
and nothing that is late harms.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gcsafepoint.worker.config import UNBOUND
from gcsafepoint.worker.delete_ranges import DeleteRange, load, register
from gcsafepoint.worker.records import (
    COLLECTED_TS,
    DONE,
    LAST_RUN_TIME,
    PENDING,
    SAFE_POINT_TS,
    load_rounds,
    read_ts,
    write_config,
)
from gcsafepoint.worker.round import Phase, Result
from storage.model.errors import TidemarkError
from storage.model.ts import compose

LEASE_MS = 121_000
LIFE_MS = 600_000
DAY_MS = 86_400_000


class KilledError(BaseException):
    """What ends a process."""


class Tripwire:
    """Stands before everything a worker calls, and counts it."""

    def __init__(self, inner: Any, count: "Counter") -> None:
        self._inner, self._count = inner, count

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*arguments: Any) -> Any:
            return await self._count.pass_by(lambda: found(*arguments), f"{name} {arguments}")

        return call


class Counter:
    """The calls of one worker, in order; at the chosen one something happens."""

    def __init__(self, chosen: int, at: Callable[[], Awaitable[None]], *, after: bool) -> None:
        self._chosen, self._at, self._after = chosen, at, after
        self.calls: list[str] = []
        self.tripped = False

    async def pass_by(self, call: Callable[[], Awaitable[Any]], name: str) -> Any:
        chosen = len(self.calls) == self._chosen
        self.calls.append(name)
        if not chosen:
            return await call()
        self.tripped = True
        if not self._after:
            await self._at()
            return await call()
        answer = await call()
        await self._at()
        return answer


async def littered(cluster: Any, records: Any, mode: str) -> None:
    await write_config(records, {"tikv_gc_mode": mode}, UNBOUND)
    cluster.decisions = {5: 6}
    for key, start_ts in ((b"a", 5), (b"h", 5), (b"z", 7), (b"p", 8)):
        cluster.lock(key, start_ts)
    for number in (1, 2):
        await register(records, DeleteRange(number, 1, b"t%d" % number, b"t%d\xff" % number, 9))


modes = st.sampled_from(["distributed", "central"])


@settings(max_examples=150)
@given(modes, st.integers(0, 60), st.booleans(), st.none() | st.just(77))
def test_killed_at_any_request_the_next_round_does_what_was_left(
    memory_cluster: Any,
    memory_records: Any,
    bench_of: Any,
    mode: str,
    chosen: int,
    after: bool,
    service_min: int | None,
) -> None:
    async def run() -> None:
        cluster, records = memory_cluster(service_min=service_min), memory_records()
        await littered(cluster, records, mode)
        dead = False

        async def die() -> None:
            nonlocal dead
            dead = True
            raise KilledError

        counter = Counter(chosen, die, after=after)
        doomed = bench_of(
            Mortal(cluster, counter, lambda: dead), Mortal(records, counter, lambda: dead), "doomed"
        )
        with contextlib.suppress(KilledError):
            await doomed.worker.tick()
            await doomed.run_round()
        cluster.now_ms += LEASE_MS
        heir = bench_of(cluster, records, "heir")
        assert await heir.worker.tick() or not dead or LAST_RUN_TIME in records.held
        await heir.run_round()
        assert cluster.locks == {}
        assert cluster.committed == {b"a": 6, b"h": 6, b"z": 0, b"p": 0}
        assert await load(records, PENDING) == []
        assert len(await load(records, DONE)) == 2
        safe_point = await read_ts(records, SAFE_POINT_TS)
        assert safe_point == await read_ts(records, COLLECTED_TS) == cluster.published
        for border in (b"", *cluster.borders) if mode == "central" else ():
            assert any(note.startswith(f"collect {border!r}") for note in cluster.diary)
        for it in await load_rounds(records):
            assert it.phase is Phase.ENDED
            assert (
                it.result is (Result.ABANDONED if it.worker == "doomed" and dead else Result.DONE)
                or it.error == ""
            )

    asyncio.run(run())


class Mortal(Tripwire):
    """A dead process calls nothing."""

    def __init__(self, inner: Any, count: Counter, is_dead: Callable[[], bool]) -> None:
        super().__init__(inner, count)
        self._is_dead = is_dead

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*arguments: Any) -> Any:
            if self._is_dead():
                raise KilledError
            return await found(*arguments)

        return call


@settings(max_examples=150)
@given(modes, st.integers(0, 60), st.booleans())
def test_stalled_at_any_request_past_its_lease_an_old_leader_harms_nothing_that_was_not_given_up(
    memory_cluster: Any, memory_records: Any, bench_of: Any, mode: str, chosen: int, after: bool
) -> None:
    async def run() -> None:
        cluster, records = memory_cluster(), memory_records()
        await littered(cluster, records, mode)
        approved = Approvals(cluster, records)
        calls_at_stall = saved = 0

        async def stall() -> None:
            nonlocal calls_at_stall, saved
            calls_at_stall = len(counter.calls)
            cluster.now_ms += LEASE_MS
            await write_config(records, {"tikv_gc_life_time": "24h"}, UNBOUND)
            heir = bench_of(cluster, approved, "heir")
            await heir.worker.tick()
            assert heir.election.leads
            await heir.run_round()
            saved = await read_ts(records, SAFE_POINT_TS)

        counter = Counter(chosen, stall, after=after)
        old = bench_of(Tripwire(cluster, counter), Tripwire(approved, counter), "old")
        with contextlib.suppress(TidemarkError):
            if await old.worker.tick() or old.election.leads:
                await old.run_round()
        if counter.tripped:
            assert await read_ts(records, SAFE_POINT_TS) == saved
            late = [name.split()[0] for name in counter.calls[calls_at_stall:]]
            assert set(late) <= {
                "write",
                "read",
                "now_ts",
            }  # no store hears of it any more; writes are fenced
        limit = approved.greatest
        for note in cluster.diary:
            kind, *words = note.split()
            if kind in ("hold", "publish", "collect"):
                assert int(words[-1]) <= limit
        for it in await load(records, DONE):
            assert it.ts < limit

    asyncio.run(run())


class Approvals:
    """The metadata store; it notes what each approved round may ask for by the settings of that
    moment.
    """

    def __init__(self, cluster: Any, records: Any) -> None:
        self._cluster, self._records = cluster, records
        self.greatest = 0

    async def read(self, prefix: str) -> Any:
        return await self._records.read(prefix)

    async def write(self, changes: Any, expect: Any) -> int:
        done = int(await self._records.write(changes, expect))
        if done and LAST_RUN_TIME in changes:
            held = await self._records.read("/tidemark/default/gc/tikv_gc_life_time")
            life_ms = DAY_MS if held else LIFE_MS
            self.greatest = max(self.greatest, compose(max(0, self._cluster.now_ms - life_ms)))
        return done
