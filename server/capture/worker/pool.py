"""The worker processes of a capture: started with it, restarted when they die,
drained after it, and found by number.

They are children as those of `tidemark up`: whatever kills the capture ends them at once. Their
sockets lie in the capture's data directory, for its user only.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Final

import grpc
import pyarrow.flight as fl
from tidemarkpb.v1.worker_pb2_grpc import WorkerServiceStub

from server.capture.worker import metrics
from server.capture.worker.directory import control_socket, flight_socket
from server.child import Child
from server.rpc.limits import MAX_MESSAGE_BYTES
from sorter.store import shard_of
from storage.model.span import Span
from storage.tasks import beside

_SORTER_SHARDS: Final = 4
_THREADS_PER_WORKER: Final = 4
# how long a connection may take; a busy worker answers late
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    (
        "grpc.min_reconnect_backoff_ms",
        2_000,
    ),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class Worker:
    """One worker process; `number` counts from 0."""

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
        """What readers are told to connect to for its tables' rows."""
        port = self.child.endpoints["flight"].rpartition(":")[2]
        return f"{self._scheme}://{self._advertise_host}:{port}"

    @cached_property
    def stub(self) -> WorkerServiceStub:
        """For calls from any thread; reconnects by itself."""
        return WorkerServiceStub(grpc.insecure_channel(self.control, options=_OPTIONS))

    @cached_property
    def flight(self) -> fl.FlightClient:
        """For reading rows from any thread; reconnects by itself."""
        path = self._flight_socket.removeprefix("unix:")
        return fl.FlightClient(f"grpc+unix://{path}", generic_options=_OPTIONS)

    @property
    def http(self) -> str:
        """Where it shows its metrics; empty while it does not run."""
        return self.child.endpoints.get("http", "") if self.child.alive else ""

    def kill(self) -> None:
        """End it at once: it does not answer any more, and will be started again."""
        self.child.kill()


class Pool:
    """The workers of a capture, and which of them has which table."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = tuple(workers)
        self.executor = ThreadPoolExecutor(
            _THREADS_PER_WORKER * len(self.workers), thread_name_prefix="workers"
        )
        """For asking several workers at the same time."""

    def owner(self, span: Span) -> Worker:
        """The table's worker: the same as long as their number is."""
        # a worker's sorter deals its tables by the same hash: by the part of it that is not used
        # here
        return self.workers[shard_of(span, len(self.workers) * _SORTER_SHARDS) // _SORTER_SHARDS]

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
            async with beside(*(child.run() for child in children)):
                with metrics.collect_from(self.workers):
                    yield
        finally:
            self.executor.shutdown(cancel_futures=True)
            async with asyncio.TaskGroup() as draining:
                for child in children:
                    draining.create_task(child.drain())
