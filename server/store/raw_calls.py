"""RawKV's calls, reads and writes: one function a call; TTLs are counted by our clock."""

import time
from collections.abc import Sequence
from functools import partial

from kvproto import kvrpcpb_pb2 as kvrpcpb

from storage.kv import Reader
from storage.mvcc import raw
from storage.mvcc.engine import Command
from storage.mvcc.errors import InvalidTxnError
from storage.mvcc.raw import RawPair, Swapped, range_sum
from storage.mvcc.region import Region


def get(reader: Reader, request: kvrpcpb.RawGetRequest, _: Region) -> kvrpcpb.RawGetResponse:
    """RawGet."""
    value = raw.get(reader, request.key, now_s())
    return (
        kvrpcpb.RawGetResponse(not_found=True)
        if value is None
        else kvrpcpb.RawGetResponse(value=value)
    )


def get_ttl(
    reader: Reader, request: kvrpcpb.RawGetKeyTTLRequest, _: Region
) -> kvrpcpb.RawGetKeyTTLResponse:
    """RawGetKeyTTL: seconds left, 0 when the key lives for ever."""
    at_s = now_s()
    if raw.get(reader, request.key, at_s) is None:
        return kvrpcpb.RawGetKeyTTLResponse(not_found=True)
    return kvrpcpb.RawGetKeyTTLResponse(ttl=max(0, raw.expires_s(reader, request.key) - at_s))


def batch_get(
    reader: Reader, request: kvrpcpb.RawBatchGetRequest, _: Region
) -> kvrpcpb.RawBatchGetResponse:
    """RawBatchGet: absent keys are left out."""
    response, at_s = kvrpcpb.RawBatchGetResponse(), now_s()
    for key in request.keys:
        value = raw.get(reader, key, at_s)
        if value is not None:
            response.pairs.add(key=key, value=value)
    return response


def scan(
    reader: Reader, request: kvrpcpb.RawScanRequest, region: Region
) -> kvrpcpb.RawScanResponse:
    """RawScan, within the region; a reverse scan starts below start_key and goes down to
    end_key.
    """
    pairs = _scan(reader, request, request.start_key, request.end_key, request.limit, region)
    return kvrpcpb.RawScanResponse(kvs=pairs)


def batch_scan(
    reader: Reader, request: kvrpcpb.RawBatchScanRequest, region: Region
) -> kvrpcpb.RawBatchScanResponse:
    """RawBatchScan: at most `each_limit` pairs of every range, one range after the other."""
    response = kvrpcpb.RawBatchScanResponse()
    for key_range in request.ranges:
        response.kvs.extend(
            _scan(
                reader, request, key_range.start_key, key_range.end_key, request.each_limit, region
            )
        )
    return response


def checksum(
    reader: Reader, request: kvrpcpb.RawChecksumRequest, region: Region
) -> kvrpcpb.RawChecksumResponse:
    """RawChecksum of all ranges together, within the region."""
    bounds = [region.clamp(key_range.start_key, key_range.end_key) for key_range in request.ranges]
    pairs = (pair for lower, upper in bounds for pair in raw.living(reader, lower, upper, now_s()))
    xor, count, size = range_sum(pairs)
    return kvrpcpb.RawChecksumResponse(checksum=xor, total_kvs=count, total_bytes=size)


def put(request: kvrpcpb.RawPutRequest, _: Region) -> Command:
    """RawPut."""
    return partial(raw.put, pairs=[RawPair(request.key, request.value, _end_s(request.ttl))])


def batch_put(request: kvrpcpb.RawBatchPutRequest, _: Region) -> Command:
    """RawBatchPut: one TTL for all pairs, or one for each."""
    # Old clients send one `ttl`, newer ones a list.
    ttls: Sequence[int] = request.ttls or [request.ttl]
    ends = [_end_s(ttl) for ttl in ttls] * (len(request.pairs) if len(ttls) == 1 else 1)
    pairs = [
        RawPair(pair.key, pair.value, end_s)
        for pair, end_s in zip(request.pairs, ends, strict=False)
    ]
    return partial(raw.put, pairs=pairs)


def delete(request: kvrpcpb.RawDeleteRequest, _: Region) -> Command:
    """RawDelete."""
    return partial(raw.delete, keys=[request.key])


def batch_delete(request: kvrpcpb.RawBatchDeleteRequest, _: Region) -> Command:
    """RawBatchDelete."""
    return partial(raw.delete, keys=request.keys)


def delete_range(request: kvrpcpb.RawDeleteRangeRequest, region: Region) -> Command:
    """RawDeleteRange, within the region."""
    lower, upper = region.clamp(request.start_key, request.end_key)
    return partial(raw.delete_range, lower=lower, upper=upper)


def compare_and_swap(request: kvrpcpb.RawCASRequest, _: Region) -> Command:
    """RawCompareAndSwap."""
    return partial(
        raw.compare_and_swap,
        new=RawPair(request.key, request.value, _end_s(request.ttl)),
        previous=None if request.previous_not_exist else request.previous_value,
        now_s=now_s(),
        remove=request.delete,
    )


def compare_and_swap_response(done: Swapped, _: kvrpcpb.RawCASRequest) -> kvrpcpb.RawCASResponse:
    """The answer to RawCompareAndSwap."""
    return kvrpcpb.RawCASResponse(
        succeed=done.succeeded,
        previous_not_exist=done.previous is None,
        previous_value=done.previous or b"",
    )


def ttl_fault(request: kvrpcpb.RawBatchPutRequest) -> InvalidTxnError | None:
    """Why the TTLs of a request make no sense, or None."""
    if len(request.ttls) in (0, 1, len(request.pairs)):
        return None
    return InvalidTxnError(
        f"{len(request.ttls)} TTLs do not fit {len(request.pairs)} pairs; send none, one, or one "
        "for each"
    )


def _scan(
    reader: Reader,
    request: kvrpcpb.RawScanRequest | kvrpcpb.RawBatchScanRequest,
    start: bytes,
    end: bytes,
    limit: int,
    region: Region,
) -> list[kvrpcpb.KvPair]:
    lower, upper = region.clamp(*((end, start) if request.reverse else (start, end)))
    pairs = raw.scan(reader, lower, upper, now_s(), limit, reverse=request.reverse)
    return [
        kvrpcpb.KvPair(key=key, value=b"" if request.key_only else value) for key, value in pairs
    ]


def now_s() -> int:
    """Seconds since the Unix epoch."""
    return int(time.time())


def _end_s(ttl_s: int) -> int:
    return now_s() + ttl_s if ttl_s else 0
