"""What a dump asks of a real store with many regions: pages, the last key,
and where regions begin.
"""

import random
from pathlib import Path

import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.dump.cluster.chunks import ChunkLostError, ClusterStore
from server.rpc.key_error import LockedError
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.tidb.record import record_key, table_span
from tests.integration.store.daemons import running_cluster
from tests.integration.store.regions import QUICK, put, wait_regions

FLAGS = (
    "--split-keys",
    "",
    "--write-buffer-bytes",
    "65536",
    "--region-split-size",
    "200000",
    *QUICK,
)
HANDLES = range(0, 200, 2)


async def test_pages_and_last_keys_reach_over_regions_and_see_their_timestamp(
    tmp_path: Path,
) -> None:
    with running_cluster(tmp_path, *FLAGS) as cluster:
        async with PdClient.open(cluster.coordinator.addr) as pd, KvClient.open(pd) as kv:
            chance, store, span = random.Random(6), ClusterStore(pd, kv), table_span(101)
            rows = {record_key(101, handle): chance.randbytes(10_000) for handle in HANDLES}
            for key, value in rows.items():
                await put(kv, pd, key, value)
            await wait_regions(pd, 3)
            ts = await store.now()
            await put(kv, pd, record_key(101, 999), b"later")
            keys, values = await store.page(span.start_key, span.end_key, ts, 1000)
            assert dict(zip(keys.to_pylist(), values.to_pylist(), strict=True)) == rows
            assert (await store.page(record_key(101, 51), span.end_key, ts, 7))[0].to_pylist() == [
                *rows
            ][26:33]
            assert await store.keys(span.start_key, record_key(101, 50), ts, 1000) == [*rows][:25]
            assert await store.last(span.start_key, span.end_key, ts) == record_key(101, 198)
            for handle in (0, 1, 2, 77, 131, 198, 199):
                below = [key for key in rows if key < record_key(101, handle)]
                assert await store.last(span.start_key, record_key(101, handle), ts) == (
                    below[-1] if below else None
                )
            bounds = await store.region_bounds(span.start_key, span.end_key)
            assert bounds
            assert bounds == sorted(key for key in bounds if span.start_key < key < span.end_key)
            assert await store.last(*_span(202), ts) is None
            assert (await store.page(*_span(202), ts, 10))[0].to_pylist() == []


async def test_a_page_sees_locks_and_a_chunk_that_gc_overtook_is_named(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        async with PdClient.open(cluster.coordinator.addr) as pd, KvClient.open(pd) as kv:
            store, key = ClusterStore(pd, kv), record_key(101, 1)
            await put(kv, pd, key, b"v")
            start_ts = await pd.tso()
            mutation = kvrpcpb.Mutation(op=kvrpcpb.Put, key=record_key(101, 2), value=b"w")
            await kv.prewrite(
                [mutation], primary=mutation.key, start_version=start_ts, lock_ttl_ms=1
            )
            ts = await store.now()
            with pytest.raises(LockedError):
                await kv.scan_columns(key, record_key(101, 9), ts, 10)
            assert (await store.page(key, record_key(101, 9), ts, 10))[0].to_pylist() == [key], (
                "its writer is dead"
            )
            await store.check_kept(ts)
            await pd.update_gc_safe_point(await pd.tso())
            with pytest.raises(ChunkLostError, match="ErrDumpSnapshotLost"):
                await store.check_kept(ts)


def _span(table_id: int) -> tuple[bytes, bytes]:
    span = table_span(table_id)
    return span.start_key, span.end_key
