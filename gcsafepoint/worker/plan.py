"""What a round begun now would do, found out without moving or touching anything."""

from dataclasses import dataclass

from gcsafepoint.worker import safepoint
from gcsafepoint.worker.cluster import Cluster, KeyRange
from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.delete_range import DeleteRange
from gcsafepoint.worker.delete_ranges import load_due
from gcsafepoint.worker.records import COLLECTED_TS, SAFE_POINT_TS, Records, oldest_running, read_config, read_ts
from storage.model.ts import physical_ms


@dataclass(frozen=True, slots=True)
class Plan:
    """A round that did not happen."""

    config: GCConfig
    safe_point: int
    saved: int
    blocker: str
    fresh: bool
    """Whether there is a safepoint that was not collected yet; if not, only ranges are deleted."""
    regions: int
    locks: int
    transactions: int
    ranges: tuple[DeleteRange, ...]


async def make_plan(cluster: Cluster, records: Records) -> Plan:
    """Look at everything a round would look at; counting locks reads every region."""
    now_ts, config = await cluster.now_ts(), await read_config(records)
    bound = safepoint.wanted(now_ts, config.life_time_ms, await oldest_running(records))
    if lowest := await cluster.lowest_service():
        bound = safepoint.granted(bound, lowest.safe_point, lowest.service_id)
    saved, collected = await read_ts(records, SAFE_POINT_TS), await read_ts(records, COLLECTED_TS)
    fresh = config.enable and saved <= bound.ts != collected
    due = await load_due(records, bound.ts if fresh else collected, physical_ms(now_ts))
    stores = await cluster.ranges_by_store()
    regions = [within for ranges in stores.values() for within in ranges]
    locks, transactions = await _count_locks(cluster, regions, bound.ts) if fresh else (0, 0)
    return Plan(
        config=config,
        safe_point=max(bound.ts, saved),
        saved=saved,
        blocker=bound.blocker,
        fresh=fresh,
        regions=len(regions),
        locks=locks,
        transactions=transactions,
        ranges=(*due.first, *due.again),
    )


async def _count_locks(cluster: Cluster, regions: list[KeyRange], safe_point: int) -> tuple[int, int]:
    locks, transactions = 0, set[int]()
    for within in regions:
        key: bytes | None = within.start_key
        while key is not None:
            page = await cluster.scan_locks(KeyRange(key, within.end_key), safe_point)
            locks += len(page.locks)
            transactions.update(lock.start_ts for lock in page.locks)
            key = page.next_key
    return locks, len(transactions)
