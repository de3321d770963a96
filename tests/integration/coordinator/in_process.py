"""A coordinator in the test's own process, and PD's calls to it as a client without manners makes
them.
"""

from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from kvproto import metapb_pb2, pdpb_pb2, pdpb_pb2_grpc

from server.coordinator.daemon import CoordinatorConfig, open_coordinator
from server.rpc.credentials import SecurityConfig

METHODS: list[MethodDescriptor] = list(pdpb_pb2.DESCRIPTOR.services_by_name["PD"].methods)
Refusal = tuple[str, str]


class Pd:
    """A coordinator's PD service."""

    def __init__(self, channel: grpc.aio.Channel, cluster_id: int) -> None:
        self.channel = channel
        self.stub: Any = pdpb_pb2_grpc.PDStub(channel)
        self.cluster_id = cluster_id
        self.header = pdpb_pb2.RequestHeader(cluster_id=cluster_id)

    async def ask(self, method: str, **fields: Any) -> Any:
        """The answer to the method's request with a good header and these fields."""
        call = getattr(self.stub, method)
        return await call(request_of(method)(header=self.header, **fields), timeout=60)

    async def bootstrap(self) -> None:
        """Store 1 and the region that covers everything."""
        answer = await self.ask("Bootstrap", store=store(), region=region())
        assert not answer.header.HasField("error"), answer

    async def stream(self, method: str, requests: Iterable[Any]) -> list[Any]:
        """All answers to a stream of requests."""
        return [answer async for answer in getattr(self.stub, method)(iter(requests), timeout=60)]

    async def heartbeat(
        self, *regions: metapb_pb2.Region, leader: metapb_pb2.Peer | None = None
    ) -> list[Any]:
        """What is refused of the reports of regions,
        that lead with their first peers unless told otherwise.
        """
        requests = [
            pdpb_pb2.RegionHeartbeatRequest(
                header=self.header, region=one, leader=leader or next(iter(one.peers), None)
            )
            for one in regions
        ]
        return await self.stream("RegionHeartbeat", requests)

    async def raw(self, method: MethodDescriptor, message: bytes) -> Refusal:
        """How a call with these bytes ends; a stream's first answer counts."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        call = self.channel.stream_stream(path)(iter([message]), timeout=60)
        return await refusal(self._first(call))

    @staticmethod
    async def _first(call: Any) -> Any:
        async for answer in call:
            call.cancel()
            return pdpb_pb2.GetMembersResponse.FromString(
                answer
            )  # whose header is where all the headers are
        return pdpb_pb2.GetMembersResponse()


async def refusal(call: Awaitable[Any]) -> Refusal:
    """The status or the header's error and its text; `("OK", "")` of what is not refused."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as err:
        return err.code().name, err.details() or ""
    error = answer.header.error
    return pdpb_pb2.ErrorType.Name(error.type), error.message


@asynccontextmanager
async def coordinator(directory: Path, *, bootstrapped: bool = True) -> AsyncIterator[Pd]:
    """A new cluster for the block, or the one that `directory` holds."""
    config = CoordinatorConfig(addr="127.0.0.1:0", metadata=f"leveldb:{directory / 'meta'}")
    async with (
        open_coordinator(config, SecurityConfig()) as bound,
        grpc.aio.insecure_channel(bound["coordinator"]) as channel,
    ):
        members = await pdpb_pb2_grpc.PDStub(channel).GetMembers(pdpb_pb2.GetMembersRequest())
        pd = Pd(channel, members.header.cluster_id)
        if bootstrapped and not (await pd.ask("IsBootstrapped")).bootstrapped:
            await pd.bootstrap()
        yield pd


def request_of(method: str) -> type[Any]:
    """The class of a method's requests."""
    found = next(known for known in METHODS if known.name == method)
    return message_factory.GetMessageClass(found.input_type)


def store(store_id: int = 1, address: str = "127.0.0.1:20160", **fields: Any) -> metapb_pb2.Store:
    """A store that is as it should be."""
    return metapb_pb2.Store(**{"id": store_id, "address": address, "version": "8.5.0"} | fields)


def region(
    region_id: int = 2, start: bytes = b"", end: bytes = b"", version: int = 1
) -> metapb_pb2.Region:
    """A region with one peer, on store 1."""
    epoch = metapb_pb2.RegionEpoch(conf_ver=1, version=version)
    peers = [metapb_pb2.Peer(id=region_id + 100, store_id=1)]
    return metapb_pb2.Region(
        id=region_id, start_key=start, end_key=end, region_epoch=epoch, peers=peers
    )
