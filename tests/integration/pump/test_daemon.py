"""The pump as a process beside a coordinator: registry, heartbeats, kill -9, SIGTERM,
and starts that must fail.
"""

import asyncio
import contextlib
import json
import random
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tipb import binlog_pb2, pump_pb2, pump_pb2_grpc

from server.rpc.client import connect
from server.rpc.pd import PdClient
from storage.meta.client import open_meta
from storage.pump.binlog import fake

CLUSTER_ID = 4242
FAST = ("--fake-binlog-seconds", "0.2", "--heartbeat-seconds", "0.2")


@dataclass
class Daemon:
    """A started daemon and what it said when it was ready."""

    process: asyncio.subprocess.Process
    endpoints: dict[str, str]

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        await self.process.communicate()
        return self.process.returncode or 0


async def spawned(*argv: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "server.cli.main", *argv, "--http-addr", "127.0.0.1:0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def started(*argv: str) -> AsyncIterator[Daemon]:
    process = await spawned(*argv)
    assert process.stdout is not None
    async with asyncio.timeout(120):
        line = await process.stdout.readline()
    if not line:
        pytest.fail((await process.communicate())[1].decode())
    daemon = Daemon(process, json.loads(line)["endpoints"])
    try:
        yield daemon
    finally:
        await daemon.end(signal.SIGKILL)


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[str]:
    metadata = f"leveldb:{tmp_path / 'metadata'}"
    argv = (
        "coordinator",
        "--addr",
        "127.0.0.1:0",
        "--metadata",
        metadata,
        "--cluster-id",
        str(CLUSTER_ID),
    )
    async with started(*argv) as daemon:
        yield daemon.endpoints["coordinator"]


def pump_argv(coordinator: str, data_dir: Path, *more: str) -> tuple[str, ...]:
    return (
        "pump",
        "--addr",
        "127.0.0.1:0",
        "--coordinator",
        coordinator,
        "--data-dir",
        str(data_dir),
        *more,
    )


async def entry_of(coordinator: str) -> dict:
    async with open_meta(f"etcd://{coordinator}", connect) as meta:
        pairs = await meta.get_prefix(b"/tidb-binlog/v1/pumps/")
    assert len(pairs) == 1
    entry = json.loads(pairs[0].value)
    assert pairs[0].key.decode() == f"/tidb-binlog/v1/pumps/{entry['nodeId']}"
    return entry


def metrics_of(daemon: Daemon) -> str:
    with urllib.request.urlopen(f"http://{daemon.endpoints['http']}/metrics") as answer:
        return str(answer.read().decode())


_CALL_S = 20.0
"""grpcio can lose a call whose server dies as it begins: such a call would never end."""


class Client:
    """A writer and reader of one pump."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = pump_pb2_grpc.PumpStub(channel)

    async def write(self, payload: bytes) -> None:
        request = pump_pb2.WriteBinlogReq(clusterID=CLUSTER_ID, payload=payload)
        await self._stub.WriteBinlog(request, timeout=_CALL_S)

    async def pair(self, start_ts: int) -> None:
        await self.write(prewrite(start_ts))
        await self.write(
            binlog_pb2.Binlog(tp=1, start_ts=start_ts, commit_ts=start_ts + 5).SerializeToString()
        )

    async def pull(self, last_ts: int = 0) -> AsyncIterator[binlog_pb2.Binlog]:
        request = pump_pb2.PullBinlogReq(
            clusterID=CLUSTER_ID, startFrom=pump_pb2.Pos(offset=last_ts)
        )
        stream = self._stub.PullBinlogs(request)
        try:
            async for answer in stream:
                yield binlog_pb2.Binlog.FromString(answer.entity.payload)
        finally:
            stream.cancel()


def prewrite(start_ts: int) -> bytes:
    return binlog_pb2.Binlog(
        tp=0, start_ts=start_ts, prewrite_value=b"v%d" % start_ts
    ).SerializeToString()


@asynccontextmanager
async def client_of(daemon: Daemon) -> AsyncIterator[Client]:
    async with connect(daemon.endpoints["pump"]) as channel:
        yield Client(channel)


async def test_an_idle_pump_is_online_and_sends_heartbeats_until_it_is_paused(
    coordinator: str, tmp_path: Path
) -> None:
    async with started(*pump_argv(coordinator, tmp_path / "pump", *FAST)) as pump:
        entry = await entry_of(coordinator)
        assert (entry["state"], entry["host"], entry["isAlive"]) == (
            "online",
            pump.endpoints["pump"],
            False,
        )
        async with client_of(pump) as client, PdClient.open(coordinator) as pd:
            before_ts = await pd.tso()
            heartbeats = client.pull(before_ts)
            first, second = await anext(heartbeats), await anext(heartbeats)
            assert before_ts < first.commit_ts == first.start_ts < second.commit_ts
            assert first.tp == binlog_pb2.Rollback
            await heartbeats.aclose()
        text = await asyncio.to_thread(metrics_of, pump)
        assert "tidemark_pump_head_of_line_wait_seconds 0.0" in text
        assert float(text.partition("\ntidemark_pump_max_commit_ts ")[2].partition("\n")[0]) > 0
        assert await pump.end() == 0
    assert (await entry_of(coordinator))["state"] == "paused"


async def test_a_reader_does_not_delay_the_end(coordinator: str, tmp_path: Path) -> None:
    async with (
        started(*pump_argv(coordinator, tmp_path / "pump", *FAST)) as pump,
        client_of(pump) as client,
    ):
        heartbeats = client.pull()
        await anext(heartbeats)
        async with asyncio.timeout(60):
            assert await pump.end() == 0
        with pytest.raises(
            grpc.aio.AioRpcError, match="ErrPumpClosed"
        ):  # it was sent away, not waited for
            async for _ in heartbeats:
                pass


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_killed_pump_has_every_acknowledged_pair(
    coordinator: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    argv = pump_argv(
        coordinator, tmp_path / "pump", "--segment-bytes", "20000", "--fake-binlog-seconds", "3600"
    )
    acknowledged: set[int] = set()
    tried: set[int] = set()
    enough, moment = rng.randrange(200, 600), asyncio.Event()

    async def keep_writing(client: Client, first: int) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            for start_ts in range(first, 1 << 40, 1000):
                tried.add(start_ts)
                await client.pair(start_ts)
                acknowledged.add(start_ts)
                if len(acknowledged) == enough:
                    moment.set()

    async with started(*argv) as pump, client_of(pump) as client, asyncio.TaskGroup() as tasks:
        for number in range(16):
            tasks.create_task(keep_writing(client, 10 * (number + 1)))
        await moment.wait()
        pump.process.kill()
    last = sorted((tmp_path / "pump" / "value").iterdir())[-1]
    with last.open("ab") as file:
        file.write(rng.randbytes(19))
    async with started(*argv) as pump, client_of(pump) as client:
        for start_ts in tried - acknowledged:
            await client.pair(start_ts)
        await client.write(fake(1 << 41))
        # What is written again commits late, which TiDB's transactions never do: wait until all is
        # indexed.
        await anext(client.pull((1 << 41) - 1))
        found = [binlog async for binlog in until(client, 1 << 41)]
    commits = [binlog.commit_ts for binlog in found]
    assert commits == sorted(commits)
    assert {binlog.start_ts: binlog.prewrite_value for binlog in found[:-1]} == {
        ts: b"v%d" % ts for ts in tried
    }


async def until(client: Client, commit_ts: int) -> AsyncIterator[binlog_pb2.Binlog]:
    async for binlog in client.pull():
        yield binlog
        if binlog.commit_ts >= commit_ts:
            return


async def test_a_restarted_pump_keeps_its_name(coordinator: str, tmp_path: Path) -> None:
    for _ in range(2):
        async with started(*pump_argv(coordinator, tmp_path / "pump")) as pump:
            assert (await entry_of(coordinator))["host"] == pump.endpoints["pump"]


async def test_gc_gives_disk_space_back_and_readers_below_it_are_told(
    coordinator: str, tmp_path: Path
) -> None:
    more = (
        "--segment-bytes",
        "1000",
        "--gc-retention-seconds",
        "1",
        "--gc-interval-seconds",
        "0.2",
        *FAST,
    )
    async with (
        started(*pump_argv(coordinator, tmp_path / "pump", *more)) as pump,
        client_of(pump) as client,
    ):
        for start_ts in range(10, 1000, 10):
            await client.pair(start_ts)
        directory = tmp_path / "pump" / "value"
        async with asyncio.timeout(60):
            while (directory / "000000.vlog").exists():  # noqa: ASYNC110 - the disk has no event for this
                await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError, match="ErrBinlogPurged"):
            await anext(client.pull(500))
        assert (await anext(client.pull())).tp == binlog_pb2.Rollback


async def refused(*argv: str) -> str:
    process = await spawned(*argv)
    async with asyncio.timeout(120):
        _, stderr = await process.communicate()
    assert process.returncode == 1
    return stderr.decode()


async def test_a_start_that_cannot_work_says_why(coordinator: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "[TM:ErrDataDirUnusable]" in await refused(*pump_argv(coordinator, tmp_path / "file"))
    other = await refused(*pump_argv(coordinator, tmp_path / "pump", "--cluster-id", "7"))
    assert (
        f"[TM:ErrClusterMismatch] --cluster-id is 7, but the coordinator at {coordinator} serves "
        "cluster 4242" in other
    )
    async with started(*pump_argv(coordinator, tmp_path / "pump")) as pump:
        assert "[TM:ErrDataDirLocked]" in await refused(*pump_argv(coordinator, tmp_path / "pump"))
        taken = [*pump_argv(coordinator, tmp_path / "second")]
        taken[2] = pump.endpoints["pump"]
        assert "[TM:ErrPortInUse]" in await refused(*taken)
