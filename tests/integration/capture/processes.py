"""Real daemons as child processes, and a Flight reader of one changefeed."""

import asyncio
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pyarrow as pa
import pyarrow.flight as fl
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import pdpb_pb2 as pdpb
from kvproto.pdpb_pb2_grpc import PDStub
from kvproto.tikvpb_pb2_grpc import TikvStub
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from server.rpc.client import connect
from server.rpc.pd import PdClient
from storage.codec import encode_bytes
from storage.model.ts import compose
from tests.ports import free_port
from tests.split_keys import FIRST_REGIONS

COMMAND = [sys.executable, "-m", "server.cli.main"]
LOOPBACK = "127.0.0.1:0"
DRAIN_S = 120
PATIENCE_S = 120


class Daemon:
    """`tidemark NAME …`; its errors go to a file beside its data.

    Restarted, it listens where it did before.
    """

    def __init__(self, directory: Path, name: str, *flags: str) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self._flags = ["--http-addr", LOOPBACK, *flags]
        self._addresses = {name: "--addr"} | (
            {"flight": "--flight-addr"} if name == "capture" else {}
        )
        self.endpoints = {listener: f"127.0.0.1:{free_port()}" for listener in self._addresses}
        self.start()

    def start(self) -> None:
        listen = [
            part for name, flag in self._addresses.items() for part in (flag, self.endpoints[name])
        ]
        command = [*COMMAND, self.name, *listen, *self._flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        try:
            line = self.process.stdout.readline()
            assert line, f"{self.name} did not start: {self.log.read_text()}"
            self.endpoints = json.loads(line)["endpoints"]
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(DRAIN_S)
        except BaseException:
            self.kill()
            raise
        self.process.stdout.close()
        return status

    def stop(self) -> None:
        """End it, if it runs."""
        if self.process.poll() is None:
            self.terminate()


class Cluster:
    """Coordinator, store and capture."""

    def __init__(self, directory: Path, *capture_flags: str) -> None:
        self.directory = directory
        with ExitStack() as started:
            self._started = started
            self.coordinator = self.start(
                "coordinator", "--metadata", f"leveldb:{directory / 'metadata'}"
            )
            self.pd = self.coordinator.endpoints["coordinator"]
            shared = ["--coordinator", self.pd, "--data-dir"]
            self.store = self.start("store", *shared, str(directory / "store"), *FIRST_REGIONS)
            self.capture = self.start(
                "capture", *shared, str(directory / "capture"), *capture_flags
            )
            self._started = started.pop_all()

    def start(self, name: str, *flags: str) -> Daemon:
        """One more daemon, which ends with the cluster, if not before."""
        daemon = Daemon(self.directory, name, *flags)
        self._started.callback(daemon.stop)
        return daemon

    def another_capture(self) -> Daemon:
        """A second one, which waits to be owner."""
        return self.start(
            "capture", "--coordinator", self.pd, "--data-dir", str(self.directory / "another")
        )

    def now(self) -> int:
        """A new timestamp."""
        with grpc.insecure_channel(self.pd) as channel:
            stub = PDStub(channel)
            header = pdpb.RequestHeader(
                cluster_id=stub.GetMembers(pdpb.GetMembersRequest()).header.cluster_id
            )
            [answer] = stub.Tso(iter([pdpb.TsoRequest(header=header, count=1)]))
        return compose(answer.timestamp.physical, answer.timestamp.logical)

    def api(self, method: str, request, capture: Daemon | None = None):
        """A call of the changefeed API."""
        with grpc.insecure_channel((capture or self.capture).endpoints["capture"]) as channel:
            return getattr(ChangefeedServiceStub(channel), method)(
                request, timeout=60, wait_for_ready=True
            )

    def http(
        self, method: str, path: str, body=None, capture: Daemon | None = None, **headers: str
    ):
        """A request as curl sends it to the port of the changefeed API: status and document."""
        host, _, port = (capture or self.capture).endpoints["capture"].rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def cli(self, *arguments: str, timeout_s: float = 120):
        """`tidemark cli --json …`: the document, or the error line where there is an error."""
        flags = ["cli", "--server", self.capture.endpoints["capture"], "--pd", self.pd, "--json"]
        done = subprocess.run(
            [*COMMAND, *flags, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        # A command may answer by its exit status, too: that is no error.
        is_error = done.returncode != 0 and done.stderr.strip()
        return done.stderr.strip().splitlines()[-1] if is_error else json.loads(done.stdout)

    def stop(self) -> None:
        self._started.close()


@contextmanager
def transaction_client(cluster: Cluster):
    """tikv-client's client; its synchronous face runs on whatever event loop the thread has."""
    import tikv_client

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield tikv_client.TransactionClient.connect([cluster.pd])
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def patiently(call, *arguments, **named):
    """As readers do: what is not available now is asked for again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call(*arguments, **named)
        except fl.FlightUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@contextmanager
def running_cluster(directory: Path, *capture_flags: str):
    cluster = Cluster(directory, *capture_flags)
    try:
        yield cluster
    finally:
        cluster.stop()


def run(coroutine):
    """In a thread of its own: tikv-client needs this one's event loop."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


async def split(pd_addr, key):
    """Let a region begin at a key."""
    async with PdClient.open(pd_addr) as pd:
        route = await pd.region(encode_bytes(key))
        context = kvrpcpb.Context(
            region_id=route.region.id, region_epoch=route.region.region_epoch, peer=route.leader
        )
        async with connect(route.address) as channel:
            answer = await TikvStub(channel).SplitRegion(
                kvrpcpb.SplitRegionRequest(context=context, split_keys=[key])
            )
        assert len(answer.regions) == 2, answer


class Reader:
    """Reads one changefeed as Spark does; connects for every call, so captures may come and go."""

    def __init__(self, cluster: Cluster, changefeed: str, token: str = "") -> None:
        self._cluster = cluster
        self._changefeed = changefeed
        headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        self._options = fl.FlightCallOptions(headers=headers)

    def ask(self, action: str, **members):
        body = json.dumps({"changefeed": self._changefeed} | members).encode()
        with self._client() as client:
            [result] = client.do_action(fl.Action(action, body), self._options)
        return json.loads(result.body.to_pybytes())

    def read(self, start: int, end: int, table: str, location: str = "") -> pa.Table:
        """The rows of one table in `(start, end]`, from the capture or from a slice's location."""
        with self._client(location) as client:
            return client.do_get(self._ticket(start, end, table), self._options).read_all()

    def batches(self, start: int, end: int, table: str) -> Iterator[pa.RecordBatch]:
        """The same, as they are taken."""
        with self._client() as client:
            for chunk in client.do_get(self._ticket(start, end, table), self._options):
                yield chunk.data

    def _ticket(self, start: int, end: int, table: str) -> fl.Ticket:
        ticket = {"changefeed": self._changefeed, "table": table, "start": start, "end": end}
        return fl.Ticket(json.dumps(ticket).encode())

    def wait_resolved(self, ts: int, limit_s: float = 120.0) -> int:
        """A cut that ends at or after `ts`."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            end = self.ask("latest", start=ts - 1, wait_ms=1000)["ts"]
            if end >= ts:
                return end
        raise TimeoutError(f"{ts} is not resolved after {limit_s} s")

    def _client(self, location: str = "") -> fl.FlightClient:
        return fl.FlightClient(location or f"grpc://{self._cluster.capture.endpoints['flight']}")
