"""Raw KV over the wire: TTLs, compare-and-swap, batch scans."""

import asyncio

from kvproto import kvrpcpb_pb2 as kvrpcpb

from storage.mvcc.raw import range_sum
from tests.integration.store.daemons import Cluster
from tests.integration.store.stubs import stubs_of


async def test_a_pair_with_a_ttl_says_how_long_it_lives_and_ends(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        of = {"context": await stubs.context(b"r"), "key": b"r-ttl"}
        await stubs.tikv.RawPut(kvrpcpb.RawPutRequest(**of, value=b"v", ttl=1000))
        assert 900 < (await stubs.tikv.RawGetKeyTTL(kvrpcpb.RawGetKeyTTLRequest(**of))).ttl <= 1000
        await stubs.tikv.RawPut(kvrpcpb.RawPutRequest(**of, value=b"v", ttl=1))
        await asyncio.sleep(1.1)
        assert (await stubs.tikv.RawGet(kvrpcpb.RawGetRequest(**of))).not_found
        assert (await stubs.tikv.RawGetKeyTTL(kvrpcpb.RawGetKeyTTLRequest(**of))).not_found
        await stubs.tikv.RawPut(kvrpcpb.RawPutRequest(**of, value=b"v"))
        forever = await stubs.tikv.RawGetKeyTTL(kvrpcpb.RawGetKeyTTLRequest(**of))
        assert (forever.ttl, forever.not_found) == (0, False)


async def test_compare_and_swap_tells_what_it_found(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        of = {"context": await stubs.context(b"r"), "key": b"r-cas"}

        async def swap(value: bytes, **previous: object) -> tuple[bool, bool, bytes]:
            answer = await stubs.tikv.RawCompareAndSwap(
                kvrpcpb.RawCASRequest(**of, value=value, **previous)
            )
            return answer.succeed, answer.previous_not_exist, answer.previous_value

        assert await swap(b"1", previous_value=b"0") == (False, True, b"")
        assert await swap(b"1", previous_not_exist=True) == (True, True, b"")
        assert await swap(b"2", previous_not_exist=True) == (False, False, b"1")
        assert await swap(b"2", previous_value=b"1") == (True, False, b"1")
        assert await swap(b"", previous_value=b"2", delete=True) == (True, False, b"2")
        assert (await stubs.tikv.RawGet(kvrpcpb.RawGetRequest(**of))).not_found


async def test_a_batch_scan_limits_each_range_and_a_checksum_covers_all(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        context = await stubs.context(b"r")
        pairs = [kvrpcpb.KvPair(key=b"rs-%d" % at, value=b"v") for at in range(6)]
        await stubs.tikv.RawBatchPut(kvrpcpb.RawBatchPutRequest(context=context, pairs=pairs))
        ranges = [
            kvrpcpb.KeyRange(start_key=b"rs-0", end_key=b"rs-3"),
            kvrpcpb.KeyRange(start_key=b"rs-3", end_key=b"rs-9"),
        ]
        checked = kvrpcpb.RawChecksumRequest(context=context, ranges=ranges)
        total = await stubs.tikv.RawChecksum(checked)
        assert (total.total_kvs, total.total_bytes) == (6, 30)
        assert total.checksum == range_sum((pair.key, pair.value) for pair in pairs).xor
        request = kvrpcpb.RawBatchScanRequest(
            context=context, ranges=ranges, each_limit=2, key_only=True
        )
        found = (await stubs.tikv.RawBatchScan(request)).kvs
        assert [(pair.key, pair.value) for pair in found] == [
            (b"rs-%d" % at, b"") for at in (0, 1, 3, 4)
        ]
