"""GC of a real store process and what foreground writes feel of it:
`python -m tests.bench.gc --versions N`.

The store holds N old versions, ten a row. One client writes transactions of one key all the time:
alone first, then while GC runs at full speed, then, in a fresh store, while GC runs under
`gc.max-write-bytes-per-sec`. The figures of growth are those of several N: 100000, 1000000,
10000000. Prints one JSON line.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

from kvproto import debugpb_pb2 as debugpb
from kvproto import debugpb_pb2_grpc as debuggrpc
from tidemarkpb.v1 import store_pb2
from tidemarkpb.v1.store_pb2_grpc import StoreServiceStub

from tests.bench.old_versions import fill
from tests.bench.store_commit import usage
from tests.integration.store.daemons import running_cluster
from tests.integration.store.stubs import Stubs, row_key, stubs_of

VERSIONS_A_ROW = 10


class Writer:
    """One client; `latencies_ms` of its transactions since the last `take`."""

    def __init__(self, stubs: Stubs) -> None:
        self._stubs = stubs
        self._latencies_ms: list[float] = []

    def take(self) -> dict[str, float]:
        """Median and p99 of the transactions so far."""
        taken, self._latencies_ms = self._latencies_ms, []
        cuts = quantiles(taken, n=100)
        return {"p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}

    async def run(self) -> None:
        """Write until cancelled."""
        for number in range(1 << 60):
            began = time.perf_counter()
            await self._stubs.put(row_key(101, 2 * (number % 500) + 1), b"v" * 100)
            self._latencies_ms.append((time.perf_counter() - began) * 1e3)


async def wait_collected(stubs: Stubs, safe_point: int, most_s: float) -> float:
    """Seconds until GC has finished, at most `most_s`."""
    admin, began = StoreServiceStub(stubs.channel), time.perf_counter()
    while True:
        progress = (await admin.GetStoreStatus(store_pb2.GetStoreStatusRequest())).gc
        passed = time.perf_counter() - began
        if (progress.finished and progress.safe_point == safe_point) or passed > most_s:
            return passed
        await asyncio.sleep(0.05)


async def measure(directory: Path, options: argparse.Namespace, limit: int) -> dict[str, Any]:
    flags = ("--split-keys", "", "--gc-poll-interval", "0.1", "--region-check-interval", "3600")
    with running_cluster(directory, *flags) as cluster:
        async with stubs_of(cluster) as stubs:
            first_ts = await stubs.pd.tso()
        rows = options.versions // VERSIONS_A_ROW
        fill(
            cluster,
            directory,
            rows=rows,
            versions=VERSIONS_A_ROW,
            value_bytes=options.value_bytes,
            first_ts=first_ts,
        )
        async with stubs_of(cluster) as stubs, asyncio.TaskGroup() as tasks:
            request = debugpb.ModifyTikvConfigRequest(
                config_name="gc.max-write-bytes-per-sec", config_value=str(limit)
            )
            await debuggrpc.DebugStub(stubs.channel).ModifyTikvConfig(request)
            writer = Writer(stubs)
            writing = tasks.create_task(writer.run())
            await asyncio.sleep(options.seconds)
            alone = writer.take()
            cpu = usage(cluster.store.process.pid)[0]
            await stubs.pd.update_gc_safe_point(safe_point := await stubs.pd.tso())
            seconds = await wait_collected(stubs, safe_point, options.seconds if limit else 3600)
            during = writer.take()
            cpu = usage(cluster.store.process.pid)[0] - cpu
            writing.cancel()
            peak = usage(cluster.store.process.pid)[1]
    return {
        "seconds": seconds,
        "alone": alone,
        "during": during,
        "cpu_s": cpu,
        "peak_rss_mb": round(peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of writing alone, and under the limit"
    )
    parser.add_argument(
        "--limit", type=int, default=1 << 20, help="bytes per second of the limited run"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        free = asyncio.run(measure(Path(directory), options, 0))
    with tempfile.TemporaryDirectory() as directory:
        limited = asyncio.run(measure(Path(directory), options, options.limit))
    result = {
        "name": "gc",
        "versions": options.versions,
        "seconds": round(free["seconds"], 3),
        "versions_per_s": round(options.versions / free["seconds"]),
        "cpu_us_per_version": round(free["cpu_s"] / options.versions * 1e6, 2),
        "peak_rss_mb": free["peak_rss_mb"],
        "p99_ms_alone": free["alone"]["p99_ms"],
        "p99_ms_gc": free["during"]["p99_ms"],
        "p99_ms_gc_limited": limited["during"]["p99_ms"],
        "p50_ms_alone": free["alone"]["p50_ms"],
        "p50_ms_gc": free["during"]["p50_ms"],
        "p50_ms_gc_limited": limited["during"]["p50_ms"],
        "limit_bytes_per_s": options.limit,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
