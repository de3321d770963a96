"""The capture, put together: coordinator and stores on one side, gRPC and Flight on the other."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from prometheus_client import REGISTRY
from pyspark_tidemark import tracing
from tidemarkpb.v1 import capture_pb2, changefeed_pb2, dump_pb2, worker_pb2

from server.capture.api_v2.api import Api
from server.capture.api_v2.cluster import LiveCluster
from server.capture.capture_service import Blockers, CaptureService
from server.capture.changefeeds import Changefeeds
from server.capture.cluster_map import mapped_by
from server.capture.config import CaptureConfig, cores, host_of
from server.capture.console import Console, Services, explained_by
from server.capture.directory import lock
from server.capture.feed import FeedFactory
from server.capture.fence import Fence, FencedMeta
from server.capture.listener import serving_flight
from server.capture.local import LocalProcessor, Resources
from server.capture.maintainers import Maintainers
from server.capture.membership import Membership
from server.capture.metrics import FeedCollector
from server.capture.owner import Owner, Placement
from server.capture.processor import Assignment, MakeProcessor, Processor
from server.capture.records import Records
from server.capture.routing import FlightForwarder, Router
from server.capture.service import ChangefeedService
from server.capture.source.registry import sources
from server.capture.worker.flight import CaptureFeeds, ShareFeeds
from server.capture.worker.host import Host, host_context
from server.capture.worker.local_share import LocalWorker
from server.capture.worker.peers import SHARES, PeerAccess, Peers
from server.capture.worker.pool import Launch, Pool, Worker
from server.capture.worker.processor import WorkersProcessor
from server.capture.worker.service import WorkerService
from server.daemon import Endpoints
from server.dump.service import DumpService
from server.puller.source import SourceContext
from server.puller.tikv.feed import EventFeeds
from server.puller.tikv.puller import StuckLocks, TablePuller
from server.rpc.access_guard import guarded
from server.rpc.access_list import Access, open_access
from server.rpc.client import metadata_at, token_of
from server.rpc.config import Engine
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdClient
from server.rpc.server import RpcServer
from server.rpc.tikv import KvClient
from storage.spill_codec import SpillCodec
from storage.tasks import background_tasks

_log = structlog.get_logger(__name__)
_ASKING_THREADS: Final = 32
_FORWARDING_THREADS: Final = 128
"""A reader whose changefeed runs on another capture takes one of them while it waits for rows."""


@asynccontextmanager
async def open_capture(config: CaptureConfig, security: SecurityConfig) -> AsyncIterator[Endpoints]:
    """A capture for the block; ready when it is known who owns the changefeeds.

    Raises:
        DataDirError: the data directory cannot be used.
        PdUnavailableError: the coordinator does not answer.
        PortInUseError, FlightPortError: an address cannot be listened on.
        AccessFileError, TokenFileError: such a file cannot be used.
        ChildFailedError: a worker process could not start.
    """
    clients, readers = open_access(config.access_file), config.readers()
    with (
        lock(config.directory) as identity,
        tracing.sending("tidemark-capture", _log.warning),
    ):
        async with (
            _upstream(config, security) as context,
            _member(config, security, identity, context) as member,
        ):
            rows = serving_flight(
                member.flight_feeds,
                config.flight_addr,
                config.advertise_flight_addr,
                security,
                readers,
            )
            server = _served(member, context, security, clients)
            async with rows as flight, server.listen(config.addr) as bound:
                address = config.advertise_addr or bound
                await member.router.check_address(address)
                run = member.membership.run(address, config.advertise_flight_addr or flight.bound)
                sharing = member.peers.run(member.membership.sharing)
                locks = StuckLocks(context.pd, context.kv, member.pullers)
                async with background_tasks(run, locks.run(), _shown(member.maintainers), sharing):
                    await member.membership.settled.wait()
                    yield {"capture": bound, "flight": flight.bound}


@asynccontextmanager
async def _upstream(
    config: CaptureConfig, security: SecurityConfig
) -> AsyncIterator[SourceContext]:
    """Connections to coordinator, metadata and stores, as sources of changefeeds need them."""
    async with (
        PdClient.open(config.coordinator, security) as pd,
        metadata_at(config.coordinator, security) as meta,
        KvClient.open(pd, security) as kv,
        EventFeeds.open(pd.cluster_id, security, config.stream_silence_seconds) as feeds,
    ):
        yield SourceContext(
            pd, feeds, kv, meta, security, stream_silence_s=config.stream_silence_seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """This capture as a member of its cluster: what it runs, and how it reaches the others."""

    identity: str
    host: Host
    peers: Peers
    maintainers: Maintainers
    membership: Membership
    router: Router
    flight_feeds: CaptureFeeds

    def pullers(self) -> list[TablePuller]:
        """The pullers of its own changefeeds, and those of the shares that it has of others."""
        return [*self.maintainers.pullers(), *self.host.pullers()]


@asynccontextmanager
async def _member(
    config: CaptureConfig, security: SecurityConfig, identity: str, context: SourceContext
) -> AsyncIterator[_Member]:
    """The parts of a capture that exist before it listens, for the block."""
    directory, meta = config.directory, context.meta
    assert meta is not None, "a capture has the metadata"
    # Sorted rows are a cache of the upstream: what an earlier process left belongs to a run that
    # has ended.
    shutil.rmtree(directory / "sorter", ignore_errors=True)
    codec = SpillCodec(config.spill_compression, encrypted=config.spill_encryption)
    resources = Resources(context, directory / "sorter", config.memory_quota_bytes, codec)
    access, fence = _peer_access(config, security), Fence()
    async with _worker_processes(config, security, directory) as own:
        with (
            _executor(_FORWARDING_THREADS, "forwarding") as forwarding,
            _executor(_ASKING_THREADS, "workers") as asking,
        ):
            async with _hosting(directory, resources) as host:
                peers = Peers(
                    identity,
                    directory,
                    access,
                    asking,
                    lambda: fence.revision,
                    own or (LocalWorker(identity, host, sources(host_context(context))),),
                )
                maintainers = _maintainers(identity, context, fence, peers, resources)
                membership = Membership(meta, identity, maintainers, fence)
                router = Router(maintainers, membership, access)
                elsewhere = FlightForwarder(router, access, asyncio.get_running_loop(), forwarding)
                yield _Member(
                    identity=identity,
                    host=host,
                    peers=peers,
                    maintainers=maintainers,
                    membership=membership,
                    router=router,
                    flight_feeds=CaptureFeeds(
                        maintainers, ShareFeeds(host), peers.is_own, elsewhere
                    ),
                )


def _served(
    member: _Member, context: SourceContext, security: SecurityConfig, clients: Access
) -> RpcServer:
    """The gRPC server with a capture's services, and its console and HTTP API on the same port."""
    assert context.meta is not None, "a capture has the metadata"
    maintainers, membership, router = member.maintainers, member.membership, member.router
    changefeeds = ChangefeedService(maintainers, router)
    captures = CaptureService(
        maintainers.owner, membership, Blockers(maintainers), router, member.peers.leave_out
    )
    dumps = DumpService(context.meta)
    shares = WorkerService(member.host, sources(host_context(context)), membership.check_term)
    services = _guarded(clients, changefeeds, dumps, captures, shares)
    server = _rpc_server(security, services)
    api = Api(
        member.identity,
        services["ChangefeedService"],
        services["CaptureService"],
        LiveCluster(context.pd, context.kv, context.meta),
        clients,
    )
    console = Console(
        api,
        Services(changefeeds, captures, dumps),
        explained_by(context.pd, security),
        clients,
        mapped_by(context.pd, context.meta, security),
    )
    server.serve_http1(console.answer)
    return server


