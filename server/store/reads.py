"""Read requests against a frozen state of the store: one function a request, run in a reader thread."""

from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store.key_error import OPS, key_error, lock_info
from storage.codec import encode_bytes
from storage.kv import Reader
from storage.mvcc.errors import KeyIsLockedError
from storage.mvcc.history import key_history
from storage.mvcc.layout import RAW
from storage.mvcc.read_fence import Touch
from storage.mvcc.region import Region
from storage.mvcc.snapshot import Snapshot, scan_locks


def get(reader: Reader, request: kvrpcpb.GetRequest, _: Region) -> kvrpcpb.GetResponse:
    """KvGet."""
    value = _snapshot(reader, request).get(request.key)
    return kvrpcpb.GetResponse(not_found=True) if value is None else kvrpcpb.GetResponse(value=value)


def touched_keys(request: kvrpcpb.GetRequest | kvrpcpb.BatchGetRequest) -> Touch:
    """What KvGet and KvBatchGet look at."""
    return Touch(request.version, (request.key,) if isinstance(request, kvrpcpb.GetRequest) else request.keys)


def touched_span(request: kvrpcpb.ScanRequest | kvrpcpb.ScanLockRequest) -> Touch:
    """What KvScan and KvScanLock look at: the region is not asked, so it may be more than that."""
    if isinstance(request, kvrpcpb.ScanLockRequest):
        return Touch(request.max_version, span=(request.start_key, request.end_key))
    start, end = request.start_key, request.end_key
    return Touch(request.version, span=(end, start) if request.reverse else (start, end))


def batch_get(reader: Reader, request: kvrpcpb.BatchGetRequest, _: Region) -> kvrpcpb.BatchGetResponse:
    """KvBatchGet: absent keys are left out, locked ones carry their error."""
    snapshot = _snapshot(reader, request)
    response = kvrpcpb.BatchGetResponse()
    for key in request.keys:
        try:
            value = snapshot.get(key)
        except KeyIsLockedError as err:
            response.pairs.add(error=key_error(err), key=key)
            if not response.HasField("error"):
                response.error.CopyFrom(response.pairs[-1].error)
        else:
            if value is not None:
                response.pairs.add(key=key, value=value)
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


def scan_lock(reader: Reader, request: kvrpcpb.ScanLockRequest, region: Region) -> kvrpcpb.ScanLockResponse:
    """KvScanLock: all kinds of locks up to max_version."""
    start, end = (encode_bytes(key) if key else b"" for key in (request.start_key, request.end_key))
    locks = scan_locks(reader, *region.clamp(start, end), request.max_version, request.limit)
    return kvrpcpb.ScanLockResponse(locks=[lock_info(key, lock) for key, lock in locks])


def mvcc_get_by_key(reader: Reader, request: kvrpcpb.MvccGetByKeyRequest, _: Region) -> kvrpcpb.MvccGetByKeyResponse:
    """MvccGetByKey: everything there is of one key."""
    history = key_history(reader, request.key)
    info = kvrpcpb.MvccInfo()
    if history.lock is not None:
        lock = history.lock
        info.lock.CopyFrom(
            kvrpcpb.MvccLock(
                type=kvrpcpb.Op.ValueType(OPS[lock.kind]),
                start_ts=lock.start_ts,
                primary=lock.primary,
                short_value=lock.short_value or b"",
                ttl=lock.ttl_ms,
                for_update_ts=lock.for_update_ts,
                txn_size=lock.txn_size,
            )
        )
    for commit_ts, write in history.writes:
        kind = kvrpcpb.Op.ValueType(OPS[write.kind])
        info.writes.add(type=kind, start_ts=write.start_ts, commit_ts=commit_ts, short_value=write.short_value or b"")
    for start_ts, value in history.values:
        info.values.add(start_ts=start_ts, value=value)
    return kvrpcpb.MvccGetByKeyResponse(info=info)


def raw_get(reader: Reader, request: kvrpcpb.RawGetRequest, _: Region) -> kvrpcpb.RawGetResponse:
    """RawGet."""
    value = reader.get(RAW + request.key)
    return kvrpcpb.RawGetResponse(not_found=True) if value is None else kvrpcpb.RawGetResponse(value=value)


def raw_batch_get(reader: Reader, request: kvrpcpb.RawBatchGetRequest, _: Region) -> kvrpcpb.RawBatchGetResponse:
    """RawBatchGet: absent keys are left out."""
    response = kvrpcpb.RawBatchGetResponse()
    for key in request.keys:
        value = reader.get(RAW + key)
        if value is not None:
            response.pairs.add(key=key, value=value)
    return response


def raw_scan(reader: Reader, request: kvrpcpb.RawScanRequest, region: Region) -> kvrpcpb.RawScanResponse:
    """RawScan, within the region."""
    bounds = (request.end_key, request.start_key) if request.reverse else (request.start_key, request.end_key)
    lower, upper = region.clamp(*bounds)
    response = kvrpcpb.RawScanResponse()
    stop = RAW + upper if upper else bytes([RAW[0] + 1])
    for key, value in reader.scan(RAW + lower, stop, reverse=request.reverse):
        if len(response.kvs) >= request.limit:
            break
        response.kvs.add(key=key[1:], value=b"" if request.key_only else value)
    return response


def _snapshot(reader: Reader, request: Any) -> Snapshot:
    context = request.context
    return Snapshot(
        reader,
        request.version,
        resolved=frozenset(context.resolved_locks),
        committed=frozenset(context.committed_locks),
        ignore_locks=context.isolation_level == kvrpcpb.RC,
    )
