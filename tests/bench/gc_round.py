"""A round of GC over what dead clients left: `python -m tests.bench.gc_round --transactions T
--keys K --ranges R`.

T transactions are prewritten on K keys each, over four regions of one store, and left; R ranges of
dropped tables wait. Prints one JSON line: how long each phase of the round took, and locks and
transactions a second. Everything runs as processes of its own on this machine.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1 import gc_pb2

from tests.integration.gc_worker.conftest import Cluster

_AT_ONCE = 32
_LETTERS = b"ahpz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=2000)
    parser.add_argument("--keys", type=int, default=4)
    parser.add_argument("--ranges", type=int, default=0)
    print(json.dumps(asyncio.run(_measured(parser.parse_args()))))


async def _measured(arguments: argparse.Namespace) -> dict[str, object]:
    async with AsyncExitStack() as stack:
        cluster = Cluster(Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
        await cluster.start()
        _, gc = await cluster.leader()
        left = iter(range(arguments.transactions))
        async with asyncio.TaskGroup() as clients:
            for _ in range(_AT_ONCE):
                clients.create_task(_die(cluster, left, arguments.keys))
        dropped = await cluster.now()
        for number in range(arguments.ranges):
            start = b"r%06d" % number
            await gc.RegisterDeleteRange(
                gc_pb2.RegisterDeleteRangeRequest(
                    job_id=number,
                    element_id=1,
                    start_key=start,
                    end_key=start + b"\xff",
                    ts=dropped,
                )
            )
        began_s = time.perf_counter()
        done = (await gc.RunGC(gc_pb2.RunGCRequest(), timeout=600)).round
        seconds = time.perf_counter() - began_s
        locked = await cluster.locked_keys()
    resolving_s = done.phase_ms["resolve locks"] / 1000
    assert done.result == "done"
    assert locked == []
    return {
        "bench": "gc_round",
        "transactions": arguments.transactions,
        "locks": arguments.transactions * arguments.keys,
        "ranges": done.deleted_ranges,
        "seconds": round(seconds, 3),
        "phase_ms": dict(done.phase_ms),
        "locks_per_s": round(arguments.transactions * arguments.keys / max(resolving_s, 1e-3)),
        "transactions_per_s": round(arguments.transactions / max(resolving_s, 1e-3)),
    }


async def _die(cluster: Cluster, left: Iterator[int], keys: int) -> None:
    for number in left:  # shared by all clients
        names = [b"%c%07d-%d" % (_LETTERS[key % 4], number, key) for key in range(keys)]
        mutations = [kvrpcpb.Mutation(op=kvrpcpb.Put, key=name, value=b"v" * 64) for name in names]
        start_ts = await cluster.now()
        await cluster.client.kv.prewrite(
            mutations, primary=names[0], start_version=start_ts, lock_ttl_ms=600_000
        )


if __name__ == "__main__":
    main()
