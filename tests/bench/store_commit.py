"""Durable transactions of two keys against a real store process: `python -m tests.bench.store_commit --clients N`.

One operation is a prewrite and a commit, over unary calls or one BatchCommands stream; the CPU and the memory are the
store's. Timestamps are counted by the bench, the coordinator is asked only once. Prints one JSON line.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from tests.integration.store.daemons import running_cluster
from tests.integration.store.stubs import Stubs, row_key, stubs_of

Send = Callable[[str, Any], Awaitable[Any]]


class BatchClient:
    """Requests of all clients on one BatchCommands stream."""

    def __init__(self, stubs: Stubs) -> None:
        self._stubs = stubs
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._queue: list[tuple[int, tikvpb.BatchCommandsRequest.Request]] = []
        self._wake = asyncio.Event()
        self._last = 0

    async def send(self, field: str, request: Any) -> Any:
        self._last += 1
        future = self._waiting[self._last] = asyncio.get_running_loop().create_future()
        self._queue.append((self._last, tikvpb.BatchCommandsRequest.Request(**{field: request})))
        self._wake.set()
        return await future

    async def run(self) -> None:
        async for message in self._stubs.tikv.BatchCommands(self._requests()):
            for request_id, response in zip(message.request_ids, message.responses, strict=True):
                self._waiting.pop(request_id).set_result(getattr(response, response.WhichOneof("cmd")))

    async def _requests(self) -> AsyncIterator[tikvpb.BatchCommandsRequest]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            queue, self._queue = self._queue, []
            ids, requests = zip(*queue, strict=True)
            yield tikvpb.BatchCommandsRequest(request_ids=ids, requests=requests)


def unary(stubs: Stubs) -> Send:
    return lambda field, request: getattr(stubs.tikv, f"Kv{field}")(request)


async def client(send: Send, context: Any, handles: range, clock: list[int], deadline: float, value: bytes) -> int:
    done = 0
    while time.perf_counter() < deadline:
        clock[0] += 2
        start_ts, handle = clock[0], handles[done % len(handles)]
        keys = [row_key(101, handle), row_key(101, handle + 1)]
        mutations = [kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value) for key in keys]
        prewrite = kvrpcpb.PrewriteRequest(
            context=context, mutations=mutations, primary_lock=keys[0], start_version=start_ts, lock_ttl=3000
        )
        commit = kvrpcpb.CommitRequest(context=context, keys=keys, start_version=start_ts, commit_version=start_ts + 1)
        first = await send("Prewrite", prewrite)
        assert not first.errors, first
        second = await send("Commit", commit)
        assert not second.HasField("error"), second
        done += 1
    return done


def usage(pid: int) -> tuple[float, float]:
    """CPU seconds and peak MiB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(peak.split()[1]) / 1024


async def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    with running_cluster(directory, "--split-keys", "") as cluster:
        async with stubs_of(cluster) as stubs, asyncio.TaskGroup() as tasks:
            context, clock = await stubs.context(b"t"), [await stubs.pd.tso()]
            batch = BatchClient(stubs)
            running = tasks.create_task(batch.run()) if options.mode == "batch" else None
            send = batch.send if running else unary(stubs)
            before, began = usage(cluster.store.process.pid)[0], time.perf_counter()
            async with asyncio.TaskGroup() as clients:
                each = [
                    clients.create_task(
                        client(
                            send,
                            context,
                            range(at * 10_000, (at + 1) * 10_000, 2),
                            clock,
                            began + options.seconds,
                            bytes(options.value_bytes),
                        )
                    )
                    for at in range(options.clients)
                ]
            seconds = time.perf_counter() - began
            cpu, peak = usage(cluster.store.process.pid)
            if running:
                running.cancel()
    ops = sum(task.result() for task in each)
    return {
        "name": "store_commit",
        "mode": options.mode,
        "clients": options.clients,
        "ops": ops,
        "seconds": round(seconds, 3),
        "per_s": round(ops / seconds),
        "cpu_us_per_op": round((cpu - before) / ops * 1e6, 1),
        "peak_rss_mb": round(peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--value-bytes", type=int, default=200)
    parser.add_argument("--mode", choices=["unary", "batch"], default="unary")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(measure(Path(directory), options))))


if __name__ == "__main__":
    main()
