"""The table of batched methods: how each request is checked, run and answered;
unary and BatchCommands both use it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store import raw_calls, txn_calls
from server.store.key_error import key_errors
from storage.kv import Reader
from storage.mvcc.engine import Command
from storage.mvcc.errors import MvccError
from storage.mvcc.read_fence import Touch
from storage.mvcc.region import Region

Keys = Callable[[Any], Sequence[bytes]]


def _no_keys(_: Any) -> Sequence[bytes]:
    return ()


@dataclass(frozen=True, slots=True)
class Method:
    """One request type: either `read` or `command` is set;
    `stream_field` is its name in BatchCommands.

    A read at a timestamp tells by `touch` what it looks at, see `storage.mvcc.read_fence`.
    """

    name: str
    request: type[Any]
    response: type[Any]
    keys: Keys = _no_keys
    read: Callable[[Reader, Any, Region], Any] | None = None
    touch: Callable[[Any], Touch] | None = None
    command: Callable[[Any, Region], Command] | None = None
    answer: Callable[[Any, Any], Any] | None = None
    refusal: Callable[[MvccError, Any], Any] | None = None
    adds_keys: bool = False
    fault: Callable[[Any], MvccError | None] | None = None
    newest_ts: Callable[[Any], int] | None = None
    many_errors: bool = False
    batch_name: str = ""

    @property
    def raw(self) -> bool:
        """Whether it is about raw keys, whose region keys are not encoded and whose errors are
        strings.
        """
        return self.name.startswith("Raw")

    def ahead(self, request: Any) -> int:
        """The newest timestamp that the request makes the store believe in; 0 if none."""
        if self.touch is not None:
            return self.touch(request).ts
        return self.newest_ts(request) if self.newest_ts is not None else 0

    @property
    def stream_field(self) -> str:
        """The field of tikvpb.BatchCommandsRequest.Request; empty when it does not go there."""
        return self.batch_name or self.name.removeprefix("Kv")

    def respond(self, result: Any, request: Any) -> Any:
        """The response to a command's result, which may be an error."""
        if isinstance(result, MvccError):
            return self.refusal(result, request) if self.refusal else self.refuse(result)
        return self.answer(result, request) if self.answer else self.response()

    def refuse(self, err: MvccError) -> Any:
        """The response that carries an error."""
        if self.raw:
            return self.response(error=str(err))
        return (
            self.response(errors=key_errors(err))
            if self.many_errors
            else self.response(error=key_errors(err)[0])
        )


def _key(request: Any) -> Sequence[bytes]:
    return (request.key,)


def _keys(request: Any) -> Sequence[bytes]:
    return request.keys  # type: ignore[no-any-return]  # a repeated bytes field


def _primary(request: Any) -> Sequence[bytes]:
    return (request.primary_lock,)


def _status_key(request: Any) -> Sequence[bytes]:
    return (request.primary_key,)


def _mutated(request: Any) -> Sequence[bytes]:
    return [mutation.key for mutation in request.mutations]


def _pairs(request: Any) -> Sequence[bytes]:
    return [pair.key for pair in request.pairs]


_READS = (
    Method(
        "KvGet",
        kvrpcpb.GetRequest,
        kvrpcpb.GetResponse,
        _key,
        read=txn_calls.get,
        touch=txn_calls.touched_keys,
    ),
    Method(
        "KvBatchGet",
        kvrpcpb.BatchGetRequest,
        kvrpcpb.BatchGetResponse,
        _keys,
        read=txn_calls.batch_get,
        touch=txn_calls.touched_keys,
    ),
    Method(
        "KvScan",
        kvrpcpb.ScanRequest,
        kvrpcpb.ScanResponse,
        read=txn_calls.scan,
        touch=txn_calls.touched_span,
    ),
    Method(
        "KvScanLock",
        kvrpcpb.ScanLockRequest,
        kvrpcpb.ScanLockResponse,
        read=txn_calls.scan_lock,
        touch=txn_calls.touched_span,
    ),
    Method(
        "MvccGetByKey",
        kvrpcpb.MvccGetByKeyRequest,
        kvrpcpb.MvccGetByKeyResponse,
        _key,
        read=txn_calls.mvcc_get_by_key,
    ),
    Method(
        "MvccGetByStartTs",
        kvrpcpb.MvccGetByStartTsRequest,
        kvrpcpb.MvccGetByStartTsResponse,
        read=txn_calls.mvcc_get_by_start_ts,
    ),
)

