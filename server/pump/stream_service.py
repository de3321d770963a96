"""`tidemarkpb.v1.PumpService`: binlogs by the thousand in one message, and steering."""

from collections.abc import AsyncIterator
from typing import Any

from tidemarkpb.v1 import pump_pb2 as pb

from server.pump import metrics
from server.pump.admission import Admission
from server.pump.steering import Steering
from storage.model.errors import TidemarkError
from storage.pump.binlog import Binlog
from storage.pump.storage import PumpStorage

_ACTIONS = {pb.ChangeStateRequest.PAUSE: "pause", pb.ChangeStateRequest.CLOSE: "close"}


class StreamService:
    """The service over one storage; streams share the groups of the value log with each other and
    with WriteBinlog.
    """

    def __init__(
        self, storage: PumpStorage, admission: Admission, steering: Steering | None = None
    ) -> None:
        self._storage = storage
        self._admission = admission
        self._steering = steering

    async def WriteBinlogs(
        self, requests: AsyncIterator[pb.WriteBinlogsRequest], _context: Any
    ) -> AsyncIterator[pb.WriteBinlogsResponse]:
        """One answer a request, in order, when its binlogs are durable;
        a failed write ends the stream.
        """
        sequence = 0
        async for request in requests:
            self._admission.check_cluster(request.cluster_id)
            binlogs, refused = self._admitted(request.payloads, sequence)
            with metrics.WRITE_SECONDS.time():
                await self._storage.write(binlogs)
            metrics.count(
                len(binlogs), sum(len(binlog.payload) for binlog in binlogs), len(refused)
            )
            sequence += len(request.payloads)
            yield pb.WriteBinlogsResponse(acknowledged=sequence, refused=refused)

    async def ChangeState(
        self, request: pb.ChangeStateRequest, _context: Any
    ) -> pb.ChangeStateResponse:
        """Begin to pause or to close."""
        assert self._steering is not None
        state = await self._steering.apply(
            request.node_id, _ACTIONS.get(request.action, str(request.action))
        )
        return pb.ChangeStateResponse(state=state)

    def _admitted(self, payloads: Any, before: int) -> tuple[list[Binlog], list[pb.RefusedBinlog]]:
        binlogs: list[Binlog] = []
        refused: list[pb.RefusedBinlog] = []
        for sequence, payload in enumerate(payloads, before + 1):
            try:
                binlogs.append(self._admission.admit(payload))
            except TidemarkError as err:
                refused.append(pb.RefusedBinlog(sequence=sequence, message=str(err)))
        return binlogs, refused
