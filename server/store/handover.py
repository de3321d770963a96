"""Sharing of regions among stores without moving data: empty regions are handed to the store that
serves fewest.

A region that holds nothing is given away in steps that may each be repeated after a crash:
1. The source stops admitting requests for it, waits for those it admitted, and sees that it is
   still empty.
2. One batch takes it out of the source's regions and notes it as leaving, with its next epoch. From
   here on the source never serves it again, and offers it to the target until that has said yes,
   also after a restart.
3. The target keeps the region and the fact that it adopted this epoch, then serves it, then
   answers.
So at no time do two stores serve a region; between 2 and 3 none does. The target takes over what
the emptiness hides: timestamps that were read (a fresh timestamp of the oracle is above them) and
how far the region was collected.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import grpc.aio
import structlog
from kvproto import metapb_pb2 as metapb
from tidemarkpb.v1 import store_pb2
from tidemarkpb.v1.store_pb2_grpc import StoreServiceStub

from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient, PdRefusedError
from server.store import metrics
from server.store.gc import Collector
from server.store.identity import region_message
from server.store.region_table import RegionTable
from storage.kv import KV, scan_prefix
from storage.model.errors import InvalidError, UnavailableError
from storage.mvcc.engine import Draft
from storage.mvcc.read_fence import ReadFence
from storage.mvcc.record import META_COLUMN
from storage.mvcc.region import Region, decode_regions, encode_regions, is_empty

_LEAVING: Final = META_COLUMN + b"leaving/"
_ADOPTED: Final = META_COLUMN + b"adopted/"
_CONF_CHANGES = 2  # a peer added there, a peer removed here
_MAX_REGIONS = 10_000
# moving a region between stores that differ by one would only turn them round
_WORTH_IT = 2
_CALL_S = 5.0
_log = structlog.get_logger(__name__)


class WrongTargetError(InvalidError):
    """The region was offered to the wrong store."""

    code = "ErrNotForThisStore"


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A region on its way to another store."""

    region: Region
    store_id: int

    @property
    def key(self) -> bytes:
        return _LEAVING + self.region.region_id.to_bytes(8)

    def encode(self) -> bytes:
        return self.store_id.to_bytes(8) + encode_regions([self.region])


