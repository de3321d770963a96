"""pdpb.PD: timestamps."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from kvproto import pdpb_pb2

from server.coordinator.header import Headers
from server.coordinator.tso import TimestampOracle


class TsoService:
    """Tso and GetMinTS."""

    def __init__(self, headers: Headers, oracle: TimestampOracle) -> None:
        self._headers = headers
        self._oracle = oracle

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here."""
        return {"Tso": self.tso, "GetMinTS": self._headers.open(pdpb_pb2.GetMinTSResponse, self.min_ts)}

    async def tso(
        self, requests: AsyncIterator[pdpb_pb2.TsoRequest], _context: Any
    ) -> AsyncIterator[pdpb_pb2.TsoResponse]:
        """One answer for each request, in order; the timestamp is the last of the count."""
        async for request in requests:
            self._headers.check(request.header)
            timestamp = await self._take(request.count)
            yield pdpb_pb2.TsoResponse(header=self._headers.ok, count=request.count, timestamp=timestamp)

    async def min_ts(self, _request: pdpb_pb2.GetMinTSRequest) -> pdpb_pb2.GetMinTSResponse:
        """A new timestamp."""
        return pdpb_pb2.GetMinTSResponse(timestamp=await self._take(1))

    async def _take(self, count: int) -> pdpb_pb2.Timestamp:
        physical_ms, logical = await self._oracle.take(count)
        return pdpb_pb2.Timestamp(physical=physical_ms, logical=logical)
