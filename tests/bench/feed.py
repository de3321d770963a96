"""Change feed of a real store process: `python -m tests.bench.feed --rows N`.

An EventFeedV2 client subscribes to one region: first the incremental scan of N committed rows that
lie on disk, then rows that clients commit meanwhile. CPU is the store's; the client only parses
messages. Prints one JSON line.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from kvproto import cdcpb_pb2 as cdcpb
from kvproto import cdcpb_pb2_grpc as cdcgrpc
from kvproto import kvrpcpb_pb2 as kvrpcpb

from tests.bench.old_versions import fill
from tests.bench.store_commit import usage
from tests.integration.store.daemons import running_cluster
from tests.integration.store.stubs import Stubs, row_key, stubs_of


class Reader:
    """Counts the rows of a subscription as they come."""

    def __init__(self, stubs: Stubs) -> None:
        metadata = (("features", "stream-multiplexing"),)
        self._stubs = stubs
        self._call = cdcgrpc.ChangeDataStub(stubs.channel).EventFeedV2(metadata=metadata)
        self.rows = 0
        self.resolved_ts = 0
        self.initialized = False

    async def subscribe(self, checkpoint_ts: int) -> None:
        """Ask for the only region."""
        (route,) = await self._stubs.pd.scan_regions(b"")
        await self._call.write(
            cdcpb.ChangeDataRequest(
                header=cdcpb.Header(cluster_id=self._stubs.pd.cluster_id),
                region_id=route.region.id,
                region_epoch=route.region.region_epoch,
                checkpoint_ts=checkpoint_ts,
                request_id=1,
                extra_op=kvrpcpb.ReadOldValue,
            )
        )

    async def step(self) -> None:
        """Take one message."""
        message: Any = await self._call.read()
        for event in message.events:
            assert not event.HasField("error"), event
            entries = event.entries.entries
            self.initialized = self.initialized or entries[-1].type == cdcpb.Event.INITIALIZED
            self.rows += sum(
                row.type in (cdcpb.Event.COMMIT, cdcpb.Event.COMMITTED) for row in entries
            )
        self.resolved_ts = max(self.resolved_ts, message.resolved_ts.ts)


async def commit_many(
    stubs: Stubs, context: kvrpcpb.Context, start_ts: int, first: int, rows: int, value: bytes
) -> None:
    """One transaction of `rows` rows."""
    keys = [row_key(101, 2 * (first + at) + 1) for at in range(rows)]
    mutations = [kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value) for key in keys]
    answer = await stubs.tikv.KvPrewrite(
        kvrpcpb.PrewriteRequest(
            context=context,
            mutations=mutations,
            primary_lock=keys[0],
            start_version=start_ts,
            lock_ttl=3000,
        )
    )
    assert not answer.errors, answer
    await stubs.tikv.KvCommit(
        kvrpcpb.CommitRequest(
            context=context, keys=keys, start_version=start_ts, commit_version=await stubs.pd.tso()
        )
    )


async def live(stubs: Stubs, reader: Reader, options: argparse.Namespace) -> None:
    """Write transactions of 50 rows, 8 at a time, and read them from the feed."""
    context, value = await stubs.context(row_key(101, 1)), b"v" * options.value_bytes

    async def write(client: int) -> None:
        for number in range(options.live_rows // 8 // 50):
            await commit_many(
                stubs, context, await stubs.pd.tso(), (client << 32) + 50 * number, 50, value
            )

    async with asyncio.TaskGroup() as tasks:
        writers = [tasks.create_task(write(client)) for client in range(8)]
        while not all(writer.done() for writer in writers):
            await reader.step()
    end_ts = await stubs.pd.tso()
    while reader.resolved_ts < end_ts:
        await reader.step()


async def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    with running_cluster(
        directory, "--split-keys", "", "--region-check-interval", "3600"
    ) as cluster:
        async with stubs_of(cluster) as stubs:
            first_ts = await stubs.pd.tso()
        fill(
            cluster,
            directory,
            rows=options.rows,
            versions=1,
            value_bytes=options.value_bytes,
            first_ts=first_ts,
        )
        async with stubs_of(cluster) as stubs:
            reader, pid = Reader(stubs), cluster.store.process.pid
            cpu, began = usage(pid)[0], time.perf_counter()
            await reader.subscribe(first_ts - 1)
            while not reader.initialized:
                await reader.step()
            scan_s, scan_cpu, scanned = (
                time.perf_counter() - began,
                usage(pid)[0] - cpu,
                reader.rows,
            )
            peak = usage(pid)[1]
            cpu, began = usage(pid)[0], time.perf_counter()
            await live(stubs, reader, options)
            live_s, live_cpu = time.perf_counter() - began, usage(pid)[0] - cpu
    rows = reader.rows - scanned
    assert scanned == options.rows
    return {
        "name": "feed",
        "rows": scanned,
        "scan_rows_per_s": round(scanned / scan_s),
        "scan_cpu_us_per_row": round(scan_cpu / scanned * 1e6, 2),
        "scan_peak_rss_mb": round(peak),
        "live_rows": rows,
        "live_rows_per_s": round(rows / live_s),
        "live_cpu_us_per_row": round(live_cpu / rows * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--live-rows", type=int, default=20_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(measure(Path(directory), options))))


if __name__ == "__main__":
    main()
