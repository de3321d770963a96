"""Runs batches of requests: reads together against one snapshot in a reader thread, writes together
in one group. Requests that are invalid whatever the state of their keys are refused first.

Limits are TiKV's: `storage.max-key-size` (of the encoded key) and `raftstore.raft-entry-max-size`.

A timestamp that the oracle cannot have given out yet is refused: a read at a timestamp of next year
would raise every commit_ts that the store computes later to next year, too (see
`storage.mvcc.read_fence`). So a timestamp may be at most a minute ahead of the last one that the
store knows of the oracle; before it refuses a request, the store asks the oracle. Smaller
timestamps need no coordinator, so old snapshots stay readable without one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from kvproto import errorpb_pb2 as errorpb

from server.rpc.front import Answer, BatchHandler
from server.store.methods import Method
from server.store.region_table import RegionGate
from storage.defect import DefectError, request_error
from storage.kv import KV, Reader
from storage.model.errors import CorruptError, InvalidError, TidemarkError
from storage.model.ts import MAX_TS, compose
from storage.mvcc.engine import Command, Unfinished
from storage.mvcc.errors import MvccError
from storage.mvcc.group_commit import GroupCommit, StoreBusyError
from storage.mvcc.region import Region

T = TypeVar("T")
MAX_KEY_BYTES = 8 << 10
MAX_ENTRY_BYTES = 8 << 20
_GROUP, _ENCODED_GROUP = 8, 9
_AHEAD = compose(60_000)


class BadRequestError(InvalidError):
    """The bytes of a request are not its message."""

    code = "ErrBadRequest"


class KeyTooLargeError(MvccError, InvalidError):
    """A key is longer than the store takes."""

    code = "ErrKeyTooLarge"

    def __init__(self, size: int) -> None:
        super().__init__(
            f"a key of {size} encoded bytes is over the limit of {MAX_KEY_BYTES}; shorten it"
        )


class KeyEmptyError(MvccError, InvalidError):
    """A key has no bytes."""

    code = "ErrKeyEmpty"

    def __init__(self) -> None:
        super().__init__(
            "an empty key cannot be written; it stands for the end of the key space in ranges"
        )


class TimestampAheadError(MvccError, InvalidError):
    """A request's timestamp is of the future."""

    code = "ErrTimestampAhead"

    def __init__(self, ts: int, now_ts: int) -> None:
        super().__init__(
            f"timestamp {ts} is more than a minute ahead of the oracle's {now_ts}; take it from "
            "the TSO"
        )


def key_fault(keys: Sequence[bytes], *, raw: bool) -> MvccError | None:
    """Why these keys cannot be written, or None."""
    if not keys:
        return None
    if not all(keys):
        return KeyEmptyError()
    longest = max(map(len, keys))
    size = longest if raw else (longest // _GROUP + 1) * _ENCODED_GROUP
    return KeyTooLargeError(size) if size > MAX_KEY_BYTES else None


def entry_fault(size: int, region_id: int) -> errorpb.Error | None:
    """The error of a write of `size` bytes, or None."""
    if size <= MAX_ENTRY_BYTES:
        return None
    too_large = errorpb.RaftEntryTooLarge(region_id=region_id, entry_size=size)
    return errorpb.Error(
        message=(
            f"a write of {size} bytes is over the limit of {MAX_ENTRY_BYTES}; split the "
            "transaction's request"
        ),
        raft_entry_too_large=too_large,
    )


class TimestampCheck:
    """Refuses timestamps too far ahead of the oracle."""

    def __init__(self, clock: Callable[[], Awaitable[int]], now_ts: int) -> None:
        """`clock` is the oracle; `now_ts` one of its timestamps."""
        self._clock = clock
        self._now_ts = now_ts
        self._asking = asyncio.Lock()

    async def reach(self, ts: int) -> None:
        """Read the oracle's time if `ts` is above the last one read; `fault` compares with it then.

        Raises:
            UnavailableError: no coordinator answers.
        """
        if self.fault(ts) is None:
            return
        async with self._asking:
            if self.fault(ts) is not None:
                self._now_ts = max(self._now_ts, await self._clock())

    def fault(self, ts: int) -> TimestampAheadError | None:
        """Why `ts` is not taken, or None; MAX_TS stands for "the newest" and is no time."""
        return (
            TimestampAheadError(ts, self._now_ts) if self._now_ts + _AHEAD < ts < MAX_TS else None
        )


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
        # Checked first: a timestamp of the future must not reach the fence.
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
            # A command over a range gives way every 1024 keys, so that other writes get their turn.
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
        # The fence first, the snapshot afterwards: a commit that is computed in between lands above
        # these reads.
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
        # Checked in the reader thread, after the snapshot was taken: the region may have changed
        # since the call was queued.
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
