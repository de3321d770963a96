"""pdpb.PD: where keys are, and what stores report about it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import islice
from typing import Any

from kvproto import pdpb_pb2

from server.coordinator import metrics
from server.coordinator.cluster.cluster import Cluster, message_of
from server.coordinator.cluster.regions import KnownRegion, check_region, one_line
from server.coordinator.cluster.stores import is_removed
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.header import Headers


class RegionService:
    """Lookups, scans and heartbeats; an unknown region is an answer without one."""

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
        """Regions of a key range in order, at most `limit`; a limit <= 0 is none."""
        found = self._scan(request.start_key, request.end_key, request.limit)
        return pdpb_pb2.ScanRegionsResponse(
            region_metas=[known.region for known in found],
            leaders=[known.leader for known in found],
            regions=[message_of(known) for known in found],
        )

    async def batch_scan_regions(self, request: pdpb_pb2.BatchScanRegionsRequest) -> pdpb_pb2.BatchScanRegionsResponse:
        """Regions of several key ranges in order, each region once, at most `limit`; a limit <= 0 is none."""
        _check_ranges(request.ranges)
        found: dict[int, KnownRegion] = {}
        for key_range in request.ranges:
            pieces = self._scan(key_range.start_key, key_range.end_key, request.limit)
            if request.contain_all_key_range:
                _check_whole(key_range, pieces, request.limit)
            found |= {known.region.id: known for known in pieces}
            if 0 < request.limit <= len(found):
                break
        limit = request.limit if request.limit > 0 else len(found)
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
        """Take reports in; only refusals are answered, with the leader that sent the report as `target_peer`.

        The stream ends with the client's half of it, or when a store reports that is not registered.
        """
        async for request in requests:
            self._headers.check(request.header)
            try:
                self._headers.check_bootstrapped()
                self._take(request)
            except RefusedError as err:
                header = self._headers.refused(err)
                yield pdpb_pb2.RegionHeartbeatResponse(
                    header=header, region_id=request.region.id, target_peer=request.leader
                )

    def _take(self, request: pdpb_pb2.RegionHeartbeatRequest) -> None:
        store = self._cluster.stores.get(request.leader.store_id)
        if store is None:
            raise RequestError(f"invalid store ID {request.leader.store_id}, not found")
        if is_removed(store):
            return
        metrics.REGION_HEARTBEATS_TOTAL.inc()
        check_region(request.region)
        reported = self._cluster.report(request.region, request.leader)
        if reported.newer is not None:
            text = f"region is stale: region {one_line(request.region)} origin {one_line(reported.newer)}"
            raise RefusedError(pdpb_pb2.UNKNOWN, text)

    def _scan(self, start_key: bytes, end_key: bytes, limit: int) -> list[KnownRegion]:
        return list(islice(self._regions.scan(start_key, end_key), limit if limit > 0 else None))

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


def _answer(known: KnownRegion | None) -> pdpb_pb2.GetRegionResponse:
    if known is None:
        return pdpb_pb2.GetRegionResponse()
    return pdpb_pb2.GetRegionResponse(region=known.region, leader=known.leader)


def _check_ranges(ranges: Sequence[pdpb_pb2.KeyRange]) -> None:
    for at, key_range in enumerate(ranges):
        before = ranges[at - 1].end_key if at else b"\0"
        if at and (not before or key_range.start_key < before):
            raise RefusedError(pdpb_pb2.UNKNOWN, "invalid key range, ranges overlapped")
        if key_range.end_key and key_range.start_key > key_range.end_key:
            raise RefusedError(pdpb_pb2.UNKNOWN, "invalid key range, start key > end key")


def _check_whole(key_range: pdpb_pb2.KeyRange, pieces: list[KnownRegion], limit: int) -> None:
    reached = key_range.start_key
    for known in pieces:
        if known.region.start_key > reached:
            break
        reached = known.region.end_key
        if not reached or (key_range.end_key and reached >= key_range.end_key):
            return
    else:
        if 0 < limit <= len(pieces):
            return  # the caller asks on from where this answer ends
    raise RefusedError(pdpb_pb2.REGIONS_NOT_CONTAIN_ALL_KEY_RANGE, "found regions do not contain the whole key range")
