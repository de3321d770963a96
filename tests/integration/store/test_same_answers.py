"""BatchCommands answers every request as the unary call does: all methods,
good and bad requests.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from server.store.methods import BY_STREAM_FIELD
from tests.integration.store.daemons import Cluster
from tests.integration.store.stubs import Stubs, stubs_of

STREAM_ONLY_UNARY = {
    "MvccGetByKey",
    "MvccGetByStartTs",
    "RawChecksum",
    "RawCompareAndSwap",
    "RawGetKeyTTL",
}
"""Methods for which BatchCommands has no field."""


async def batched(
    stubs: Stubs, requests: list[tikvpb.BatchCommandsRequest.Request]
) -> list[tikvpb.BatchCommandsResponse.Response]:
    """Their answers, in the order of the requests."""

    async def sent() -> AsyncIterator[tikvpb.BatchCommandsRequest]:
        yield tikvpb.BatchCommandsRequest(
            requests=requests, request_ids=range(7, 7 + len(requests))
        )
        await asyncio.Event().wait()

    answers: dict[int, tikvpb.BatchCommandsResponse.Response] = {}
    call = stubs.tikv.BatchCommands(sent())
    async with asyncio.timeout(60):
        while len(answers) < len(requests):
            message = await call.read()
            answers |= dict(zip(message.request_ids, message.responses, strict=True))
    call.cancel()
    return [answers[7 + place] for place in range(len(requests))]


def asked(context: kvrpcpb.Context, key: bytes, version: int) -> list[tuple[str, str, Any]]:
    """Every batched request in a form that may be repeated: (stream field,
    unary method, request).
    """
    put = [kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=b"v")]
    lock = [kvrpcpb.Mutation(op=kvrpcpb.PessimisticLock, key=key)]
    pair = [kvrpcpb.KvPair(key=key, value=b"v")]
    span = [kvrpcpb.KeyRange(start_key=key, end_key=key + b"z")]
    of = {"context": context}
    txn = of | {"start_version": version}
    return [
        ("Get", "KvGet", kvrpcpb.GetRequest(**of, key=key, version=version)),
        ("Get", "KvGet", kvrpcpb.GetRequest(**of, key=key, version=version, need_commit_ts=True)),
        ("Get", "KvGet", kvrpcpb.GetRequest(**of, key=b"outside", version=version)),
        ("BatchGet", "KvBatchGet", kvrpcpb.BatchGetRequest(**of, keys=[key, key], version=version)),
        ("Scan", "KvScan", kvrpcpb.ScanRequest(**of, start_key=key, limit=5, version=version)),
        (
            "Scan",
            "KvScan",
            kvrpcpb.ScanRequest(**of, end_key=key, limit=5, version=version, reverse=True),
        ),
        ("ScanLock", "KvScanLock", kvrpcpb.ScanLockRequest(**of, max_version=version)),
        (
            "Prewrite",
            "KvPrewrite",
            kvrpcpb.PrewriteRequest(**txn, mutations=put, primary_lock=key, lock_ttl=9),
        ),
        ("Prewrite", "KvPrewrite", kvrpcpb.PrewriteRequest(**of, mutations=put, primary_lock=key)),
        (
            "PessimisticLock",
            "KvPessimisticLock",
            kvrpcpb.PessimisticLockRequest(
                **of,
                start_version=version + 1,
                for_update_ts=version + 1,
                mutations=lock,
                wait_timeout=-1,
            ),
        ),
        (
            "TxnHeartBeat",
            "KvTxnHeartBeat",
            kvrpcpb.TxnHeartBeatRequest(**txn, primary_lock=key, advise_lock_ttl=99),
        ),
        (
            "CheckTxnStatus",
            "KvCheckTxnStatus",
            kvrpcpb.CheckTxnStatusRequest(**of, primary_key=key, lock_ts=7, current_ts=version),
        ),
        (
            "CheckSecondaryLocks",
            "KvCheckSecondaryLocks",
            kvrpcpb.CheckSecondaryLocksRequest(**txn, keys=[key]),
        ),
        ("Commit", "KvCommit", kvrpcpb.CommitRequest(**txn, keys=[key], commit_version=version)),
        (
            "Commit",
            "KvCommit",
            kvrpcpb.CommitRequest(**of, start_version=7, keys=[key], commit_version=8),
        ),
        ("Cleanup", "KvCleanup", kvrpcpb.CleanupRequest(**of, key=key, start_version=7)),
        ("ResolveLock", "KvResolveLock", kvrpcpb.ResolveLockRequest(**txn, keys=[key])),
        ("ResolveLock", "KvResolveLock", kvrpcpb.ResolveLockRequest(**txn)),
        ("BatchRollback", "KvBatchRollback", kvrpcpb.BatchRollbackRequest(**txn, keys=[key])),
        (
            "PessimisticRollback",
            "KVPessimisticRollback",
            kvrpcpb.PessimisticRollbackRequest(**txn, for_update_ts=version, keys=[key]),
        ),
        ("GC", "KvGC", kvrpcpb.GCRequest(**of, safe_point=1)),
        (
            "DeleteRange",
            "KvDeleteRange",
            kvrpcpb.DeleteRangeRequest(**of, start_key=key, end_key=key + b"z"),
        ),
        ("RawPut", "RawPut", kvrpcpb.RawPutRequest(**of, key=key, value=b"v")),
        ("RawPut", "RawPut", kvrpcpb.RawPutRequest(**of, key=b"", value=b"v")),
        ("RawBatchPut", "RawBatchPut", kvrpcpb.RawBatchPutRequest(**of, pairs=pair)),
        ("RawBatchPut", "RawBatchPut", kvrpcpb.RawBatchPutRequest(**of, pairs=pair, ttls=[1, 2])),
        ("RawGet", "RawGet", kvrpcpb.RawGetRequest(**of, key=key)),
        ("RawBatchGet", "RawBatchGet", kvrpcpb.RawBatchGetRequest(**of, keys=[key, key + b"x"])),
        ("RawScan", "RawScan", kvrpcpb.RawScanRequest(**of, start_key=key, limit=3)),
        (
            "RawBatchScan",
            "RawBatchScan",
            kvrpcpb.RawBatchScanRequest(**of, ranges=span, each_limit=3),
        ),
        ("RawDelete", "RawDelete", kvrpcpb.RawDeleteRequest(**of, key=key)),
        ("RawBatchDelete", "RawBatchDelete", kvrpcpb.RawBatchDeleteRequest(**of, keys=[key])),
        (
            "RawDeleteRange",
            "RawDeleteRange",
            kvrpcpb.RawDeleteRangeRequest(**of, start_key=key, end_key=key + b"z"),
        ),
    ]


async def test_every_request_gets_the_same_answer_batched_and_unary(cluster: Cluster) -> None:
    key = b"k-same"
    async with stubs_of(cluster) as stubs:
        await stubs.put(key, b"v" * 500)
        requests = asked(await stubs.context(key), key, await stubs.pd.tso())
        assert {field for field, _, _ in requests} >= set(BY_STREAM_FIELD) - STREAM_ONLY_UNARY
        for field, method, request in requests:
            (answer,) = await batched(
                stubs, [tikvpb.BatchCommandsRequest.Request(**{field: request})]
            )
            assert getattr(answer, field) == await getattr(stubs.tikv, method)(request), (
                method,
                request,
            )


async def test_many_requests_in_one_message_are_all_answered_even_unknown_ones(
    cluster: Cluster,
) -> None:
    key = b"k-many"
    async with stubs_of(cluster) as stubs:
        context, version = await stubs.context(key), await stubs.pd.tso()
        read = tikvpb.BatchCommandsRequest.Request(
            Get=kvrpcpb.GetRequest(context=context, key=key, version=version)
        )
        unknown = tikvpb.BatchCommandsRequest.Request.FromString(
            b"\xb2\x01\x00"
        )  # field 22, a coprocessor request
        empty = tikvpb.BatchCommandsRequest.Request(
            Empty=tikvpb.BatchCommandsEmptyRequest(test_id=4)
        )
        first, nothing, test, last = await batched(stubs, [read, unknown, empty, read])
        assert first == last
        assert first.Get.not_found
        assert nothing.WhichOneof("cmd") is None
        assert test.Empty.test_id == 4
