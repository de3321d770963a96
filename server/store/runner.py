"""Runs batches of requests: reads together against one snapshot in a reader thread,
writes together in one group.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from kvproto import errorpb_pb2 as errorpb

from server.rpc.front import Answer, BatchHandler
from server.store.methods import Method
from server.store.region_table import RegionGate
from server.store.request_check import TimestampCheck, entry_fault, key_fault
from storage.defect import DefectError, request_error
from storage.kv import KV, Reader
from storage.model.errors import CorruptError, InvalidError, TidemarkError
from storage.mvcc.engine import Command, Unfinished
from storage.mvcc.errors import MvccError
from storage.mvcc.group_commit import GroupCommit, StoreBusyError
from storage.mvcc.region import Region

T = TypeVar("T")


class BadRequestError(InvalidError):
    """The bytes of a request are not its message."""

    code = "ErrBadRequest"


class Call(NamedTuple):
    """One request of one method."""

    method: Method
    request: Any


class Runner:
    """Answers calls of `server.store.methods`."""

    def __init__(
        self,
        kv: KV,
        gate: RegionGate,
        group: GroupCommit,
        readers: Executor,
        timestamps: TimestampCheck | None = None,
    ) -> None:
        """Without `timestamps` the requests' timestamps are not checked."""
        self._kv = kv
        self._gate = gate
        self._group = group
        self._readers = readers
        self._timestamps = timestamps

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
                    answers[place] = BadRequestError(
                        f"this is no {method.request.DESCRIPTOR.full_name}: {err}"
                    )
            responses = await (self.read(calls) if method.read else self.write(calls))
            for place, response in zip(places, responses, strict=True):
                answers[place] = (
                    response
                    if isinstance(response, TidemarkError)
                    else response.SerializeToString()
                )
            return answers

        return handle

    async def read(self, calls: Sequence[Call]) -> list[Any]:
        """Responses to read calls, aligned; a CorruptError or DefectError for one that met damage
        or a defect.
        """
        if not calls:
            return []
        ahead = await self._ahead(calls)
        good = [call for place, call in enumerate(calls) if place not in ahead]
        answers = await asyncio.get_running_loop().run_in_executor(
            self._readers, self._read_all, good
        )
        return _filled(calls, ahead, answers)

    async def write(self, calls: Sequence[Call]) -> list[Any]:
        """Responses to write calls, aligned; what they say is durable.

        CorruptError and DefectError as in `read`.
        """
        refused = await self._ahead(calls)
        commands: list[Command] = []
        size = 0
        for place, call in enumerate(calls):
            if place in refused:
                continue
            bytes_ = call.request.ByteSize()
            admitted = self._checked(call, bytes_)
            if isinstance(admitted, Region):
                assert call.method.command is not None
                commands.append(call.method.command(call.request, admitted))
                size += bytes_
            else:
                refused[place] = admitted
        good = [call for place, call in enumerate(calls) if place not in refused]
        return _filled(calls, refused, await self._submit(good, commands, size) if commands else [])

    async def look(self, function: Callable[[Reader], T]) -> T:
        """Run a function of ours on a snapshot, in a reader thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._look, function)

    async def run(self, command: Command) -> Any:
        """Run one command to its end; durable when it returns.

        Raises:
            StoreBusyError, StoreStoppedError: see `GroupCommit.submit`.
            CorruptError: the command met damage.
        """
        (result,) = await self._group.submit([command])
        while isinstance(result, Unfinished):
            (result,) = await self._group.submit([result.rest])
        if isinstance(result, CorruptError | DefectError):
            raise result
        return result

    async def _submit(
        self, calls: Sequence[Call], commands: Sequence[Command], size: int
    ) -> list[Any]:
        try:
            results = [
                await self._rest(result.rest) if isinstance(result, Unfinished) else result
                for result in await self._group.submit(commands, size)
            ]
        except StoreBusyError as err:
            busy = errorpb.Error(
                message=str(err), server_is_busy=errorpb.ServerIsBusy(reason=err.message)
            )
            return [call.method.response(region_error=busy) for call in calls]
        return [
            result
            if isinstance(result, CorruptError | DefectError)
            else call.method.respond(result, call.request)
            for call, result in zip(calls, results, strict=True)
        ]

    async def _rest(self, command: Command) -> Any:
        try:
            return await self.run(command)
        except (CorruptError, DefectError) as err:
            return err

    async def _ahead(self, calls: Sequence[Call]) -> dict[int, Any]:
        """The answers to calls that name timestamps of the future, by place."""
        if self._timestamps is None:
            return {}
        newest = [call.method.ahead(call.request) for call in calls]
        faults = [
            place for place, ts in enumerate(newest) if self._timestamps.fault(ts) is not None
        ]
        for place in faults:
            await self._timestamps.reach(newest[place])
        return {
            place: calls[place].method.respond(fault, calls[place].request)
            for place in faults
            if (fault := self._timestamps.fault(newest[place])) is not None
        }

    def _checked(self, call: Call, size: int) -> Region | Any:
        """The region of a write, or the answer that refuses it."""
        method, request = call
        keys = method.keys(request)
        region = self._gate.admit(request.context, keys, raw=method.raw)
        if not isinstance(region, Region):
            return method.response(region_error=region)
        too_large = entry_fault(size, region.region_id)
        if too_large is not None:
            return method.response(region_error=too_large)
        fault = key_fault(keys, raw=method.raw) if method.adds_keys else None
        fault = fault or (method.fault(request) if method.fault else None)
        return region if fault is None else method.respond(fault, request)

    def _read_all(self, calls: Sequence[Call]) -> list[Any]:
        self._group.fence.enter(
            call.method.touch(call.request) for call in calls if call.method.touch
        )
        snapshot = self._kv.snapshot()
        try:
            return [self._read_one(snapshot, call) for call in calls]
        finally:
            snapshot.close()

    def _look(self, function: Callable[[Reader], T]) -> T:
        snapshot = self._kv.snapshot()
        try:
            return function(snapshot)
        finally:
            snapshot.close()

    def _read_one(self, snapshot: Any, call: Call) -> Any:
        method, request = call
        region = self._gate.admit(request.context, method.keys(request), raw=method.raw)
        if not isinstance(region, Region):
            return method.response(region_error=region)
        assert method.read is not None
        try:
            return method.read(snapshot, request, region)
        except MvccError as err:
            return method.refuse(err)
        except CorruptError as err:  # of this read alone: its neighbours in the batch are answered
            return err
        except TidemarkError:
            raise  # the disk failed, not the call
        except Exception as err:  # noqa: BLE001 - it ends this call; its neighbours in the batch go on
            return request_error(err, method.name)


def _filled(calls: Sequence[Call], refused: dict[int, Any], answers: Sequence[Any]) -> list[Any]:
    """The answers to all calls, in their order, from those refused by place and those to the
    rest.
    """
    if not refused:
        return list(answers)
    rest = iter(answers)
    return [refused[place] if place in refused else next(rest) for place in range(len(calls))]
