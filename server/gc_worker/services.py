"""Who holds GC back, read from the coordinator's records without moving anything. Source: PD's etcd keys."""

import json

from gcsafepoint.worker.cluster import LowestService
from gcsafepoint.worker.records import Records

OWN_ID = "gc_worker"


async def lowest_service(records: Records, cluster_id: int, now_s: float) -> LowestService | None:
    """The living service or global barrier with the smallest safepoint, GC itself left out; None if there is none."""
    prefix = f"/pd/{cluster_id}/gc/"
    found: list[tuple[int, str]] = []
    for kind, name, ts, expires in (
        ("safe_point/service/", "service_id", "safe_point", "expired_at"),
        ("global_gc_barriers/", "barrier_id", "barrier_ts", "expiration_time"),
    ):
        for record in (await records.read(prefix + kind)).values():
            held = json.loads(record.value)
            expires_s = held.get(expires)
            if held[name] != OWN_ID and (expires_s is None or expires_s >= now_s):
                found.append((int(held[ts]), held[name]))
    if not found:
        return None
    safe_point, service_id = min(found)
    return LowestService(service_id, safe_point)
