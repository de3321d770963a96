"""Calls of WriteBinlog on their way into the value log, whose disk waits for the test."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from tipb import pump_pb2

from server.pump import metrics
from server.pump.registry import ONLINE, Node
from server.pump.service import Admission, WriteBinlogCalls
from server.pump.upkeep import DiskWatch
from server.rpc import front
from server.rpc.errors import StatusError
from server.rpc.front import Answer, OverloadedError
from storage.pump import write_pipeline
from tests.hooked_fs import HookedFS
from tests.memory_fs import MemFS
from tests.unit.storage.pump.storages import DIRECTORY, commit, opened, prewrite, rollback

CLUSTER_ID = 7
OK = pump_pb2.WriteBinlogResp().SerializeToString()


class Pump:
    def __init__(self) -> None:
        self.released = threading.Event()
        self.synced = 0
        self.fails = False

    def hook(self, call: str, path: Path) -> None:
        if call == "sync" and path.suffix == ".vlog":
            assert self.released.wait(60)
            self.synced += 1
            if self.fails:
                raise OSError("the disk is gone")


@asynccontextmanager
async def serving(pump: Pump) -> AsyncIterator[WriteBinlogCalls]:
    fs = MemFS()
    pump.released.set()
    async with opened(HookedFS(fs, pump.hook)) as storage:
        storage.observe_groups(metrics.count_group)
        disk = DiskWatch(fs, DIRECTORY, 0)
        admission = Admission(storage, CLUSTER_ID, Node("test", "", ONLINE), disk)
        pump.synced = 0
        pump.released.clear()
        try:
            yield WriteBinlogCalls(storage, admission)
        finally:
            pump.released.set()


def request(payload: bytes, cluster_id: int = CLUSTER_ID) -> bytes:
    return pump_pb2.WriteBinlogReq(clusterID=cluster_id, payload=payload).SerializeToString()


def put(calls: WriteBinlogCalls, request: bytes) -> "asyncio.Future[Answer]":
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    calls.put(request, future)
    return future


async def begun(pump: Pump) -> None:
    """Until the first group is on its way to the disk."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_calls_are_answered_when_their_group_is_durable_and_a_bad_one_alone_is_refused() -> (
    None
):
    pump = Pump()
    written, refused = metrics.WRITTEN._value.get(), metrics.REFUSED._value.get()
    async with serving(pump) as calls:
        first = put(calls, request(prewrite(1).payload))
        await begun(pump)
        others = [put(calls, request(rollback(ts).payload)) for ts in (1, 2, 3)]
        bad = {
            "failed to unmarshal": put(calls, b"\xff"),
            "not a binlog": put(calls, request(b"no binlog")),
            "cluster ID are mismatch, 8 vs 7": put(calls, request(commit(1, 2).payload, 8)),
        }
        assert not any(each.done() for each in (first, *others, *bad.values()))
        pump.released.set()
        for text, call in bad.items():
            answer = await call
            assert isinstance(answer, StatusError)
            assert text in answer.message
        assert await asyncio.gather(first, *others) == [OK] * 4
    assert pump.synced == 2
    assert metrics.WRITTEN._value.get() - written == 4
    assert metrics.REFUSED._value.get() - refused == 3


async def test_a_call_whose_client_has_gone_is_not_stored() -> None:
    pump = Pump()
    async with serving(pump) as calls:
        first = put(calls, request(prewrite(1).payload))
        await begun(pump)
        gone, stays = (put(calls, request(rollback(ts).payload)) for ts in (1, 2))
        gone.cancel()
        pump.released.set()
        assert await asyncio.gather(first, stays) == [OK, OK]
        assert calls._storage.written == 2


async def test_a_group_that_the_disk_refuses_is_unknown_to_its_callers() -> None:
    pump = Pump()
    async with serving(pump) as calls:
        pump.fails = True
        calls_made = [put(calls, request(prewrite(ts).payload)) for ts in (1, 2)]
        pump.released.set()
        for answer in await asyncio.gather(*calls_made):
            assert isinstance(answer, StatusError)
            assert answer.status is grpc.StatusCode.UNKNOWN
        pump.fails = False


@pytest.mark.parametrize("bound", ["calls", "bytes", "bytes of all writers"])
async def test_more_than_the_pump_will_hold_is_refused_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    pump = Pump()
    large = request(prewrite(2, b"x" * 1000).payload)
    async with serving(pump) as calls:
        first = put(calls, request(prewrite(1).payload))
        await begun(pump)
        if bound == "calls":
            monkeypatch.setattr(front, "MAX_WAITING", 1)
        elif bound == "bytes":
            monkeypatch.setattr(front, "MAX_WAITING_BYTES", 1500)
        else:
            monkeypatch.setattr(write_pipeline, "WAITING_BYTES_MAX", 1500)
        waits, refused = put(calls, large), put(calls, large)
        answer = refused.result()
        if bound == "bytes of all writers":
            assert isinstance(answer, StatusError)
            assert "bytes wait for the disk" in answer.message
        else:
            assert isinstance(answer, OverloadedError)
            assert answer.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        pump.released.set()
        assert await asyncio.gather(first, waits) == [OK, OK]


async def test_a_defect_ends_its_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = Pump()
    async with serving(pump) as calls:

        def admit(_payload: bytes) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(calls._admission, "admit", admit)
            pump.released.set()
            answer = await put(calls, request(prewrite(1).payload))
            assert "a defect" in str(answer)
        assert await put(calls, request(prewrite(1).payload)) == OK
