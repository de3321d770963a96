"""pdpb.PD: where keys are, and what stores report about it."""

from collections.abc import AsyncIterator, Mapping
from itertools import islice
from typing import Any

from kvproto import metapb_pb2, pdpb_pb2

from server.coordinator import metrics
from server.coordinator.cluster import Cluster, message_of
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.header import Headers
from server.coordinator.regions import KnownRegion

MAX_SCAN = 10_000
MAX_SPLITS = 1000


class RegionService:
    """Lookups, scans, heartbeats and splits; an unknown region is an answer without one."""

    def __init__(self, headers: Headers, cluster: Cluster) -> None:
        self._headers = headers
        self._cluster = cluster
        self._regions = cluster.regions

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here."""
        door = self._headers
        return {
            "GetRegion": door.bound(pdpb_pb2.GetRegionResponse, self.get_region),
            "GetPrevRegion": door.bound(pdpb_pb2.GetRegionResponse, self.get_prev_region),
            "GetRegionByID": door.bound(pdpb_pb2.GetRegionResponse, self.get_region_by_id),
            "ScanRegions": door.bound(pdpb_pb2.ScanRegionsResponse, self.scan_regions),
            "BatchScanRegions": door.bound(pdpb_pb2.BatchScanRegionsResponse, self.batch_scan_regions),
            "QueryRegion": self.query_region,
            "RegionHeartbeat": self.region_heartbeat,
            "AskBatchSplit": door.bound(pdpb_pb2.AskBatchSplitResponse, self.ask_batch_split),
            "ReportBatchSplit": door.bound(pdpb_pb2.ReportBatchSplitResponse, self.report_batch_split),
        }

    async def get_region(self, request: pdpb_pb2.GetRegionRequest) -> pdpb_pb2.GetRegionResponse:
        """The region that holds a key."""
        return _answer(self._regions.find(request.region_key))

    async def get_prev_region(self, request: pdpb_pb2.GetRegionRequest) -> pdpb_pb2.GetRegionResponse:
        """The region before the one that holds a key."""
        return _answer(self._regions.before(request.region_key))

    async def get_region_by_id(self, request: pdpb_pb2.GetRegionByIDRequest) -> pdpb_pb2.GetRegionResponse:
        """The region of an id."""
        return _answer(self._regions.by_id(request.region_id))

    async def scan_regions(self, request: pdpb_pb2.ScanRegionsRequest) -> pdpb_pb2.ScanRegionsResponse:
        """Regions of a key range; a limit <= 0 is none."""
        found = self._scan(request.start_key, request.end_key, request.limit)
        return pdpb_pb2.ScanRegionsResponse(
            region_metas=[known.region for known in found],
            leaders=[known.leader for known in found],
            regions=[message_of(known) for known in found],
        )

    async def batch_scan_regions(self, request: pdpb_pb2.BatchScanRegionsRequest) -> pdpb_pb2.BatchScanRegionsResponse:
        """Regions of several key ranges, each region once."""
        found: dict[int, KnownRegion] = {}
        for key_range in request.ranges:
            pieces = self._scan(key_range.start_key, key_range.end_key, request.limit)
            if request.contain_all_key_range:
                _check_whole(key_range, pieces)
            found |= {known.region.id: known for known in pieces}
        limit = request.limit if request.limit > 0 else MAX_SCAN
        return pdpb_pb2.BatchScanRegionsResponse(regions=[message_of(known) for known in islice(found.values(), limit)])

    async def query_region(
        self, requests: AsyncIterator[pdpb_pb2.QueryRegionRequest], _context: Any
    ) -> AsyncIterator[pdpb_pb2.QueryRegionResponse]:
        """Many lookups a message; 0 in a map means no such region."""
        async for request in requests:
            self._headers.check(request.header)
            yield self._query(request)

    async def region_heartbeat(
        self, requests: AsyncIterator[pdpb_pb2.RegionHeartbeatRequest], _context: Any
    ) -> AsyncIterator[pdpb_pb2.RegionHeartbeatResponse]:
        """Take reports in; only refusals are answered. The stream ends with the client's half of it."""
        async for request in requests:
            self._headers.check(request.header)
            try:
                self._headers.check_bootstrapped()
                self._check_region(request.region)
            except RefusedError as err:
                yield pdpb_pb2.RegionHeartbeatResponse(header=self._headers.refused(err))
                continue
            metrics.REGION_HEARTBEATS_TOTAL.inc()
            self._cluster.report(request.region, request.leader)

    async def ask_batch_split(self, request: pdpb_pb2.AskBatchSplitRequest) -> pdpb_pb2.AskBatchSplitResponse:
        """Ids for the new regions of a split and for their peers."""
        if not 0 < request.split_count <= MAX_SPLITS:
            raise RequestError(f"a split makes 1 to {MAX_SPLITS} regions, not {request.split_count}")
        peers = len(request.region.peers)
        last = await self._cluster.alloc_id(request.split_count * (1 + peers))
        ids = iter(range(last + 1 - request.split_count * (1 + peers), last + 1))
        splits = [
            pdpb_pb2.SplitID(new_region_id=next(ids), new_peer_ids=list(islice(ids, peers)))
            for _ in range(request.split_count)
        ]
        return pdpb_pb2.AskBatchSplitResponse(ids=splits)

    async def report_batch_split(self, request: pdpb_pb2.ReportBatchSplitRequest) -> pdpb_pb2.ReportBatchSplitResponse:
        """Take a split's outcome in."""
        for region in request.regions:
            self._check_region(region)
        for region in request.regions:
            self._cluster.report(region, metapb_pb2.Peer())
        return pdpb_pb2.ReportBatchSplitResponse()

    def _scan(self, start_key: bytes, end_key: bytes, limit: int) -> list[KnownRegion]:
        return list(islice(self._regions.scan(start_key, end_key), limit if limit > 0 else MAX_SCAN))

    def _query(self, request: pdpb_pb2.QueryRegionRequest) -> pdpb_pb2.QueryRegionResponse:
        if not self._headers.bootstrapped():
            return pdpb_pb2.QueryRegionResponse(
                header=self._headers.refused(RefusedError(pdpb_pb2.NOT_BOOTSTRAPPED, "cluster is not bootstrapped"))
            )
        by_key = [self._regions.find(key) for key in request.keys]
        by_prev = [self._regions.before(key) for key in request.prev_keys]
        by_id = [self._regions.by_id(region_id) for region_id in request.ids]
        response = pdpb_pb2.QueryRegionResponse(
            header=self._headers.ok,
            key_id_map=[known.region.id if known else 0 for known in by_key],
            prev_key_id_map=[known.region.id if known else 0 for known in by_prev],
        )
        for known in (*by_key, *by_prev, *by_id):
            if known is not None:
                found = pdpb_pb2.RegionResponse(region=known.region, leader=known.leader)
                response.regions_by_id[known.region.id].CopyFrom(found)
        return response

    def _check_region(self, region: metapb_pb2.Region) -> None:
        bounded = not region.end_key or region.start_key < region.end_key
        if not (region.id and region.peers and region.region_epoch.version and bounded):
            raise RefusedError(pdpb_pb2.UNKNOWN, f"region {region.id} needs an id, peers, an epoch and bounds in order")


def _answer(known: KnownRegion | None) -> pdpb_pb2.GetRegionResponse:
    if known is None:
        return pdpb_pb2.GetRegionResponse()
    return pdpb_pb2.GetRegionResponse(region=known.region, leader=known.leader)


def _check_whole(key_range: pdpb_pb2.KeyRange, pieces: list[KnownRegion]) -> None:
    reached = key_range.start_key
    for known in pieces:
        if known.region.start_key > reached:
            break
        reached = known.region.end_key
        if not reached or (key_range.end_key and reached >= key_range.end_key):
            return
    raise RefusedError(pdpb_pb2.REGIONS_NOT_CONTAIN_ALL_KEY_RANGE, "found regions do not contain the whole key range")
