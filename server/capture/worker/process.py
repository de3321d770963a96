"""A worker process, put together: coordinator and stores on one side,
its capture and Flight readers on the other.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from pyspark_tidemark import tracing
from tidemarkpb.v1 import worker_pb2

from server.capture.directory import control_socket, flight_socket, sorter_directory
from server.capture.listener import readers_of, serving_flight
from server.capture.local import LocalProcessor, Resources
from server.capture.source.registry import sources
from server.capture.worker.flight import ShareFeeds
from server.capture.worker.host import Host, host_context
from server.capture.worker.service import WorkerService
from server.config import setting
from server.daemon import Endpoints
from server.puller.source import SourceContext
from server.puller.stream_timeout import SILENT_S
from server.puller.tikv.feed import EventFeeds
from server.puller.tikv.puller import StuckLocks
from server.rpc.access_list import open_access
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from server.rpc.server import RpcServer
from server.rpc.tikv import KvClient
from storage.spill_codec import NO_COMPRESSION, SpillCodec

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The settings of a worker process, which its capture gives it on its command line."""

    number: int = setting(0, "its number, from 0")
    data_dir: str = setting("./data/capture", "the capture's data directory")
    coordinator: str = setting("127.0.0.1:2379", "coordinators (or PDs), host:port[,host:port…]")
    flight_addr: str = setting("127.0.0.1:0", "Arrow Flight address: the rows of its tables")
    flight_token_file: str = setting(
        "", "file with the token that readers must bring at flight_addr; empty: none"
    )
    access_file: str = setting("", "as the capture's")
    http_addr: str = setting("127.0.0.1:0", "/metrics, /healthz, /readyz")
    memory_quota_bytes: int = setting(256 << 20, "memory for the rows of one changefeed's share")
    stream_silence_seconds: float = setting(SILENT_S, "as the capture's", least=0.001)
    spill_compression: str = setting(NO_COMPRESSION, "as the capture's")
    spill_encryption: bool = setting(
        default=False, help_text="as the capture's; each worker makes a key of its own"
    )


@asynccontextmanager
async def open_worker(config: WorkerConfig, security: SecurityConfig) -> AsyncIterator[Endpoints]:
    """A worker for the block.

    Raises:
        PdUnavailableError: the coordinator does not answer.
        PortInUseError, FlightPortError: an address cannot be listened on.
    """
    directory, number = Path(config.data_dir), config.number
    with tracing.sending(f"tidemark-capture-worker-{number}", _log.warning):
        async with (
            PdClient.open(config.coordinator, security) as pd,
            KvClient.open(pd, security) as kv,
            EventFeeds.open(pd.cluster_id, security, config.stream_silence_seconds) as feeds,
            asyncio.TaskGroup() as tasks,
        ):
            context = host_context(SourceContext(pd, feeds, kv))
            resources = Resources(
                context,
                sorter_directory(directory, number),
                config.memory_quota_bytes,
                SpillCodec(config.spill_compression, encrypted=config.spill_encryption),
            )
            host = Host(tasks, partial(LocalProcessor, resources))
            server = RpcServer()
            server.add_service(
                worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
                WorkerService(host, sources(context)),
            )
            locks = tasks.create_task(StuckLocks(pd, kv, host.pullers).run())
            async with (
                serving_flight(
                    ShareFeeds(host),
                    config.flight_addr,
                    security=security,
                    readers=readers_of(open_access(config.access_file), config.flight_token_file),
                ) as flight,
                # For its capture: a Unix socket that only the capture's user can open needs neither
                # TLS nor token.
                serving_flight(ShareFeeds(host), flight_socket(directory, number)),
                server.listen(control_socket(directory, number)),
            ):
                yield {"flight": flight.bound}
            locks.cancel()
            host.close()
