"""What a pump takes and gives: `python -m tests.bench.pump --subject unary --callers 64 --bytes 256
…`.

`unary` is WriteBinlog over real sockets from a load generator that costs little, `stream` is
WriteBinlogs in batches, `pull` is PullBinlogs of what was written before; `append`, `gc` and
`recovery` are the storage in process. Pairs of prewrite and commit; the disk syncs each group. The
last line is one JSON object; cpu_us_per_op is the pump's own. With `--addr`, `--pid` and
`--cluster-id` a running peer is measured, filled by WriteBinlog before it is pulled from.
"""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path

import grpc.aio
from tidemarkpb.v1 import pump_pb2 as stream_pb2
from tipb import binlog_pb2, pump_pb2

from storage.pump.binlog import parse
from storage.pump.storage import PumpStorage, open_pump_storage
from storage.vfs import RealFS
from tests.bench.http2 import Load
from tests.bench.target import Target
from tests.integration.store.daemons import start

CLUSTER_ID = 4242
FIRST_TS = 1 << 58
STREAMS, IN_FLIGHT = 2, 4


def started(stack: ExitStack, directory: Path) -> Target:
    """A pump of our own beside a coordinator, on a directory of its own."""
    coordinator = start(
        *("coordinator", "--addr", "127.0.0.1:0", "--cluster-id", str(CLUSTER_ID)),
        *("--metadata", f"leveldb:{directory / 'meta'}"),
    )
    stack.callback(coordinator.kill)
    daemon = start(
        "pump",
        "--addr",
        "127.0.0.1:0",
        "--coordinator",
        coordinator.addr,
        "--data-dir",
        f"{directory}/pump",
    )
    stack.callback(daemon.kill)
    return Target(daemon.addr, {"pump": daemon.process.pid}, CLUSTER_ID)


def binlogs(size: int) -> Iterator[bytes]:
    """Prewrite, commit, prewrite, …, with new timestamps for each pair;
    `size` bytes of rows in a prewrite.
    """
    rows = bytes(size)
    for ts in count(FIRST_TS, 2):
        yield binlog_pb2.Binlog(
            tp=0, start_ts=ts, prewrite_key=b"k", prewrite_value=rows
        ).SerializeToString()
        yield binlog_pb2.Binlog(
            tp=1, start_ts=ts, commit_ts=ts + 1, prewrite_key=b"k"
        ).SerializeToString()


async def unary(args: argparse.Namespace, pump: Target) -> dict[str, float]:
    """WriteBinlog, `callers` at a time."""
    payloads = binlogs(args.bytes)
    cpu: list[float] = []

    def requests() -> Iterator[bytes]:
        for payload in payloads:
            yield pump_pb2.WriteBinlogReq(
                clusterID=pump.cluster_id, payload=payload
            ).SerializeToString()

    async def measure() -> None:
        cpu.append(pump.cpu_s()["pump"])

    load = await Load.run(
        *(pump.address, "binlog.Pump/WriteBinlog", requests),
        callers=args.callers,
        seconds=args.seconds,
        measure=measure,
    )
    return figures(load.calls, load.seconds, cpu[1] - cpu[0]) | {
        "p50_ms": round(load.quantile_ms(0.5), 2),
        "p99_ms": round(load.quantile_ms(0.99), 2),
    }


async def stream(args: argparse.Namespace, pump: Target) -> dict[str, float]:
    """WriteBinlogs: batches made before the clock starts,
    a few of them under way on each stream.
    """
    payloads = binlogs(args.bytes)
    batches = [list(islice(payloads, args.batch)) for _ in range(args.batches)]
    messages = [
        stream_pb2.WriteBinlogsRequest(cluster_id=pump.cluster_id, payloads=batch)
        for batch in batches
    ]
    raw = [message.SerializeToString() for message in messages]
    async with grpc.aio.insecure_channel(pump.address) as channel:
        cpu, began = pump.cpu_s()["pump"], time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(STREAMS):
                tasks.create_task(_send(channel, raw[number::STREAMS]))
        seconds, cpu = time.perf_counter() - began, pump.cpu_s()["pump"] - cpu
    return figures(args.batches * args.batch, seconds, cpu) | {
        "batch": args.batch,
        "streams": STREAMS,
    }


async def _send(channel: grpc.aio.Channel, messages: list[bytes]) -> None:
    call = channel.stream_stream("/tidemarkpb.v1.PumpService/WriteBinlogs")()
    for number, message in enumerate(messages):
        await call.write(message)
        if number >= IN_FLIGHT:
            await call.read()
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass


async def pull(args: argparse.Namespace, pump: Target) -> dict[str, float]:
    """PullBinlogs of all that was written just before, by one reader;
    its clock starts at the first.
    """
    written = await (unary if args.addr else stream)(args, pump)
    pairs = int(written["ops"]) // 2 - args.callers
    async with grpc.aio.insecure_channel(pump.address) as channel:
        request = pump_pb2.PullBinlogReq(clusterID=pump.cluster_id).SerializeToString()
        call = channel.unary_stream("/binlog.Pump/PullBinlogs")(request)
        found, cpu, began = 0, 0.0, 0.0
        async for _ in call:
            if not found:
                cpu, began = pump.cpu_s()["pump"], time.perf_counter()
            found += 1
            if found == pairs:
                break
        seconds, cpu = time.perf_counter() - began, pump.cpu_s()["pump"] - cpu
        call.cancel()
    return figures(pairs, seconds, cpu)


