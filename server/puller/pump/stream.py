"""One pump's stream of committed binlogs, read again from where it broke off."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from tipb import binlog_pb2, pump_pb2
from tipb.pump_pb2_grpc import PumpStub

from server.puller import metrics
from server.puller.pump.transactions import BinlogInvalidError, Transaction
from server.puller.stream_timeout import SILENT_S, StreamSilentError, StreamTimeout
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from storage.backoff import Backoff
from storage.model.errors import CorruptError, InvalidError, TidemarkError

_BACKOFF_S: Final = (0.1, 5.0)

_log = structlog.get_logger(__name__)


class PrewriteMissingError(CorruptError):
    """A transaction is committed, but its rows are not to be had."""

    code = "ErrBinlogPrewriteMissing"


class BinlogPurgedError(InvalidError):
    """A pump's GC has removed binlogs that were not read yet."""

    code = "ErrBinlogPurged"


class PumpClusterError(InvalidError):
    """A registered pump serves another cluster."""

    code = "ErrClusterIDMismatch"


class PumpStream:
    """Reads one pump above `last_ts`; a heartbeat comes as a transaction without rows and job."""

    def __init__(
        self,
        name: str,
        host: str,
        cluster_id: int,
        security: SecurityConfig | None,
        last_ts: int,
        silent_s: float = SILENT_S,
    ) -> None:
        self.name = name
        self.host = host
        self._cluster_id = cluster_id
        self._security = security
        self._last_ts = last_ts
        self._backoff = Backoff(*_BACKOFF_S)
        self._timeout = StreamTimeout(silent_s)

    async def run(self) -> AsyncIterator[Transaction]:
        """Committed transactions in commit order, without end; waits while the pump is away.

        Raises:
            BinlogPurgedError, PumpClusterError: the pump will never serve what is asked for.
            BinlogInvalidError, PrewriteMissingError: it sent something that cannot be used.
        """
        while True:
            try:
                async with connect(self.host, self._security) as channel:
                    async for transaction in self._read(channel):
                        self._backoff.reset()
                        self._last_ts = transaction.commit_ts
                        yield transaction
            except grpc.aio.AioRpcError as err:
                _raise_if_final(self.name, self._last_ts, err)
                # A pump may be away for hours: one line a minute says so.
                if self._backoff.failures % 10 == 0:
                    _log.warning(
                        "pump does not answer", pump=self.name, host=self.host, error=err.details()
                    )
            except StreamSilentError as err:
                metrics.SILENT_STREAMS.labels("pump").inc()
                _log.warning("pump is silent", pump=self.name, host=self.host, error=err.message)
            await asyncio.sleep(self._backoff.next_s())

    async def _read(self, channel: grpc.aio.Channel) -> AsyncIterator[Transaction]:
        start = pump_pb2.Pos(offset=self._last_ts)
        request = pump_pb2.PullBinlogReq(clusterID=self._cluster_id, startFrom=start)
        call = PumpStub(channel).PullBinlogs(request)
        answer = await self._timeout.first(call)
        while isinstance(answer, pump_pb2.PullBinlogResp):
            yield transaction_of(self.name, self._last_ts, answer.entity.payload)
            answer = await self._timeout.next(call)


def transaction_of(pump: str, last_ts: int, payload: bytes) -> Transaction:
    """Read a binlog that a pump sent after `last_ts`.

    Raises:
        BinlogInvalidError: it is no committed binlog.
        PrewriteMissingError: it tells of a commit, but not of what was committed.
    """
    try:
        binlog = binlog_pb2.Binlog.FromString(payload)
    except DecodeError as err:
        raise BinlogInvalidError(
            f"pump {pump} sent garbage after {last_ts}: {payload[:64].hex()}"
        ) from err
    commit_ts, start_ts = binlog.commit_ts, binlog.start_ts
    # A pump's fake binlog, by which it says that it has nothing more up to there.
    if binlog.tp == binlog_pb2.Rollback and start_ts == commit_ts > 0:
        return Transaction(commit_ts, start_ts, b"", 0, b"")
    if binlog.tp != binlog_pb2.Commit or not 0 < start_ts < commit_ts:
        raise BinlogInvalidError(
            f"pump {pump} sent a binlog of type {binlog.tp} with start_ts {start_ts} and "
            f"commit_ts {commit_ts} after {last_ts}: that is no committed transaction"
        )
    if not binlog.prewrite_value and not binlog.ddl_job_id:
        raise PrewriteMissingError(
            f"pump {pump} knows that the transaction of {start_ts} was committed at {commit_ts}, "
            "but not its rows"
        )
    return Transaction(
        commit_ts, start_ts, binlog.prewrite_value, binlog.ddl_job_id, binlog.ddl_query
    )


def _raise_if_final(pump: str, last_ts: int, err: grpc.aio.AioRpcError) -> None:
    # PullBinlogs knows no errors but texts: ours has the code, a cluster id is refused in the words
    # of TiDB's Pump.
    details = err.details() or ""
    error: TidemarkError | None = None
    if BinlogPurgedError.code in details:
        error = BinlogPurgedError(
            f"pump {pump} does not have all binlogs above {last_ts} any more: {details}"
        )
    elif "cluster ID are mismatch" in details:
        error = PumpClusterError(
            f"pump {pump} is of another cluster: {details}; correct the registry or --coordinator"
        )
    if error is not None:
        raise error from err
