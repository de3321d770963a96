"""The worker's cluster over PdClient and KvClient: ours, or a real PD with real TiKVs."""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc.aio
from kvproto import debugpb_pb2 as debugpb
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto.debugpb_pb2_grpc import DebugStub

from gcsafepoint.worker.cluster import KeyRange, Lock, LockPage, LowestService, SafePointDecreasesError
from gcsafepoint.worker.config import MAX_WRITE_BYTES
from gcsafepoint.worker.do_gc import CollectUnsupportedError
from gcsafepoint.worker.records import Records
from server.gc_worker.services import OWN_ID, lowest_service
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.lock_resolver import LockResolver
from server.rpc.pd import PdClient, PdRefusedError, RegionRoute
from server.rpc.region_bounds import region_end
from server.rpc.region_router import RegionError, StoreRefusedError
from server.rpc.tikv import KvClient
from storage.model.errors import UnavailableError
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
    """See `gcsafepoint.worker.cluster.Cluster`."""

    def __init__(self, pd: PdClient, kv: KvClient, records: Records, security: SecurityConfig | None = None) -> None:
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
            lowest = await self._pd.update_service_gc_safe_point(OWN_ID, _FOREVER_S, safe_point)
        except PdRefusedError as err:
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
        found: dict[int, list[KeyRange]] = defaultdict(list)
        leader, reached = 0, b""
        async for route in self._regions():
            leader, end = route.leader.store_id, region_end(route)
            found[leader].append(KeyRange(reached, end))  # with the hole before it, which some region serves
            reached = end
        if reached or not found:
            found[leader].append(KeyRange(reached, b""))
        return found

    async def store_addresses(self) -> Sequence[str]:
        """See `Cluster`."""
        return [store.address for store in await self._pd.stores()]

    async def scan_locks(self, within: KeyRange, safe_point: int) -> LockPage:
        """See `Cluster`."""
        page = await self._kv.scan_lock(within.start_key, within.end_key, max(0, safe_point - 1), _LOCKS_PER_PAGE)
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
            raise StoreSettingError(f"the store at {address} answered {err.code().name}: {err.details()}") from err

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
            start_key = page[-1].region.end_key or None if page else None


def _lock(info: kvrpcpb.LockInfo) -> Lock:
    return Lock(info.key, info.lock_version, info.lock_type == kvrpcpb.PessimisticLock, info)
