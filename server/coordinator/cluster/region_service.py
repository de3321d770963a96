"""pdpb.PD: where keys are (lookups, scans, region heartbeats),
and the splitting and scattering of regions.

`RegionService` answers from the region map and takes the stores' reports in. `RegionSplitService`
gives ids to splits, and does what PD's schedulers do: with one copy of a region there is nothing to
move, so scattering is done at once. A split requested by a client is done by the store that leads
the region: the coordinator calls the store, which reports back as after a split of its own, before
the client is answered.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import grpc.aio
import structlog
from kvproto import kvrpcpb_pb2, metapb_pb2, pdpb_pb2, tikvpb_pb2_grpc
from prometheus_client import Counter

from server.coordinator.cluster.cluster import Cluster, message_of
from server.coordinator.cluster.regions import KnownRegion, check_region, one_line
from server.coordinator.cluster.stores import is_removed
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.header import Headers, by_name

_REGION_HEARTBEATS_TOTAL = Counter(
    "tidemark_coordinator_region_heartbeats_total", "Region heartbeats received"
)
MAX_SPLITS = 1000
MAX_SPLIT_IDS = 10 * MAX_SPLITS
_MAX_ROUNDS = 5
_CALL_SECONDS = 5.0
_STALE_SPLIT = "invalid region epoch, request: {}, current: {}"
Connect = Callable[[str], grpc.aio.Channel]

_log = structlog.get_logger(__name__)


class RegionService:
    """Lookups, scans and heartbeats; an unknown region is an answer without one."""

    def __init__(self, headers: Headers, cluster: Cluster) -> None:
        self._headers = headers
        self._cluster = cluster
        self._regions = cluster.regions

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        unary = self._headers.calls(
            self.GetRegion,
            self.GetPrevRegion,
            self.GetRegionByID,
            self.ScanRegions,
            self.BatchScanRegions,
        )
        return {**unary, **by_name(self.QueryRegion, self.RegionHeartbeat)}

    async def GetRegion(self, request: pdpb_pb2.GetRegionRequest) -> pdpb_pb2.GetRegionResponse:
        """The region that holds a key."""
        return _answer(self._regions.find(request.region_key))

    async def GetPrevRegion(self, request: pdpb_pb2.GetRegionRequest) -> pdpb_pb2.GetRegionResponse:
        """The region before the one that holds a key."""
        return _answer(self._regions.before(request.region_key))

    async def GetRegionByID(
        self, request: pdpb_pb2.GetRegionByIDRequest
    ) -> pdpb_pb2.GetRegionResponse:
        """The region of an id."""
        return _answer(self._regions.by_id(request.region_id))

    async def ScanRegions(
        self, request: pdpb_pb2.ScanRegionsRequest
    ) -> pdpb_pb2.ScanRegionsResponse:
        """Regions of a key range in order, at most `limit`; a limit <= 0 is none."""
        regions = self._scan(request.start_key, request.end_key, request.limit)
        return pdpb_pb2.ScanRegionsResponse(
            region_metas=[entry.region for entry in regions],
            leaders=[entry.leader for entry in regions],
            regions=[message_of(entry) for entry in regions],
        )

    async def BatchScanRegions(
        self, request: pdpb_pb2.BatchScanRegionsRequest
    ) -> pdpb_pb2.BatchScanRegionsResponse:
        """Regions of several key ranges in order, each region once, at most `limit`;
        a limit <= 0 is none.
        """
        _check_ranges(request.ranges)
        regions: dict[int, KnownRegion] = {}
        for key_range in request.ranges:
            pieces = self._scan(key_range.start_key, key_range.end_key, request.limit)
            if request.contain_all_key_range:
                _check_whole(key_range, pieces, request.limit)
            regions |= {entry.region.id: entry for entry in pieces}
            if 0 < request.limit <= len(regions):
                break
        limit = request.limit if request.limit > 0 else len(regions)
        return pdpb_pb2.BatchScanRegionsResponse(
            regions=[message_of(entry) for entry in islice(regions.values(), limit)]
        )

    async def QueryRegion(
        self, requests: AsyncIterator[pdpb_pb2.QueryRegionRequest], _context: Any
    ) -> AsyncIterator[pdpb_pb2.QueryRegionResponse]:
        """Many lookups a message; 0 in a map means no such region."""
        async for request in requests:
            self._headers.check(request.header)
            yield self._query(request)

    async def RegionHeartbeat(
        self, requests: AsyncIterator[pdpb_pb2.RegionHeartbeatRequest], _context: Any
    ) -> AsyncIterator[pdpb_pb2.RegionHeartbeatResponse]:
        """Take reports in; only refusals are answered,
        with the leader that sent the report as `target_peer`.

        The stream ends with the client's half of it, or when a store reports that is not
        registered.
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
        _REGION_HEARTBEATS_TOTAL.inc()
        check_region(request.region)
        reported = self._cluster.report(request.region, request.leader)
        if reported.newer is not None:
            text = (
                f"region is stale: region {one_line(request.region)} origin "
                f"{one_line(reported.newer)}"
            )
            raise RefusedError(pdpb_pb2.UNKNOWN, text)

    def _scan(self, start_key: bytes, end_key: bytes, limit: int) -> list[KnownRegion]:
        return list(islice(self._regions.scan(start_key, end_key), limit if limit > 0 else None))

    def _query(self, request: pdpb_pb2.QueryRegionRequest) -> pdpb_pb2.QueryRegionResponse:
        if not self._headers.bootstrapped():
            return pdpb_pb2.QueryRegionResponse(
                header=self._headers.refused(
                    RefusedError(pdpb_pb2.NOT_BOOTSTRAPPED, "cluster is not bootstrapped")
                )
            )
        by_key = [self._regions.find(key) for key in request.keys]
        by_prev = [self._regions.before(key) for key in request.prev_keys]
        by_id = [self._regions.by_id(region_id) for region_id in request.ids]
        response = pdpb_pb2.QueryRegionResponse(
            header=self._headers.ok,
            key_id_map=[entry.region.id if entry else 0 for entry in by_key],
            prev_key_id_map=[entry.region.id if entry else 0 for entry in by_prev],
        )
        for entry in (*by_key, *by_prev, *by_id):
            if entry is not None:
                by_id_answer = pdpb_pb2.RegionResponse(region=entry.region, leader=entry.leader)
                response.regions_by_id[entry.region.id].CopyFrom(by_id_answer)
        return response