_WRITES = (
    Method(
        "KvPrewrite",
        kvrpcpb.PrewriteRequest,
        kvrpcpb.PrewriteResponse,
        _mutated,
        command=txn_calls.prewrite,
        answer=txn_calls.prewrite_response,
        newest_ts=txn_calls.prewrite_ts,
        adds_keys=True,
        many_errors=True,
    ),
    Method(
        "KvCommit",
        kvrpcpb.CommitRequest,
        kvrpcpb.CommitResponse,
        _keys,
        command=txn_calls.commit,
        answer=txn_calls.commit_response,
    ),
    Method(
        "KvBatchRollback",
        kvrpcpb.BatchRollbackRequest,
        kvrpcpb.BatchRollbackResponse,
        _keys,
        command=txn_calls.batch_rollback,
    ),
    Method(
        "KvCleanup",
        kvrpcpb.CleanupRequest,
        kvrpcpb.CleanupResponse,
        _key,
        command=txn_calls.cleanup,
        answer=txn_calls.cleanup_response,
    ),
    Method(
        "KvPessimisticLock",
        kvrpcpb.PessimisticLockRequest,
        kvrpcpb.PessimisticLockResponse,
        _mutated,
        command=txn_calls.pessimistic_lock,
        answer=txn_calls.pessimistic_lock_response,
        refusal=txn_calls.pessimistic_refusal,
        newest_ts=txn_calls.lock_ts,
        adds_keys=True,
    ),
    Method(
        "KVPessimisticRollback",
        kvrpcpb.PessimisticRollbackRequest,
        kvrpcpb.PessimisticRollbackResponse,
        _keys,
        command=txn_calls.pessimistic_rollback,
        many_errors=True,
        batch_name="PessimisticRollback",
    ),
    Method(
        "KvTxnHeartBeat",
        kvrpcpb.TxnHeartBeatRequest,
        kvrpcpb.TxnHeartBeatResponse,
        _primary,
        command=txn_calls.heartbeat,
        answer=txn_calls.heartbeat_response,
    ),
    Method(
        "KvCheckTxnStatus",
        kvrpcpb.CheckTxnStatusRequest,
        kvrpcpb.CheckTxnStatusResponse,
        _status_key,
        command=txn_calls.check_txn_status,
        answer=txn_calls.check_txn_status_response,
    ),
    Method(
        "KvCheckSecondaryLocks",
        kvrpcpb.CheckSecondaryLocksRequest,
        kvrpcpb.CheckSecondaryLocksResponse,
        _keys,
        command=txn_calls.check_secondaries,
        answer=txn_calls.check_secondaries_response,
    ),
    Method(
        "KvResolveLock",
        kvrpcpb.ResolveLockRequest,
        kvrpcpb.ResolveLockResponse,
        _keys,
        command=txn_calls.resolve_lock,
    ),
)

_RAW_READS = (
    Method("RawGet", kvrpcpb.RawGetRequest, kvrpcpb.RawGetResponse, _key, read=raw_calls.get),
    Method(
        "RawGetKeyTTL",
        kvrpcpb.RawGetKeyTTLRequest,
        kvrpcpb.RawGetKeyTTLResponse,
        _key,
        read=raw_calls.get_ttl,
    ),
    Method(
        "RawBatchGet",
        kvrpcpb.RawBatchGetRequest,
        kvrpcpb.RawBatchGetResponse,
        _keys,
        read=raw_calls.batch_get,
    ),
    Method("RawScan", kvrpcpb.RawScanRequest, kvrpcpb.RawScanResponse, read=raw_calls.scan),
    Method(
        "RawChecksum",
        kvrpcpb.RawChecksumRequest,
        kvrpcpb.RawChecksumResponse,
        read=raw_calls.checksum,
    ),
    Method(
        "RawBatchScan",
        kvrpcpb.RawBatchScanRequest,
        kvrpcpb.RawBatchScanResponse,
        read=raw_calls.batch_scan,
    ),
)

_RAW_WRITES = (
    Method(
        "RawPut",
        kvrpcpb.RawPutRequest,
        kvrpcpb.RawPutResponse,
        _key,
        command=raw_calls.put,
        adds_keys=True,
    ),
    Method(
        "RawBatchPut",
        kvrpcpb.RawBatchPutRequest,
        kvrpcpb.RawBatchPutResponse,
        _pairs,
        command=raw_calls.batch_put,
        fault=raw_calls.ttl_fault,
        adds_keys=True,
    ),
    Method(
        "RawDelete",
        kvrpcpb.RawDeleteRequest,
        kvrpcpb.RawDeleteResponse,
        _key,
        command=raw_calls.delete,
    ),
    Method(
        "RawBatchDelete",
        kvrpcpb.RawBatchDeleteRequest,
        kvrpcpb.RawBatchDeleteResponse,
        _keys,
        command=raw_calls.batch_delete,
    ),
    Method(
        "RawDeleteRange",
        kvrpcpb.RawDeleteRangeRequest,
        kvrpcpb.RawDeleteRangeResponse,
        command=raw_calls.delete_range,
    ),
    Method(
        "RawCompareAndSwap",
        kvrpcpb.RawCASRequest,
        kvrpcpb.RawCASResponse,
        _key,
        command=raw_calls.compare_and_swap,
        answer=raw_calls.compare_and_swap_response,
        adds_keys=True,
    ),
)

METHODS = {method.name: method for method in (*_READS, *_WRITES, *_RAW_READS, *_RAW_WRITES)}
BY_STREAM_FIELD = {method.stream_field: method for method in METHODS.values()}
