"""What a simulation puts in the place of a machine's network, disk and threads."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import pyarrow.flight as fl
from tidemarkpb.v1.worker_pb2_grpc import WorkerServiceStub

import server.capture.daemon
import server.capture.routing
import server.capture.worker.combined
import server.capture.worker.flight
import server.capture.worker.moves
import server.capture.worker.peers
import server.coordinator.daemon
import server.coordinator.term
import server.gc_worker.cluster
import server.gc_worker.daemon
import server.puller.tidb.schema_puller
import server.puller.tikv.feed
import server.rpc.members
import server.rpc.region_router
import server.store.app
import server.store.handover
import sink.manager
from gcsafepoint.worker.worker import GCWorker
from server.capture.worker.peers import PeerCapture
from server.coordinator.term import CurrentTerm
from sink.dispatcher import Dispatcher
from sink.flight.documents import Ticket
from sink.flight.server import _errors_cross_the_wire, _streamed
from storage.defect import DefectError
from storage.meta.client import EtcdMeta
from tests.sim.process import current_process, in_process
from tests.sim.threads import Condition, Submitted, wait
from tests.sim.whole.transport import Net, SimChannel, SimServer

_CONNECTING = (
    server.capture.worker.peers,
    server.coordinator.daemon,
    server.coordinator.term,
    server.gc_worker.cluster,
    server.puller.tikv.feed,
    server.rpc.members,
    server.rpc.region_router,
    server.store.handover,
)
_LISTENING = (
    server.capture.daemon,
    server.coordinator.daemon,
    server.gc_worker.daemon,
    server.store.app,
)
_THREADS = (
    server.capture.daemon,
    server.capture.local,
    server.puller.tidb.schema_puller,
    server.store.app,
)


_CONDITIONS = (server.capture.worker.combined, sink.manager)
_SPLIT_EVERY_S = 8.0


class Pool(Executor):
    """Threads of executors: `VirtualLoop.run_in_executor` runs what is theirs in the loop, and
    what a thread gives to others it does itself, one after the other.
    """

    def __init__(self, workers: int = 1, *_: Any, **__: Any) -> None:
        self.workers = workers

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run it at once."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as err:  # noqa: BLE001 - as an executor does
            future.set_exception(err)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to end."""


class Machines(Protocol):
    """The machines of a simulation, by name."""

    net: Net

    def machine(self, name: str) -> Any:
        """The machine of that name."""
        ...


@contextmanager
def installed(machines: Machines, defects: list[str]) -> Iterator[None]:
    """All seams for the block; `defects` gets every exception that nobody expected."""
    seams = _Seams(machines, defects)
    with ExitStack() as stack:
        for owner, name, instead in seams.patches():
            stack.enter_context(patch.object(owner, name, instead))
        yield


