"""The real puller over regions that split, merge and lose their store:
every committed change comes, none too late.
"""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.puller.open_transactions import OpenTransactions
from server.puller.tikv.feed import EventFeeds
from server.puller.tikv.puller import TablePuller, Upstream
from server.rpc.pd import PdClient
from server.rpc.region_cache import region_end
from server.rpc.tikv import KvClient
from storage.codec import encode_i64
from storage.model.errors import TidemarkError
from storage.model.span import Span
from tests.integration.store.daemons import running_cluster
from tests.integration.store.stubs import row_key, stubs_of
from tests.integration.store.test_regions import QUICK, change_regions

Change = tuple[int, bytes, bytes | None]
TABLE = b"t" + encode_i64(101)


@dataclass
class Recorder:
    """A sorter that checks the promise of resolved timestamps."""

    changes: set[Change] = field(default_factory=set)
    resolved_ts: int = 0

    def add(self, _: Span, batch: pa.RecordBatch) -> None:
        rows = batch.select(["commit_ts", "key", "value"]).to_pylist()
        assert all(row["commit_ts"] > self.resolved_ts for row in rows), (
            "a change at or before a resolved_ts"
        )
        self.changes |= {(row["commit_ts"], row["key"], row["value"]) for row in rows}

    def resolve(self, _: Span, ts: int) -> None:
        assert ts >= self.resolved_ts
        self.resolved_ts = ts


async def write(client: KvClient, pd: PdClient, rng: random.Random, written: set[Change]) -> None:
    """Transactions of two keys, until cancelled between two of them;
    one whose fate is not known ends in a lock.
    """
    while True:
        start_ts = await pd.tso()
        keys = sorted({row_key(101, rng.randrange(1000)) for _ in range(2)})
        values = dict.fromkeys(keys, b"%d" % start_ts)
        mutations = [
            kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value) for key, value in values.items()
        ]
        try:
            await client.prewrite(
                mutations, primary=keys[0], start_version=start_ts, lock_ttl_ms=3000
            )
        except TidemarkError:
            await client.batch_rollback(keys, start_ts)
            continue
        commit_ts = await pd.tso()
        await client.commit(keys, start_ts, commit_ts)
        written |= {(commit_ts, key, value) for key, value in values.items()}


@pytest.mark.parametrize(("seed", "memory_bytes"), [(1, 1 << 30), (2, 0)])
async def test_the_puller_gets_every_change_whatever_regions_and_store_go_through(
    tmp_path: Path, seed: int, memory_bytes: int
) -> None:
    rng, recorder, written = random.Random(seed), Recorder(), set[Change]()
    with (
        running_cluster(tmp_path, *QUICK, "--resolved-ts-interval", "0.05") as cluster,
        closing(OpenTransactions(tmp_path / "open", memory_bytes)) as shared,
        ThreadPoolExecutor(1) as pool,
    ):
        async with (
            PdClient.open(cluster.coordinator.addr) as pd,
            KvClient.open(pd) as client,
            EventFeeds.open(pd.cluster_id) as feeds,
            asyncio.TaskGroup() as tasks,
        ):
            span = Span(1, TABLE, b"t" + encode_i64(102))
            puller = TablePuller(span, await pd.tso(), Upstream(pd, feeds, pool, shared), recorder)
            pulling = tasks.create_task(puller.run())
            writers = [
                tasks.create_task(write(client, pd, random.Random(seed * 10 + at), written))
                for at in range(3)
            ]
            for _ in range(2):
                async with stubs_of(cluster) as stubs, asyncio.TaskGroup() as churn:
                    churn.create_task(change_regions(stubs, rng))
                    await asyncio.sleep(rng.uniform(0.5, 0.9))
                    cluster.store.kill()
                cluster.restart_store()
            async with asyncio.timeout(60):
                while len(written) <= 50:  # noqa: ASYNC110 - writers tell no events
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            for writer in writers:
                writer.cancel()
            await asyncio.wait(writers)
            end_ts = await pd.tso()
            async with asyncio.timeout(60):
                while (
                    recorder.resolved_ts < end_ts
                ):  # a prewrite of a cancelled writer may arrive after a look
                    await resolve_locks(client, end_ts, written)
                    await asyncio.sleep(0.05)
            pulling.cancel()
        pool.shutdown()
        assert (shared.spilled, shared.used_bytes, (tmp_path / "open").exists()) == (0, 0, False)
    assert written <= {change for change in recorder.changes if change[0] <= end_ts}
    unknown = {change for change in recorder.changes - written if change[0] <= end_ts}
    assert len(unknown) <= 2 * 3, "only the writers' last transactions may be unknown to them"


async def test_a_large_open_transaction_waits_on_disk_and_comes_whole(tmp_path: Path) -> None:
    recorder, limit = Recorder(), 1 << 20
    values = {
        row_key(101, handle): random.Random(handle).randbytes(50_000) for handle in range(400)
    }
    with (
        running_cluster(tmp_path, "--resolved-ts-interval", "0.05") as cluster,
        closing(OpenTransactions(tmp_path / "open", limit)) as shared,
        ThreadPoolExecutor(1) as pool,
    ):
        async with (
            PdClient.open(cluster.coordinator.addr) as pd,
            KvClient.open(pd) as client,
            EventFeeds.open(pd.cluster_id) as feeds,
            asyncio.TaskGroup() as tasks,
        ):
            span = Span(1, TABLE, b"t" + encode_i64(102))
            pulling = tasks.create_task(
                TablePuller(span, await pd.tso(), Upstream(pd, feeds, pool, shared), recorder).run()
            )
            start_ts = await pd.tso()
            keys = list(values)
            for first in range(0, 400, 20):
                mutations = [
                    kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=values[key])
                    for key in keys[first:][:20]
                ]
                await client.prewrite(
                    mutations, primary=keys[0], start_version=start_ts, lock_ttl_ms=60_000
                )
            async with asyncio.timeout(60):
                while shared.spilled < 380:  # noqa: ASYNC110 - it spills in a thread
                    await asyncio.sleep(0.01)
            assert not recorder.changes
            commit_ts = await pd.tso()
            await client.commit(keys[:1], start_ts, commit_ts)
            await client.commit(keys[1:], start_ts, commit_ts)
            async with asyncio.timeout(60):
                while recorder.resolved_ts < commit_ts:  # noqa: ASYNC110 - the recorder tells no events
                    await asyncio.sleep(0.01)
            assert recorder.changes == {(commit_ts, key, value) for key, value in values.items()}
            pulling.cancel()
        pool.shutdown()
        assert (shared.spilled, shared.used_bytes, (tmp_path / "open").exists()) == (0, 0, False)


async def resolve_locks(client: KvClient, end_ts: int, written: set[Change]) -> None:
    """Roll back what cancelled writers left locked; what they committed half stays committed."""
    commits = {int(value): commit_ts for commit_ts, _, value in written if value}
    start, end = TABLE, TABLE + b"\xff"
    while start and start < end:
        page = await client.scan_lock(start, end, end_ts, 1000)
        for lock in page.locks:
            status = await client.cleanup(lock.primary_lock, lock.lock_version)
            await client.resolve_lock(
                [lock.key], lock.lock_version, commits.get(lock.lock_version, status)
            )
        start = page.next_key or region_end(page.route)
