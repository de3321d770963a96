"""How fast binlogs become durable: `python -m tests.bench.value_log [--subject append] [--bytes
256] …`.

`value_log` appends groups of fixed size from one thread; `append` drives the whole pump storage
with concurrent writers of prewrite and commit pairs. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from pathlib import Path

from storage.pump.binlog import parse
from storage.pump.storage import PumpStorage, open_pump_storage
from storage.value_log import ValueLog
from storage.vfs import RealFS


def main() -> None:
    """Run one subject and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subject", choices=["value_log", "append"], default="value_log")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--bytes", type=int, default=256, help="payload size")
    parser.add_argument("--group", type=int, default=64, help="payloads in a group (value_log)")
    parser.add_argument("--writers", type=int, default=64, help="concurrent writers (storage)")
    parser.add_argument("--no-sync", action="store_true", help="do not fdatasync")
    parser.add_argument("--dir", help="directory on the disk to measure; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        before, start = _cpu_seconds(), time.perf_counter()
        run = _append_groups if args.subject == "value_log" else _write_pairs
        ops = run(Path(directory), args)
        seconds, cpu = time.perf_counter() - start, _cpu_seconds() - before
    print(
        json.dumps(
            {
                "name": f"{args.subject}_{args.bytes}B_{'nosync' if args.no_sync else 'sync'}",
                "ops": ops,
                "seconds": round(seconds, 3),
                "per_s": round(ops / seconds),
                "cpu_us_per_op": round(cpu / ops * 1e6, 2),
                "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
                "writers": args.writers if args.subject == "append" else 1,
                "group": args.group if args.subject == "value_log" else None,
            }
        )
    )


def _append_groups(directory: Path, args: argparse.Namespace) -> int:
    log = ValueLog(RealFS(), directory, ts_of=lambda _: 0, sync=not args.no_sync)
    group = [bytes([number % 251]) * args.bytes for number in range(args.group)]
    ops = 0
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end:
        log.append(group, ops)
        ops += len(group)
    log.close()
    return ops


def _write_pairs(directory: Path, args: argparse.Namespace) -> int:
    return asyncio.run(_write_for_a_while(directory, args))


async def _write_for_a_while(directory: Path, args: argparse.Namespace) -> int:
    async with open_pump_storage(RealFS(), directory, sync=not args.no_sync) as storage:
        end = time.perf_counter() + args.seconds
        async with asyncio.TaskGroup() as tasks:
            writers = [
                tasks.create_task(
                    _write_until(storage, end, number, args.writers, bytes(args.bytes))
                )
                for number in range(args.writers)
            ]
        return sum(writer.result() for writer in writers)


async def _write_until(
    storage: PumpStorage, end: float, number: int, writers: int, value: bytes
) -> int:
    ops, ts = 0, 2 * number + (1 << 58)
    while time.perf_counter() < end:
        ts += 2 * writers
        start_ts, commit_ts = _varint(ts), _varint(ts + 1)
        prewrite = b"\x08\x00\x10" + start_ts + b"\x18\x00\x2a" + _varint(len(value)) + value
        await storage.write([parse(prewrite)])
        await storage.write([parse(b"\x08\x01\x10" + start_ts + b"\x18" + commit_ts)])
        ops += 2
    return ops


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
