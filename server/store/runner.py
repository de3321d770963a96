"""Runs batches of requests: reads together against one snapshot in a reader thread, writes together in one group."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from kvproto import errorpb_pb2 as errorpb

from server.rpc.front import Answer, BatchHandler
from server.store.methods import Method
from server.store.region_check import RegionGate
from storage.kv import KV
from storage.model.errors import InvalidError
from storage.mvcc.engine import Command
from storage.mvcc.errors import MvccError
from storage.mvcc.group_commit import GroupCommit, StoreBusyError
from storage.mvcc.region import Region


class BadRequestError(InvalidError):
    """The bytes of a request are not its message."""

    code = "ErrBadRequest"


class Call(NamedTuple):
    """One request of one method."""

    method: Method
    request: Any


class Runner:
    """Answers calls of `server.store.methods`."""

    def __init__(self, kv: KV, gate: RegionGate, group: GroupCommit, readers: Executor) -> None:
        self._kv = kv
        self._gate = gate
        self._group = group
        self._readers = readers

    def watch_unlocked(self, on_unlocked: Callable[[Sequence[bytes]], None]) -> None:
        """See `GroupCommit.watch_unlocked`."""
        self._group.watch_unlocked(on_unlocked)

    def handler(self, method: Method) -> BatchHandler:
        """The batch function of one unary method."""

        async def handle(requests: Sequence[bytes]) -> Sequence[Answer]:
            answers: list[Answer] = [b""] * len(requests)
            calls: list[Call] = []
            places: list[int] = []
            for place, data in enumerate(requests):
                try:
                    calls.append(Call(method, method.request.FromString(data)))
                    places.append(place)
                except DecodeError as err:
                    answers[place] = BadRequestError(f"this is no {method.request.DESCRIPTOR.full_name}: {err}")
            responses = await (self.read(calls) if method.read else self.write(calls))
            for place, response in zip(places, responses, strict=True):
                answers[place] = response.SerializeToString()
            return answers

        return handle

    async def read(self, calls: Sequence[Call]) -> list[Any]:
        """Responses to read calls, aligned."""
        if not calls:
            return []
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read_all, calls)

    async def write(self, calls: Sequence[Call]) -> list[Any]:
        """Responses to write calls, aligned; what they say is durable."""
        responses: list[Any] = [None] * len(calls)
        places: list[int] = []
        commands: list[Command] = []
        size = 0
        for place, (method, request) in enumerate(calls):
            region = self._admit(method, request)
            if isinstance(region, Region):
                assert method.command is not None
                places.append(place)
                commands.append(method.command(request, region))
                size += request.ByteSize()
            else:
                responses[place] = method.response(region_error=region)
        if not commands:
            return responses
        try:
            results: Sequence[Any] = await self._group.submit(commands, size)
        except StoreBusyError as err:
            busy = errorpb.Error(message=str(err), server_is_busy=errorpb.ServerIsBusy(reason=err.message))
            for place in places:
                responses[place] = calls[place].method.response(region_error=busy)
            return responses
        for place, result in zip(places, results, strict=True):
            method, request = calls[place]
            responses[place] = method.respond(result, request)
        return responses

    def _read_all(self, calls: Sequence[Call]) -> list[Any]:
        self._group.fence.enter(call.method.touch(call.request) for call in calls if call.method.touch)
        snapshot = self._kv.snapshot()
        try:
            return [self._read_one(snapshot, call) for call in calls]
        finally:
            snapshot.close()

    def _read_one(self, snapshot: Any, call: Call) -> Any:
        method, request = call
        region = self._admit(method, request)
        if not isinstance(region, Region):
            return method.response(region_error=region)
        assert method.read is not None
        try:
            return method.read(snapshot, request, region)
        except MvccError as err:
            return method.refuse(err)

    def _admit(self, method: Method, request: Any) -> Region | errorpb.Error:
        return self._gate.admit(request.context, method.keys(request), raw=method.raw)
