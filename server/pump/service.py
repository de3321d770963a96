"""`binlog.Pump`: WriteBinlog as a batch function, PullBinlogs as a stream;
answers as the original Pump gives them.

Every refusal is gRPC UNKNOWN; `admission` says what is refused.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from tipb import pump_pb2

from server.pump import metrics
from server.pump.admission import Admission
from server.rpc.errors import StatusError
from server.rpc.front import Answer
from storage.model.errors import TidemarkError
from storage.pump.binlog import Binlog
from storage.pump.storage import PumpStorage

_OK = pump_pb2.WriteBinlogResp().SerializeToString()

_log = structlog.get_logger(__name__)


class PumpService:
    """The methods of `binlog.Pump` over one storage."""

    def __init__(self, storage: PumpStorage, admission: Admission) -> None:
        self._storage = storage
        self._admission = admission

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


def _unknown(err: TidemarkError) -> StatusError:
    return err if isinstance(err, StatusError) else StatusError(grpc.StatusCode.UNKNOWN, str(err))