_SERVICES: Final = {
    name: file.services_by_name[name]
    for file, name in (
        (changefeed_pb2.DESCRIPTOR, "ChangefeedService"),
        (dump_pb2.DESCRIPTOR, "DumpService"),
        (capture_pb2.DESCRIPTOR, "CaptureService"),
        (worker_pb2.DESCRIPTOR, "WorkerService"),
    )
}


def _guarded(
    clients: Access,
    changefeeds: ChangefeedService,
    dumps: DumpService,
    captures: CaptureService,
    shares: WorkerService,
) -> dict[str, object]:
    """The services of a capture by name, each behind the check of who calls."""
    servicers = (changefeeds, dumps, captures, shares)
    return {
        name: guarded(service, servicer, clients)
        for (name, service), servicer in zip(_SERVICES.items(), servicers, strict=True)
    }


def _rpc_server(security: SecurityConfig, services: Mapping[str, object]) -> RpcServer:
    """The gRPC server with the services of a capture."""
    server = RpcServer(security, suited=Engine.NATIVE)
    for name, servicer in services.items():
        server.add_service(_SERVICES[name], servicer)
    return server


def _peer_access(config: CaptureConfig, security: SecurityConfig) -> PeerAccess:
    """The access to other captures: with this one's own token, or the one that all readers share.

    Raises:
        TokenFileError: its file cannot be read, or holds no token.
    """
    if config.token_file:
        token_of(config.token_file)
    return PeerAccess(security, config.token_file or config.flight_token_file)


