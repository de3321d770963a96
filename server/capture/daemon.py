"""The capture, put together: coordinator and stores on one side, gRPC and Flight on the other."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from tidemarkpb.v1 import capture_pb2, changefeed_pb2

from server.capture.blockers import Blockers
from server.capture.directory import lock
from server.capture.flight import OwnerFeeds
from server.capture.local import LocalProcessor, Resources
from server.capture.membership import Membership
from server.capture.metrics import FeedCollector
from server.capture.owner import Owner
from server.capture.records import Records
from server.capture.service import CaptureService, ChangefeedService
from server.config import setting
from server.daemon import Endpoints
from server.puller.tikv.feed import EventFeeds
from server.puller.tikv.stuck_locks import StuckLocks
from server.rpc.client import connect
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from server.rpc.server import RpcServer
from server.rpc.tikv import KvClient
from sink.flight.server import FlightServer, FlightTls, open_server
from storage.meta.client import open_meta


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """Where a capture listens, whom it asks, and what it may use."""

    addr: str = setting("127.0.0.1:8300", "gRPC address: the changefeed API")
    flight_addr: str = setting("127.0.0.1:8301", "Arrow Flight address: the rows")
    advertise_addr: str = setting("", "gRPC address that other captures are told; empty: the one listened on")
    advertise_flight_addr: str = setting("", "Flight address that readers are told; empty: the one listened on")
    coordinator: str = setting("127.0.0.1:2379", "coordinators (or PDs), host:port[,host:port…]")
    data_dir: str = setting("./data/capture", "directory for sorted rows; a cache, filled again after a restart")
    http_addr: str = setting("127.0.0.1:8303", "/metrics, /healthz, /readyz")
    memory_quota_bytes: int = setting(512 << 20, "memory for the rows of one changefeed (TiCDC: 1 GiB)")


@asynccontextmanager
async def open_capture(config: CaptureConfig, security: SecurityConfig) -> AsyncIterator[Endpoints]:
    """A capture for the block; ready when it is known who owns the changefeeds.

    Raises:
        DataDirError: the data directory cannot be used.
        PdUnavailableError: the coordinator does not answer.
        PortInUseError, FlightPortError: an address cannot be listened on.
    """
    directory = Path(config.data_dir)
    with lock(directory) as identity:
        shutil.rmtree(directory / "sorter", ignore_errors=True)
        async with (
            PdClient.open(config.coordinator, security) as pd,
            open_meta(f"etcd://{config.coordinator}", lambda address: connect(address, security)) as meta,
            KvClient.open(pd, security) as kv,
            EventFeeds.open(pd.cluster_id, security) as feeds,
        ):
            records = Records(meta)
            resources = Resources(pd, feeds, kv, directory / "sorter", config.memory_quota_bytes)
            owner = Owner(records, pd, partial(LocalProcessor, resources))
            membership = Membership(meta, identity, owner, records)
            server = RpcServer(security)
            changefeeds = ChangefeedService(owner, membership, security)
            server.add_service(changefeed_pb2.DESCRIPTOR.services_by_name["ChangefeedService"], changefeeds)
            captures = CaptureService(membership, Blockers(owner))
            server.add_service(capture_pb2.DESCRIPTOR.services_by_name["CaptureService"], captures)
            locks = StuckLocks(pd, kv, owner.pullers)
            async with _flight(config, security, owner) as flight, server.listen(config.addr) as bound:
                run = membership.run(config.advertise_addr or bound, config.advertise_flight_addr or flight.bound)
                async with _running(run, locks.run(), _shown(owner)):
                    await membership.settled.wait()
                    yield {"capture": bound, "flight": flight.bound}


@asynccontextmanager
async def _running(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `parts` for the block; their failure ends it."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part) for part in parts]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


async def _shown(owner: Owner) -> None:
    """Show the changefeeds' gauges until cancelled."""
    collector = FeedCollector(lambda: list(owner.feeds.values()))
    REGISTRY.register(collector)
    try:
        await asyncio.Event().wait()
    finally:
        REGISTRY.unregister(collector)


@asynccontextmanager
async def _flight(config: CaptureConfig, security: SecurityConfig, owner: Owner) -> AsyncIterator[FlightServer]:
    """The Flight listener for the block; its threads are waited for outside the event loop."""
    feeds = OwnerFeeds(owner)
    server = open_server(feeds, config.flight_addr, config.advertise_flight_addr, _flight_tls(security))
    thread = threading.Thread(target=server.serve, name="flight", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        feeds.close()
        await asyncio.to_thread(server.shutdown)
        await asyncio.to_thread(thread.join)


def _flight_tls(security: SecurityConfig) -> FlightTls | None:
    if not security.enabled:
        return None
    root = Path(security.ca_path).read_bytes() if security.ca_path else None
    return FlightTls(
        certificate=Path(security.cert_path).read_bytes(), key=Path(security.key_path).read_bytes(), root=root
    )
