"""A metadata store and a cluster in memory: the oracles that the worker's rules are checked
against.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from gcsafepoint.worker.cluster import Lock, LockPage, LowestService
from gcsafepoint.worker.config import UNBOUND
from gcsafepoint.worker.delete_ranges import DeleteRange
from gcsafepoint.worker.election import Election
from gcsafepoint.worker.gc_leader import Stage
from gcsafepoint.worker.records import Record
from gcsafepoint.worker.round import Round
from gcsafepoint.worker.worker import GCWorker
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.span import KeyRange
from storage.model.ts import compose, physical_ms


class MemoryRecords:
    """`Records` in memory; revisions as etcd counts them."""

    def __init__(self) -> None:
        self.held: dict[str, Record] = {}
        self.revision = 0

    async def read(self, prefix: str) -> dict[str, Record]:
        return {key: record for key, record in sorted(self.held.items()) if key.startswith(prefix)}

    async def write(self, changes: Mapping[str, str | None], expect: Mapping[str, int]) -> int:
        if any(
            (self.held[key].revision if key in self.held else 0) != wanted
            for key, wanted in expect.items()
        ):
            return 0
        self.revision += 1
        for key, value in changes.items():
            if value is None:
                self.held.pop(key, None)
            else:
                self.held[key] = Record(value, self.revision)
        return self.revision


@dataclass
class MemoryCluster:
    """`Cluster` in memory: stores one and two, regions that end at `borders`, transactions with the
    outcomes in `decisions`, and every request in `diary`. A request of `failing` raises its error.
    """

    now_ms: int = 10_000_000
    service_min: int | None = None
    borders: Sequence[bytes] = (b"g", b"n", b"t")
    locks: dict[bytes, Lock] = field(default_factory=dict)
    decisions: dict[int, int] = field(default_factory=dict)
    committed: dict[bytes, int] = field(default_factory=dict)
    failing: dict[str, TidemarkError] = field(default_factory=dict)
    moving: int = 0
    held: int = 0
    published: int = 0
    central: bool = True
    diary: list[str] = field(default_factory=list)

    def lock(self, key: bytes, start_ts: int, *, pessimistic: bool = False) -> None:
        self.locks[key] = Lock(key, start_ts, pessimistic, None)

    def _note(self, request: str, *details: object) -> None:
        self.diary.append(" ".join([request, *(str(detail) for detail in details)]))
        if request in self.failing:
            raise self.failing[request]

    async def now_ts(self) -> int:
        self.now_ms += 1
        return compose(self.now_ms)

    async def hold_safe_point(self, safe_point: int) -> LowestService:
        self._note("hold", safe_point)
        self.held = max(self.held, safe_point)
        return min(
            (LowestService("gc_worker", safe_point), *self._services()),
            key=lambda it: it.safe_point,
        )

    async def lowest_service(self) -> LowestService | None:
        return min(self._services(), key=lambda it: it.safe_point, default=None)

    def _services(self) -> list[LowestService]:
        return (
            []
            if self.service_min is None
            else [LowestService("ticdc-default-feed", self.service_min)]
        )

    async def publish_safe_point(self, safe_point: int) -> int:
        self._note("publish", safe_point)
        self.published = max(self.published, safe_point)
        return self.published

    async def ranges_by_store(self) -> Mapping[int, Sequence[KeyRange]]:
        self._note("regions")
        ranges = [
            KeyRange(start, end)
            for start, end in zip((b"", *self.borders), (*self.borders, b""), strict=True)
        ]
        return {1: ranges[::2], 2: ranges[1::2]}

    async def store_addresses(self) -> Sequence[str]:
        return ["one", "two"]

    async def scan_locks(self, within: KeyRange, safe_point: int) -> LockPage:
        self._note("scan", within.start_key)
        inside = [
            lock
            for key, lock in sorted(self.locks.items())
            if within.start_key <= key
            and (not within.end_key or key < within.end_key)
            and lock.start_ts < safe_point
        ]
        page, rest = inside[:2], inside[2:]
        return LockPage(page, page[-1].key + b"\0" if rest else None, within, more=bool(rest))

    async def decide(self, lock: Lock) -> int:
        self._note("decide", lock.start_ts)
        return self.decisions.get(lock.start_ts, 0)

    async def rollback_pessimistic(self, lock: Lock) -> None:
        self._note("rollback pessimistic", lock.key)
        self.locks.pop(lock.key, None)

    async def resolve(self, page: LockPage, commit_ts_of: Mapping[int, int]) -> bool:
        self._note("resolve", sorted(commit_ts_of.items()))
        if self.moving:
            self.moving -= 1
            return False
        for lock in page.locks:
            if lock.start_ts in commit_ts_of and lock.key in self.locks and not lock.pessimistic:
                del self.locks[lock.key]
                self.committed[lock.key] = commit_ts_of[lock.start_ts]
        return True

    async def destroy_range(self, address: str, within: KeyRange) -> None:
        self._note(f"destroy on {address}", within.start_key)

    async def limit_writes(self, address: str, bytes_per_s: int) -> None:
        self._note(f"limit {address}", bytes_per_s)

    async def collect(self, within: KeyRange, safe_point: int) -> bytes | None:
        self._note("collect", within.start_key, safe_point)
        later = [border for border in self.borders if border > within.start_key]
        return later[0] if later and (not within.end_key or later[0] < within.end_key) else None


class Diary:
    """A `Listener` that records what it is called with."""

    def __init__(self) -> None:
        self.skipped: list[str] = []
        self.failed: list[str] = []
        self.leads: list[bool] = []
        self.ended: list[Round] = []
        self.stages: list[Stage] = []
        self.blockers: list[tuple[str, bool]] = []
        self.raised: list[int] = []
        self.forgotten: list[str] = []
        self.first_ended = asyncio.Event()

    def tick_ended(self, *, leads: bool) -> None:
        self.leads.append(leads)

    def tick_failed(self, err: TidemarkError) -> None:
        self.failed.append(err.code)

    def configured(self, config: Any) -> None: ...

    def life_time_raised(self, configured_ms: int, least_ms: int) -> None:
        self.raised.append(configured_ms)

    def store_not_limited(self, address: str, err: TidemarkError) -> None:
        self.failed.append(f"{address} {err.code}")

    def round_skipped(self, err: TidemarkError) -> None:
        self.skipped.append(err.message)

    def held_back(self, it: Round, target_ts: int, *, moved: bool) -> None:
        self.blockers.append((it.blocker, moved))

    def stage_began(self, stage: Stage, it: Round) -> None: ...

    def stage_ended(
        self, stage: Stage, it: Round, seconds: float, err: TidemarkError | None
    ) -> None:
        if err is None:
            self.stages.append(stage)

    def page_resolved(self, locks: int, *, more: bool) -> None: ...

    def range_deleted(self, it: DeleteRange, err: TidemarkError | None, *, redo: bool) -> None: ...

    def region_collected(self, err: TidemarkError | None) -> None: ...

    def round_ended(self, it: Round) -> None:
        self.ended.append(it)
        self.first_ended.set()

    def round_not_recorded(self, it: Round, err: TidemarkError) -> None:
        self.forgotten.append(err.code)


class Bench:
    """A worker with its cluster, records and listener; its clock is `cluster.now_ms`."""

    def __init__(
        self,
        cluster: MemoryCluster,
        records: MemoryRecords,
        name: str = "me",
        bounds: Any = UNBOUND,
    ) -> None:
        self.cluster, self.records, self.diary = cluster, records, Diary()
        self.election = Election(
            records, uuid=name, desc="", lease_ms=120_000, monotonic_s=self.monotonic_s
        )
        self.worker = GCWorker(
            cluster, records, self.election, self.diary, monotonic_s=self.monotonic_s, bounds=bounds
        )

    def monotonic_s(self) -> float:
        return float(self.cluster.now_ms) / 1000

    async def run_round(self) -> Round:
        """Run a round from admission to its end, in this task."""
        number = await self.cluster.now_ts()
        self.worker.rounds.admit(number, physical_ms(number))
        return await self.worker.leader.run_round(number)


@pytest.fixture(scope="session")
def bench_of() -> type[Bench]:
    return Bench


@pytest.fixture
async def bench(cluster: MemoryCluster, records: MemoryRecords) -> Bench:
    made = Bench(cluster, records)
    assert await made.worker.tick()
    return made


@pytest.fixture
def records() -> MemoryRecords:
    return MemoryRecords()


@pytest.fixture(scope="session")
def memory_records() -> type[MemoryRecords]:
    return MemoryRecords


@pytest.fixture(scope="session")
def memory_cluster() -> type[MemoryCluster]:
    return MemoryCluster


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
def unavailable() -> TidemarkError:
    return UnavailableError("the store is away")