@dataclass(slots=True)
class Handover:
    """Gives empty regions to other stores, and adopts those that others give."""

    cluster_id: int
    kv: KV
    pd: PdClient
    table: RegionTable
    collector: Collector
    fence: ReadFence
    security: SecurityConfig
    interval_s: float
    enabled: bool = True

    async def run(self) -> None:
        """Hand over leaving regions and share empty ones, until cancelled."""
        while True:
            try:
                await self._deliver_all()
                if self.enabled:
                    await self._share()
            except (UnavailableError, PdRefusedError) as err:
                _log.warning("regions cannot be shared now", error=err.message)
            await asyncio.sleep(self.interval_s)

    async def adopt(self, cluster_id: int, offered: metapb.Region, gc_safe_point: int) -> None:
        """Serve a region from now on; durable when it returns.

        An offer that was taken before changes nothing.

        Raises:
            WrongTargetError: the region belongs to another cluster or store.
        """
        peers = [peer for peer in offered.peers if peer.store_id == self.table.gate.store_id]
        if cluster_id != self.cluster_id or not peers:
            raise WrongTargetError(
                f"region {offered.id} of cluster {cluster_id} has no peer on store "
                f"{self.table.gate.store_id} of cluster {self.cluster_id}"
            )
        epoch = offered.region_epoch
        region = Region(
            offered.id,
            peers[0].id,
            offered.start_key,
            offered.end_key,
            epoch.conf_ver,
            epoch.version,
        )
        await self.table.change(lambda: self._adopt(region, gc_safe_point))

    async def _adopt(self, region: Region, gc_safe_point: int) -> None:
        """Step 3."""
        gate, mark = self.table.gate, _ADOPTED + region.region_id.to_bytes(8)
        # The offer comes again when its answer was lost. The mark outlives a later handover back,
        # so an old copy cannot revive the region here. What is marked was served: no change of the
        # table ends between its write and its being in force.
        if int.from_bytes(self.kv.get(mark) or b"") >= region.conf_ver:
            return
        if any(region.overlaps(served.start_key, served.end_key) for served in gate.regions):
            raise WrongTargetError(
                f"region {region.region_id} overlaps regions that store {gate.store_id} serves"
            )
        # The source may have read the empty region at any timestamp up to now; a commit here must
        # land above it.
        self.fence.read(await self.pd.tso())
        # What the source collected is gone; feeds that ask for history before it must be refused
        # here, too.
        await self.collector.save(self.collector.walk.begun(gc_safe_point))
        await self.table.replace([], [region], {mark: region.conf_ver.to_bytes(8)})
        _log.info("region adopted", region_id=region.region_id)

    async def _share(self) -> None:
        """Give empty regions away, as long as another store that answers serves at least two
        fewer.
        """
        gate = self.table.gate
        others = {
            store.id: store
            for store in await self.pd.stores()
            if store.id != gate.store_id and _is_up(store)
        }
        if not others:
            return
        routes = await self.pd.scan_regions(b"", b"", _MAX_REGIONS)
        serving = Counter(route.leader.store_id for route in routes)
        target = min(others, key=lambda store_id: serving[store_id])
        for region in reversed(list(gate.regions)):
            if len(gate.regions) - serving[target] < _WORTH_IT:
                return
            if is_empty(self.kv, region) and await self._answers(others[target]):
                serving[target] += await self._release(region, target)
        await self._deliver_all()

    async def _answers(self, store: metapb.Store) -> bool:
        """Whether the target answers; a region must not wait for a store that is gone."""
        try:
            async with connect(store.address, self.security) as channel:
                status = await StoreServiceStub(channel).GetStoreStatus(
                    store_pb2.GetStoreStatusRequest(), timeout=_CALL_S
                )
        except grpc.aio.AioRpcError:
            return False
        return (status.cluster_id, status.store_id) == (self.cluster_id, store.id)

    async def _release(self, region: Region, target: int) -> bool:
        """Steps 1 and 2; returns whether the region is leaving."""
        leaving = _Leaving(
            replace(
                region, peer_id=await self.pd.alloc_id(), conf_ver=region.conf_ver + _CONF_CHANGES
            ),
            target,
        )
        return await self.table.change(lambda: self._take_out(region, leaving))

    async def _take_out(self, region: Region, leaving: _Leaving) -> bool:
        gate, group = self.table.gate, self.table.group
        if gate.regions.get(region.region_id) != region:
            return False
        # From here on nobody is admitted; then the group is drained, so nothing admitted earlier
        # can land after the look.
        gate.leaving = frozenset({region.region_id})
        try:
            # whatever was admitted before is applied when this is
            await group.submit([])
            # Looked at again within the change: a write may have landed since it was chosen.
            if not await group.quiet(lambda: is_empty(self.kv, region)):
                return False
            await self.table.replace([region], [], {leaving.key: leaving.encode()})
        finally:
            gate.leaving = frozenset()
        return True

    async def _deliver_all(self) -> None:
        # Read from disk each time, so an offer that a crash interrupted goes on after the restart.
        for leaving in self._all_leaving():
            store = await self.pd.store(leaving.store_id)
            await self._offer(store.address, leaving)
            await self.table.group.submit([partial(_delete, key=leaving.key)])
            metrics.REGION_HANDOVERS.inc()
            _log.info(
                "region handed over", region_id=leaving.region.region_id, store_id=leaving.store_id
            )

    async def _offer(self, address: str, leaving: _Leaving) -> None:
        request = store_pb2.AdoptRegionRequest(
            cluster_id=self.cluster_id,
            region=region_message(leaving.region, leaving.store_id),
            gc_safe_point=self.collector.walk.begun_safe_point,
        )
        try:
            async with connect(address, self.security) as channel:
                await StoreServiceStub(channel).AdoptRegion(request, timeout=_CALL_S)
        except grpc.aio.AioRpcError as err:
            raise UnavailableError(
                f"store {leaving.store_id} at {address} has not taken region "
                f"{leaving.region.region_id} yet: {err.details()}"
            ) from err

    def _all_leaving(self) -> Sequence[_Leaving]:
        stored = [data for _, data in scan_prefix(self.kv, _LEAVING)]
        return [
            _Leaving(region, int.from_bytes(data[:8]))
            for data in stored
            for region in decode_regions(data[8:])
        ]


def _delete(draft: Draft, key: bytes) -> None:
    draft.delete(key)


def _is_up(store: metapb.Store) -> bool:
    return store.state == metapb.Up
