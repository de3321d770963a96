"""The pump's gRPC services, and which binlogs they take.

`BinlogPump` is `binlog.Pump` of TiDB and Drainer: WriteBinlog as a batch function, PullBinlogs as
a stream, answers as the original Pump gives them; every refusal is gRPC UNKNOWN. `PumpService` is
`tidemarkpb.v1.PumpService`: binlogs by the thousand in one message, and steering.

`Admission` decides for both: a heartbeat is taken even when the disk is low or the node not online,
a prewrite only when neither is so and there is memory to wait for its outcome; commits and
rollbacks are taken as long as there is disk. Refusals have the original Pump's text where it has
one.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from tidemarkpb.v1 import pump_pb2 as pb
from tipb import pump_pb2

from server.pump import metrics
from server.pump.registry import ONLINE, Node
from server.pump.steering import Steering
from server.pump.upkeep import DiskWatch
from server.rpc.errors import StatusError
from server.rpc.front import Answer
from storage.model.errors import TidemarkError, UnavailableError
from storage.pump.binlog import Binlog, Kind, parse
from storage.pump.storage import PumpStorage

_OK = pump_pb2.WriteBinlogResp().SerializeToString()
_ACTIONS = {pb.ChangeStateRequest.PAUSE: "pause", pb.ChangeStateRequest.CLOSE: "close"}
WAITING_BYTES_MAX = 256 << 20

_log = structlog.get_logger(__name__)


class PrewritesFullError(UnavailableError):
    """More prewrites wait for their outcome than the pump will hold."""

    code = "ErrPrewritesFull"


class Admission:
    """The door of one storage."""

    def __init__(
        self,
        storage: PumpStorage,
        cluster_id: int,
        node: Node,
        disk: DiskWatch,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        self._storage = storage
        self._cluster_id = cluster_id
        self._node = node
        self._disk = disk
        self._waiting_bytes_max = waiting_bytes_max

    def check_cluster(self, cluster_id: int) -> None:
        """Raises: StatusError: the client believes that this is another cluster."""
        if cluster_id != self._cluster_id:
            raise StatusError(
                grpc.StatusCode.UNKNOWN,
                f"cluster ID are mismatch, {cluster_id} vs {self._cluster_id}",
            )

    def admit(self, payload: bytes) -> Binlog:
        """The binlog to be stored.

        Raises:
            BinlogInvalidError: it is none.
            StatusError: the node is not online, or its disk is low.
            PrewritesFullError: too many prewrites have no outcome.
        """
        binlog = parse(payload)
        # A heartbeat tells readers that time passes; refusing it would stop them, and it takes a
        # few bytes.
        if binlog.is_fake:
            return binlog
        if self._disk.is_low:
            raise StatusError(
                grpc.StatusCode.UNKNOWN,
                f"no available space, available: {self._disk.available_bytes}, "
                f"StopWriteAtAvailableSpace: {self._disk.stop_write_at_bytes}",
            )
        # A commit or rollback is taken while there is disk: refusing the outcome of a stored
        # prewrite would block all readers.
        if binlog.kind == Kind.PREWRITE and not binlog.is_empty:
            self._check_prewrites()
        return binlog

    def _check_prewrites(self) -> None:
        if self._node.state != ONLINE:
            raise StatusError(grpc.StatusCode.UNKNOWN, f"no online: {self._node.state}")
        if self._storage.waiting_bytes > self._waiting_bytes_max:
            raise PrewritesFullError(
                f"prewrites without an outcome take {self._storage.waiting_bytes} bytes; write to "
                "another pump, and see whether this one reaches the store"
            )


class BinlogPump:
    """The methods of `binlog.Pump` over one storage."""

    def __init__(self, storage: PumpStorage, admission: Admission) -> None:
        self._storage = storage
        self._admission = admission

    async def WriteBinlog(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """WriteBinlog for all that wait: one group in the value log, durable when answered."""
        # One bad request has its refusal in its place; the others share one fdatasync.
        accepted = [self._accept(request) for request in requests]
        binlogs = [item for item in accepted if isinstance(item, Binlog)]
        failure: Answer = _OK
        with metrics.WRITE_SECONDS.time():
            try:
                await self._storage.write(binlogs)
            except TidemarkError as err:
                # The group failed as a whole: none of it is acknowledged, and TiDB writes again.
                failure = _unknown(err)
        answers = [failure if isinstance(item, Binlog) else item for item in accepted]
        refused = sum(isinstance(answer, TidemarkError) for answer in answers)
        metrics.count(
            len(answers) - refused, sum(len(binlog.payload) for binlog in binlogs), refused
        )
        return answers

    async def PullBinlogs(
        self, request: pump_pb2.PullBinlogReq, context: Any
    ) -> AsyncIterator[pump_pb2.PullBinlogResp]:
        """Committed binlogs after `startFrom.offset`, in commit order, without end."""
        del context
        self._admission.check_cluster(request.clusterID)
        with metrics.READERS.track_inprogress():
            try:
                async for chunk in self._storage.pull(max(0, request.startFrom.offset)):
                    if chunk.orphans:
                        self._report_orphans(chunk.orphans)
                    for payload in chunk.payloads:
                        yield pump_pb2.PullBinlogResp(entity=pump_pb2.Entity(payload=payload))
                    metrics.PULLED.inc(len(chunk.payloads))
            except TidemarkError as err:
                # TiDB and Drainer know the original Pump's UNKNOWN only, and try again on it.
                raise _unknown(err) from err

    def _accept(self, request: bytes) -> Binlog | StatusError:
        try:
            message = pump_pb2.WriteBinlogReq.FromString(request)
            self._admission.check_cluster(message.clusterID)
            return self._admission.admit(message.payload)
        except DecodeError as err:
            return StatusError(
                grpc.StatusCode.INTERNAL, f"failed to unmarshal the received message: {err}"
            )
        except TidemarkError as err:
            return _unknown(err)

    @staticmethod
    def _report_orphans(orphans: Sequence[int]) -> None:
        metrics.ORPHANS.inc(len(orphans))
        _log.error(
            "commits without a known prewrite were sent without rows",
            count=len(orphans),
            first_start_ts=orphans[0],
        )


class PumpService:
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


def _unknown(err: TidemarkError) -> StatusError:
    return err if isinstance(err, StatusError) else StatusError(grpc.StatusCode.UNKNOWN, str(err))
