"""Regions change on disk and in force together, though who asked for it has given up."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from server.rpc.credentials import SecurityConfig
from server.store.gc import Collector, CollectorParts
from server.store.handover import Handover
from server.store.identity import REGIONS_KEY, region_message
from server.store.paced_scan import ByteRate
from server.store.region_table import RegionGate, RegionTable
from server.store.split_merge import Merger
from storage.mvcc.engine import Engine
from storage.mvcc.gc import RegionVersions
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.read_fence import ReadFence
from storage.mvcc.region import Region, RegionMap, decode_regions
from tests.memory_kv import StallingKV

LEFT, MIDDLE, RIGHT = Region(1, 11, b"", b"g"), Region(2, 12, b"g", b"p"), Region(3, 13, b"p", b"")
OFFERED = Region(3, 23, b"p", b"", conf_ver=3)


class Coordinator:
    """All that these changes ask of one."""

    async def tso(self) -> int:
        return 1000

    async def region_heartbeat(self, _regions: Any) -> None:
        """Hears of it."""


@dataclass
class Store:
    """A store whose writes of the region table stall."""

    kv: StallingKV
    table: RegionTable
    handover: Handover

    @property
    def served(self) -> list[Region]:
        return list(self.table.gate.regions)

    @property
    def stored(self) -> list[Region]:
        return list(decode_regions(self.kv.get(REGIONS_KEY) or b""))


@asynccontextmanager
async def store(regions: Sequence[Region]) -> AsyncIterator[Store]:
    kv, pd, fence = StallingKV(REGIONS_KEY), Coordinator(), ReadFence(0)
    gate = RegionGate(9, RegionMap(regions))
    with ThreadPoolExecutor(1) as writer:
        group = GroupCommit(Engine(kv, fence), writer, lambda _: None)
        versions = RegionVersions(gate.regions, {})
        parts = CollectorParts(
            kv=kv,
            group=group,
            gate=gate,
            versions=versions,
            scanners=writer,
            forget_locks=lambda _lower, _upper: None,
            rate=ByteRate(),
            ratio_threshold=1.1,
        )
        table = RegionTable(pd, gate, group, versions, lambda _old, _new: None)  # type: ignore[arg-type]  # all that is asked of one
        handover = Handover(7, kv, pd, table, Collector(parts), fence, SecurityConfig(), 60.0)  # type: ignore[arg-type]  # the same
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(group.run())
            try:
                yield Store(kv, table, handover)
            finally:
                kv.go_on()
                running.cancel()


async def given_up(db: Store, call: Any) -> None:
    """Cancel a call while its write of the region table stalls, as a deadline does."""
    calling = asyncio.get_running_loop().create_task(call)
    async with asyncio.timeout(60):
        await db.kv.stalled.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        db.kv.go_on()
        await db.table.group.submit([])  # behind it: it is on disk


async def test_a_region_adopted_after_its_source_gave_up_is_served_when_it_is_offered_again() -> (
    None
):
    async with store([LEFT, MIDDLE]) as target:
        offer = region_message(OFFERED, 9)
        await given_up(target, target.handover.adopt(7, offer, 5))
        await target.handover.adopt(7, offer, 5)  # the answer makes the source forget the region
        assert target.served == target.stored == [LEFT, MIDDLE, OFFERED]


async def test_a_merge_whose_caller_gave_up_is_in_force_before_the_next_change() -> None:
    async with store([LEFT, MIDDLE, RIGHT]) as db:
        merger = Merger(db.table)
        await given_up(db, merger.merge(1, 2))
        merged = await merger.merge(3, 2)
        assert (merged.start_key, merged.end_key) == (b"", b"")
        assert db.served == db.stored == [merged]
