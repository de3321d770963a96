"""`binlog.Pump`: WriteBinlog as a batch function, PullBinlogs as a stream; answers as the original Pump gives them.

Every refusal is gRPC UNKNOWN with the original's text where it has one. A heartbeat is stored even when the disk is low
or the node not online, a prewrite only when neither is so.
"""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from tipb import pump_pb2

from server.pump import metrics
from server.pump.disk import DiskWatch
from server.pump.node import ONLINE, Node
from server.rpc.errors import StatusError
from server.rpc.front import Answer
from storage.model.errors import TidemarkError, UnavailableError
from storage.pump.append import Append
from storage.pump.binlog import Binlog, Kind, parse

WAITING_BYTES_MAX = 256 << 20
_OK = pump_pb2.WriteBinlogResp().SerializeToString()

_log = structlog.get_logger(__name__)


class PrewritesFullError(UnavailableError):
    """More prewrites wait for their outcome than the pump will hold."""

    code = "ErrPrewritesFull"


class PumpService:
    """The methods of `binlog.Pump` over one storage."""

    def __init__(
        self, storage: Append, cluster_id: int, node: Node, disk: DiskWatch, waiting_bytes_max: int = WAITING_BYTES_MAX
    ) -> None:
        self.last_write = time.monotonic()
        self._storage = storage
        self._cluster_id = cluster_id
        self._node = node
        self._disk = disk
        self._waiting_bytes_max = waiting_bytes_max

    async def write_binlog(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """WriteBinlog for all that wait: one group in the value log, durable when answered."""
        accepted = [self._accept(request) for request in requests]
        binlogs = [item for item in accepted if isinstance(item, Binlog)]
        failure: Answer = _OK
        with metrics.WRITE_SECONDS.time():
            try:
                await self._storage.write(binlogs)
            except TidemarkError as err:
                failure = _unknown(err)
        answers = [failure if isinstance(item, Binlog) else item for item in accepted]
        self._count(binlogs, answers)
        return answers

    async def PullBinlogs(  # noqa: N802 - the name in the protocol
        self, request: pump_pb2.PullBinlogReq, context: Any
    ) -> AsyncIterator[pump_pb2.PullBinlogResp]:
        """Committed binlogs after `startFrom.offset`, in commit order, without end."""
        del context
        self._check_cluster(request.clusterID)
        with metrics.READERS.track_inprogress():
            try:
                async for chunk in self._storage.pull(max(0, request.startFrom.offset)):
                    if chunk.orphans:
                        self._report_orphans(chunk.orphans)
                    for payload in chunk.payloads:
                        yield pump_pb2.PullBinlogResp(entity=pump_pb2.Entity(payload=payload))
                    metrics.PULLED.inc(len(chunk.payloads))
            except TidemarkError as err:
                raise _unknown(err) from err

    def _accept(self, request: bytes) -> Binlog | StatusError:
        try:
            message = pump_pb2.WriteBinlogReq.FromString(request)
            self._check_cluster(message.clusterID)
            binlog = parse(message.payload)
            self._check_accepting(binlog)
        except DecodeError as err:
            return StatusError(grpc.StatusCode.INTERNAL, f"failed to unmarshal the received message: {err}")
        except TidemarkError as err:
            return _unknown(err)
        return binlog

    def _check_cluster(self, cluster_id: int) -> None:
        if cluster_id != self._cluster_id:
            raise StatusError(grpc.StatusCode.UNKNOWN, f"cluster ID are mismatch, {cluster_id} vs {self._cluster_id}")

    def _check_accepting(self, binlog: Binlog) -> None:
        if binlog.is_fake:
            return
        if self._disk.is_low:
            raise StatusError(
                grpc.StatusCode.UNKNOWN,
                f"no available space, available: {self._disk.available_bytes}, "
                f"StopWriteAtAvailableSpace: {self._disk.stop_write_at_bytes}",
            )
        if binlog.kind == Kind.PREWRITE and not binlog.is_empty:
            self._check_accepting_prewrites()

    def _check_accepting_prewrites(self) -> None:
        if self._node.state != ONLINE:
            raise StatusError(grpc.StatusCode.UNKNOWN, f"no online: {self._node.state}")
        if self._storage.waiting_bytes > self._waiting_bytes_max:
            raise PrewritesFullError(
                f"prewrites without an outcome take {self._storage.waiting_bytes} bytes; write to another pump, "
                "and see whether this one reaches the store"
            )

    def _count(self, binlogs: Sequence[Binlog], answers: Sequence[Answer]) -> None:
        refused = sum(isinstance(answer, TidemarkError) for answer in answers)
        metrics.REFUSED.inc(refused)
        if refused < len(answers):
            self.last_write = time.monotonic()
            metrics.WRITTEN.inc(len(answers) - refused)
            metrics.WRITTEN_BYTES.inc(sum(len(binlog.payload) for binlog in binlogs))

    @staticmethod
    def _report_orphans(orphans: Sequence[int]) -> None:
        metrics.ORPHANS.inc(len(orphans))
        _log.error("commits without a known prewrite were not sent", count=len(orphans), first_start_ts=orphans[0])


def _unknown(err: TidemarkError) -> StatusError:
    return err if isinstance(err, StatusError) else StatusError(grpc.StatusCode.UNKNOWN, str(err))
