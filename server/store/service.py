"""The coroutines of tikvpb.Tikv: the BatchCommands stream, waits for pessimistic locks, and the
rare calls about whole regions and ranges that are not worth a batch.

Those are GC, destruction, splits, the store's resolved timestamp (`RegionCalls`). A `BatchStream`
takes requests of all kinds in one message and answers each as soon as it is known, in any order:
the reads of a message against one snapshot, its writes in one group. Raw pairs whose TTL is over
are removed beside them.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import grpc.aio
import structlog
from google.protobuf.unknown_fields import UnknownFieldSet
from kvproto import errorpb_pb2 as errorpb
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from server.rpc.errors import StatusError
from server.store.feed.hub import FeedHub
from server.store.gc import AutoGc, Collector
from server.store.lock_wait import LockWaits, Wait
from server.store.methods import BY_STREAM_FIELD
from server.store.raw_calls import now_s
from server.store.region_table import RegionGate
from server.store.runner import Call, Runner
from server.store.split_merge import Splitter
from storage.codec import encode_bytes
from storage.defect import DefectError, request_error
from storage.model.errors import CorruptError, InvalidError, TidemarkError
from storage.mvcc import raw
from storage.mvcc.group_commit import StoreBusyError
from storage.mvcc.region import Region
from storage.tidb.number import encode_uvarint

_MAX_IN_FLIGHT = 64
_ERROR_TEXT_OF_UNSUPPORTED = {
    5: ("Import", (2,)),
    22: ("Coprocessor", (4,)),
    34: ("RawCoprocessor", (2,)),
    35: ("FlashbackToVersion", (2,)),
    36: ("PrepareFlashbackToVersion", (2,)),
    37: ("Flush", (2, 3)),
    38: ("BufferBatchGet", (2, 3)),
    39: ("RequestHealthFeedback", (1, 1)),
}
"""TiKV's commands that this store does not have: field number in BatchCommands -> name, and the
path of field numbers to the text of an error in its response: `other_error`, `error`,
`errors.abort`, or `region_error.message`.

client-go ends such a request at once with this text; an empty answer it calls "Unknown command
response". Source: kvproto tikvpb.proto, kvrpcpb.proto, coprocessor.proto.
"""
_LENGTH_DELIMITED = 2
_EXPIRE_EVERY_S = 60.0
_EXPIRED_AT_ONCE = 1024
Others = Mapping[str, Callable[[Any, Any], Awaitable[Any]]]
"""Stream field -> coroutine, for requests that are not in the batched methods."""

_log = structlog.get_logger(__name__)


class SafePointAheadError(InvalidError):
    """The coordinator's safepoint still protects this history."""

    code = "ErrGCSafePointAhead"

    def __init__(self, requested: int, allowed: int) -> None:
        super().__init__(
            f"safepoint {requested} is ahead of the coordinator's GC safepoint {allowed}; update that "
            "one first"
        )


class EmptyRangeError(InvalidError):
    """A range to destroy has no keys; an empty end is not taken for the end of everything."""

    code = "ErrEmptyRange"

    def __init__(self, start: bytes, end: bytes) -> None:
        super().__init__(
            f"the range [{start.hex()}, {end.hex()}) has no keys, nothing was destroyed; name "
            "both its ends"
        )


@dataclass(frozen=True, slots=True)
class RegionBackend:
    """The parts of the store that these calls use."""

    gate: RegionGate
    collector: Collector
    splitter: Splitter
    hub: FeedHub
    gc: AutoGc


