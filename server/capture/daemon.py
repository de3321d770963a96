"""The capture, put together: coordinator and stores on one side, gRPC and Flight on the other."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client import REGISTRY
from tidemarkpb.v1 import capture_pb2, changefeed_pb2, dump_pb2

from server.capture.api_v2.api import Api
from server.capture.blockers import Blockers
from server.capture.directory import lock
from server.capture.feed import FeedFactory
from server.capture.flight import OwnerFeeds
from server.capture.listener import serving_flight
from server.capture.local import LocalProcessor, Resources
from server.capture.membership import Membership
from server.capture.metrics import FeedCollector
from server.capture.owner import Owner
from server.capture.processor import Assignment, MakeProcessor, Processor
from server.capture.records import Records
from server.capture.service import CaptureService, ChangefeedService
from server.capture.source.registry import sources
from server.capture.worker.launch import Launch, cores, host_of
from server.capture.worker.pool import Pool
from server.capture.worker.processor import WorkersProcessor
from server.config import setting
from server.daemon import Endpoints
from server.dump.service import DumpService
from server.puller.patience import SILENT_S
from server.puller.source import SourceContext
from server.puller.tikv.feed import EventFeeds
from server.puller.tikv.stuck_locks import StuckLocks
from server.rpc.client import metadata_at
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from server.rpc.server import RpcServer
from server.rpc.tikv import KvClient
from storage.tasks import beside


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """Where a capture listens, whom it asks, and what it may use."""

    addr: str = setting("127.0.0.1:8300", "gRPC address: the changefeed API")
    flight_addr: str = setting("127.0.0.1:8301", "Arrow Flight address: the rows")
    flight_token_file: str = setting(
        "", "file with the token that Flight readers must bring; empty: none is asked for"
    )
    advertise_addr: str = setting(
        "", "gRPC address that other captures are told; empty: the one listened on"
    )
    advertise_flight_addr: str = setting(
        "", "Flight address that readers are told; empty: the one listened on"
    )
    coordinator: str = setting("127.0.0.1:2379", "coordinators (or PDs), host:port[,host:port…]")
    data_dir: str = setting(
        "./data/capture", "directory for sorted rows; a cache, filled again after a restart"
    )
    http_addr: str = setting("127.0.0.1:8303", "/metrics, /healthz, /readyz")
    memory_quota_bytes: int = setting(
        512 << 20, "memory for the rows of one changefeed (TiCDC: 1 GiB)"
    )
    stream_silence_seconds: float = setting(
        SILENT_S,
        "a stream of a store or pump that is silent for so long is opened again",
        least=0.001,
    )
    workers: int = setting(
        1, "processes that pull, sort and serve tables; 1: this one alone, 0: one for each core"
    )
    worker_flight_addr: str = setting(
        "",
        "Flight address of the first worker, the next ones have the next ports; empty: any ports",
    )


@asynccontextmanager
async def open_capture(config: CaptureConfig, security: SecurityConfig) -> AsyncIterator[Endpoints]:
    """A capture for the block; ready when it is known who owns the changefeeds.

    Raises:
        DataDirError: the data directory cannot be used.
        PdUnavailableError: the coordinator does not answer.
        PortInUseError, FlightPortError: an address cannot be listened on.
        ChildFailedError: a worker process could not start.
    """
    directory = _directory(config)
    with lock(directory) as identity:
        shutil.rmtree(directory / "sorter", ignore_errors=True)
        async with (
            PdClient.open(config.coordinator, security) as pd,
            metadata_at(config.coordinator, security) as meta,
            KvClient.open(pd, security) as kv,
            EventFeeds.open(pd.cluster_id, security, config.stream_silence_seconds) as feeds,
            AsyncExitStack() as parts,
        ):
            records = Records(meta)
            context = SourceContext(
                pd,
                feeds,
                kv,
                meta,
                security,
                tables_here=(config.workers or cores()) == 1,
                stream_silence_s=config.stream_silence_seconds,
            )
            resources = Resources(context, directory / "sorter", config.memory_quota_bytes)
            make_processor = await parts.enter_async_context(
                _processors(config, security, directory, resources)
            )
            owner = Owner(FeedFactory(records, sources(context), make_processor), pd)
            membership = Membership(meta, identity, owner, records)
            server = RpcServer(security)
            changefeeds = ChangefeedService(owner, membership, security)
            server.add_service(
                changefeed_pb2.DESCRIPTOR.services_by_name["ChangefeedService"], changefeeds
            )
            dumps = DumpService(meta)
            server.add_service(dump_pb2.DESCRIPTOR.services_by_name["DumpService"], dumps)
            captures = CaptureService(membership, Blockers(owner))
            server.add_service(capture_pb2.DESCRIPTOR.services_by_name["CaptureService"], captures)
            server.serve_http1(Api(identity, changefeeds, captures, pd).answer)
            locks = StuckLocks(pd, kv, owner.pullers)
            readers = serving_flight(
                OwnerFeeds(owner),
                config.flight_addr,
                config.advertise_flight_addr,
                security,
                config.flight_token_file,
            )
            async with readers as flight, server.listen(config.addr) as bound:
                run = membership.run(
                    config.advertise_addr or bound, config.advertise_flight_addr or flight.bound
                )
                async with beside(run, locks.run(), _shown(owner)):
                    await membership.settled.wait()
                    yield {"capture": bound, "flight": flight.bound}


def _directory(config: CaptureConfig) -> Path:
    return Path(config.data_dir).absolute()  # workers' sockets have their path


@asynccontextmanager
async def _processors(
    config: CaptureConfig, security: SecurityConfig, directory: Path, resources: Resources
) -> AsyncIterator[MakeProcessor]:
    """What runs the changefeeds: this process, or workers, kept alive for the block."""
    count = config.workers or cores()
    if count == 1:
        yield partial(LocalProcessor, resources)
        return
    launch = Launch(
        directory=directory,
        coordinator=config.coordinator,
        flight_addr=config.worker_flight_addr or f"{host_of(config.flight_addr)}:0",
        advertise_host=host_of(config.advertise_flight_addr or config.flight_addr),
        memory_quota_bytes=config.memory_quota_bytes // count,
        flight_token_file=config.flight_token_file,
        stream_silence_seconds=config.stream_silence_seconds,
        security=security,
    )
    pool = Pool(launch.workers(count))

    def processor(assignment: Assignment) -> Processor:
        if assignment.source.per_table:
            return WorkersProcessor(pool, directory, assignment)
        # a log is read once, for all tables
        return LocalProcessor(resources, assignment)

    async with pool.running():
        yield processor


async def _shown(owner: Owner) -> None:
    """Show the changefeeds' gauges until cancelled."""
    collector = FeedCollector(lambda: list(owner.feeds.values()))
    REGISTRY.register(collector)
    try:
        await asyncio.Event().wait()
    finally:
        REGISTRY.unregister(collector)
