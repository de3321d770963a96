"""A metadata store and a cluster in memory: the oracles that the worker's rules are checked against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from gcsafepoint.worker.cluster import KeyRange, Lock, LockPage
from gcsafepoint.worker.records import Record
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.ts import compose


class MemoryRecords:
    """Revisions as etcd counts them."""

    def __init__(self) -> None:
        self.held: dict[str, Record] = {}
        self.revision = 0

    async def read(self, prefix: str) -> dict[str, Record]:
        return {key: record for key, record in sorted(self.held.items()) if key.startswith(prefix)}

    async def write(self, changes: Mapping[str, str | None], expect: Mapping[str, int]) -> int:
        if any((self.held[key].revision if key in self.held else 0) != wanted for key, wanted in expect.items()):
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
    """Two stores, regions at fixed keys, transactions with a known fate, and a diary of every request."""

    now_ms: int = 10_000_000
    service_min: int | None = None
    borders: Sequence[bytes] = (b"g", b"n", b"t")
    locks: dict[bytes, Lock] = field(default_factory=dict)
    fates: dict[int, int] = field(default_factory=dict)
    committed: dict[bytes, int] = field(default_factory=dict)
    failing: dict[str, TidemarkError] = field(default_factory=dict)
    moving: int = 0
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
        return compose(self.now_ms)

    async def hold_safe_point(self, safe_point: int) -> int:
        self._note("hold", safe_point)
        return safe_point if self.service_min is None else min(safe_point, self.service_min)

    async def publish_safe_point(self, safe_point: int) -> int:
        self._note("publish", safe_point)
        self.published = max(self.published, safe_point)
        return self.published

    async def ranges_by_store(self) -> Mapping[int, Sequence[KeyRange]]:
        self._note("regions")
        ranges = [KeyRange(start, end) for start, end in zip((b"", *self.borders), (*self.borders, b""), strict=True)]
        return {1: ranges[::2], 2: ranges[1::2]}

    async def store_addresses(self) -> Sequence[str]:
        return ["one", "two"]

    async def scan_locks(self, within: KeyRange, safe_point: int) -> LockPage:
        self._note("scan", within.start_key)
        inside = [
            lock
            for key, lock in sorted(self.locks.items())
            if within.start_key <= key and (not within.end_key or key < within.end_key) and lock.start_ts <= safe_point
        ]
        page, rest = inside[:2], inside[2:]
        return LockPage(page, page[-1].key + b"\0" if rest else None, within)

    async def decide(self, lock: Lock) -> int:
        self._note("decide", lock.start_ts)
        return self.fates.get(lock.start_ts, 0)

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

    async def collect(self, start_key: bytes, safe_point: int) -> bytes | None:
        self._note("collect", start_key, safe_point)
        later = [border for border in self.borders if border > start_key]
        return later[0] if later else None


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