def _answer(entry: KnownRegion | None) -> pdpb_pb2.GetRegionResponse:
    if entry is None:
        return pdpb_pb2.GetRegionResponse()
    return pdpb_pb2.GetRegionResponse(region=entry.region, leader=entry.leader)


def _check_ranges(ranges: Sequence[pdpb_pb2.KeyRange]) -> None:
    for at, key_range in enumerate(ranges):
        before = ranges[at - 1].end_key if at else b"\0"
        if at and (not before or key_range.start_key < before):
            raise RefusedError(pdpb_pb2.UNKNOWN, "invalid key range, ranges overlapped")
        if key_range.end_key and key_range.start_key > key_range.end_key:
            raise RefusedError(pdpb_pb2.UNKNOWN, "invalid key range, start key > end key")


def _check_whole(key_range: pdpb_pb2.KeyRange, pieces: list[KnownRegion], limit: int) -> None:
    reached = key_range.start_key
    for entry in pieces:
        if entry.region.start_key > reached:
            break
        reached = entry.region.end_key
        if not reached or (key_range.end_key and reached >= key_range.end_key):
            return
    else:
        if 0 < limit <= len(pieces):
            return  # the caller asks on from where this answer ends
    raise RefusedError(
        pdpb_pb2.REGIONS_NOT_CONTAIN_ALL_KEY_RANGE,
        "found regions do not contain the whole key range",
    )


