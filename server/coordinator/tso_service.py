"""pdpb.PD: timestamps. What gathers on all Tso streams is answered together, each message in its place."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from kvproto import pdpb_pb2

from server.coordinator.header import Headers
from server.coordinator.tso import TimestampOracle
from server.rpc.errors import StatusError
from server.rpc.front import Answer, BatchHandler
from storage.model.errors import TidemarkError
from storage.model.ts import LOGICAL_MAX

_Share = list[pdpb_pb2.TsoRequest] | TidemarkError
_MAX_SHARE = LOGICAL_MAX // 8
"""Timestamps taken at once: of a millisecond's, less than this many are lost when the next share does not fit."""


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
        parsed = [self._parsed(raw) for raw in requests]
        answers: list[Answer] = []
        for taken in _shares(parsed):
            answers += await self._taken(taken)
        return answers

    async def min_ts(self, _request: pdpb_pb2.GetMinTSRequest) -> pdpb_pb2.GetMinTSResponse:
        """A new timestamp."""
        return pdpb_pb2.GetMinTSResponse(timestamp=await self._take(1))

    def _parsed(self, raw: bytes) -> pdpb_pb2.TsoRequest | TidemarkError:
        try:
            request = pdpb_pb2.TsoRequest.FromString(raw)
            self._headers.check(request.header)
        except DecodeError as err:
            return StatusError(grpc.StatusCode.INTERNAL, f"grpc: error unmarshalling request: {err}")
        except TidemarkError as err:
            return err
        return request

    async def _taken(self, share: _Share) -> Sequence[Answer]:
        """The answers to requests that take their timestamps together, or to one that takes none."""
        if isinstance(share, TidemarkError):
            return [share]
        try:
            last = await self._take(sum(request.count for request in share))
        except TidemarkError as err:
            return [err] * len(share)
        answers: list[Answer] = []
        logical = last.logical - sum(request.count for request in share)
        for request in share:
            logical += request.count
            last.logical = logical
            answers.append(
                pdpb_pb2.TsoResponse(header=self._headers.ok, count=request.count, timestamp=last).SerializeToString()
            )
        return answers

    async def _take(self, count: int) -> pdpb_pb2.Timestamp:
        physical_ms, logical = await self._oracle.take(count)
        return pdpb_pb2.Timestamp(physical=physical_ms, logical=logical)


def _shares(parsed: Sequence[pdpb_pb2.TsoRequest | TidemarkError]) -> Iterator[_Share]:
    """Neighbours that can take their timestamps together; requests for none, or very many, stand alone."""
    share: list[pdpb_pb2.TsoRequest] = []
    total = 0
    for request in parsed:
        count = 0 if isinstance(request, TidemarkError) else request.count
        alone = not 0 < count <= _MAX_SHARE
        if share and (alone or total + count > _MAX_SHARE):
            yield share
            share, total = [], 0
        if isinstance(request, TidemarkError):
            yield request
        elif alone:
            yield [request]
        else:
            share.append(request)
            total += count
    if share:
        yield share