@asynccontextmanager
async def _worker_processes(
    config: CaptureConfig, security: SecurityConfig, directory: Path
) -> AsyncIterator[Sequence[Worker]]:
    """This capture's worker processes, kept alive for the block; empty with `--workers 1`."""
    count = config.workers or cores()
    if count == 1:
        yield ()
        return
    launch = Launch(
        directory=directory,
        coordinator=config.coordinator,
        flight_addr=config.first_worker_flight_addr,
        advertise_host=host_of(config.advertise_flight_addr or config.flight_addr),
        memory_quota_bytes=config.memory_quota_bytes // count,
        flight_token_file=config.flight_token_file,
        access_file=config.access_file,
        stream_silence_seconds=config.stream_silence_seconds,
        spill_compression=config.spill_compression,
        spill_encryption=config.spill_encryption,
        security=security,
    )
    pool = Pool(launch.workers(count))
    async with pool.running():
        yield pool.workers


def _maintainers(
    identity: str, context: SourceContext, fence: Fence, peers: Peers, resources: Resources
) -> Maintainers:
    """The changefeeds that this capture runs: the cluster's as the owner, whose writes `fence`
    guards, and those of logs as their maintainer.
    """
    meta, pd = context.meta, context.pd
    assert meta is not None, "a capture has the metadata"
    make_processor = _processors(peers, resources)

    def factory(of: Fence) -> FeedFactory:
        # What a source keeps is fenced as the changefeed's records are.
        fenced = replace(context, meta=FencedMeta(meta, of))
        return FeedFactory(Records(meta, of), sources(fenced), make_processor)

    def maintained(of: Fence, changefeed: str) -> Changefeeds:
        return Changefeeds(factory(of), pd, changefeed)

    placement = Placement(meta, fence, peers.refused)
    owner = Owner(factory(fence), pd, placement)
    return Maintainers(meta, identity, owner, maintained, placement.decided)


def _processors(peers: Peers, resources: Resources) -> MakeProcessor:
    """The factory of what runs a changefeed: all workers, or this process."""

    def processor(assignment: Assignment) -> Processor:
        if assignment.source.per_table:
            return WorkersProcessor(peers, assignment)
        # A log is read once, for all tables: dividing them would read it once in each worker.
        return LocalProcessor(resources, assignment)

    return processor


@contextmanager
def _executor(threads: int, name: str) -> Iterator[Executor]:
    """Threads for calls to workers and captures; those under way at the end are not waited for."""
    executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def _hosting(directory: Path, resources: Resources) -> AsyncIterator[Host]:
    """The host of shares, for the block: it runs the tables of changefeeds that their owners give
    to this capture.
    """
    shares = replace(
        resources, context=host_context(resources.context), directory=directory / SHARES
    )
    # Like `sorter`, a cache of shares that ended with an earlier process.
    shutil.rmtree(directory / SHARES, ignore_errors=True)
    async with asyncio.TaskGroup() as tasks:
        host = Host(tasks, partial(LocalProcessor, shares))
        try:
            yield host
        finally:
            host.close()


async def _shown(maintainers: Maintainers) -> None:
    """Export the changefeeds' gauges until cancelled."""
    collector = FeedCollector(lambda: list(maintainers.feeds.values()))
    REGISTRY.register(collector)
    try:
        await asyncio.Event().wait()
    finally:
        REGISTRY.unregister(collector)
