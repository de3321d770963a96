"""The BatchCommands stream: requests of all kinds in one message,
answered in any order as soon as they are known.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import grpc.aio
import structlog
from google.protobuf.unknown_fields import UnknownFieldSet
from kvproto import errorpb_pb2 as errorpb
from kvproto import tikvpb_pb2 as tikvpb

from server.rpc.errors import StatusError
from server.store.lock_wait import LockWaits, Wait
from server.store.methods import BY_STREAM_FIELD
from server.store.runner import Call, Runner
from storage.defect import DefectError, request_error
from storage.model.errors import CorruptError, TidemarkError
from storage.tidb.number import encode_uvarint

_MAX_IN_FLIGHT = 64
_LENGTH_DELIMITED = 2

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

_log = structlog.get_logger(__name__)

Others = Mapping[str, Callable[[Any, Any], Awaitable[Any]]]
"""Stream field -> coroutine, for requests that are not in the batched methods."""


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
            # a status would end the stream, and its other commands
            # A status would end the stream, and the commands of everybody who shares it.
            if isinstance(answer, CorruptError | DefectError):
                answer = call.method.response(region_error=errorpb.Error(message=str(answer)))
            settled = (
                self._waits.enlist(call.request, answer) if field == "PessimisticLock" else answer
            )
            if isinstance(settled, Wait):
                answering.create_task(self._outlast(request_id, settled))
                continue
            response.request_ids.append(request_id)
            getattr(response.responses.add(), field).CopyFrom(settled)
        if response.request_ids:
            self._ready.put_nowait(response)
        else:
            self._slots.release()

    async def _outlast(self, request_id: int, wait: Wait) -> None:
        """Takes a slot only for the answer: the commit that frees the lock may come on this same
        stream.
        """
        response = tikvpb.BatchCommandsResponse(request_ids=[request_id])
        response.responses.add().PessimisticLock.CopyFrom(await self._waits.outlast(wait))
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

        Ending the stream instead would fail the requests of everybody who shares it.
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
