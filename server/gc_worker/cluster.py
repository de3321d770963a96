"""The GC worker's `Cluster` over PdClient and KvClient: ours, or a real PD with real TiKVs.

`lowest_service` reads who holds GC back from the coordinator's records (PD's etcd keys), because
asking by UpdateServiceGCSafePoint would move something.
"""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc.aio
from kvproto import debugpb_pb2 as debugpb
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto.debugpb_pb2_grpc import DebugStub

from gcsafepoint.worker.cluster import Lock, LockPage, LowestService, SafePointDecreasesError
from gcsafepoint.worker.config import MAX_WRITE_BYTES
from gcsafepoint.worker.do_gc import CollectUnsupportedError
from gcsafepoint.worker.records import Records
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient, PdRefusedError
from server.rpc.region_cache import RegionRoute, region_end
from server.rpc.region_router import RegionError, StoreRefusedError
from server.rpc.tikv import KvClient
from storage.model.errors import CorruptError, UnavailableError
from storage.model.span import KeyRange
from storage.model.ts import physical_ms

_FOREVER_S = (1 << 63) - 1
_LOCKS_PER_PAGE = 1024
_REGIONS_PER_PAGE = 128
_SETTING_S = 10.0
_DECREASES = "ErrDecreasingTxnSafePoint"


class StoreSettingError(UnavailableError):
    """A store did not take a setting."""

    code = "ErrStoreSetting"


class TikvCluster:
    """The `gcsafepoint.worker.cluster.Cluster` of a PD and its stores."""

    def __init__(
        self, pd: PdClient, kv: KvClient, records: Records, security: SecurityConfig | None = None
    ) -> None:
        self._security = security
        self._pd = pd
        self._kv = kv
        self._records = records
        self._resolver = LockResolver(pd, kv)

    async def now_ts(self) -> int:
        """See `Cluster`."""
        return await self._pd.tso()

    async def hold_safe_point(self, safe_point: int) -> LowestService:
        """See `Cluster`."""
        try:
            # For ever: GC's own safe point must not expire while no worker runs.
            lowest = await self._pd.update_service_gc_safe_point(
                GC_WORKER_ID, _FOREVER_S, safe_point
            )
        except PdRefusedError as err:
            # Another worker has moved it further meanwhile; the round ends instead of going back.
            if _DECREASES not in err.message:
                raise
            raise SafePointDecreasesError(err.message) from err
        return LowestService(lowest.service_id, lowest.safe_point)

    async def lowest_service(self) -> LowestService | None:
        """See `Cluster`."""
        now_s = physical_ms(await self._pd.tso()) / 1000
        return await lowest_service(self._records, self._pd.cluster_id, now_s)

    async def publish_safe_point(self, safe_point: int) -> int:
        """See `Cluster`."""
        return await self._pd.update_gc_safe_point(safe_point)

    async def ranges_by_store(self) -> Mapping[int, Sequence[KeyRange]]:
        """See `Cluster`."""
        ranges: dict[int, list[KeyRange]] = defaultdict(list)
        leader, reached = 0, b""
        async for route in self._regions():
            leader, end = route.leader.store_id, region_end(route)
            # from where the last region ended: a hole between two reported regions is served by
            # some region
            ranges[leader].append(KeyRange(reached, end))
            reached = end
        if reached or not ranges:
            ranges[leader].append(KeyRange(reached, b""))
        return ranges

    async def store_addresses(self) -> Sequence[str]:
        """See `Cluster`."""
        return [store.address for store in await self._pd.stores()]

    async def scan_locks(self, within: KeyRange, safe_point: int) -> LockPage:
        """See `Cluster`."""
        page = await self._kv.scan_lock(
            # A lock at the safepoint itself is not older than it: its transaction may still be
            # read.
            within.start_key,
            within.end_key,
            max(0, safe_point - 1),
            _LOCKS_PER_PAGE,
        )
        more = len(page.locks) == _LOCKS_PER_PAGE
        return LockPage([_lock(info) for info in page.locks], page.next_key, page.route, more=more)

    async def decide(self, lock: Lock) -> int:
        """See `Cluster`."""
        assert isinstance(lock.token, kvrpcpb.LockInfo)
        return await self._resolver.decide(lock.token)

    async def rollback_pessimistic(self, lock: Lock) -> None:
        """See `Cluster`."""
        assert isinstance(lock.token, kvrpcpb.LockInfo)
        await self._resolver.rollback_pessimistic(lock.token)

    async def resolve(self, page: LockPage, commit_ts_of: Mapping[int, int]) -> bool:
        """See `Cluster`."""
        assert isinstance(page.region, RegionRoute)
        try:
            await self._kv.resolve_region(page.region, commit_ts_of)
        # The region has changed since the page was read: its locks are read again.
        except RegionError:
            return False
        return True

    async def destroy_range(self, address: str, within: KeyRange) -> None:
        """See `Cluster`."""
        await self._kv.unsafe_destroy_range(address, within.start_key, within.end_key)

    async def limit_writes(self, address: str, bytes_per_s: int) -> None:
        """See `Cluster`; as `tikv-ctl modify-tikv-config` does it.

        Raises:
            StoreSettingError: the store did not take the setting.
        """
        request = debugpb.ModifyTikvConfigRequest(
            module=debugpb.SERVER, config_name=MAX_WRITE_BYTES, config_value=str(bytes_per_s)
        )
        try:
            async with connect(address, self._security) as channel:
                await DebugStub(channel).ModifyTikvConfig(request, timeout=_SETTING_S)
        except grpc.aio.AioRpcError as err:
            raise StoreSettingError(
                f"the store at {address} answered {err.code().name}: {err.details()}"
            ) from err

    async def collect(self, within: KeyRange, safe_point: int) -> bytes | None:
        """See `Cluster`."""
        try:
            return await self._kv.gc(within.start_key, within.end_key, safe_point)
        except StoreRefusedError as err:
            raise CollectUnsupportedError(
                f"tikv_gc_mode central needs stores that take KvGC; use distributed ({err.message})"
            ) from err

    async def _regions(self) -> AsyncIterator[RegionRoute]:
        start_key: bytes | None = b""
        while start_key is not None:
            page = await self._pd.scan_regions(start_key, limit=_REGIONS_PER_PAGE)
            for route in page:
                yield route
            # An empty end key is the end of the key space, not its beginning.
            start_key = page[-1].region.end_key or None if page else None


