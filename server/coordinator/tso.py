"""Timestamps: the oracle (TSO), the RPCs Tso and GetMinTS,
and the cluster's timestamps that others decide.

`TimestampOracle` hands out timestamps. Invariants (PD's pkg/tso):

1. Every timestamp is greater than all before it, whatever the wall clock does.
2. No timestamp's physical part reaches `limit_ms`, which is durable before it is used; a restart,
   and another leader, begin at the limit. So a kill -9 never makes one go back, at the price of a
   step of at most `WINDOW_MS`.
3. When a millisecond's logical numbers are used up, callers wait for its end: however many
   timestamps are taken, and while the wall clock stands behind, the physical part runs no faster
   than time.

`TsoService` answers the requests that gather on all Tso streams together, each message in its
place. `ClusterTsService` keeps the external timestamp, which only grows and never passes the newest
one handed out (PD's server: SetExternalTS), and what stores have resolved.
"""

import asyncio
import enum
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from kvproto import pdpb_pb2
from prometheus_client import Counter

from server.coordinator.cluster.cluster import Cluster
from server.coordinator.errors import NotLeaderError, RefusedError, RequestError
from server.coordinator.header import Headers, by_name
from server.coordinator.keys import ClusterKeys
from server.coordinator.leadership.durable_limit import DurableLimit
from server.coordinator.leadership.leadership import FencedMetadata
from server.log import RateLimitedWarning
from server.rpc.errors import StatusError
from server.rpc.front import Answer, BatchHandler
from storage.meta.errors import MetaUnavailableError
from storage.meta.meta import Put
from storage.model.errors import TidemarkError
from storage.model.ts import LOGICAL_MAX, compose

_TSO_TOTAL = Counter("tidemark_coordinator_tso_total", "Timestamps handed out")

WINDOW_MS = 3000
_SPARE_MS = 1500
_CHECK_SECONDS = 0.5
_STEP_SECONDS = 0.001
_SAVE_SECONDS = 1.0
_NANOSECONDS_PER_MS = 1_000_000
_RETRIES_TEXT = (
    "[PD:tso:ErrGenerateTimestamp]generate timestamp failed, generate tso maximum number of "
    "retries exceeded"
)
_COUNT_TEXT = "[PD:tso:ErrGenerateTimestamp]generate timestamp failed, tso count should be positive"

_Share = list[pdpb_pb2.TsoRequest] | TidemarkError
_MAX_SHARE = LOGICAL_MAX // 8
"""Timestamps taken at once: of a millisecond's,
less than this many are lost when the next share does not fit.
"""

_log = structlog.get_logger(__name__)


class Needed(enum.Enum):
    """The step that is needed before more timestamps can be handed out."""

    LIMIT = "a greater limit"
    MILLISECOND = "the next millisecond"


class Oracle:
    """The pure half: `(physical_ms, logical)` and the limit."""

    def __init__(self, limit_ms: int) -> None:
        self.limit_ms = limit_ms
        self._physical_ms = limit_ms
        self._logical = 0

    @property
    def physical_ms(self) -> int:
        """The millisecond of the last timestamp."""
        return self._physical_ms

    def take(self, count: int, now_ms: int) -> "tuple[int, int] | Needed":
        """Reserve `count` timestamps; returns physical and the last logical,
        or what has to be done first.
        """
        physical_ms, logical = self._physical_ms, self._logical
        # Never back: while the wall clock stands behind, logical numbers of the last millisecond go
        # on.
        if now_ms > physical_ms:
            physical_ms, logical = now_ms, 0
        # A timestamp at the limit could be handed out again after a crash, which begins there.
        if physical_ms >= self.limit_ms:
            return Needed.LIMIT
        if logical + count > LOGICAL_MAX:
            return Needed.MILLISECOND
        self._physical_ms, self._logical = physical_ms, logical + count
        return self._physical_ms, self._logical

    def step(self, used_up_ms: int) -> None:
        """The millisecond's timestamps are used up: go on with the next one, unless another caller
        has.
        """
        # Of many callers that waited for the same millisecond, one steps.
        if self._physical_ms == used_up_ms:
            self._physical_ms, self._logical = used_up_ms + 1, 0

    def next_limit(self, now_ms: int) -> int:
        """The limit to save for the time ahead."""
        return max(now_ms, self._physical_ms + 1) + WINDOW_MS


