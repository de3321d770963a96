"""Workers, which run shares of changefeeds, and the worker processes of a capture.

`Worker` is what the owner asks of a worker, `Workers` are those that a changefeed is divided among:
processes of this capture (`WorkerProcess`), or captures of the cluster (`peers`).

`Launch` builds the processes' command lines; `Pool` starts them with the capture, restarts
them when they die, and drains them after it. They are children as those of `tidemark up`: whatever
kills the capture ends them at once. Their sockets lie in its data directory, for its user only.

The capture's `/metrics` shows the metrics of its processes, too (`WorkersRegistry`), told apart by
the label `worker`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

import grpc
import grpc.aio
import pyarrow.flight as fl
from prometheus_client import REGISTRY as OWN
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from tidemarkpb.v1.worker_pb2_grpc import WorkerServiceStub

from server.capture.config import check_workers
from server.capture.directory import control_socket, flight_socket, make_sockets_directory
from server.capture.worker.remote import RemoteShare
from server.capture.worker.share import ShareStart, WorkerShare
from server.log import LogConfig, log_config
from server.process import Child
from server.puller.stream_timeout import SILENT_S
from server.rpc.client import NO_WEB_PROXY, connect, scrape, with_token
from server.rpc.config import MAX_MESSAGE_BYTES
from server.rpc.credentials import SecurityConfig, channel_credentials
from server.rpc.renewed_channel import RenewedBlockingChannel
from storage.spill_codec import NO_COMPRESSION
from storage.tasks import background_tasks

_OPTIONS: Final = [
    NO_WEB_PROXY,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long a connection attempt may take, in spite of its name: a busy worker accepts late.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_COMMAND = "capture worker"
_SCRAPE_S = 1.0


class Worker(Protocol):
    """Runs shares of changefeeds: a process of this capture, or another capture of the cluster."""

    @property
    def name(self) -> str:
        """Its name in messages; unique."""
        ...

    @property
    def id(self) -> str:
        """The name used in commands: a capture's id, or `worker-N` for a process."""
        ...

    @property
    def location(self) -> str:
        """The Flight location of its tables' rows, as `plan` gives it to readers; empty: where they
        ask for the plan.
        """
        ...

    def share(self, start: ShareStart) -> WorkerShare:
        """A share of a changefeed on it, which does not run yet."""
        ...


class Workers(Protocol):
    """The workers that a changefeed is divided among."""

    executor: Executor
    """For parallel calls to several workers."""

    @property
    def term(self) -> int:
        """The owner's: the create revision of its key."""
        ...

    def workers(self) -> Sequence[Worker]:
        """The workers that can be used now; at least one."""
        ...

    async def wait_known(self) -> None:
        """Wait, a few seconds at most, until the workers that are there now are known."""
        ...

    def wipe(self, changefeed: str) -> None:
        """Delete what they have of a changefeed that does not run."""
        ...


def stub_at(
    address: str, security: SecurityConfig | None = None, token_file: str = ""
) -> WorkerServiceStub:
    """Return a client for calls from any thread; it sends the token of a file and reconnects by
    itself.
    """
    files = channel_credentials(security or SecurityConfig())
    channel: grpc.Channel
    if files is None:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
    else:
        channel = RenewedBlockingChannel(
            files, lambda credentials: grpc.secure_channel(address, credentials, options=_OPTIONS)
        )
    return WorkerServiceStub(with_token(channel, token_file))


class WorkerProcess:
    """Implements `Worker`, and `RemoteWorker` of its shares, by a child process; `number` counts
    from 0.
    """

    comes_back = True

    def __init__(
        self, number: int, directory: Path, child: Child, advertise_host: str, scheme: str
    ) -> None:
        self.number = number
        self.child = child
        self.control = control_socket(directory, number)
        self._flight_socket = flight_socket(directory, number)
        self._advertise_host = advertise_host
        self._scheme = scheme

    @property
    def location(self) -> str:
        """The Flight location of its tables' rows, as `plan` gives it to readers."""
        port = self.child.endpoints["flight"].rpartition(":")[2]
        return f"{self._scheme}://{self._advertise_host}:{port}"

    @cached_property
    def stub(self) -> WorkerServiceStub:
        """The client for calls from any thread; it reconnects by itself."""
        return stub_at(self.control)

    def do_get(self, ticket: fl.Ticket, timeout_s: float) -> fl.FlightStreamReader:
        """Its rows, from any thread."""
        return self._flight.do_get(ticket, fl.FlightCallOptions(timeout=timeout_s))

    @cached_property
    def _flight(self) -> fl.FlightClient:
        """Reconnects by itself."""
        path = self._flight_socket.removeprefix("unix:")
        return fl.FlightClient(f"grpc+unix://{path}", generic_options=_OPTIONS)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"worker {self.number} of this capture"

    @property
    def id(self) -> str:
        """See `Worker.id`."""
        return f"worker-{self.number}"

    def share(self, start: ShareStart) -> WorkerShare:
        """See `Worker.share`."""
        return RemoteShare.of(self, start)

    def connect(self) -> grpc.aio.Channel:
        """A channel for calls from the event loop."""
        return connect(self.control)

    def lost(self) -> None:
        """Do nothing: it is started again when it has ended."""

    @property
    def http(self) -> str:
        """The address of its metrics; empty while it does not run."""
        return self.child.endpoints.get("http", "") if self.child.alive else ""

    def kill(self) -> None:
        """End it at once: it does not answer any more, and will be started again."""
        self.child.kill()