def _lock(info: kvrpcpb.LockInfo) -> Lock:
    return Lock(info.key, info.lock_version, info.lock_type == kvrpcpb.PessimisticLock, info)


GC_WORKER_ID = "gc_worker"


async def lowest_service(records: Records, cluster_id: int, now_s: float) -> LowestService | None:
    """The living service or global barrier with the smallest safepoint, GC itself left out;
    None if there is none.

    Raises:
        CorruptError: the coordinator's record of one cannot be read.
    """
    prefix = f"/pd/{cluster_id}/gc/"
    living: list[tuple[int, str]] = []
    for kind, name, ts, expires in (
        ("safe_point/service/", "service_id", "safe_point", "expired_at"),
        ("global_gc_barriers/", "barrier_id", "barrier_ts", "expiration_time"),
    ):
        for key, record in (await records.read(prefix + kind)).items():
            try:
                fields = json.loads(record.value)
                safe_point, service_id, expires_s = (
                    int(fields[ts]),
                    str(fields[name]),
                    fields.get(expires),
                )
            except (ValueError, TypeError, KeyError, AttributeError) as err:
                raise CorruptError(f"the record {key} cannot be read: {record.value!r}") from err
            if service_id != GC_WORKER_ID and (expires_s is None or expires_s >= now_s):
                living.append((safe_point, service_id))
    return next(
        (LowestService(service_id, safe_point) for safe_point, service_id in sorted(living)), None
    )
