"""Machines: each has a disk, a link to the metadata, and one daemon at a time."""

import asyncio
import itertools
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from server.capture.config import CaptureConfig
from server.capture.daemon import open_capture
from server.coordinator.daemon import CoordinatorConfig, open_coordinator
from server.gc_worker.daemon import GCWorkerConfig, open_gc_worker
from server.rpc.credentials import SecurityConfig
from server.store.app import open_store
from server.store.config import StoreConfig
from storage.model.errors import TidemarkError, leaves
from tests.sim.network import Link
from tests.sim.process import Process
from tests.sim.whole.disk import DiskKV
from tests.sim.whole.metadata import Metadata

COORDINATORS = ("pd1", "pd2")
STORES = ("kv1", "kv2")
CAPTURES = ("ann", "ben")
JOINING = "cat"
"""A capture that is not there at first, and joins and goes."""
WORKERS = ("gc1", "gc2")
PD = ",".join(f"{name}:2379" for name in COORDINATORS)
_AGAIN_S = (0.2, 3.0)

Opens = Callable[[], AbstractAsyncContextManager[Any]]


class Machine:
    """One machine; `open` opens its daemon."""

    def __init__(self, name: str, open_daemon: Opens, etcd: Metadata, chance: Random) -> None:
        self.name = name
        self.link = Link(etcd, chance)
        self.disk = DiskKV()
        self.parts: dict[str, Any] = {}
        """Objects of the daemon that runs, for checks: its term as a coordinator, its GC worker,
        its store; and what its Flight port would serve.
        """
        self.process = Process(name)
        self.is_up = False
        self.ends: list[str] = []
        """How daemons ended by themselves, with errors of their own."""
        self._etcd = etcd
        self._open = open_daemon
        self._chance = chance

    def start(self) -> None:
        """Switch it on."""
        ahead_s = self.process.clock_ahead_s
        self.process = Process(self.name)
        self.process.clock_ahead_s = ahead_s
        self.link = Link(self._etcd, self._chance)
        self.is_up = True
        self.process.start(self._daemon())

    async def kill(self, *, with_power: bool) -> None:
        """The daemon dies as by `kill -9`; without power what was not synced may be lost, too."""
        self.is_up = False
        self.link.is_cut = True
        self.parts = {}
        if not with_power:
            self.disk = self.disk.crashed(self._chance)
        await self.process.kill()

    @property
    def feeds(self) -> Any:
        """What its Flight port would serve; None while no capture listens here."""
        return self.parts.get("feeds")

    @property
    def leads(self) -> bool:
        """Whether it is a coordinator that leads, a GC worker that does, or the owner."""
        term, worker = self.parts.get("term"), self.parts.get("worker")
        if term is not None:
            return term.term is not None and bool(term.term.leadership.held)
        if worker is not None:
            return bool(worker.election.leads)
        return self.feeds is not None and bool(self.feeds._maintainers.owner.is_active)

    async def _daemon(self) -> None:
        """Keep the daemon alive, as systemd does: one that ends with an error of its own is started
        again.
        """
        while True:
            try:
                async with self._open():
                    await asyncio.Event().wait()
            except* TidemarkError as group:
                self.ends.append(str(leaves(group)[0]))
            if self.process.is_dead:
                return
            self.parts = {}
            self.disk = self.disk.crashed(self._chance)
            await asyncio.sleep(self._chance.uniform(*_AGAIN_S))


def coordinator(name: str) -> Opens:
    """Opens a coordinator over the simulated etcd."""
    config = CoordinatorConfig(
        addr=f"{name}:2379", metadata="etcd://etcd:2379", cluster_id=7, leader_lease=3
    )
    return lambda: open_coordinator(config, SecurityConfig())


def store(name: str, split_keys: str, merge_size: int) -> Opens:
    """Opens a store; neighbours of its regions within `merge_size` bytes become one."""
    config = StoreConfig(
        addr=f"{name}:20160",
        coordinator=PD,
        split_keys=split_keys,
        gc_poll_interval=1.5,
        resolved_ts_interval=0.4,
        gc_ratio_threshold=0.0,
        region_check_interval=1.0,
        region_split_size=1 << 30,
        region_merge_size=merge_size,
        split_merge_interval=5.0,
    )
    return lambda: open_store(config, SecurityConfig())


def gc_worker(name: str) -> Opens:
    """Opens a GC worker."""
    config = GCWorkerConfig(
        addr=f"{name}:8302", coordinator=PD, tick_seconds=1.0, lease_seconds=4.0, min_gc_time="1s"
    )
    return lambda: open_gc_worker(config, SecurityConfig())


def capture(name: str, directory: Path) -> Opens:
    """Opens a capture, which finds an empty directory, as it is a cache: another one each time, as
    what a killed process had open is not closed.
    """
    lives = itertools.count()
    config = CaptureConfig(
        addr=f"{name}:8300",
        flight_addr=f"{name}:8301",
        coordinator=PD,
        memory_quota_bytes=64 << 20,
        stream_silence_seconds=5.0,
    )

    def opened() -> AbstractAsyncContextManager[Any]:
        home = directory / name
        shutil.rmtree(home, ignore_errors=True)
        life = replace(config, data_dir=str(home / str(next(lives))))
        return open_capture(life, SecurityConfig())

    return opened
