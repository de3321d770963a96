"""Who holds GC back, read from the coordinator's records without moving anything. Source: PD's etcd keys."""

import json

from gcsafepoint.worker.cluster import LowestService
from gcsafepoint.worker.records import Records
from storage.model.errors import CorruptError

OWN_ID = "gc_worker"


async def lowest_service(records: Records, cluster_id: int, now_s: float) -> LowestService | None:
    """The living service or global barrier with the smallest safepoint, GC itself left out; None if there is none.

    Raises:
        CorruptError: the coordinator's record of one cannot be read.
    """
    prefix = f"/pd/{cluster_id}/gc/"
    found: list[tuple[int, str]] = []
    for kind, name, ts, expires in (
        ("safe_point/service/", "service_id", "safe_point", "expired_at"),
        ("global_gc_barriers/", "barrier_id", "barrier_ts", "expiration_time"),
    ):
        for key, record in (await records.read(prefix + kind)).items():
            try:
                held = json.loads(record.value)
                safe_point, service_id, expires_s = int(held[ts]), str(held[name]), held.get(expires)
            except (ValueError, TypeError, KeyError, AttributeError) as err:
                raise CorruptError(f"the record {key} cannot be read: {record.value!r}") from err
            if service_id != OWN_ID and (expires_s is None or expires_s >= now_s):
                found.append((safe_point, service_id))
    return next((LowestService(service_id, safe_point) for safe_point, service_id in sorted(found)), None)
