"""The BatchCommands stream: requests of all kinds in one message, answered in any order as soon as they are known."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import grpc.aio
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from server.rpc.errors import StatusError
from server.store.lock_wait import lock_or_wait
from server.store.methods import BY_STREAM_FIELD
from server.store.runner import Call, Runner
from storage.model.errors import TidemarkError

_MAX_IN_FLIGHT = 64
_MAX_LOCK_WAITS = 1024

Others = Mapping[str, Callable[[Any, Any], Awaitable[Any]]]
"""Stream field -> coroutine, for requests that are not in the batched methods."""


class _Part(NamedTuple):
    """The reads, or the writes, of one message."""

    ids: list[int]
    fields: list[str]
    calls: list[Call]


class BatchStream:
    """One client's stream; its messages are worked on concurrently, at most 64 parts of them."""

    def __init__(self, runner: Runner, others: Others) -> None:
        self._runner = runner
        self._others = others
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)  # taken by a part, given back when its answer is sent
        self._waits = asyncio.Semaphore(_MAX_LOCK_WAITS)  # beyond it, lock requests are answered without a wait
        self._ready: asyncio.Queue[tikvpb.BatchCommandsResponse | TidemarkError | None] = asyncio.Queue()

    def close(self) -> None:
        """End the stream: answers that are not queued yet are lost, as in a crash."""
        self._ready.put_nowait(None)

    async def responses(self) -> AsyncIterator[tikvpb.BatchCommandsResponse]:
        """What `receive` found out, until its requests end."""
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
        self._ready.put_nowait(end)

    async def _start(self, answering: asyncio.TaskGroup, request: tikvpb.BatchCommandsRequest) -> None:
        if len(request.request_ids) != len(request.requests):
            raise StatusError(grpc.StatusCode.INVALID_ARGUMENT, "a batch needs one request id for each request")
        reads, writes = _Part([], [], []), _Part([], [], [])
        for request_id, item in zip(request.request_ids, request.requests, strict=True):
            field = item.WhichOneof("cmd") or ""
            method = BY_STREAM_FIELD.get(field)
            if field == "PessimisticLock" and item.PessimisticLock.wait_timeout > 0 and not self._waits.locked():
                await self._waits.acquire()
                answering.create_task(self._wait_for_lock(request_id, item.PessimisticLock))
                continue
            if method is None:
                await self._slots.acquire()
                answering.create_task(self._answer_other(request_id, field, item))
                continue
            part = reads if method.read else writes
            part.ids.append(request_id)
            part.fields.append(method.stream_field)
            part.calls.append(Call(method, getattr(item, method.stream_field)))
        for part, run in ((reads, self._runner.read), (writes, self._runner.write)):
            if part.ids:
                await self._slots.acquire()
                answering.create_task(self._answer(part, run))

    async def _answer(self, part: _Part, run: Callable[[list[Call]], Awaitable[list[Any]]]) -> None:
        response = tikvpb.BatchCommandsResponse(request_ids=part.ids)
        for field, answer in zip(part.fields, await run(part.calls), strict=True):
            getattr(response.responses.add(), field).CopyFrom(answer)
        self._ready.put_nowait(response)

    async def _wait_for_lock(self, request_id: int, request: kvrpcpb.PessimisticLockRequest) -> None:
        """Takes its slot only for the answer: the commit that frees the lock may come on this same stream."""
        response = tikvpb.BatchCommandsResponse(request_ids=[request_id])
        try:
            response.responses.add().PessimisticLock.CopyFrom(await lock_or_wait(self._runner, request))
        finally:
            self._waits.release()
        await self._slots.acquire()
        self._ready.put_nowait(response)

    async def _answer_other(self, request_id: int, field: str, item: tikvpb.BatchCommandsRequest.Request) -> None:
        response = tikvpb.BatchCommandsResponse(request_ids=[request_id])
        if field == "Empty":
            response.responses.add().Empty.test_id = item.Empty.test_id
        elif field in self._others:
            answer = await self._others[field](getattr(item, field), None)
            getattr(response.responses.add(), field).CopyFrom(answer)
        else:
            raise StatusError(grpc.StatusCode.UNIMPLEMENTED, f"batched request {field or 'unknown'} is not served")
        self._ready.put_nowait(response)


def _first(group: BaseExceptionGroup[TidemarkError]) -> TidemarkError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
