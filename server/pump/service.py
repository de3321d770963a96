"""The pump's gRPC services, and the rule by which they take binlogs.

`WriteBinlogCalls` and `BinlogPump` are `binlog.Pump` of TiDB and Drainer, with the answers that the
original Pump gives; every refusal is gRPC UNKNOWN. `PumpService` is
`tidemarkpb.v1.PumpService`: binlogs by the thousand in one message, and steering.

`Admission` decides for both. A heartbeat is always taken, even if the disk is low or the node not
online. Commits and rollbacks are taken unless the disk is low. A prewrite is taken only if,
besides, the node is online and there is memory to wait for its outcome. Refusals have the original
Pump's text if it has one.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from tidemarkpb.v1 import pump_pb2 as pb
from tipb import pump_pb2

from server.pump import metrics
from server.pump.registry import ONLINE, Node, PumpLifecycle
from server.pump.upkeep import DiskWatch
from server.rpc.errors import StatusError
from server.rpc.front import Messages, Waiter, overload
from storage.defect import request_error
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
    """Decides which binlogs one storage takes."""

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
        """Parse a binlog, and decide whether it is stored.

        Raises:
            BinlogInvalidError: the payload is no binlog.
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


class _WriteBinlog:
    """A call in the queue of the value log."""

    __slots__ = ("_admission", "_request", "_waiter")

    def __init__(self, admission: Admission, request: bytes, waiter: Waiter) -> None:
        self._admission = admission
        self._request = request
        self._waiter = waiter

    def begin(self) -> Sequence[Binlog]:
        # One whose client has gone is dropped before the work, not after it.
        if self._waiter.done():
            return ()
        try:
            binlog = self._admitted()
        except TidemarkError as err:
            self.stored(err)
        except Exception as err:  # noqa: BLE001 - whatever a call meets, it ends that call only
            metrics.REFUSED.inc()
            self._waiter.set_result(request_error(err, "WriteBinlog"))
        else:
            if not binlog.is_empty:
                return (binlog,)
            self.stored(None)
        return ()

    def _admitted(self) -> Binlog:
        try:
            message = pump_pb2.WriteBinlogReq.FromString(self._request)
        except DecodeError as err:
            text = f"failed to unmarshal the received message: {err}"
            raise StatusError(grpc.StatusCode.INTERNAL, text) from err
        self._admission.check_cluster(message.clusterID)
        return self._admission.admit(message.payload)

    def stored(self, failure: TidemarkError | None) -> None:
        # A group fails as a whole: none of it is acknowledged, and TiDB writes again.
        if failure is not None:
            metrics.REFUSED.inc()
        if not self._waiter.done():
            self._waiter.set_result(_OK if failure is None else _unknown(failure))


class WriteBinlogCalls:
    """Calls of WriteBinlog: each goes right into the queue of the value log, and is answered when
    its binlog is durable there.
    """

    def __init__(self, storage: PumpStorage, admission: Admission) -> None:
        self._storage = storage
        self._admission = admission

    def put(self, request: bytes, waiter: Waiter) -> None:
        """See `CallQueue`."""
        call, size = _WriteBinlog(self._admission, request, waiter), len(request)
        busy = overload("WriteBinlog", *self._storage.waiting_writes, size)
        if busy is not None:
            call.stored(busy)
            return
        try:
            self._storage.put(call, size)
        except TidemarkError as err:
            call.stored(err)


class BinlogPump:
    """PullBinlogs, the other method of `binlog.Pump`, over one storage."""

    def __init__(self, storage: PumpStorage, admission: Admission) -> None:
        self._storage = storage
        self._admission = admission

    async def PullBinlogs(
        self, request: pump_pb2.PullBinlogReq, context: Any
    ) -> AsyncIterator[Messages]:
        """Committed binlogs after `startFrom.offset`, in commit order, without end."""
        del context
        self._admission.check_cluster(request.clusterID)
        with metrics.READERS.track_inprogress():
            try:
                async for chunk in self._storage.pull(max(0, request.startFrom.offset)):
                    if chunk.orphans:
                        self._report_orphans(chunk.orphans)
                    yield Messages(_responses(chunk.payloads))
                    metrics.PULLED.inc(len(chunk.payloads))
            except TidemarkError as err:
                # TiDB and Drainer know the original Pump's UNKNOWN only, and try again on it.
                raise _unknown(err) from err

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
        self, storage: PumpStorage, admission: Admission, steering: PumpLifecycle | None = None
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
            await self._storage.write(binlogs)
            metrics.REFUSED.inc(len(refused))
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


def _responses(payloads: Sequence[bytes]) -> Iterator[bytes]:
    """A serialized `PullBinlogResp` for each."""
    # One message object for all: making two for each costs three times what serializing does.
    response = pump_pb2.PullBinlogResp()
    for payload in payloads:
        response.entity.payload = payload
        yield response.SerializeToString()


def _unknown(err: TidemarkError) -> StatusError:
    return err if isinstance(err, StatusError) else StatusError(grpc.StatusCode.UNKNOWN, str(err))