class RegionCalls:
    """Rare calls: coroutines, not batch functions."""

    def __init__(self, backend: RegionBackend) -> None:
        self._regions = backend

    async def KvGC(self, request: kvrpcpb.GCRequest, _: Any) -> kvrpcpb.GCResponse:
        """Collect one region up to the given safepoint (GC mode "central");
        done when it returns.
        """
        region = self._regions.gate.admit(request.context, ())
        if not isinstance(region, Region):
            return kvrpcpb.GCResponse(region_error=region)
        allowed = await self._regions.gc.allowed()
        if request.safe_point > allowed:
            ahead = SafePointAheadError(request.safe_point, allowed)
            return kvrpcpb.GCResponse(error=kvrpcpb.KeyError(abort=str(ahead)))
        await self._regions.collector.collect(region, request.safe_point)
        return kvrpcpb.GCResponse()

    async def KvDeleteRange(
        self, request: kvrpcpb.DeleteRangeRequest, _: Any
    ) -> kvrpcpb.DeleteRangeResponse:
        """Destroy all versions of a range within one region."""
        region = self._regions.gate.admit(request.context, (request.start_key,))
        if not isinstance(region, Region):
            return kvrpcpb.DeleteRangeResponse(region_error=region)
        if not request.start_key < request.end_key:
            return kvrpcpb.DeleteRangeResponse(
                error=str(EmptyRangeError(request.start_key, request.end_key))
            )
        if not request.notify_only:
            lower, upper = region.clamp(
                encode_bytes(request.start_key), encode_bytes(request.end_key)
            )
            await self._regions.collector.destroy(lower, upper)
        return kvrpcpb.DeleteRangeResponse()

    async def UnsafeDestroyRange(
        self, request: kvrpcpb.UnsafeDestroyRangeRequest, _: Any
    ) -> kvrpcpb.UnsafeDestroyRangeResponse:
        """Destroy all versions and locks of a range of this store, whatever its regions;
        done when it returns.
        """
        if not request.start_key < request.end_key:
            return kvrpcpb.UnsafeDestroyRangeResponse(
                error=str(EmptyRangeError(request.start_key, request.end_key))
            )
        await self._regions.collector.destroy(
            encode_bytes(request.start_key), encode_bytes(request.end_key)
        )
        return kvrpcpb.UnsafeDestroyRangeResponse()

    async def SplitRegion(
        self, request: kvrpcpb.SplitRegionRequest, _: Any
    ) -> kvrpcpb.SplitRegionResponse:
        """Split a region at user keys."""
        return await self._regions.splitter.split(request)

    async def GetStoreSafeTS(
        self, request: kvrpcpb.StoreSafeTSRequest, _: Any
    ) -> kvrpcpb.StoreSafeTSResponse:
        """The least resolved timestamp of the regions that the range touches;
        0 when there is none.
        """
        key_range = request.key_range
        return kvrpcpb.StoreSafeTSResponse(
            safe_ts=self._regions.hub.safe_ts(*_encoded(key_range.start_key, key_range.end_key))
        )


def _encoded(start: bytes, end: bytes) -> tuple[bytes, bytes]:
    return encode_bytes(start) if start else b"", encode_bytes(end) if end else b""


class TikvService(RegionCalls):
    """The calls that are no batch functions, for `RpcServer.add_service`."""

    def __init__(
        self, tasks: asyncio.TaskGroup, runner: Runner, regions: RegionBackend, lock_wait_s: float
    ) -> None:
        """`tasks` outlives every call: streams that a client leaves are cancelled there."""
        super().__init__(regions)
        self._tasks = tasks
        self._runner = runner
        self._waits = LockWaits(runner, lock_wait_s)
        self._streams: dict[BatchStream, None] = {}
        self._expiry = tasks.create_task(expire(runner), name="raw-expiry")
        self._others: Others = {"GC": self.KvGC, "DeleteRange": self.KvDeleteRange}

    def close(self) -> None:
        """End all streams, so that the listener need not wait for their clients."""
        self._expiry.cancel()
        for stream in self._streams:
            stream.close()

    async def BatchCommands(
        self, requests: Any, _: Any
    ) -> AsyncIterator[tikvpb.BatchCommandsResponse]:
        """One client's stream, see `BatchStream`."""
        stream = BatchStream(self._runner, self._waits, self._others)
        self._streams[stream] = None
        # Not a child of this handler: gRPC cancels that when the client leaves, and answers under
        # way still have to be counted.
        receiving = self._tasks.create_task(stream.receive(requests), name="batch-commands")
        try:
            async for response in stream.responses():
                yield response
        finally:
            self._streams.pop(stream, None)
            receiving.cancel()

    async def KvPessimisticLock(
        self, request: kvrpcpb.PessimisticLockRequest, _: Any
    ) -> kvrpcpb.PessimisticLockResponse:
        """Take pessimistic locks, see `lock_wait`; not a batch function,
        because one call's wait is not another's.
        """
        return await self._waits.lock(request)


