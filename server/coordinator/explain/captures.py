"""What the captures tell of their changefeeds, each asked by itself and given little time; silence is a finding."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import grpc.aio
from tidemarkpb.v1 import capture_pb2 as pb
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub

from gcsafepoint.explain.situation import Capture, Lock, Region, Table
from server.changefeed import keys
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from storage.meta.meta import KeyValue, Meta

ANSWER_SECONDS = 2.5
_ASKED_AT_ONCE = 16


@dataclass(slots=True)
class Told:
    """The captures, and by changefeed who runs it and how far its tables are."""

    captures: list[Capture] = field(default_factory=list)
    running: dict[str, tuple[str, tuple[Table, ...]]] = field(default_factory=dict)


async def ask_captures(meta: Meta, security: SecurityConfig) -> Told:
    """Ask every living capture; takes about `ANSWER_SECONDS` if one is silent, more only if many are."""
    owner = await meta.get(keys.OWNER)
    captures = _living(await meta.get_prefix(keys.CAPTURES), owner)
    at_once = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def ask(capture: Capture) -> tuple[Capture, pb.GetBlockersResponse]:
        async with at_once:
            return await _ask(capture, security)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(capture)) for capture in captures]
    told = Told()
    for capture, answer in (task.result() for task in asked):
        told.captures.append(capture)
        for changefeed in answer.changefeeds:
            tables = tuple(map(_table, changefeed.tables))
            told.running[changefeed.changefeed] = (f"{capture.id} at {capture.address}", tables)
    return told


def _living(pairs: Iterable[KeyValue], owner: KeyValue | None) -> list[Capture]:
    found: list[Capture] = []
    for pair in pairs:
        capture_id = pair.key.removeprefix(keys.CAPTURES).decode(errors="replace")
        is_owner = owner is not None and owner.value.decode(errors="replace") == capture_id
        try:
            fields: Mapping[str, object] = json.loads(pair.value)
            found.append(Capture(capture_id, str(fields["address"]), is_owner))
        except (ValueError, KeyError, TypeError):
            found.append(Capture(capture_id, "", is_owner, "its record in the metadata cannot be read"))
    return sorted(found, key=lambda capture: capture.is_owner)


async def _ask(capture: Capture, security: SecurityConfig) -> tuple[Capture, pb.GetBlockersResponse]:
    if capture.problem:
        return capture, pb.GetBlockersResponse()
    try:
        async with asyncio.timeout(ANSWER_SECONDS), connect(capture.address, security) as channel:
            return capture, await CaptureServiceStub(channel).GetBlockers(pb.GetBlockersRequest())
    except TimeoutError:
        problem = f"no answer within {ANSWER_SECONDS:g} s"
    except grpc.aio.AioRpcError as err:
        problem = f"{err.code().name}: {err.details()}"
    return replace(capture, problem=problem), pb.GetBlockersResponse()


def _table(message: pb.TableBlockers) -> Table:
    regions = tuple(map(_region, message.regions))
    return Table(message.name, message.checkpoint_ts, message.resolved_ts, regions)


def _region(message: pb.RegionBlockers) -> Region:
    locks = tuple(
        Lock(lock.start_ts, lock.primary.hex(), lock.key.hex(), lock.ttl_ms, lock.kind) for lock in message.locks
    )
    return Region(message.region_id, message.resolved_ts, message.store, locks, message.problem, message.pump)
