"""Writes and watches through our client: `python -m tests.bench.metadata --servers embedded etcd
passed-on`.

Each caller puts 100 B values one after the other; then a watch reads them all. The servers take
turns, so that they share the machine's moods. Prints one JSON line.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from server.rpc.credentials import SecurityConfig
from storage.meta.client import EtcdMeta, open_meta
from tests.integration.meta import conftest as servers

SERVERS = ("embedded", "etcd", "passed-on")
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--callers", nargs="+", type=int, default=[1, 16, 128])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(_medians(arguments))))


async def _medians(arguments: argparse.Namespace) -> dict[str, object]:
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for name in arguments.servers:
            with (
                tempfile.TemporaryDirectory() as directory,
                running(name, Path(directory)) as (api, pids),
            ):
                for callers in arguments.callers:
                    measured = await _measured(api, pids, callers, arguments.seconds)
                    found.setdefault(f"{name} x{callers}", []).append(measured)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    return {"name": "metadata", "rounds": arguments.rounds, **medians}


@contextmanager
def running(name: str, directory: Path) -> Iterator[tuple[servers.Api, list[int]]]:
    """The server and the processes that are its cost."""
    with ExitStack() as stack:
        if name == "embedded":
            processes = [stack.enter_context(servers.coordinator(f"leveldb:{directory}"))]
        else:
            processes = stack.enter_context(servers.etcd_cluster(directory, 1))
            if name == "passed-on":
                processes.append(
                    stack.enter_context(servers.coordinator(f"etcd://{processes[0].address}"))
                )
        pids = [process.running.pid for process in processes if process.running]
        yield servers.Api([processes[-1].address], SecurityConfig()), pids


async def _measured(
    api: servers.Api, pids: list[int], callers: int, seconds: float
) -> dict[str, float]:
    async with open_meta(api.url, api.channel) as meta:
        first = await meta.put(b"bench/warm", b"")
        cpu_s, began = _cpu_s(pids), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            putting = [
                tasks.create_task(_put(meta, b"bench/%d" % caller, began + seconds))
                for caller in range(callers)
            ]
            counts = [await task for task in putting]
        took, puts = time.monotonic() - began, sum(counts)
        used_us = (_cpu_s(pids) - cpu_s) * 1e6
        began = time.monotonic()
        events = await _watched(meta, first + 1, min(puts, 5000))
        return {
            "puts_per_s": round(puts / took),
            "server_cpu_us": round(used_us / puts),
            "events_per_s": round(events / (time.monotonic() - began)),
        }


async def _put(meta: EtcdMeta, key: bytes, until: float) -> int:
    count = 0
    while time.monotonic() < until:
        await meta.put(key, bytes(100))
        count += 1
    return count


async def _watched(meta: EtcdMeta, start: int, count: int) -> int:
    seen = 0
    async for events in meta.watch(b"bench/", start):
        seen += len(events)
        if seen >= count:
            break
    return seen


def _cpu_s(pids: list[int]) -> float:
    stats: list[Any] = [
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids
    ]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS


if __name__ == "__main__":
    main()
