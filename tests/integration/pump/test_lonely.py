"""Lonely prewrites beside a real coordinator and store: committed, rolled back, alive,
or never there at all.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from structlog.testing import capture_logs
from tipb import binlog_pb2, pump_pb2, pump_pb2_grpc

from server.pump.unmatched import UnmatchedPrewrites
from server.rpc.client import connect
from server.rpc.tikv import KvClient
from storage.pump.binlog import fake, parse
from storage.pump.storage import PumpStorage, open_pump_storage
from storage.vfs import RealFS
from tests.integration.pump.test_daemon import FAST, metrics_of, pump_argv, started
from tests.integration.store.daemons import Cluster, running_cluster
from tests.integration.store.stubs import Stubs, row_key, stubs_of

YOUNG, OLD = 600.0, 0.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@dataclass
class Bench:
    """A storage, the cluster it belongs to, and what looks after it."""

    storage: PumpStorage
    stubs: Stubs
    kv: KvClient

    async def prewrite(self, start_ts: int, key: bytes) -> None:
        binlog = binlog_pb2.Binlog(
            tp=0, start_ts=start_ts, prewrite_key=key, prewrite_value=b"rows"
        )
        await self.storage.write([parse(binlog.SerializeToString())])
        async with asyncio.timeout(60):
            while start_ts not in dict(await self.storage.oldest_waiting(100)):  # noqa: ASYNC110 - indexing has no event
                await asyncio.sleep(0)

    async def settled(self, txn_timeout_seconds: float = YOUNG) -> int:
        """How many prewrites the second look settles: the first one only remembers who waits."""
        lonely = UnmatchedPrewrites(self.storage, self.stubs.pd, self.kv, txn_timeout_seconds)
        assert await lonely.look() == 0
        return await lonely.look()

    async def commits(self) -> list[int]:
        """What a reader gets, as commit_ts; ends with a heartbeat that only comes when nothing
        waits.
        """
        end_ts = await self.stubs.pd.tso()
        await self.storage.write([parse(fake(end_ts))])
        found: list[int] = []
        async for chunk in self.storage.pull(0):
            found += [binlog_pb2.Binlog.FromString(payload).commit_ts for payload in chunk.payloads]
            if found and found[-1] == end_ts:
                return found[:-1]
        raise AssertionError


@pytest.fixture
async def bench(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Bench]:
    async with benched(cluster, tmp_path) as found:
        yield found


@asynccontextmanager
async def benched(cluster: Cluster, directory: Path) -> AsyncIterator[Bench]:
    async with (
        stubs_of(cluster) as stubs,
        KvClient.open(stubs.pd) as kv,
        open_pump_storage(RealFS(), directory) as storage,
    ):
        yield Bench(storage, stubs, kv)


async def test_a_prewrite_whose_commit_binlog_was_lost_is_served_and_lets_the_others_go(
    bench: Bench,
) -> None:
    key = row_key(201, 1)
    start_ts = await bench.stubs.prewrite(key, b"v")
    await bench.prewrite(start_ts, key)
    commit_ts = await bench.stubs.commit(key, start_ts)
    later_ts = await bench.stubs.prewrite(row_key(201, 2), b"w")
    await bench.prewrite(later_ts, row_key(201, 2))
    after_ts = await bench.stubs.commit(row_key(201, 2), later_ts)
    assert await bench.settled() == 2
    assert await bench.commits() == [commit_ts, after_ts]
    assert bench.storage.all_matched


async def test_a_prewrite_that_was_rolled_back_is_dropped(bench: Bench) -> None:
    key = row_key(202, 1)
    start_ts = await bench.stubs.prewrite(key, b"v")
    await bench.prewrite(start_ts, key)
    await bench.kv.batch_rollback([key], start_ts)
    assert await bench.settled() == 1
    assert await bench.commits() == []


async def test_a_young_transaction_without_a_trace_and_a_living_one_are_waited_for(
    bench: Bench,
) -> None:
    locked, unseen = row_key(203, 1), row_key(203, 2)
    start_ts = await bench.stubs.prewrite(locked, b"v", ttl_ms=600_000)
    await bench.prewrite(start_ts, locked)
    await bench.prewrite(await bench.stubs.pd.tso(), unseen)
    assert await bench.settled(YOUNG) == 0
    assert bench.storage.statistics().waiting_prewrites == 2
    assert await bench.settled(OLD) == 1  # the one without a trace; the other is alive, however old
    commit_ts = await bench.stubs.commit(locked, start_ts)
    assert await bench.settled(OLD) == 1
    assert await bench.commits() == [commit_ts]


async def test_an_old_transaction_is_rolled_back_in_the_store_before_it_is_dropped(
    bench: Bench,
) -> None:
    key, unseen = row_key(204, 1), row_key(204, 2)
    start_ts = await bench.stubs.pd.tso()
    await bench.stubs.prewrite(key, b"v", start_ts=start_ts, ttl_ms=1)
    await bench.prewrite(start_ts, key)
    await bench.prewrite(start_ts + 1, unseen)
    assert await bench.settled(OLD) == 2
    assert await bench.commits() == []
    late = kvrpcpb.PrewriteRequest(
        context=await bench.stubs.context(unseen),
        mutations=[kvrpcpb.Mutation(op=kvrpcpb.Put, key=unseen, value=b"v")],
        primary_lock=unseen,
        start_version=start_ts + 1,
        lock_ttl=3000,
    )
    assert (await bench.stubs.tikv.KvPrewrite(late)).errors, (
        "its rows are not in the lake, so it must not commit now"
    )


async def test_an_outcome_that_gc_may_have_removed_is_not_guessed(bench: Bench) -> None:
    start_ts = await bench.stubs.pd.tso()
    await bench.prewrite(start_ts, row_key(205, 1))
    safe_point = await bench.stubs.pd.tso()
    await bench.stubs.pd.update_service_gc_safe_point("gc_worker", (1 << 63) - 1, safe_point)
    await bench.stubs.pd.update_gc_safe_point(safe_point)
    with capture_logs() as logs:
        assert await bench.settled(OLD) == 0
    assert any("GC has passed it" in str(entry.get("error")) for entry in logs)
    assert not bench.storage.all_matched


async def test_a_prewrite_without_a_key_keeps_waiting_and_says_why(bench: Bench) -> None:
    await bench.prewrite(await bench.stubs.pd.tso(), b"")
    with capture_logs() as logs:
        assert await bench.settled(OLD) == 0
    assert any("names no key" in str(entry.get("error")) for entry in logs)


async def test_a_running_pump_serves_what_its_writer_never_finished(
    cluster: Cluster, tmp_path: Path
) -> None:
    key = row_key(206, 1)
    argv = pump_argv(cluster.coordinator.addr, tmp_path / "pump", *FAST, "--lonely-seconds", "0.2")
    async with (
        stubs_of(cluster) as stubs,
        started(*argv) as pump,
        connect(pump.endpoints["pump"]) as channel,
    ):
        start_ts = await stubs.prewrite(key, b"v", ttl_ms=600_000)
        binlog = binlog_pb2.Binlog(
            tp=0, start_ts=start_ts, prewrite_key=key, prewrite_value=b"rows"
        )
        pumps, cluster_id = pump_pb2_grpc.PumpStub(channel), stubs.pd.cluster_id
        await pumps.WriteBinlog(
            pump_pb2.WriteBinlogReq(clusterID=cluster_id, payload=binlog.SerializeToString())
        )
        commit_ts = await stubs.commit(key, start_ts)
        request = pump_pb2.PullBinlogReq(
            clusterID=cluster_id, startFrom=pump_pb2.Pos(offset=start_ts)
        )
        async with asyncio.timeout(60):
            async for answer in pumps.PullBinlogs(request):
                found = binlog_pb2.Binlog.FromString(answer.entity.payload)
                if found.start_ts == start_ts:
                    break
        assert (found.commit_ts, found.prewrite_value) == (commit_ts, b"rows")
        text = await asyncio.to_thread(metrics_of, pump)
        asked = re.search(
            r'tidemark_pump_lonely_prewrites_asked_total\{answer="committed"\} (\S+)', text
        )
        # More than once where the next look comes before the outcome is indexed.
        assert asked
        assert float(asked[1]) >= 1.0
