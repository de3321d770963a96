"""Requests that make no sense get an error that says so, and leave nothing behind."""

from typing import Any

import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store.runner import MAX_ENTRY_BYTES
from tests.integration.store.daemons import Cluster
from tests.integration.store.stubs import Stubs, stubs_of

KEY = b"k-bad"


async def prewrite(
    stubs: Stubs, mutations: list[kvrpcpb.Mutation], *, where: bytes = KEY, **more: Any
) -> kvrpcpb.PrewriteResponse:
    fields = {"start_version": await stubs.pd.tso(), "primary_lock": KEY, "lock_ttl": 9} | more
    request = kvrpcpb.PrewriteRequest(
        context=await stubs.context(where), mutations=mutations, **fields
    )
    return await stubs.tikv.KvPrewrite(request)


def put(key: bytes = KEY, value: bytes = b"v", op: int = kvrpcpb.Put) -> kvrpcpb.Mutation:
    return kvrpcpb.Mutation(op=op, key=key, value=value)


@pytest.mark.parametrize(
    ("mutations", "more", "code"),
    [
        ([put(bytes(9000))], {}, "ErrKeyTooLarge"),
        ([put(), put(b"")], {}, "ErrKeyEmpty"),
        ([put()], {"start_version": 0}, "ErrInvalidTxn"),
        ([put(), put(value=b"w")], {}, "ErrInvalidTxn"),
        ([put(op=kvrpcpb.Rollback)], {}, "ErrInvalidTxn"),
        ([put(op=kvrpcpb.PessimisticLock)], {}, "ErrInvalidTxn"),
        ([put(op=kvrpcpb.SharedLock)], {}, "ErrInvalidTxn"),
        ([put(op=99)], {}, "ErrInvalidTxn"),
        ([put()], {"start_version": 2**63}, "ErrTimestampAhead"),
        ([put()], {"min_commit_ts": 2**63, "use_async_commit": True}, "ErrTimestampAhead"),
    ],
)
async def test_a_prewrite_that_makes_no_sense_is_aborted(
    cluster: Cluster, mutations: list[kvrpcpb.Mutation], more: dict[str, Any], code: str
) -> None:
    async with stubs_of(cluster) as stubs:
        answer = await prewrite(stubs, mutations, **more)
        assert [error.abort.startswith(f"[TM:{code}]") for error in answer.errors] == [True], answer
        assert (await stubs.get(KEY)).not_found


