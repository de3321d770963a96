"""Durable transactions of `--keys` keys against a real store process:
`python -m tests.bench.store_commit`.

A transaction is committed by 2PC (a prewrite, then a commit), by async commit (the same, but it is
over after the prewrite, and the commit is awaited by nobody) or by 1PC, over unary calls or one
BatchCommands stream. CPU and memory are the store's. `--versions` first loads that many versions,
16 a key. Timestamps are counted by the bench from one of the oracle on. Prints one JSON line for
each number of clients and way to commit.
"""

import argparse
import asyncio
import itertools
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

VERSIONS_PER_KEY = 16
STORE_FLAGS = ("--region-split-size", "0", "--region-merge-size", "0", "--no-share-regions")
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
                self._waiting.pop(request_id).set_result(
                    getattr(response, response.WhichOneof("cmd"))
                )

    async def _requests(self) -> AsyncIterator[tikvpb.BatchCommandsRequest]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            queue, self._queue = self._queue, []
            ids, requests = zip(*queue, strict=True)
            yield tikvpb.BatchCommandsRequest(request_ids=ids, requests=requests)


def unary(stubs: Stubs) -> Send:
    return lambda field, request: getattr(stubs.tikv, f"Kv{field}")(request)


class Teller:
    """Commits transactions of its own keys, one after the other."""

    def __init__(
        self, send: Send, context: Any, clock: list[int], options: argparse.Namespace
    ) -> None:
        self._send = send
        self._context = context
        self._clock = clock
        self._value = bytes(options.value_bytes)
        self._keys = options.keys

    async def run(
        self, handles: range, deadline: float, commit: str, tasks: asyncio.TaskGroup
    ) -> int:
        """Transactions until `deadline`; returns how many."""
        done = 0
        while time.perf_counter() < deadline:
            handle = handles[done % len(handles)]
            keys = [row_key(101, handle + number) for number in range(self._keys)]
            self._clock[0] += 2
            await self.transact(keys, self._clock[0], commit, tasks)
            done += 1
        return done

    async def transact(
        self, keys: list[bytes], start_ts: int, commit: str, tasks: asyncio.TaskGroup
    ) -> None:
        """One transaction."""
        prewrite = kvrpcpb.PrewriteRequest(
            context=self._context,
            mutations=[
                kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=self._value) for key in keys
            ],
            primary_lock=keys[0],
            start_version=start_ts,
            lock_ttl=3000,
            txn_size=len(keys),
            use_async_commit=commit == "async",
            try_one_pc=commit == "1pc",
            secondaries=keys[1:] if commit != "2pc" else [],
        )
        answer = await self._send("Prewrite", prewrite)
        assert not answer.errors, answer
        assert not answer.HasField("region_error"), answer
        self._clock[0] = max(self._clock[0], answer.one_pc_commit_ts, answer.min_commit_ts)
        if commit == "1pc":
            assert answer.one_pc_commit_ts
        elif commit == "async":
            tasks.create_task(self._commit(keys, start_ts, answer.min_commit_ts))
        else:
            self._clock[0] += 2
            await self._commit(keys, start_ts, self._clock[0])

    async def _commit(self, keys: list[bytes], start_ts: int, commit_ts: int) -> None:
        request = kvrpcpb.CommitRequest(
            context=self._context, keys=keys, start_version=start_ts, commit_version=commit_ts
        )
        answer = await self._send("Commit", request)
        assert not answer.HasField("error"), answer


async def load(teller: Teller, clock: list[int], versions: int, tasks: asyncio.TaskGroup) -> None:
    """Write versions of 16 to a key, in transactions of 500 keys."""
    rows = versions // VERSIONS_PER_KEY
    for _ in range(VERSIONS_PER_KEY):
        for first in range(0, rows, 500):
            clock[0] += 2
            keys = [row_key(101, handle) for handle in range(first, min(first + 500, rows))]
            await teller.transact(keys, clock[0], "1pc", tasks)


def usage(pid: int) -> tuple[float, float]:
    """CPU seconds and peak MiB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    peak = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(
        peak.split()[1]
    ) / 1024


async def measure(directory: Path, options: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    with running_cluster(directory, "--split-keys", "", *STORE_FLAGS) as cluster:
        async with stubs_of(cluster) as stubs, asyncio.TaskGroup() as tasks:
            context, clock = await stubs.context(b"t"), [await stubs.pd.tso()]
            batch = BatchClient(stubs)
            running = tasks.create_task(batch.run()) if options.mode == "batch" else None
            teller = Teller(batch.send if running else unary(stubs), context, clock, options)
            await load(teller, clock, options.versions, tasks)
            for commit, clients in itertools.product(options.commit, options.clients):
                yield await _round(teller, cluster.store.process.pid, commit, clients, options)
            if running:
                running.cancel()


async def _round(
    teller: Teller, pid: int, commit: str, clients: int, options: argparse.Namespace
) -> dict[str, Any]:
    before, began = usage(pid)[0], time.perf_counter()
    async with asyncio.TaskGroup() as tellers:
        each = [
            tellers.create_task(
                teller.run(
                    range(at * 10_000, (at + 1) * 10_000, options.keys),
                    began + options.seconds,
                    commit,
                    tellers,
                )
            )
            for at in range(clients)
        ]
    seconds = time.perf_counter() - began
    cpu, peak = usage(pid)
    ops = sum(task.result() for task in each)
    return {
        "name": "store_commit",
        "mode": options.mode,
        "commit": commit,
        "clients": clients,
        "versions": options.versions,
        "keys": options.keys,
        "ops": ops,
        "seconds": round(seconds, 3),
        "per_s": round(ops / seconds),
        "cpu_us_per_op": round((cpu - before) / ops * 1e6, 1),
        "cpu_us_per_row": round((cpu - before) / (ops * options.keys) * 1e6, 2),
        "peak_rss_mb": round(peak),
    }


async def report(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async for result in measure(Path(directory), options):
            print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[16])
    parser.add_argument(
        "--commit", nargs="+", choices=["2pc", "async", "1pc"], default=["2pc", "async", "1pc"]
    )
    parser.add_argument(
        "--versions", type=int, default=0, help="versions to load first; 10000000 takes a while"
    )
    parser.add_argument("--keys", type=int, default=2, help="keys of a transaction")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--value-bytes", type=int, default=200)
    parser.add_argument("--mode", choices=["unary", "batch"], default="batch")
    asyncio.run(report(parser.parse_args()))


if __name__ == "__main__":
    main()
