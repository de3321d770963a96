"""The demo's changefeed: made once, asked often."""

from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from server.rpc.client import connect

_RPC_SECONDS = 30.0


async def ensure(capture: str, changefeed: str, sink_uri: str, tables: list[pb.Table]) -> None:
    """Create the changefeed unless an earlier run did."""
    async with connect(capture) as channel:
        stub = ChangefeedServiceStub(channel)
        known = await stub.ListChangefeeds(pb.ListChangefeedsRequest(), timeout=_RPC_SECONDS)
        if any(found.id == changefeed for found in known.changefeeds):
            return
        request = pb.CreateChangefeedRequest(id=changefeed, sink_uri=sink_uri, tables=tables)
        await stub.CreateChangefeed(request, timeout=_RPC_SECONDS)


async def query(capture: str, changefeed: str) -> pb.Changefeed:
    """How far the changefeed has come."""
    async with connect(capture) as channel:
        request = pb.QueryChangefeedRequest(id=changefeed)
        answer = await ChangefeedServiceStub(channel).QueryChangefeed(request, timeout=_RPC_SECONDS)
        return answer.changefeed
