"""pdpb.PD: splits and their new ids, and what PD's schedulers do; with one copy of a region there is nothing to move.

A split asked for here is done by the store that leads the region: it is called, and reports back as after a split of
its own, before it answers.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import grpc.aio
import structlog
from kvproto import kvrpcpb_pb2, metapb_pb2, pdpb_pb2, tikvpb_pb2_grpc

from server.coordinator.cluster.cluster import Cluster
from server.coordinator.cluster.regions import KnownRegion, check_region, one_line
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.header import Headers

MAX_SPLITS = 1000
MAX_SPLIT_IDS = 10 * MAX_SPLITS
_MAX_ROUNDS = 5
_CALL_SECONDS = 5.0
_STALE_SPLIT = "invalid region epoch, request: {}, current: {}"

Connect = Callable[[str], grpc.aio.Channel]

_log = structlog.get_logger(__name__)


class RegionSplitService:
    """Splits on request of a store, and on request of anybody; scatters, which here are done at once."""

    def __init__(self, headers: Headers, cluster: Cluster, connect: Connect) -> None:
        self._headers = headers
        self._cluster = cluster
        self._regions = cluster.regions
        self._connect = connect

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here."""
        door = self._headers
        return {
            "AskBatchSplit": door.bound(pdpb_pb2.AskBatchSplitResponse, self.ask_batch_split),
            "ReportBatchSplit": door.bound(pdpb_pb2.ReportBatchSplitResponse, self.report_batch_split),
            "SplitRegions": door.bound(pdpb_pb2.SplitRegionsResponse, self.split_regions),
            "SplitAndScatterRegions": door.bound(pdpb_pb2.SplitAndScatterRegionsResponse, self.split_and_scatter),
            "ScatterRegion": door.bound(pdpb_pb2.ScatterRegionResponse, self.scatter_region),
            "GetOperator": door.bound(pdpb_pb2.GetOperatorResponse, self.get_operator),
        }

    async def ask_batch_split(self, request: pdpb_pb2.AskBatchSplitRequest) -> pdpb_pb2.AskBatchSplitResponse:
        """Ids for the new regions of a split and for their peers."""
        if not request.HasField("region"):
            raise RefusedError(pdpb_pb2.REGION_NOT_FOUND, "missing region for split")
        if request.split_count > MAX_SPLITS:
            raise _refused(f"a split makes at most {MAX_SPLITS} regions, not {request.split_count}")
        width = 1 + len(request.region.peers)
        total = request.split_count * width
        if total > MAX_SPLIT_IDS:
            raise _refused(f"a split takes at most {MAX_SPLIT_IDS} ids, not {total}: {width - 1} peers are too many")
        self._check_known(request.region)
        if not total:
            return pdpb_pb2.AskBatchSplitResponse()
        last = await self._cluster.alloc_id(total)
        ids = iter(range(last + 1 - total, last + 1))
        splits = [
            pdpb_pb2.SplitID(new_region_id=next(ids), new_peer_ids=list(islice(ids, width - 1)))
            for _ in range(request.split_count)
        ]
        return pdpb_pb2.AskBatchSplitResponse(ids=splits)

    async def report_batch_split(self, request: pdpb_pb2.ReportBatchSplitRequest) -> pdpb_pb2.ReportBatchSplitResponse:
        """Take a split's outcome in; PD waits for the heartbeats that follow."""
        regions = request.regions
        if len(regions) < 2 or any(left.end_key != right.start_key for left, right in pairwise(regions)):
            raise _refused("invalid split region")
        for region in regions:
            check_region(region)
        for region in regions:
            self._cluster.report(region, metapb_pb2.Peer())
        return pdpb_pb2.ReportBatchSplitResponse()

    async def split_regions(self, request: pdpb_pb2.SplitRegionsRequest) -> pdpb_pb2.SplitRegionsResponse:
        """Make encoded keys the first ones of regions; answers these, and how many of 100 keys were done."""
        done, percentage = await self._split(request.split_keys, request.retry_limit)
        return pdpb_pb2.SplitRegionsResponse(regions_id=done, finished_percentage=percentage)

    async def split_and_scatter(
        self, request: pdpb_pb2.SplitAndScatterRegionsRequest
    ) -> pdpb_pb2.SplitAndScatterRegionsResponse:
        """As `split_regions`; the scattering is done with it."""
        done, percentage = await self._split(request.split_keys, request.retry_limit)
        if not done:
            raise RequestError("[PD:scatter:ErrEmptyRegion]empty region")
        return pdpb_pb2.SplitAndScatterRegionsResponse(
            regions_id=done, split_finished_percentage=percentage, scatter_finished_percentage=100
        )

    async def scatter_region(self, request: pdpb_pb2.ScatterRegionRequest) -> pdpb_pb2.ScatterRegionResponse:
        """Done at once: each region has one copy, and it stays where it is."""
        if request.regions_id:
            failed = [region_id for region_id in request.regions_id if self._regions.by_id(region_id) is None]
            percentage = 100 * (len(request.regions_id) - len(failed)) // len(request.regions_id)
            return pdpb_pb2.ScatterRegionResponse(finished_percentage=percentage, failed_regions_id=failed)
        if self._regions.by_id(request.region_id) is None and not request.HasField("region"):
            raise RefusedError(pdpb_pb2.REGION_NOT_FOUND, f"region {request.region_id} not found")
        return pdpb_pb2.ScatterRegionResponse(finished_percentage=100)

    async def get_operator(self, _request: pdpb_pb2.GetOperatorRequest) -> pdpb_pb2.GetOperatorResponse:
        """There are none: clients that wait for one to end go on."""
        raise RefusedError(pdpb_pb2.REGION_NOT_FOUND, "Not Found")

    async def _split(self, keys: Sequence[bytes], retries: int) -> tuple[list[int], int]:
        wanted = sorted({key for key in keys if key})
        for _ in range(1 + min(retries, _MAX_ROUNDS)):
            for known, inside in self._undone(wanted):
                await self._ask_store(known, inside)
        holders = [(key, self._regions.find(key)) for key in wanted]
        done = [holder.region.id for key, holder in holders if holder and holder.region.start_key == key]
        return done, 100 * len(done) // len(wanted) if wanted else 0

    def _undone(self, keys: Sequence[bytes]) -> list[tuple[KnownRegion, list[bytes]]]:
        inside: dict[int, list[bytes]] = defaultdict(list)
        for key in keys:
            known = self._regions.find(key)
            if known is not None and known.region.start_key != key:
                inside[known.region.id].append(key)
        holders = ((self._regions.by_id(region_id), found) for region_id, found in inside.items())
        return [(holder, found) for holder, found in holders if holder is not None]

    async def _ask_store(self, known: KnownRegion, keys: Sequence[bytes]) -> None:
        store = self._cluster.stores.get(known.leader.store_id)
        if store is None:
            return
        context = kvrpcpb_pb2.Context(
            region_id=known.region.id, region_epoch=known.region.region_epoch, peer=known.leader
        )
        request = kvrpcpb_pb2.SplitRegionRequest(context=context, split_keys=keys, is_raw_kv=True)
        async with self._connect(store.address) as channel:
            try:
                await tikvpb_pb2_grpc.TikvStub(channel).SplitRegion(request, timeout=_CALL_SECONDS)
            except grpc.aio.AioRpcError as err:
                _log.warning(
                    "a store does not split", store_id=store.id, region_id=known.region.id, error=err.details()
                )

    def _check_known(self, region: metapb_pb2.Region) -> None:
        known = self._regions.find(region.start_key)
        if known is None:
            raise _refused(f"region not found, request region: {region.id}")
        asked, current = region.region_epoch, known.region.region_epoch
        if asked.version < current.version or asked.conf_ver < current.conf_ver:
            raise _refused(_STALE_SPLIT.format(one_line(asked), one_line(current)))


def _refused(text: str) -> RefusedError:
    return RefusedError(pdpb_pb2.UNKNOWN, text)