class _Part(NamedTuple):
    """The reads, or the writes, of one message."""

    ids: list[int]
    calls: list[Call]


class BatchStream:
    """One client's stream; its messages are worked on concurrently, at most 64 parts of them."""

    def __init__(self, runner: Runner, waits: LockWaits, others: Others) -> None:
        self._runner = runner
        self._waits = waits
        self._others = others
        # taken by a part, given back when its answer is sent
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._refused_before = False
        self._ready: asyncio.Queue[tikvpb.BatchCommandsResponse | TidemarkError | None] = (
            asyncio.Queue()
        )

    def close(self) -> None:
        """End the stream: answers that are not queued yet are lost, as in a crash."""
        self._ready.put_nowait(None)

    async def responses(self) -> AsyncIterator[tikvpb.BatchCommandsResponse]:
        """The answers to the requests that `receive` takes, until these end."""
        while (response := await self._ready.get()) is not None:
            if isinstance(response, TidemarkError):
                raise response
            self._slots.release()
            yield response

    async def receive(self, requests: AsyncIterator[tikvpb.BatchCommandsRequest]) -> None:
        """Work on all requests of the stream; ends when they do, and never fails."""
        end: TidemarkError | None = None
        try:
            async with asyncio.TaskGroup() as answering:
                async for request in requests:
                    await self._start(answering, request)
        except* TidemarkError as group:
            end = _first(group)
        except* (grpc.aio.BaseError, grpc.aio.UsageError):
            end = None  # the client is gone
        except* Exception as group:  # noqa: BLE001 - nobody expected it: it is logged and ends this alone
            end = request_error(group, "BatchCommands")
        # Last, behind all answers: the stream ends when they are sent.
        self._ready.put_nowait(end)

    async def _start(
        self, answering: asyncio.TaskGroup, request: tikvpb.BatchCommandsRequest
    ) -> None:
        if len(request.request_ids) != len(request.requests):
            raise StatusError(
                grpc.StatusCode.INVALID_ARGUMENT, "a batch needs one request id for each request"
            )
        reads, writes = _Part([], []), _Part([], [])
        for request_id, item in zip(request.request_ids, request.requests, strict=True):
            field = item.WhichOneof("cmd") or ""
            method = BY_STREAM_FIELD.get(field)
            if method is None:
                # Taken here, in the loop that reads the stream: a client that sends faster than the
                # store works is held up by its own window.
                await self._slots.acquire()
                answering.create_task(self._answer_other(request_id, field, item))
                continue
            part = reads if method.read else writes
            part.ids.append(request_id)
            part.calls.append(Call(method, getattr(item, field)))
        # All reads of a message against one snapshot, all writes in one group: that is what the
        # client batched them for.
        for part, run in ((reads, self._runner.read), (writes, self._runner.write)):
            if part.ids:
                await self._slots.acquire()
                answering.create_task(self._answer(answering, part, run))

    async def _answer(
        self,
        answering: asyncio.TaskGroup,
        part: _Part,
        run: Callable[[list[Call]], Awaitable[list[Any]]],
    ) -> None:
        """All answers of a part in one message, but for lock requests that have to wait."""
        response = tikvpb.BatchCommandsResponse()
        for request_id, call, answered in zip(
            part.ids, part.calls, await run(part.calls), strict=True
        ):
            field, answer = call.method.stream_field, answered
            # A status would end the stream, and the commands of everybody who shares it.
            if isinstance(answer, CorruptError | DefectError):
                answer = call.method.response(region_error=errorpb.Error(message=str(answer)))
            settled = (
                self._waits.enlist(call.request, answer) if field == "PessimisticLock" else answer
            )
            if isinstance(settled, Wait):
                answering.create_task(self._answer_after_wait(request_id, settled))
                continue
            response.request_ids.append(request_id)
            getattr(response.responses.add(), field).CopyFrom(settled)
        if response.request_ids:
            self._ready.put_nowait(response)
        else:
            self._slots.release()

    async def _answer_after_wait(self, request_id: int, wait: Wait) -> None:
        """Takes a slot only for the answer: the commit that frees the lock may come on this same
        stream.
        """
        response = tikvpb.BatchCommandsResponse(request_ids=[request_id])
        response.responses.add().PessimisticLock.CopyFrom(await self._waits.wait_for_locks(wait))
        await self._slots.acquire()
        self._ready.put_nowait(response)

    async def _answer_other(
        self, request_id: int, field: str, item: tikvpb.BatchCommandsRequest.Request
    ) -> None:
        response = tikvpb.BatchCommandsResponse(request_ids=[request_id])
        answer = response.responses.add()
        if field == "Empty":
            answer.Empty.test_id = item.Empty.test_id
        elif field in self._others:
            getattr(answer, field).CopyFrom(await self._others[field](getattr(item, field), None))
        else:
            unknown = UnknownFieldSet(item)
            self._refuse(answer, [unknown[index].field_number for index in range(len(unknown))])
        self._ready.put_nowait(response)

    def _refuse(self, answer: tikvpb.BatchCommandsResponse.Response, numbers: list[int]) -> None:
        """Name the unsupported command in its own response;
        the fields of one we never heard of stay empty, as TiKV's.

        Ending the stream instead would fail all requests that share it.
        """
        number = next((number for number in numbers if number in _ERROR_TEXT_OF_UNSUPPORTED), 0)
        name, path = _ERROR_TEXT_OF_UNSUPPORTED.get(
            number, (f"command of field {numbers[:1] or 'none'}", ())
        )
        if not self._refused_before:
            self._refused_before = True
            _log.warning("a client sends BatchCommands that this store does not have", command=name)
        if path:
            text = (
                f"[TM:ErrCommandUnsupported] this store has no {name}; see "
                "docs/design/0013-transactions.md"
            )
            answer.MergeFromString(_nested((number, *path), text.encode()))


def _nested(path: tuple[int, ...], value: bytes) -> bytes:
    """A protobuf message with one field, in which there is one field, and so on;
    the innermost one is `value`.
    """
    for number in reversed(path):
        value = encode_uvarint(number << 3 | _LENGTH_DELIMITED) + encode_uvarint(len(value)) + value
    return value


def _first(group: BaseExceptionGroup[TidemarkError]) -> TidemarkError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def expire(runner: Runner) -> None:
    """Look every minute until cancelled."""
    while True:
        try:
            while await _expire_some(runner) == _EXPIRED_AT_ONCE:
                """There may be more."""
        except StoreBusyError:
            _log.info("raw pairs are not expired now, the store is busy")
        except CorruptError as err:
            _log.error("raw pairs are not expired", error=err.message)
        await asyncio.sleep(_EXPIRE_EVERY_S)


async def _expire_some(runner: Runner) -> int:
    keys = await runner.look(lambda reader: raw.expired(reader, now_s(), _EXPIRED_AT_ONCE))
    if keys:
        await runner.run(partial(raw.sweep, keys=keys, now_s=now_s()))
    return len(keys)