class _Seams:
    """What stands in the place of the real things; each is for the machine whose process runs."""

    def __init__(self, machines: Machines, defects: list[str]) -> None:
        self._machines = machines
        self._defects = defects

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Where each of them stands."""
        yield from ((module, "connect", self.channel) for module in _CONNECTING)
        yield from ((module, "RpcServer", self.listener) for module in _LISTENING)
        yield from ((module, "ThreadPoolExecutor", Pool) for module in _THREADS)
        yield server.gc_worker.daemon, "metadata_at", self.metadata
        yield server.gc_worker.daemon, "_since_boot_s", _since_boot_s
        yield server.coordinator.daemon, "_open_metadata", self.etcd
        yield server.store.app, "_database", lambda _: self._here().disk.opened()
        yield server.capture.daemon, "metadata_at", self.metadata
        yield server.capture.daemon, "serving_flight", self.flight
        yield server.capture.daemon, "lock", self.identity
        yield server.capture.daemon, "_shown", _unshown
        yield from ((module, "threading", _CONDITIONED) for module in _CONDITIONS)
        yield asyncio, "run_coroutine_threadsafe", Submitted
        yield server.capture.worker.flight, "FlightWaits", NoWaiting
        yield server.capture.worker.moves, "_SPLIT_EVERY_S", _SPLIT_EVERY_S
        yield server.capture.worker.peers, "stub_at", self.stub
        yield PeerCapture, "do_get", self.rows()
        yield server.capture.worker.peers, "_unreachable", self.unreachable
        yield server.capture.routing, "connection_fault", _no_fault
        yield Dispatcher, "start", lambda _: None
        yield DefectError, "__init__", self._noting_defects()
        # The same objects, which the checks look at.
        yield server.coordinator.daemon, "CurrentTerm", self._noted(CurrentTerm, "term")
        yield server.gc_worker.daemon, "GCWorker", self._noted(GCWorker, "worker")
        yield server.store.app, "_Parts", self._noted(server.store.app._Parts, "store")

    def channel(self, address: str, *_: Any, **__: Any) -> SimChannel:
        """In the place of `server.rpc.client.connect`."""
        return SimChannel(self._machines.net, address)

    def stub(self, address: str, *_: Any, **__: Any) -> "BlockingStub":
        """In the place of `server.capture.worker.pool.stub_at`."""
        return BlockingStub(SimChannel(self._machines.net, address))

    def rows(self) -> Any:
        """In the place of `PeerCapture.do_get`."""

        def do_get(peer: PeerCapture, ticket: fl.Ticket, timeout_s: float) -> FlightRows:
            del timeout_s
            here, there = self._here(), self._machines.machine(peer.record.id)
            return FlightRows(self._machines.net, here.name, there, ticket)

        return do_get

    def listener(self, *_: Any, **__: Any) -> SimServer:
        """In the place of `server.rpc.server.RpcServer`."""
        return SimServer(self._machines.net)

    @asynccontextmanager
    async def metadata(self, *_: Any) -> AsyncIterator[Any]:
        """In the place of a client of the metadata behind the coordinators."""
        yield EtcdMeta(self._here().link)

    @asynccontextmanager
    async def etcd(self, *_: Any) -> AsyncIterator[Any]:
        """In the place of a coordinator's client of etcd."""
        yield self._here().link

    @asynccontextmanager
    async def flight(self, feeds: Any, addr: str, *_: Any) -> AsyncIterator[Any]:
        """In the place of a Flight listener: readers call what is behind it."""
        feeds._waiting = NoWaiting()
        parts = self._here().parts
        parts["feeds"] = feeds
        try:
            yield SimpleNamespace(bound=addr)
        finally:
            parts.pop("feeds", None)

    @contextmanager
    def identity(self, _: Any) -> Iterator[str]:
        """In the place of a capture's data directory's lock, and the id in it."""
        yield self._here().name

    async def unreachable(self, record: Any) -> str:
        """In the place of a look whether a capture's ports take connections."""
        net = self._machines.net
        is_there = record.address in net.listeners and net.reaches(self._here().name, record.id)
        return "" if is_there else f"{record.address} cannot be reached from here"

    def _noted(self, make: Any, as_name: str) -> Any:
        """Makes the same object, and lets the machine have it."""

        def made(*args: Any, **named: Any) -> Any:
            part = make(*args, **named)
            self._here().parts[as_name] = part
            return part

        return made

    def _noting_defects(self) -> Any:
        def init(error: DefectError, message: str) -> None:
            self._defects.append(message)
            super(DefectError, error).__init__(message)

        return init

    def _here(self) -> Any:
        process = current_process()
        assert process is not None, "only daemons ask for it"
        return self._machines.machine(process.name)


def _since_boot_s() -> float:
    return asyncio.get_running_loop().time()


async def _no_fault(*_: object) -> str:
    """Why a server does not answer is asked of real sockets only."""
    return ""


async def _unshown(_: Any) -> None:
    """The registry of metrics is one for all captures of this process."""
    await asyncio.Event().wait()


_CONDITIONED = SimpleNamespace(**vars(threading) | {"Condition": Condition})


class BlockingStub:
    """Implements `WorkerServiceStub` for calls from threads."""

    def __init__(self, channel: SimChannel) -> None:
        self._stub = WorkerServiceStub(channel)

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._stub, method)

        def ask(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            return wait(call(request, timeout=timeout, metadata=metadata))

        return ask


class FlightRows:
    """Implements `pyarrow.flight.FlightStreamReader`: the rows of one ticket from another machine,
    as what is behind its Flight port gives them.
    """

    def __init__(self, net: Net, here: str, there: Any, ticket: fl.Ticket) -> None:
        self._net, self._here, self._there = net, here, there
        self._process = there.process
        request = Ticket.parse(ticket.ticket)
        self._cross()
        with _errors_cross_the_wire("get"):
            self.schema, batches = self._within(
                there.feeds.read,
                *(request.changefeed, request.table, request.start, request.end),
                before=request.before,
            )
        self._batches = _streamed(batches)

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._within(next, self._batches, None)) is not None:
            self._cross()
            yield SimpleNamespace(data=batch)

    def read_chunk(self) -> Any:
        """See `FlightStreamReader`."""
        return next(iter(self))

    def _within(self, call: Any, *args: Any, **named: Any) -> Any:
        return in_process(self._process).run(call, *args, **named)

    def _cross(self) -> None:
        """Let some time pass, and see that the other one is still there.

        Raises:
            FlightUnavailableError: it is not.
        """
        wait(self._passing())
        there = self._there
        is_there = there.process is self._process and there.is_up and there.feeds is not None
        if not is_there or not self._net.reaches(self._here, there.name):
            raise fl.FlightUnavailableError("Socket closed")

    async def _passing(self) -> None:
        await asyncio.sleep(self._net.quick())
        await self._process.runs()


class NoWaiting:
    """Implements `server.capture.flight.FlightWaits`, whose calls wait in threads: here nobody
    waits, and readers ask again.
    """

    def close(self) -> None:
        """Nobody waits."""

    def pause(self, seconds: float) -> bool:
        """The caller gives up at once."""
        del seconds
        return True

    def resolved(self, sink: Any, span: Any, ts: int, limit_s: float) -> bool:
        """Whether it is so now."""
        del limit_s
        return bool(sink.resolved_ts(span) >= ts)