class Scraped(Protocol):
    """A worker by its number, and where it answers over HTTP."""

    number: int

    @property
    def http(self) -> str:
        """`host:port`; empty while it does not run."""
        ...


class WorkersRegistry(CollectorRegistry):
    """Collects this process's metrics, and in the same families those of its workers."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: Sequence[Scraped] = ()

    def collect(self) -> Iterator[Metric]:
        """All families; a worker that does not answer is `tidemark_capture_worker_up` 0."""
        families = {family.name: family for family in OWN.collect()}
        up = Metric(
            "tidemark_capture_worker_up", "1 if the worker process answered this scrape", "gauge"
        )
        for worker in self.workers:
            label = {"worker": str(worker.number)}
            text = scrape(worker.http, _SCRAPE_S)
            up.add_sample(up.name, label, 0.0 if text is None else 1.0)
            for family in text_string_to_metric_families(text or ""):
                # It is a part of another family, and its samples have the label already.
                if family.name.endswith("_created"):
                    continue
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, **label}, sample.value)
        if self.workers:
            families[up.name] = up
        yield from families.values()


REGISTRY = WorkersRegistry()
"""The metrics of the workers, shown by `tidemark capture`."""


@contextmanager
def collect_from(workers: Sequence[Scraped]) -> Iterator[None]:
    """Show the workers' metrics in `REGISTRY` for the block."""
    REGISTRY.workers = workers
    try:
        yield
    finally:
        REGISTRY.workers = ()


class Pool:
    """The worker processes of a capture."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self.workers = tuple(workers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the workers alive for the block.

        Raises:
            ChildFailedError: one could not start.
        """
        children = [worker.child for worker in self.workers]
        try:
            async with asyncio.TaskGroup() as starting:
                for child in children:
                    starting.create_task(child.start(), name=child.name)
            async with background_tasks(*(child.run() for child in children)):
                with collect_from(self.workers):
                    yield
        finally:
            async with asyncio.TaskGroup() as draining:
                for child in children:
                    draining.create_task(child.drain())


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings that all workers of a capture share."""

    directory: Path
    """The capture's; absolute."""
    coordinator: str
    flight_addr: str
    """The address of the first worker; the next workers have the following ports, unless the port
    is 0.
    """
    advertise_host: str
    memory_quota_bytes: int
    """The memory quota of each worker for each changefeed."""
    security: SecurityConfig
    flight_token_file: str = ""
    access_file: str = ""
    stream_silence_seconds: float = SILENT_S
    spill_compression: str = NO_COMPRESSION
    spill_encryption: bool = False
    log: LogConfig = field(default_factory=log_config)
    """The log configuration of the capture."""

    def workers(self, count: int) -> list[WorkerProcess]:
        """The workers, not yet started.

        Raises:
            ConfigError: their number, or their address, cannot be used.
            DataDirError: their sockets cannot lie in the data directory.
        """
        check_workers(count, self.flight_addr)
        make_sockets_directory(self.directory, count)
        return [self._worker(number) for number in range(count)]

    def _worker(self, number: int) -> WorkerProcess:
        arguments = {
            "--number": number,
            "--data-dir": self.directory,
            "--coordinator": self.coordinator,
            "--flight-addr": self._flight_addr(number),
            "--http-addr": "127.0.0.1:0",
            "--memory-quota-bytes": self.memory_quota_bytes,
            "--flight-token-file": self.flight_token_file,
            "--access-file": self.access_file,
            "--stream-silence-seconds": self.stream_silence_seconds,
            "--spill-compression": self.spill_compression,
            "--ca-path": self.security.ca_path,
            "--cert-path": self.security.cert_path,
            "--key-path": self.security.key_path,
            "--log-level": self.log.log_level,
            "--log-format": self.log.log_format,
        }
        flags = [str(part) for flag in arguments.items() if flag[1] != "" for part in flag]
        if self.spill_encryption:
            flags.append("--spill-encryption")
        if self.log.redact_info_log:
            flags.append("--redact-info-log")
        child = Child(_COMMAND, flags)
        scheme = "grpc+tls" if self.security.enabled else "grpc"
        return WorkerProcess(number, self.directory, child, self.advertise_host, scheme)

    def _flight_addr(self, number: int) -> str:
        host, _, port = self.flight_addr.rpartition(":")
        return f"{host}:{int(port) + number if int(port) else 0}"
