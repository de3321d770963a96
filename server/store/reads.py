"""Read requests against a frozen state of the store: one function a request,
run in a reader thread.
"""

from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store.key_error import OPS, key_error, lock_info
from storage.codec import encode_bytes
from storage.kv import Reader
from storage.mvcc.errors import KeyIsLockedError
from storage.mvcc.read_fence import Touch
from storage.mvcc.record import Lock
from storage.mvcc.region import Region
from storage.mvcc.snapshot import Snapshot, key_history, key_of_transaction, scan_locks


def get(reader: Reader, request: kvrpcpb.GetRequest, _: Region) -> kvrpcpb.GetResponse:
    """KvGet."""
    snapshot = _snapshot(reader, request)
    if not request.need_commit_ts:
        value = snapshot.get(request.key)
        return (
            kvrpcpb.GetResponse(not_found=True)
            if value is None
            else kvrpcpb.GetResponse(value=value)
        )
    version = snapshot.version(request.key)
    if version is None:
        return kvrpcpb.GetResponse(not_found=True)
    return kvrpcpb.GetResponse(value=version[0], commit_ts=version[1])


def touched_keys(request: kvrpcpb.GetRequest | kvrpcpb.BatchGetRequest) -> Touch:
    """What KvGet and KvBatchGet look at."""
    return Touch(
        request.version, (request.key,) if isinstance(request, kvrpcpb.GetRequest) else request.keys
    )


def touched_span(request: kvrpcpb.ScanRequest | kvrpcpb.ScanLockRequest) -> Touch:
    """What KvScan and KvScanLock look at: the region is not asked, so it may be more than that."""
    if isinstance(request, kvrpcpb.ScanLockRequest):
        return Touch(request.max_version, span=(request.start_key, request.end_key))
    start, end = request.start_key, request.end_key
    return Touch(request.version, span=(end, start) if request.reverse else (start, end))


def batch_get(
    reader: Reader, request: kvrpcpb.BatchGetRequest, _: Region
) -> kvrpcpb.BatchGetResponse:
    """KvBatchGet: absent keys are left out, locked ones carry their error."""
    snapshot = _snapshot(reader, request)
    response = kvrpcpb.BatchGetResponse()
    for key in request.keys:
        try:
            version = snapshot.version(key)
        except KeyIsLockedError as err:
            response.pairs.add(error=key_error(err), key=key)
            # TiKV's clients look at the first error of the answer, and at each pair's.
            if not response.HasField("error"):
                response.error.CopyFrom(response.pairs[-1].error)
        else:
            if version is not None:
                response.pairs.add(
                    key=key, value=version[0], commit_ts=version[1] if request.need_commit_ts else 0
                )
    return response


def scan(reader: Reader, request: kvrpcpb.ScanRequest, region: Region) -> kvrpcpb.ScanResponse:
    """KvScan: a reverse scan starts below start_key and goes down to end_key."""
    start, end = (encode_bytes(key) if key else b"" for key in (request.start_key, request.end_key))
    lower, upper = region.clamp(*((end, start) if request.reverse else (start, end)))
    response = kvrpcpb.ScanResponse()
    rows = _snapshot(reader, request).scan(
        lower, upper, request.limit, key_only=request.key_only, reverse=request.reverse
    )
    for row in rows:
        if row.error is None:
            response.pairs.add(key=row.key, value=row.value)
        else:
            response.pairs.add(key=row.key, error=key_error(row.error))
    return response


def scan_lock(
    reader: Reader, request: kvrpcpb.ScanLockRequest, region: Region
) -> kvrpcpb.ScanLockResponse:
    """KvScanLock: all kinds of locks up to max_version."""
    start, end = (encode_bytes(key) if key else b"" for key in (request.start_key, request.end_key))
    locks = scan_locks(reader, *region.clamp(start, end), request.max_version, request.limit)
    return kvrpcpb.ScanLockResponse(locks=[lock_info(key, lock) for key, lock in locks])


def mvcc_get_by_key(
    reader: Reader, request: kvrpcpb.MvccGetByKeyRequest, _: Region
) -> kvrpcpb.MvccGetByKeyResponse:
    """MvccGetByKey: everything there is of one key."""
    return kvrpcpb.MvccGetByKeyResponse(info=_mvcc_info(reader, request.key))


def mvcc_get_by_start_ts(
    reader: Reader, request: kvrpcpb.MvccGetByStartTsRequest, region: Region
) -> kvrpcpb.MvccGetByStartTsResponse:
    """MvccGetByStartTs: everything of the first key in the region that the transaction touched;
    walks the region.
    """
    key = key_of_transaction(reader, region.start_key, region.end_key, request.start_ts)
    if key is None:
        return kvrpcpb.MvccGetByStartTsResponse()
    return kvrpcpb.MvccGetByStartTsResponse(key=key, info=_mvcc_info(reader, key))


def _mvcc_info(reader: Reader, key: bytes) -> kvrpcpb.MvccInfo:
    history = key_history(reader, key)
    info = kvrpcpb.MvccInfo()
    if history.lock is not None:
        info.lock.CopyFrom(_mvcc_lock(history.lock))
    for commit_ts, write in history.writes:
        info.writes.add(
            type=kvrpcpb.Op.ValueType(OPS[write.kind]),
            start_ts=write.start_ts,
            commit_ts=commit_ts,
            short_value=write.short_value or b"",
            has_overlapped_rollback=write.overlapped_rollback,
        )
    for start_ts, value in history.values:
        info.values.add(start_ts=start_ts, value=value)
    return info


def _mvcc_lock(lock: Lock) -> kvrpcpb.MvccLock:
    return kvrpcpb.MvccLock(
        type=kvrpcpb.Op.ValueType(OPS[lock.kind]),
        start_ts=lock.start_ts,
        primary=lock.primary,
        short_value=lock.short_value or b"",
        ttl=lock.ttl_ms,
        for_update_ts=lock.for_update_ts,
        txn_size=lock.txn_size,
        use_async_commit=lock.async_commit,
        secondaries=lock.secondaries,
    )


def _snapshot(reader: Reader, request: Any) -> Snapshot:
    context = request.context
    return Snapshot(
        reader,
        request.version,
        resolved=frozenset(context.resolved_locks),
        committed=frozenset(context.committed_locks),
        ignore_locks=context.isolation_level == kvrpcpb.RC,
    )