class RegionSplitService:
    """Splits on request of a store, and of any client; scatters, which here are done at once."""

    def __init__(self, headers: Headers, cluster: Cluster, connect: Connect) -> None:
        self._headers = headers
        self._cluster = cluster
        self._regions = cluster.regions
        self._connect = connect

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        return self._headers.calls(
            self.AskBatchSplit,
            self.ReportBatchSplit,
            self.SplitRegions,
            self.SplitAndScatterRegions,
            self.ScatterRegion,
            self.GetOperator,
        )

    async def AskBatchSplit(
        self, request: pdpb_pb2.AskBatchSplitRequest
    ) -> pdpb_pb2.AskBatchSplitResponse:
        """Ids for the new regions of a split and for their peers."""
        if not request.HasField("region"):
            raise RefusedError(pdpb_pb2.REGION_NOT_FOUND, "missing region for split")
        # Ids are free, but one request must not take all of them, nor make an answer of any size.
        if request.split_count > MAX_SPLITS:
            raise _refused(f"a split makes at most {MAX_SPLITS} regions, not {request.split_count}")
        width = 1 + len(request.region.peers)
        total = request.split_count * width
        if total > MAX_SPLIT_IDS:
            raise _refused(
                f"a split takes at most {MAX_SPLIT_IDS} ids, not {total}: {width - 1} peers are "
                "too many"
            )
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

    async def ReportBatchSplit(
        self, request: pdpb_pb2.ReportBatchSplitRequest
    ) -> pdpb_pb2.ReportBatchSplitResponse:
        """Take a split's outcome in; PD waits for the heartbeats that follow."""
        regions = request.regions
        if len(regions) < 2 or any(
            left.end_key != right.start_key for left, right in pairwise(regions)
        ):
            raise _refused("invalid split region")
        for region in regions:
            check_region(region)
        for region in regions:
            self._cluster.report(region, metapb_pb2.Peer())
        return pdpb_pb2.ReportBatchSplitResponse()

    async def SplitRegions(
        self, request: pdpb_pb2.SplitRegionsRequest
    ) -> pdpb_pb2.SplitRegionsResponse:
        """Make encoded keys the first ones of regions; answers these,
        and how many of 100 keys were done.
        """
        done, percentage = await self._split(request.split_keys, request.retry_limit)
        return pdpb_pb2.SplitRegionsResponse(regions_id=done, finished_percentage=percentage)

    async def SplitAndScatterRegions(
        self, request: pdpb_pb2.SplitAndScatterRegionsRequest
    ) -> pdpb_pb2.SplitAndScatterRegionsResponse:
        """Split as `SplitRegions` does; there is nothing to scatter."""
        done, percentage = await self._split(request.split_keys, request.retry_limit)
        if not done:
            raise RequestError("[PD:scatter:ErrEmptyRegion]empty region")
        return pdpb_pb2.SplitAndScatterRegionsResponse(
            regions_id=done, split_finished_percentage=percentage, scatter_finished_percentage=100
        )

    async def ScatterRegion(
        self, request: pdpb_pb2.ScatterRegionRequest
    ) -> pdpb_pb2.ScatterRegionResponse:
        """Done at once: each region has one copy, and it stays where it is."""
        if request.regions_id:
            failed = [
                region_id
                for region_id in request.regions_id
                if self._regions.by_id(region_id) is None
            ]
            percentage = 100 * (len(request.regions_id) - len(failed)) // len(request.regions_id)
            return pdpb_pb2.ScatterRegionResponse(
                finished_percentage=percentage, failed_regions_id=failed
            )
        if self._regions.by_id(request.region_id) is None and not request.HasField("region"):
            raise RefusedError(pdpb_pb2.REGION_NOT_FOUND, f"region {request.region_id} not found")
        return pdpb_pb2.ScatterRegionResponse(finished_percentage=100)

    async def GetOperator(
        self, _request: pdpb_pb2.GetOperatorRequest
    ) -> pdpb_pb2.GetOperatorResponse:
        """Answer that there is no operator; clients that wait for one to finish continue then."""
        raise RefusedError(pdpb_pb2.REGION_NOT_FOUND, "Not Found")

    async def _split(self, keys: Sequence[bytes], retries: int) -> tuple[list[int], int]:
        split_keys = sorted({key for key in keys if key})
        # A region may be split by somebody else between the lookup and the call; the store then
        # refuses its old epoch.
        for _ in range(1 + min(retries, _MAX_ROUNDS)):
            for entry, inside in self._undone(split_keys):
                await self._ask_store(entry, inside)
        holders = [(key, self._regions.find(key)) for key in split_keys]
        done = [
            holder.region.id for key, holder in holders if holder and holder.region.start_key == key
        ]
        return done, 100 * len(done) // len(split_keys) if split_keys else 0

    def _undone(self, keys: Sequence[bytes]) -> list[tuple[KnownRegion, list[bytes]]]:
        inside: dict[int, list[bytes]] = defaultdict(list)
        for key in keys:
            entry = self._regions.find(key)
            if entry is not None and entry.region.start_key != key:
                inside[entry.region.id].append(key)
        holders = (
            (self._regions.by_id(region_id), split_keys) for region_id, split_keys in inside.items()
        )
        return [(holder, split_keys) for holder, split_keys in holders if holder is not None]

    async def _ask_store(self, entry: KnownRegion, keys: Sequence[bytes]) -> None:
        store = self._cluster.stores.get(entry.leader.store_id)
        if store is None:
            return
        context = kvrpcpb_pb2.Context(
            region_id=entry.region.id, region_epoch=entry.region.region_epoch, peer=entry.leader
        )
        # The keys are encoded already, as PD's callers send them; `is_raw_kv` tells the store not
        # to encode them again.
        request = kvrpcpb_pb2.SplitRegionRequest(context=context, split_keys=keys, is_raw_kv=True)
        async with self._connect(store.address) as channel:
            try:
                await tikvpb_pb2_grpc.TikvStub(channel).SplitRegion(request, timeout=_CALL_SECONDS)
            except grpc.aio.AioRpcError as err:
                _log.warning(
                    "a store does not split",
                    store_id=store.id,
                    region_id=entry.region.id,
                    error=err.details(),
                )

    def _check_known(self, region: metapb_pb2.Region) -> None:
        entry = self._regions.find(region.start_key)
        if entry is None:
            raise _refused(f"region not found, request region: {region.id}")
        epoch, current = region.region_epoch, entry.region.region_epoch
        if epoch.version < current.version or epoch.conf_ver < current.conf_ver:
            raise _refused(_STALE_SPLIT.format(one_line(epoch), one_line(current)))


def _refused(text: str) -> RefusedError:
    return RefusedError(pdpb_pb2.UNKNOWN, text)
