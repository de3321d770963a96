"""Thousands of streams at once: each is answered, or refused with a status;
memory stays bounded and the daemon well.

CI opens 1,000; `TIDEMARK_TEST_STREAMS=10000` opens as many as the coordinator must stand, and shows
what they cost.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from kvproto import pdpb_pb2, pdpb_pb2_grpc

STREAMS = int(os.environ.get("TIDEMARK_TEST_STREAMS", "1000"))
STREAM_KIB = 64
PATIENCE_S = 120


def most_memory_kib(process_id: int) -> int:
    """The most the process ever had in memory."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


class Crowd:
    """Streams that all stay open until the last one has been settled."""

    def __init__(self, stub: Any, header: pdpb_pb2.RequestHeader, size: int) -> None:
        self._stub = stub
        self._request = pdpb_pb2.TsoRequest(header=header, count=1)
        self._missing = size
        self._settled = asyncio.Event()

    async def stream(self) -> str:
        try:
            async for answer in self._stub.Tso(self._requests(), timeout=PATIENCE_S):
                assert answer.timestamp.physical > 0
                self._count_down()
        except grpc.aio.AioRpcError as err:
            self._count_down()
            return err.code().name
        return "answered"

    async def _requests(self) -> AsyncIterator[pdpb_pb2.TsoRequest]:
        yield self._request
        await self._settled.wait()

    def _count_down(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._settled.set()


async def crowd(address: str, size: int) -> Counter[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pdpb_pb2_grpc.PDStub(channel)
        header = (await stub.GetMembers(pdpb_pb2.GetMembersRequest())).header
        streams = Crowd(stub, pdpb_pb2.RequestHeader(cluster_id=header.cluster_id), size)
        return Counter(await asyncio.gather(*(streams.stream() for _ in range(size))))


async def test_a_crowd_of_streams_is_answered_within_bounded_memory(
    start: Any, tmp_path: Path
) -> None:
    coordinator = start(f"leveldb:{tmp_path}")
    before = most_memory_kib(coordinator.process.pid)
    assert await crowd(coordinator.address, STREAMS) == {"answered": STREAMS}
    grown = most_memory_kib(coordinator.process.pid) - before
    print(f"{STREAMS} streams: {before >> 10} MiB before, {grown >> 10} MiB more at most")
    assert grown < STREAMS * STREAM_KIB
    assert coordinator.process.poll() is None
    assert await crowd(coordinator.address, 10) == {"answered": 10}
