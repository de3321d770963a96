"""A Pump's storage on disks of memory, and the binlogs the tests write to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tipb import binlog_pb2

from storage.kv import KV
from storage.pump.binlog import Binlog, fake, parse
from storage.pump.storage import PumpStorage, open_pump_storage
from storage.vfs import FS
from tests.memory_kv import MemoryKV

DIRECTORY = Path("/pump")
Row = tuple[int, int, bytes]
"""commit_ts, start_ts, prewrite_value."""


def prewrite(start_ts: int, value: bytes = b"rows") -> Binlog:
    message = binlog_pb2.Binlog(
        tp=0, start_ts=start_ts, commit_ts=0, prewrite_key=b"k", prewrite_value=value
    )
    return parse(message.SerializeToString())


def commit(start_ts: int, commit_ts: int) -> Binlog:
    message = binlog_pb2.Binlog(tp=1, start_ts=start_ts, commit_ts=commit_ts, prewrite_key=b"k")
    return parse(message.SerializeToString())


def rollback(start_ts: int) -> Binlog:
    return parse(binlog_pb2.Binlog(tp=2, start_ts=start_ts, commit_ts=0).SerializeToString())


def heartbeat(ts: int) -> Binlog:
    return parse(fake(ts))


@asynccontextmanager
async def opened(
    fs: FS, kv: KV | None = None, segment_bytes: int = 1 << 20, **more: Any
) -> AsyncIterator[PumpStorage]:
    async with open_pump_storage(
        fs, DIRECTORY, kv=kv or MemoryKV(), segment_bytes=segment_bytes, **more
    ) as storage:
        yield storage


async def pulled(storage: PumpStorage, last_ts: int, until_ts: int) -> list[Row]:
    """What a reader after `last_ts` gets up to the binlog with commit_ts `until_ts`."""
    found: list[Row] = []
    async for chunk in storage.pull(last_ts):
        for payload in chunk.payloads:
            message = binlog_pb2.Binlog.FromString(payload)
            found.append((message.commit_ts, message.start_ts, message.prewrite_value))
        if found and found[-1][0] >= until_ts:
            return found
    raise AssertionError("a pull ends only by closing")


async def wait_max_commit_ts(storage: PumpStorage, ts: int) -> None:
    async for _ in storage.pull(ts - 1):
        return