async def test_keys_outside_the_region_are_refused_wherever_they_stand(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        for outside in (b"", b"zzz"):
            answer = await prewrite(stubs, [put(), put(b"t\xff" + outside)])
            assert answer.region_error.HasField("key_not_in_region")
        assert (await stubs.get(KEY)).not_found


async def test_a_request_over_the_entry_limit_is_refused_and_one_below_is_not(
    cluster: Cluster,
) -> None:
    key = b"k-huge"
    async with stubs_of(cluster) as stubs:
        answer = await prewrite(stubs, [put(key, bytes(MAX_ENTRY_BYTES))], primary_lock=key)
        assert answer.region_error.raft_entry_too_large.entry_size > MAX_ENTRY_BYTES
        assert (await stubs.get(key)).not_found
        start_ts = await stubs.pd.tso()
        fits = await prewrite(
            stubs, [put(key, bytes(6 << 20))], primary_lock=key, start_version=start_ts
        )
        assert not fits.errors
        await stubs.commit(key, start_ts)
        assert len((await stubs.get(key)).value) == 6 << 20


async def test_a_commit_needs_a_prewrite_and_a_later_timestamp(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        context, start_ts = await stubs.context(KEY), await stubs.pd.tso()

        async def commit(commit_ts: int) -> kvrpcpb.KeyError:
            request = kvrpcpb.CommitRequest(
                context=context, start_version=start_ts, keys=[KEY], commit_version=commit_ts
            )
            return (await stubs.tikv.KvCommit(request)).error

        assert (await commit(start_ts - 1)).abort.startswith("[TM:ErrInvalidTxn]")
        assert (await commit(start_ts)).abort.startswith("[TM:ErrInvalidTxn]")
        missing = await commit(start_ts + 1)
        assert missing.txn_lock_not_found.key == KEY
        assert missing.retryable


async def test_unknown_transactions_are_told_apart_from_finished_ones(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        context, unknown = await stubs.context(KEY), await stubs.pd.tso()
        heartbeat = kvrpcpb.TxnHeartBeatRequest(
            context=context, primary_lock=KEY, start_version=unknown, advise_lock_ttl=9
        )
        assert (await stubs.tikv.KvTxnHeartBeat(heartbeat)).error.txn_not_found.start_ts == unknown
        status = kvrpcpb.CheckTxnStatusRequest(
            context=context, primary_key=KEY, lock_ts=unknown, current_ts=await stubs.pd.tso()
        )
        assert (await stubs.tikv.KvCheckTxnStatus(status)).error.txn_not_found.primary_key == KEY
        whole = kvrpcpb.ResolveLockRequest(
            context=context, start_version=unknown, commit_version=unknown + 1
        )
        assert not (await stubs.tikv.KvResolveLock(whole)).HasField("error")
        lite = kvrpcpb.ResolveLockRequest(
            context=context, start_version=unknown, commit_version=unknown + 1, keys=[KEY]
        )
        assert (await stubs.tikv.KvResolveLock(lite)).error.txn_lock_not_found.key == KEY


async def test_a_stale_for_update_ts_is_refused_or_conflicts(cluster: Cluster) -> None:
    key = b"k-stale"
    async with stubs_of(cluster) as stubs:
        start_ts = await stubs.pd.tso()
        commit_ts = await stubs.put(key, b"v")

        async def lock(for_update_ts: int) -> kvrpcpb.KeyError:
            request = kvrpcpb.PessimisticLockRequest(
                context=await stubs.context(key),
                mutations=[kvrpcpb.Mutation(op=kvrpcpb.PessimisticLock, key=key)],
                primary_lock=key,
                start_version=start_ts,
                for_update_ts=for_update_ts,
                lock_ttl=9,
            )
            (error,) = (await stubs.tikv.KvPessimisticLock(request)).errors
            return error

        assert (await lock(start_ts - 1)).abort.startswith("[TM:ErrInvalidTxn]")
        assert (await lock(start_ts)).conflict.conflict_commit_ts == commit_ts


async def test_a_read_of_the_future_is_refused_and_moves_no_later_commit(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        future = await stubs.get(KEY, 2**63)
        assert future.error.abort.startswith("[TM:ErrTimestampAhead]")
        context = await stubs.context(KEY)
        scanned = await stubs.tikv.KvScan(
            kvrpcpb.ScanRequest(context=context, version=2**63, limit=1)
        )
        assert scanned.error.abort.startswith("[TM:ErrTimestampAhead]")
        key = b"k-after-future"
        answer = await prewrite(stubs, [put(key)], primary_lock=key, try_one_pc=True)
        assert 0 < answer.one_pc_commit_ts <= await stubs.pd.tso()


async def test_raw_pairs_are_checked_too(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        context = await stubs.context(b"r")
        for key, code in ((b"", "ErrKeyEmpty"), (b"r" * 9000, "ErrKeyTooLarge")):
            answer = await stubs.tikv.RawPut(
                kvrpcpb.RawPutRequest(context=context, key=key, value=b"v")
            )
            assert answer.error.startswith(f"[TM:{code}]")
        pairs = [kvrpcpb.KvPair(key=b"r1"), kvrpcpb.KvPair(key=b"r2"), kvrpcpb.KvPair(key=b"r3")]
        odd = await stubs.tikv.RawBatchPut(
            kvrpcpb.RawBatchPutRequest(context=context, pairs=pairs, ttls=[1, 2])
        )
        assert "2 TTLs do not fit 3 pairs" in odd.error