async def append(args: argparse.Namespace, directory: Path) -> dict[str, float]:
    """`callers` writers of pairs to the storage itself."""
    cpu, began = time.process_time(), time.perf_counter()
    async with open_pump_storage(RealFS(), directory) as storage:
        timestamps = count(FIRST_TS, 2)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(args.callers):
                tasks.create_task(
                    _write(storage, timestamps, began + args.seconds, bytes(args.bytes))
                )
        ops = storage.written
        seconds = time.perf_counter() - began
    return figures(ops, seconds, time.process_time() - cpu)


async def gc(args: argparse.Namespace, directory: Path) -> dict[str, float]:
    """GC of `keys` index keys, and what writers feel of it:
    p99 of 16 of them before it and meanwhile.
    """
    async with open_pump_storage(RealFS(), directory) as storage:
        await _fill(storage, args)
        timestamps = count(FIRST_TS + args.keys + 2, 2)
        before = await _latencies(storage, timestamps, args.seconds)
        gc_ts, cpu, began = FIRST_TS + args.keys - 2, time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(_latencies(storage, timestamps, args.seconds))
            done = await storage.gc(gc_ts)
            seconds = time.perf_counter() - began
        found = figures(done.keys, seconds, time.process_time() - cpu)
        return found | {
            "p99_ms_before": _p99_ms(before),
            "p99_ms": _p99_ms(writing.result()),
            "pauses": done.pauses,
        }


async def recovery(args: argparse.Namespace, directory: Path) -> dict[str, float]:
    """A start without an index: all of the log is read and indexed."""
    async with open_pump_storage(RealFS(), directory) as storage:
        await _fill(storage, args)
        size = storage.statistics().log_bytes
    shutil.rmtree(directory / "kv")
    cpu, began = time.process_time(), time.perf_counter()
    async with open_pump_storage(RealFS(), directory) as storage:
        seconds = time.perf_counter() - began
        found = figures(storage.recovery.replayed, seconds, time.process_time() - cpu)
    return found | {"mb_per_s": round(size / seconds / 1e6, 1), "log_mb": round(size / 1e6)}


async def _fill(storage: PumpStorage, args: argparse.Namespace) -> None:
    payloads = islice(binlogs(args.bytes), args.keys)
    while batch := [parse(payload) for payload in islice(payloads, 1024)]:
        await storage.write(batch)
    while storage.max_commit_ts < FIRST_TS + args.keys - 1:  # noqa: ASYNC110 - a bench waits as it likes
        await asyncio.sleep(0.01)


async def _latencies(
    storage: PumpStorage, timestamps: Iterator[int], seconds: float
) -> list[float]:
    taken: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(16):
            tasks.create_task(
                _write(storage, timestamps, time.perf_counter() + seconds, bytes(256), taken)
            )
    return sorted(taken)


def _p99_ms(latencies: list[float]) -> float:
    return round(latencies[int(0.99 * len(latencies))] * 1e3, 2)


async def _write(
    storage: PumpStorage,
    timestamps: Iterator[int],
    until: float,
    rows: bytes,
    taken: list[float] | None = None,
) -> None:
    """Pairs until a moment; how long each binlog took goes to `taken`."""
    while (began := time.perf_counter()) < until:
        ts = next(timestamps)
        prewrite = binlog_pb2.Binlog(tp=0, start_ts=ts, prewrite_value=rows).SerializeToString()
        await storage.write([parse(prewrite)])
        between = time.perf_counter()
        await storage.write(
            [parse(binlog_pb2.Binlog(tp=1, start_ts=ts, commit_ts=ts + 1).SerializeToString())]
        )
        if taken is not None:
            taken += (between - began, time.perf_counter() - between)


def figures(ops: int, seconds: float, cpu_s: float) -> dict[str, float]:
    return {
        "ops": ops,
        "seconds": round(seconds, 3),
        "per_s": round(ops / seconds),
        "cpu_us_per_op": round(cpu_s / ops * 1e6, 1),
    }


IN_PROCESS = {"append": append, "gc": gc, "recovery": recovery}


def main() -> None:
    """Run one subject and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--subject", choices=["unary", "stream", "pull", *IN_PROCESS], default="unary"
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--bytes", type=int, default=256, help="rows of a prewrite")
    parser.add_argument(
        "--callers", type=int, default=64, help="calls, or writers, at a time (unary, append)"
    )
    parser.add_argument(
        "--batch", type=int, default=1024, help="binlogs in a message (stream, pull)"
    )
    parser.add_argument("--batches", type=int, default=200, help="messages (stream, pull)")
    parser.add_argument(
        "--keys", type=int, default=1_000_000, help="binlogs in the log (gc, recovery)"
    )
    parser.add_argument("--dir", help="directory on the disk to measure; default: a temporary one")
    parser.add_argument("--addr", help="a pump that runs already (unary, pull)")
    parser.add_argument("--pid", type=int, default=0, help="its process")
    parser.add_argument("--cluster-id", type=int, default=0, help="of its PD")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory, ExitStack() as stack:
        if args.subject in IN_PROCESS:
            found = asyncio.run(IN_PROCESS[args.subject](args, Path(directory)))
        else:
            peer = Target(args.addr, {"pump": args.pid}, args.cluster_id)
            pump = peer if args.addr else started(stack, Path(directory))
            found = asyncio.run(
                {"unary": unary, "stream": stream, "pull": pull}[args.subject](args, pump)
            )
    callers = {"callers": args.callers} if args.subject in ("unary", "append") else {}
    load = round(os.getloadavg()[0], 1)
    print(
        json.dumps(
            {"name": f"pump_{args.subject}_{args.bytes}B", **found, **callers, "load_1m": load}
        )
    )


if __name__ == "__main__":
    main()