class TimestampOracle:
    """The shell: the wall clock, and the limit kept in metadata (`/pd/<cluster>/timestamp`, ns,
    8 bytes).
    """

    def __init__(
        self, metadata: FencedMetadata, limit: DurableLimit, clock_ns: Callable[[], int]
    ) -> None:
        """`limit` is loaded."""
        self._metadata = metadata
        self._limit = limit
        self._oracle = Oracle(self._saved_ms)
        self._clock_ns = clock_ns
        self._growing = asyncio.Lock()
        self._stepping = asyncio.Lock()

    @classmethod
    async def load(
        cls,
        metadata: FencedMetadata,
        key: bytes,
        clock_ns: Callable[[], int] | None = None,
        *,
        must_exist: bool = False,
    ) -> "TimestampOracle":
        """Continue above everything that was ever handed out;
        the first window is durable when it returns.

        Raises:
            StateLostError: it is not known what was handed out; without any record only if one
                `must_exist`.
        """
        limit = DurableLimit(metadata, key)
        await limit.load(must_exist=must_exist)
        oracle = cls(metadata, limit, clock_ns or time.time_ns)
        # Also when the old limit lies ahead: the first window has to be this leader's own write,
        # under its fence.
        await oracle._grow()
        ahead_ms = oracle._oracle.physical_ms - oracle._now_ms()
        if ahead_ms > WINDOW_MS:
            _log.warning(
                "timestamps are ahead of the clock: it was, or another machine's is",
                ahead_ms=ahead_ms,
            )
        return oracle

    async def put_back(self) -> None:
        """See `DurableLimit.put_back`."""
        await self._limit.put_back()

    async def run(self) -> None:
        """Keep the limit ahead of the clock, so that callers need not wait for it."""
        warning = RateLimitedWarning(_log, "the TSO window cannot grow")
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if self._oracle.limit_ms >= self._now_ms() + _SPARE_MS:
                continue
            try:
                await self._grow()
            except MetaUnavailableError as err:
                warning.warn(reason=err.message)
            except NotLeaderError:
                return  # the term is over

    async def take(self, count: int) -> tuple[int, int]:
        """Reserve `count` timestamps; returns physical ms and the largest logical.

        Raises:
            RequestError: `count` is 0 or does not fit into one millisecond.
            NotLeaderError: another coordinator may hand them out.
        """
        if count <= 0:
            raise RequestError(_COUNT_TEXT)
        if count > LOGICAL_MAX:
            raise RequestError(_RETRIES_TEXT)
        while True:
            self._metadata.leadership.check()
            taken = self._oracle.take(count, self._now_ms())
            if isinstance(taken, tuple):
                _TSO_TOTAL.inc(count)
                return taken
            await (self._grow() if taken is Needed.LIMIT else self._step())

    async def _grow(self) -> None:
        before_ms = self._oracle.limit_ms
        async with self._growing:
            while self._oracle.limit_ms <= before_ms:
                self._metadata.leadership.check()
                # a member of etcd is silent: ask again, another is soon in use
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SAVE_SECONDS):
                        await self._save(self._oracle.next_limit(self._now_ms()))

    async def _save(self, limit_ms: int) -> None:
        # Durable first, used afterwards; a write that arrives late must not lower the number, hence
        # the maximum.
        await self._limit.raise_to(max(limit_ms, self._saved_ms) * _NANOSECONDS_PER_MS)
        self._oracle.limit_ms = self._saved_ms

    @property
    def _saved_ms(self) -> int:
        # Rounded up: PD's record has nanoseconds, and rounding down would allow a millisecond
        # twice.
        return -(-self._limit.value // _NANOSECONDS_PER_MS)

    async def _step(self) -> None:
        used_up_ms = self._oracle.physical_ms
        async with self._stepping:
            if self._oracle.physical_ms == used_up_ms:
                await asyncio.sleep(_STEP_SECONDS)
                self._oracle.step(used_up_ms)

    def _now_ms(self) -> int:
        return self._clock_ns() // _NANOSECONDS_PER_MS


class TsoService:
    """Tso and GetMinTS."""

    def __init__(self, headers: Headers, oracle: TimestampOracle) -> None:
        self._headers = headers
        self._oracle = oracle

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        return self._headers.calls(self.GetMinTS, before_bootstrap=True)

    def batches(self) -> Mapping[str, BatchHandler]:
        """The batch handlers by the names of their RPCs."""
        return by_name(self.Tso)

    async def Tso(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """Tso: one answer for each request, in order; the timestamp is the last of the count."""
        parsed = [self._parse(raw) for raw in requests]
        answers: list[Answer] = []
        # One visit to the oracle for all that gathered; 128 streams that ask at once cost one.
        for share in _shares(parsed):
            answers += await self._answers(share)
        return answers

    async def GetMinTS(self, _request: pdpb_pb2.GetMinTSRequest) -> pdpb_pb2.GetMinTSResponse:
        """A new timestamp."""
        return pdpb_pb2.GetMinTSResponse(timestamp=await self._take(1))

    def _parse(self, raw: bytes) -> pdpb_pb2.TsoRequest | TidemarkError:
        try:
            request = pdpb_pb2.TsoRequest.FromString(raw)
            self._headers.check(request.header)
        except DecodeError as err:
            return StatusError(
                grpc.StatusCode.INTERNAL, f"grpc: error unmarshalling request: {err}"
            )
        except TidemarkError as err:
            return err
        return request

    async def _answers(self, share: _Share) -> Sequence[Answer]:
        """The answers to requests that take their timestamps together,
        or to one that takes none.
        """
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
                pdpb_pb2.TsoResponse(
                    header=self._headers.ok, count=request.count, timestamp=last
                ).SerializeToString()
            )
        return answers

    async def _take(self, count: int) -> pdpb_pb2.Timestamp:
        physical_ms, logical = await self._oracle.take(count)
        return pdpb_pb2.Timestamp(physical=physical_ms, logical=logical)


def _shares(parsed: Sequence[pdpb_pb2.TsoRequest | TidemarkError]) -> Iterator[_Share]:
    """Neighbours that can take their timestamps together; requests for none, or very many,
    stand alone.
    """
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


class ClusterTsService:
    """The external timestamp (that stale readers use when told to) and the stores' resolved
    ones.
    """

    def __init__(
        self, headers: Headers, cluster: Cluster, oracle: TimestampOracle, metadata: FencedMetadata
    ) -> None:
        self._headers = headers
        self._cluster = cluster
        self._oracle = oracle
        self._metadata = metadata
        self._key = ClusterKeys(cluster.id).external_ts
        self._writing = asyncio.Lock()

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        before_bootstrap = self._headers.calls(
            self.SetExternalTimestamp, self.GetExternalTimestamp, before_bootstrap=True
        )
        return {
            **before_bootstrap,
            **self._headers.calls(self.ReportMinResolvedTS),
            **by_name(self.GetDCLocationInfo, self.SyncMaxTS),
        }

    async def SetExternalTimestamp(
        self, request: pdpb_pb2.SetExternalTimestampRequest
    ) -> pdpb_pb2.SetExternalTimestampResponse:
        """Move the external timestamp; durable when it returns."""
        new_ts = request.timestamp
        async with self._writing:
            # A timestamp above the newest would let stale readers see what is not written yet.
            if new_ts > compose(*await self._oracle.take(1)):
                raise _refused("the external timestamp should not be larger than global ts")
            if not self._cluster.bootstrapped:
                raise _refused(
                    "[PD:cluster:ErrNotBootstrapped]TiKV cluster not bootstrapped, please start "
                    "TiKV first"
                )
            if new_ts <= await self._external():
                raise _refused(
                    "the external timestamp should be larger than current external timestamp"
                )
            await self._metadata.txn((), [Put(self._key, f"{new_ts:x}".encode())])
        return pdpb_pb2.SetExternalTimestampResponse()

    async def GetExternalTimestamp(
        self, _request: pdpb_pb2.GetExternalTimestampRequest
    ) -> pdpb_pb2.GetExternalTimestampResponse:
        """The external timestamp; 0 while none was set."""
        return pdpb_pb2.GetExternalTimestampResponse(timestamp=await self._external())

    async def ReportMinResolvedTS(
        self, request: pdpb_pb2.ReportMinResolvedTsRequest
    ) -> pdpb_pb2.ReportMinResolvedTsResponse:
        """Note up to where a store has resolved all its regions; kept in memory only,
        stores report it again.
        """
        if request.store_id not in self._cluster.stores:
            raise RequestError(f"[PD:core:ErrStoreNotFound]store {request.store_id} not found")
        self._cluster.min_resolved_ts[request.store_id] = request.min_resolved_ts
        return pdpb_pb2.ReportMinResolvedTsResponse()

    async def GetDCLocationInfo(
        self, _request: pdpb_pb2.GetDCLocationInfoRequest, _context: Any
    ) -> pdpb_pb2.GetDCLocationInfoResponse:
        """Answers an empty message: like PD today, we have no timestamps of single data centres."""
        return pdpb_pb2.GetDCLocationInfoResponse(header=self._headers.ok)

    async def SyncMaxTS(
        self, _request: pdpb_pb2.SyncMaxTSRequest, _context: Any
    ) -> pdpb_pb2.SyncMaxTSResponse:
        """Answers an empty message, as `GetDCLocationInfo`."""
        return pdpb_pb2.SyncMaxTSResponse(header=self._headers.ok)

    async def _external(self) -> int:
        pair = await self._metadata.get(self._key)
        return int(pair.value, 16) if pair else 0


def _refused(text: str) -> RefusedError:
    return RefusedError(pdpb_pb2.INVALID_VALUE, text)
