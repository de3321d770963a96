"""A coordinator, a store with four regions and GC workers, each a process of its own."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tidemarkpb.v1 import gc_pb2, gc_pb2_grpc

from server.gc_worker.view import MetaRecords
from server.rpc.client import connect
from server.rpc.transaction import TransactionClient
from storage.meta.client import open_meta
from storage.model.errors import TidemarkError
from tests.integration.gc_worker.proxy import StoreProxy, store_proxy

SPLITS = (b"g", b"n", b"t")
TICK_S = 0.5
LEASE_S, SHORT_LEASE_S = 120.0, 3.0
"""Of workers that nothing happens to, and of those whose lease is to end."""


@dataclass
class Daemon:
    """One process and where it listens."""

    process: Process
    endpoints: dict[str, str]

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


def tail(log: Path) -> str:
    return log.read_text()[-2000:]


@asynccontextmanager
async def daemon(log: Path, name: str, *arguments: str) -> AsyncIterator[Daemon]:
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "server.cli.main",
                name,
                "--addr",
                "127.0.0.1:0",
                "--http-addr",
                "127.0.0.1:0",
            ),
            *arguments,
            stdout=PIPE,
            stderr=stderr,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            line = await process.stdout.readline()
        assert line, f"{name} ended before it was ready: {tail(log)}"
        yield Daemon(process, json.loads(line)["endpoints"])
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            async with asyncio.timeout(120):
                assert await process.wait() == 0, f"{name} did not drain: {tail(log)}"
        process._transport.close()  # type: ignore[attr-defined]  # asyncio leaves the pipe of a killed child open


class Cluster:
    """The processes, and clients to them."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.coordinator = self.store = ""
        self.client: TransactionClient
        self.records: MetaRecords

    async def start(self, proxy: Any = None) -> None:
        metadata = f"leveldb:{self._directory / 'coordinator'}"
        coordinator = await self._daemon("coordinator", "--metadata", metadata)
        self.coordinator = coordinator.endpoints["coordinator"]
        data_dir, splits = str(self._directory / "store"), ",".join(key.hex() for key in SPLITS)
        front = ("--advertise-addr", proxy.address) if proxy else ()
        store = await self._daemon(
            "store",
            *self._to,
            "--data-dir",
            data_dir,
            "--split-keys",
            splits,
            "--gc-poll-interval",
            "0.2",
            *front,
        )
        self.store = store.endpoints["store"]
        if proxy:
            proxy.target = store.endpoints["store"]
        self.client = await self._stack.enter_async_context(
            TransactionClient.open(self.coordinator)
        )
        self.records = MetaRecords(
            await self._stack.enter_async_context(open_meta(f"etcd://{self.coordinator}", connect))
        )

    async def second_store(self, address: str) -> Daemon:
        """A store without regions, on its own disk; at `address` again after it was killed."""
        data_dir = str(self._directory / "second")
        return await self._daemon("store", *self._to, "--data-dir", data_dir, "--addr", address)

    async def worker(self, lease_s: float = LEASE_S) -> Daemon:
        pace = (
            "--tick-seconds",
            str(TICK_S),
            "--lease-seconds",
            str(lease_s),
            "--min-gc-time",
            "1ms",
        )
        return await self._daemon("gc-worker", *self._to, *pace)

    async def service(self, worker: Daemon) -> Any:
        channel = await self._stack.enter_async_context(connect(worker.endpoints["gc-worker"]))
        return gc_pb2_grpc.GCServiceStub(channel)

    async def leader(self, lease_s: float = LEASE_S) -> tuple[Daemon, Any]:
        """A new worker, and its service, once it leads; it collects everything,
        but only when told.
        """
        worker = await self.worker(lease_s)
        service = await self.service(worker)

        async def leads() -> bool:
            return bool((await service.GetGCStatus(gc_pb2.GetGCStatusRequest())).leader.is_self)

        await eventually(leads)
        variables = {"tikv_gc_life_time": "1ms", "tikv_gc_run_interval": "24h"}
        await service.SetGCConfig(gc_pb2.SetGCConfigRequest(variables=variables))

        async def first_round_over() -> bool:
            return bool((await service.GetGCStatus(gc_pb2.GetGCStatusRequest())).last_round.result)

        await eventually(
            first_round_over
        )  # the first of a cluster is due at once; of others the successor says how
        return worker, service

    async def put(self, *pairs: tuple[bytes, bytes | None]) -> int:
        transaction = await self.client.begin()
        for key, value in pairs:
            await (transaction.delete(key) if value is None else transaction.put(key, value))
        return await transaction.commit()

    async def now(self) -> int:
        return await self.client.pd.tso()

    async def locked_keys(self) -> list[bytes]:
        keys: list[bytes] = []
        key: bytes | None = b""
        while key is not None:
            page = await self.client.kv.scan_lock(key, b"", (1 << 64) - 1, 1024)
            keys += [lock.key for lock in page.locks]
            key = page.next_key
        return keys

    @property
    def _to(self) -> tuple[str, str]:
        return "--coordinator", self.coordinator

    async def _daemon(self, name: str, *arguments: str) -> Daemon:
        return await self._stack.enter_async_context(
            daemon(self._directory / f"{name}.log", name, *arguments)
        )


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        made = Cluster(tmp_path, stack)
        await made.start()
        yield made


@pytest.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[tuple[Cluster, StoreProxy]]:
    """A cluster whose store is behind a proxy."""
    async with store_proxy() as proxy, AsyncExitStack() as stack:
        made = Cluster(tmp_path, stack)
        await made.start(proxy)
        yield made, proxy


@pytest.fixture
async def gc(cluster: Cluster) -> Any:
    """The admin service of a worker that leads and collects only when told."""
    return (await cluster.leader())[1]


async def eventually(claim: Any, seconds: float = 100.0) -> None:
    """Wait until the coroutine function `claim` answers true; what it raises last is told."""
    refused: TidemarkError | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    if await claim():
                        return
                except TidemarkError as err:
                    refused = err
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(f"not within {seconds} s") from refused


@pytest.fixture(scope="session")
def until() -> Any:
    return eventually
