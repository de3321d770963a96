"""pdpb.PD: timestamps of the whole cluster that somebody else decides: the external one, and what stores resolved.

Invariants (PD's server: SetExternalTS): the external timestamp only grows, and never passes the newest one handed out.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from kvproto import pdpb_pb2

from server.coordinator.cluster.cluster import Cluster
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.header import Headers
from server.coordinator.keys import ClusterKeys
from server.coordinator.leadership.ledger import Ledger
from server.coordinator.tso import TimestampOracle
from storage.meta.meta import Put
from storage.model.ts import compose


class ClusterTsService:
    """The external timestamp (that stale readers use when told to) and the stores' resolved ones."""

    def __init__(self, headers: Headers, cluster: Cluster, oracle: TimestampOracle, ledger: Ledger) -> None:
        self._headers = headers
        self._cluster = cluster
        self._oracle = oracle
        self._ledger = ledger
        self._key = ClusterKeys(cluster.id).external_ts
        self._writing = asyncio.Lock()

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here."""
        door = self._headers
        return {
            "SetExternalTimestamp": door.open(pdpb_pb2.SetExternalTimestampResponse, self.set_external),
            "GetExternalTimestamp": door.open(pdpb_pb2.GetExternalTimestampResponse, self.get_external),
            "ReportMinResolvedTS": door.bound(pdpb_pb2.ReportMinResolvedTsResponse, self.report_resolved),
            "GetDCLocationInfo": self.get_dc_location_info,
            "SyncMaxTS": self.sync_max_ts,
        }

    async def set_external(
        self, request: pdpb_pb2.SetExternalTimestampRequest
    ) -> pdpb_pb2.SetExternalTimestampResponse:
        """Move the external timestamp; durable when it returns."""
        asked = request.timestamp
        async with self._writing:
            if asked > compose(*await self._oracle.take(1)):
                raise _refused("the external timestamp should not be larger than global ts")
            if not self._cluster.bootstrapped:
                raise _refused("[PD:cluster:ErrNotBootstrapped]TiKV cluster not bootstrapped, please start TiKV first")
            if asked <= await self._external():
                raise _refused("the external timestamp should be larger than current external timestamp")
            await self._ledger.txn((), [Put(self._key, f"{asked:x}".encode())])
        return pdpb_pb2.SetExternalTimestampResponse()

    async def get_external(
        self, _request: pdpb_pb2.GetExternalTimestampRequest
    ) -> pdpb_pb2.GetExternalTimestampResponse:
        """The external timestamp; 0 while none was set."""
        return pdpb_pb2.GetExternalTimestampResponse(timestamp=await self._external())

    async def report_resolved(
        self, request: pdpb_pb2.ReportMinResolvedTsRequest
    ) -> pdpb_pb2.ReportMinResolvedTsResponse:
        """Take in up to where a store has resolved all its regions; kept in memory only, stores tell it again."""
        if request.store_id not in self._cluster.stores:
            raise RequestError(f"[PD:core:ErrStoreNotFound]store {request.store_id} not found")
        self._cluster.min_resolved_ts[request.store_id] = request.min_resolved_ts
        return pdpb_pb2.ReportMinResolvedTsResponse()

    async def get_dc_location_info(
        self, _request: pdpb_pb2.GetDCLocationInfoRequest, _context: Any
    ) -> pdpb_pb2.GetDCLocationInfoResponse:
        """Nothing: timestamps of single data centres are no longer handed out, by PD neither."""
        return pdpb_pb2.GetDCLocationInfoResponse(header=self._headers.ok)

    async def sync_max_ts(self, _request: pdpb_pb2.SyncMaxTSRequest, _context: Any) -> pdpb_pb2.SyncMaxTSResponse:
        """Nothing, as `get_dc_location_info`."""
        return pdpb_pb2.SyncMaxTSResponse(header=self._headers.ok)

    async def _external(self) -> int:
        found = await self._ledger.get(self._key)
        return int(found.value, 16) if found else 0


def _refused(text: str) -> RefusedError:
    return RefusedError(pdpb_pb2.INVALID_VALUE, text)
