"""pdpb.PD: timestamps. What gathers on all Tso streams is answered together, each message in its place."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from kvproto import pdpb_pb2

from server.coordinator.header import Headers
from server.coordinator.tso import TimestampOracle
from server.rpc.errors import StatusError
from server.rpc.front import Answer, BatchHandler
from storage.model.errors import TidemarkError


class TsoService:
    """Tso and GetMinTS."""

    def __init__(self, headers: Headers, oracle: TimestampOracle) -> None:
        self._headers = headers
        self._oracle = oracle

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here."""
        return {"GetMinTS": self._headers.open(pdpb_pb2.GetMinTSResponse, self.min_ts)}

    def batches(self) -> Mapping[str, BatchHandler]:
        """PD's names for what is served here in batches."""
        return {"Tso": self.tso}

    async def tso(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """One answer for each request, in order; the timestamp is the last of the count."""
        return [await self._answer(raw) for raw in requests]

    async def min_ts(self, _request: pdpb_pb2.GetMinTSRequest) -> pdpb_pb2.GetMinTSResponse:
        """A new timestamp."""
        return pdpb_pb2.GetMinTSResponse(timestamp=await self._take(1))

    async def _answer(self, raw: bytes) -> Answer:
        try:
            request = pdpb_pb2.TsoRequest.FromString(raw)
            self._headers.check(request.header)
            timestamp = await self._take(request.count)
        except DecodeError as err:
            return StatusError(grpc.StatusCode.INTERNAL, f"grpc: error unmarshalling request: {err}")
        except TidemarkError as err:
            return err
        return pdpb_pb2.TsoResponse(
            header=self._headers.ok, count=request.count, timestamp=timestamp
        ).SerializeToString()

    async def _take(self, count: int) -> pdpb_pb2.Timestamp:
        physical_ms, logical = await self._oracle.take(count)
        return pdpb_pb2.Timestamp(physical=physical_ms, logical=logical)
