"""A listener's bounds over real sockets: whoever exceeds one is told so or cut off,
and the others go on.
"""

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb
from kvproto.tikvpb_pb2_grpc import TikvStub

from server.rpc.client import connect
from server.rpc.config import Limits
from server.rpc.server import RpcServer
from tests.unit.server.rpc.http2.wire import Client

pytestmark = pytest.mark.usefixtures("engine")

TIKV = tikvpb.DESCRIPTOR.services_by_name["Tikv"]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
CALL = Client(ready=False).call(1, b"")
"""Of RawGet, on a connection that has had none."""


class Servicer:
    """Answers when `leave` is set."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self.inside = 0

    async def RawGet(self, request: kvrpcpb.RawGetRequest, _: Any) -> kvrpcpb.RawGetResponse:
        self.inside += 1
        await self.leave.wait()
        return kvrpcpb.RawGetResponse(value=request.key)


@asynccontextmanager
async def serving(limits: Limits) -> AsyncIterator[tuple[Servicer, str]]:
    servicer = Servicer()
    server = RpcServer(limits=limits)
    server.add_service(TIKV, servicer)
    async with server.listen("127.0.0.1:0") as bound:
        yield servicer, bound


async def outcome(stub: Any, key: bytes = b"k") -> str:
    try:
        answer: kvrpcpb.RawGetResponse = await stub.RawGet(
            kvrpcpb.RawGetRequest(key=key), timeout=60
        )
    except grpc.aio.AioRpcError as err:
        return err.code().name
    return "answered" if answer.value == key else "wrong"


async def test_calls_beyond_the_bound_are_refused_and_those_within_are_answered() -> None:
    async with serving(Limits(calls=10)) as (servicer, bound), connect(bound) as channel:
        stub = TikvStub(channel)
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(outcome(stub)) for _ in range(20)]
            for _, refused in zip(range(10), asyncio.as_completed(calls), strict=False):
                assert await refused == "RESOURCE_EXHAUSTED"
            servicer.leave.set()
        assert Counter(call.result() for call in calls) == {
            "answered": 10,
            "RESOURCE_EXHAUSTED": 10,
        }
        assert await outcome(stub) == "answered"


async def test_a_burst_within_the_bound_is_answered_to_the_last_call() -> None:
    async with serving(Limits()) as (servicer, bound), connect(bound) as channel:
        servicer.leave.set()
        assert (
            await outcome(TikvStub(channel)) == "answered"
        )  # connected: the burst itself keeps this loop busy
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(outcome(TikvStub(channel))) for _ in range(1500)]
        assert {call.result() for call in calls} == {"answered"}


async def test_a_message_beyond_the_bound_is_refused() -> None:
    async with serving(Limits(message_bytes=1000)) as (servicer, bound), connect(bound) as channel:
        servicer.leave.set()
        assert await outcome(TikvStub(channel), bytes(2000)) == "RESOURCE_EXHAUSTED"
        assert await outcome(TikvStub(channel), bytes(900)) == "answered"


async def test_connections_beyond_the_bound_are_closed() -> None:
    async with serving(Limits(connections=2)) as (servicer, bound):
        host, _, port = bound.rpartition(":")
        opened = [await handshake(host, int(port)) for _ in range(2)]
        for _, used in opened:
            used.write(CALL)
        async with asyncio.timeout(60):
            while servicer.inside < 2:  # noqa: ASYNC110 - handlers tell nobody else
                await asyncio.sleep(0.01)
        refused, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(60):
            assert await closed(refused)
        servicer.leave.set()
        for one in (*(writer for _, writer in opened), writer):
            one.close()


async def test_whoever_floods_with_pings_is_cut_off() -> None:
    async with serving(Limits()) as (servicer, bound), connect(bound) as channel:
        host, _, port = bound.rpartition(":")
        reader, writer = await handshake(host, int(port))
        writer.write(frame(PING, bytes(8)) * 100)
        async with asyncio.timeout(60):
            while (await read_frame(reader))[0] != GOAWAY:
                pass
        writer.close()
        servicer.leave.set()
        assert await outcome(TikvStub(channel)) == "answered"


def test_the_bounds_leave_files_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.rpc.config._open_files", lambda: 1024)
    assert dict(Limits().options())["grpc.max_allowed_incoming_connections"] == 512


async def handshake(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(PREFACE + frame(SETTINGS, b""))
    async with asyncio.timeout(60):
        while (await read_frame(reader))[0] != SETTINGS:
            pass
    return reader, writer


def frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, 0, 0) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    header = await reader.readexactly(9)
    return header[3], await reader.readexactly(int.from_bytes(header[:3]))


async def closed(reader: asyncio.StreamReader) -> bool:
    try:
        while await reader.read(1000):
            pass
    except ConnectionResetError:
        pass
    return True
