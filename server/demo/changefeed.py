"""The demo's changefeed: made once, asked often."""

from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from server.rpc.client import connect
from storage.model.errors import InvalidError

_RPC_SECONDS = 30.0


class OtherLakeError(InvalidError):
    """The changefeed of this data directory belongs to another lake."""

    code = "ErrOtherLake"


async def ensure(capture: str, changefeed: str, sink_uri: str, tables: list[pb.Table]) -> None:
    """Create the changefeed unless an earlier run did.

    Raises:
        OtherLakeError: the earlier run's lake is another one, which alone has the changes so far.
    """
    async with connect(capture) as channel:
        stub = ChangefeedServiceStub(channel)
        known = await stub.ListChangefeeds(pb.ListChangefeedsRequest(), timeout=_RPC_SECONDS)
        for found in known.changefeeds:
            if found.id == changefeed and found.sink_uri != sink_uri:
                raise OtherLakeError(
                    f"changefeed {changefeed} already feeds {found.sink_uri}, not {sink_uri}; "
                    "run with that lake, or start anew elsewhere with --data-dir (make run DATA=…)"
                )
            if found.id == changefeed:
                return
        request = pb.CreateChangefeedRequest(id=changefeed, sink_uri=sink_uri, tables=tables)
        await stub.CreateChangefeed(request, timeout=_RPC_SECONDS)


async def query(capture: str, changefeed: str) -> pb.Changefeed:
    """How far the changefeed has come."""
    async with connect(capture) as channel:
        request = pb.QueryChangefeedRequest(id=changefeed)
        answer = await ChangefeedServiceStub(channel).QueryChangefeed(request, timeout=_RPC_SECONDS)
        return answer.changefeed
