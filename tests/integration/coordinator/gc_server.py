"""Servers of PD's GC calls: how they are asked, ours on a real socket,
and whether an answer is the expected one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
from kvproto import pdpb_pb2, pdpb_pb2_grpc

from gcsafepoint.state.compat import Compat
from gcsafepoint.state.records import GcKeys
from gcsafepoint.state.service import GcStateManager
from server.coordinator.gc_service import GcService
from server.coordinator.header import Headers
from server.coordinator.leadership.leadership import Leadership
from server.rpc.server import RpcServer
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from tests.integration.coordinator.gc_cases import Answer, Call, Refused, Status, Wait

CLUSTER_ID = 7


class Asked:
    """A server of PD's GC calls."""

    def __init__(
        self, channel: grpc.aio.Channel, cluster_id: int, clock: list[float] | None
    ) -> None:
        self.channel = channel
        self.stub = pdpb_pb2_grpc.PDStub(channel)
        self.cluster_id = cluster_id
        self.clock = clock
        """Seconds ahead of the real clock; None: the server has its own."""

    async def take(self, step: Call | Wait) -> None:
        if isinstance(step, Call):
            assert not isinstance(answer := await self.ask(step), Status), answer
        elif self.clock is not None:
            self.clock[0] += step.seconds
        else:
            await asyncio.sleep(step.seconds)

    async def ask(self, call: Call, cluster_id: int | None = None) -> Any:
        """The answering message, or the Status."""
        header = pdpb_pb2.RequestHeader(
            cluster_id=self.cluster_id if cluster_id is None else cluster_id
        )
        request = getattr(pdpb_pb2, f"{call.method}Request")(header=header, **call.fields)
        try:
            answer = getattr(self.stub, call.method)(request)
            return (
                [message async for message in answer] if hasattr(answer, "read") else await answer
            )
        except grpc.aio.AioRpcError as err:
            return Status(err.code().name, err.details() or "")

    async def raw(self, method: str, request: bytes) -> Status:
        """What becomes of bytes that are no good."""
        try:
            await self.channel.unary_unary(f"/pdpb.PD/{method}")(request)
        except grpc.aio.AioRpcError as err:
            return Status(err.code().name, err.details() or "")
        return Status("OK", "")


@asynccontextmanager
async def ours(
    directory: Path, compat: Compat, *, bootstrapped: bool = True
) -> AsyncIterator[Asked]:
    """Our services on a real socket, over embedded metadata."""
    ahead = [0.0]
    async with EmbeddedEtcd.open(directory) as etcd:
        safe_points = GcStateManager(
            EtcdMeta(etcd), GcKeys(b"/pd/7/gc/"), lambda: time.time() + ahead[0], compat=compat
        )
        await safe_points.load()
        gc = GcService(Headers(CLUSTER_ID, lambda: bootstrapped, Leadership()), safe_points)
        server = RpcServer()
        server.add_service(
            pdpb_pb2.DESCRIPTOR.services_by_name["PD"], SimpleNamespace(**gc.calls()), gc.batches()
        )
        async with (
            server.listen("127.0.0.1:0") as bound,
            grpc.aio.insecure_channel(bound) as channel,
        ):
            yield Asked(channel, CLUSTER_ID, ahead)


def assert_answer(found: Any, expected: Answer) -> None:
    if isinstance(expected, Status):
        assert found == expected
        return
    assert not isinstance(found, Status), found
    error = found.header.error
    if isinstance(expected, Refused):
        assert (error.message, pdpb_pb2.ErrorType.Name(error.type)) == (
            expected.text,
            expected.type,
        )
        return
    assert not found.header.HasField("error"), error
    assert found.header.cluster_id
    assert_fields(found, expected, set(expected) | {"header"})


def assert_fields(message: Any, expected: Mapping[str, Any], may_be_set: set[str]) -> None:
    assert {field.name for field, _ in message.ListFields()} <= may_be_set, message
    for name, wanted in expected.items():
        found = getattr(message, name)
        if callable(wanted):
            assert wanted(found), (name, found)
        elif isinstance(wanted, Mapping):
            assert_fields(found, wanted, set(wanted))
        elif isinstance(wanted, list):
            pairs = list(zip(sorted(found, key=str), sorted(wanted, key=str), strict=True))
            for one, fields in pairs:
                assert_fields(one, fields, set(fields))
        else:
            assert found == wanted, (name, found)
