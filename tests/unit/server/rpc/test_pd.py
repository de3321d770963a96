"""The client of the coordinators against one that is overloaded."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from kvproto import pdpb_pb2

from server.rpc.errors import StatusError
from server.rpc.front import OverloadedError
from server.rpc.members import NoAddressError, addresses_of
from server.rpc.pd import PdClient, PdRefusedError
from server.rpc.server import RpcServer

pytestmark = pytest.mark.usefixtures("engine")

PD = pdpb_pb2.DESCRIPTOR.services_by_name["PD"]


class Coordinator:
    """Leads, and fails AllocID with what is in `failures` first."""

    def __init__(self, *failures: StatusError) -> None:
        self.failures = list(failures)
        self.member = pdpb_pb2.Member()

    async def GetMembers(self, _request: Any, _: Any) -> pdpb_pb2.GetMembersResponse:
        header = pdpb_pb2.ResponseHeader(cluster_id=7)
        return pdpb_pb2.GetMembersResponse(header=header, members=[self.member], leader=self.member)

    async def AllocID(self, _request: Any, _: Any) -> pdpb_pb2.AllocIDResponse:
        if self.failures:
            raise self.failures.pop(0)
        return pdpb_pb2.AllocIDResponse(header=pdpb_pb2.ResponseHeader(cluster_id=7), id=5)


@pytest.mark.parametrize("text", ["", " , ", "pd1", "pd1:2379,pd2", "http://pd1", ":2379"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(NoAddressError):
        addresses_of(text)
    assert addresses_of("http://pd1:2379/, pd2:2379") == ["http://pd1:2379", "pd2:2379"]


@asynccontextmanager
async def asking(coordinator: Coordinator) -> AsyncIterator[PdClient]:
    server = RpcServer()
    server.add_service(PD, coordinator)
    async with server.listen("127.0.0.1:0") as bound:
        coordinator.member.client_urls.append(f"http://{bound}")
        async with PdClient.open(bound) as pd:
            yield pd


async def test_a_call_to_an_overloaded_coordinator_is_repeated() -> None:
    gone = StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
    async with asking(
        Coordinator(OverloadedError("many are waiting; slow down and try again"), gone)
    ) as pd:
        assert await pd.alloc_id() == 5


async def test_a_message_that_is_too_large_is_not_sent_again() -> None:
    large = StatusError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (5 vs. 4)"
    )
    coordinator = Coordinator(large, large)
    async with asking(coordinator) as pd:
        with pytest.raises(PdRefusedError, match="larger than max"):
            await pd.alloc_id()
    assert coordinator.failures == [large]
