"""What foreground writes feel while the range of a dropped table is deleted:
`python -m tests.bench.destroy_range`.

A real store holds `--rows` rows of one table; a client writes transactions of one key of another
table, alone first and then while UnsafeDestroyRange runs. Prints one JSON line.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from tests.bench.gc import Writer
from tests.bench.old_versions import fill
from tests.bench.store_commit import usage
from tests.integration.store.daemons import running_cluster
from tests.integration.store.stubs import row_key, stubs_of


class OtherTable(Writer):
    """Writes to a table that stays."""

    async def run(self) -> None:
        """Write until cancelled."""
        for number in range(1 << 60):
            began = time.perf_counter()
            await self._stubs.put(row_key(200, number % 1000), b"v" * 100)
            self._latencies_ms.append((time.perf_counter() - began) * 1e3)


async def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    flags = ("--split-keys", "", "--region-check-interval", "3600", *options.flags)
    with running_cluster(directory, *flags) as cluster:
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
        async with stubs_of(cluster) as stubs, asyncio.TaskGroup() as tasks:
            writer = OtherTable(stubs)
            writing = tasks.create_task(writer.run())
            await asyncio.sleep(options.seconds)
            alone = writer.take()
            cpu, began = usage(cluster.store.process.pid)[0], time.perf_counter()
            destroy = kvrpcpb.UnsafeDestroyRangeRequest(
                start_key=row_key(101, 0)[:9], end_key=row_key(102, 0)[:9]
            )
            answer = await stubs.tikv.UnsafeDestroyRange(destroy)
            assert not answer.error, answer
            seconds = time.perf_counter() - began
            during = writer.take()
            cpu = usage(cluster.store.process.pid)[0] - cpu
            writing.cancel()
    return {
        "name": "destroy_range",
        "rows": options.rows,
        "seconds": round(seconds, 2),
        "us_per_row": round(seconds / options.rows * 1e6, 2),
        "p50_ms_alone": alone["p50_ms"],
        "p50_ms_during": during["p50_ms"],
        "p99_ms_alone": alone["p99_ms"],
        "p99_ms_during": during["p99_ms"],
        "cpu_s": round(cpu, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--value-bytes", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=4.0, help="of writing alone")
    parser.add_argument("--flags", nargs="*", default=[], help="more flags of the store")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(measure(Path(directory), options))))


if __name__ == "__main__":
    main()
