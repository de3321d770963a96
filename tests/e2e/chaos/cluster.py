"""A whole cluster for one run: etcd, coordinators, captures, and the source and the lake jobs that
were asked for. Ports are the usual ones, as each node has an address of its own.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from kvproto import pdpb_pb2 as pdpb
from kvproto.pdpb_pb2_grpc import PDStub
from tidemarkpb.v1.changefeed_pb2 import CHANGEFEED_STATE_FAILED, ListChangefeedsRequest
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from storage.codec import encode_i64
from tests.e2e.chaos.clocks import Clock, can_jump
from tests.e2e.chaos.lakes import MEMORY
from tests.e2e.chaos.nodes import Node, Supervisor
from tests.e2e.chaos.rooms import Rooms
from tests.integration.coordinator.clusters import members_of
from tests.integration.coordinator.processes import ENVIRONMENT
from tests.mariadb import MariaDb

_READY_S, _ASK_S = 300.0, 2.0
_SIZES_MIB = {"etcd": 400, "capture": 48, "store": 200, "job": 400}
_WEIGHTS = {"capture": 2, "mariadb": 3, "store": 3}
"""Daemons through which rows go have faults more often."""
_USERS = (
    "SET sql_log_bin = 0;\n"
    "CREATE USER IF NOT EXISTS root@'%';\n"
    "GRANT ALL ON *.* TO root@'%' WITH GRANT OPTION;\n"
)
"""Nodes are no `localhost` of each other."""
_TIDEMARK = (sys.executable, "-m", "server.cli.main")


@dataclass(frozen=True)
class Plan:
    """What a run has."""

    source: str
    targets: tuple[str, ...]
    faults: tuple[str, ...]
    members: int = 3
    """Of etcd; as many coordinators."""
    captures: int = 3


@dataclass
class World:
    """All that runs."""

    plan: Plan
    directory: Path
    rooms: Rooms
    supervisor: Supervisor = field(default_factory=Supervisor)
    server: MariaDb | None = None
    failed: dict[str, str] = field(default_factory=dict)
    """Changefeeds that have given up, as nothing here should make them."""

    @property
    def nodes(self) -> dict[str, Node]:
        """By name, those that can have faults."""
        return self.supervisor.nodes

    def victims(self) -> dict[str, list[str]]:
        """Which nodes may have which fault, of the kinds that were asked for and can be made."""
        names = [
            name
            for name in sorted(self.nodes)
            for _ in range(_WEIGHTS.get(self.nodes[name].kind, 1))
        ]
        able = {
            "kill": names,
            "outage": ["all", "capture", "coordinator", "etcd"],
            "stop": names,
            "net": names if self.rooms.isolated else [],
            "disk": [name for name in sorted({*names}) if self.nodes[name].disk],
            "clock": [name for name in names if self.nodes[name].clock],
        }
        return {kind: able[kind] for kind in self.plan.faults if able[kind]}

    def named(self, name: str) -> list[Node]:
        """The node of that name, or all of that kind."""
        return [each for each in self.nodes.values() if name in (each.name, each.kind, "all")]

    def lake(self, target: str) -> Path:
        """Where the lake of a target is."""
        return self.directory / "lakes" / target

    def addresses(self, kind: str, port: int, scheme: str = "") -> str:
        """Of all nodes of a kind, by commas."""
        nodes = [node for name, node in self.nodes.items() if name.startswith(kind)]
        return ",".join(f"{scheme}{node.room.address}:{port}" for node in nodes)

    def call(self, method: str, request: Any, stub: Any = ChangefeedServiceStub) -> Any:
        """A call of the changefeed API, to whichever capture answers."""
        deadline = time.monotonic() + _READY_S
        while True:
            for address in self.addresses("capture", 8300).split(","):
                options = [("grpc.use_local_subchannel_pool", 1)]
                with grpc.insecure_channel(address, options=options) as channel:
                    try:
                        return getattr(stub(channel), method)(request, timeout=20)
                    except grpc.RpcError as err:
                        if err.code() == grpc.StatusCode.INVALID_ARGUMENT:
                            raise
                        last = err
            if time.monotonic() > deadline:
                raise last
            time.sleep(0.5)

    def checkpoints(self) -> dict[str, list[tuple[str, int]]]:
        """How far the captures and the coordinators that answer at once say that each changefeed
        is acknowledged: no lake may be behind any of it.
        """
        said: dict[str, list[tuple[str, int]]] = {}
        for address in self.addresses("capture", 8300).split(","):
            answer = _ask(
                address, ChangefeedServiceStub, "ListChangefeeds", ListChangefeedsRequest()
            )
            for each in answer.changefeeds if answer else ():
                if each.state == CHANGEFEED_STATE_FAILED:
                    self.failed[each.id] = f"{each.error.code} {each.error.message}"
                said.setdefault(each.id, []).append(
                    (f"checkpoint of {address}", each.checkpoint_ts)
                )
        if self.plan.source == "store":
            for address in self.addresses("coordinator", 2379).split(","):
                request = pdpb.GetGCSafePointRequest()
                answer = _ask(address, PDStub, "GetGCSafePoint", request)
                for places in said.values() if answer and answer.safe_point else ():
                    places.append((f"GC safe point of {address}", answer.safe_point))
        return said

    # Nodes

    def add(self, name: str, directory: Path | None = None, *, jumps: bool = True) -> Node:
        """A node that is not started yet; with a `directory` that is its disk."""
        clock = None
        if jumps and "clock" in self.plan.faults and can_jump():
            clock = Clock(self.directory, name)
        node = Node(name, self.rooms.add(), self.directory / f"{name}.log", clock)
        size = _SIZES_MIB.get(node.kind)
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            if size and "disk" in self.plan.faults and self.rooms.isolated:
                node.disk = self.rooms.add_disk(directory, size)
        return self.supervisor.add(node)

    def add_daemon(self, kind: str, number: str, *flags: str, port: int, **more: Any) -> Node:
        """One daemon of Tidemark."""
        node = self.add(f"{kind}{number}", **more)
        address = node.room.address
        listen = ["--addr", f"{address}:{port}", "--http-addr", f"{address}:{port + 1000}"]
        node.set_command([*_TIDEMARK, kind, *listen, *flags])
        return node


@contextmanager
def running(plan: Plan, directory: Path) -> Iterator[World]:
    """Everything but changefeeds and their jobs, started."""
    with ExitStack() as places, ExitStack() as processes:
        world = World(plan, directory, Rooms(places))
        processes.callback(world.supervisor.end)
        _add_etcd(world)
        _add_daemons(world)
        if plan.source == "mariadb":
            _add_mariadb(world)
        else:
            _add_store(world)
        for node in world.nodes.values():
            node.launch()
        _wait("a leader", lambda: _has_leader(world))
        world.supervisor.begin()
        if world.server is not None:
            _wait("MariaDB", world.server.execute, "SELECT 1")
        else:
            _wait("GC", lambda: _shorten_gc(world))
        yield world


def _add_etcd(world: World) -> None:
    names = [f"etcd{number}" for number in range(1, world.plan.members + 1)]
    nodes = [world.add(name, world.directory / name, jumps=False) for name in names]
    cluster = ",".join(f"{node.name}=http://{node.room.address}:2380" for node in nodes)
    for node in nodes:
        client, peer = (f"http://{node.room.address}:{port}" for port in (2379, 2380))
        flags = {
            "name": node.name,
            "data-dir": world.directory / node.name / "data",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": cluster,
        }
        node.set_command(["etcd", *(f"--{key}={value}" for key, value in flags.items())])


def _add_daemons(world: World) -> None:
    metadata = f"etcd://{world.addresses('etcd', 2379)}"
    for number in range(1, world.plan.members + 1):
        world.add_daemon("coordinator", str(number), "--metadata", metadata, port=2379)
    coordinators = ("--coordinator", world.addresses("coordinator", 2379))
    for number in range(1, world.plan.captures + 1):
        data = world.directory / f"capture{number}"
        node = world.add_daemon("capture", str(number), *coordinators, port=8300, directory=data)
        node.set_command(["--data-dir", str(data), "--flight-addr", f"{node.room.address}:8301"])


def _add_mariadb(world: World) -> None:
    place = world.directory / "mariadb"
    # No small disk: a MariaDB that is killed while it has no room leaves a log that ends in the
    # middle of an event, and then refuses its own replicas.
    place.mkdir()
    node = world.add("mariadb")
    users = world.directory / "users.sql"
    users.write_text(_USERS)
    flags = ("--max-connections=200", f"--init-file={users}")
    server = MariaDb(place, flags, port=3306, host=node.room.address)
    shutil.copytree(server.prepared_datadir(), place / "data")
    node.set_command(server.arguments())
    world.server = server


def _add_store(world: World) -> None:
    coordinators = ("--coordinator", world.addresses("coordinator", 2379))
    data = world.directory / "store"
    keys = ",".join((b"t" + encode_i64(number)).hex() for number in range(101, 108))
    flags = ("--data-dir", str(data / "data"), "--split-keys", keys, "--gc-poll-interval", "2")
    world.add_daemon("store", "", *coordinators, *flags, port=20160, directory=data)
    often = ("--tick-seconds", "1", "--lease-seconds", "4", "--min-gc-time", "1s")
    world.add_daemon("gc-worker", "", *coordinators, *often, port=8302)


def _shorten_gc(world: World) -> bool:
    """Let old versions be collected at once; only those who read hold it back."""
    variables = ("tikv_gc_life_time=2s", "tikv_gc_run_interval=1s")
    coordinators = world.addresses("coordinator", 2379)
    command = [*_TIDEMARK, "cli", "--pd", coordinators, "gc", "config", "set", *variables]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return True


def add_job(world: World, target: str, start_ts: int) -> None:
    """The lake job of a target's changefeed, started."""
    lake = world.lake(target)
    node = world.add(f"job-{target}", lake)
    endpoints = world.addresses("capture", 8301, "grpc://")
    if target == MEMORY:
        job = (sys.executable, "-m", "tests.e2e.chaos.memory_job")
        node.set_command([*job, endpoints, target, str(start_ts), str(lake)])
    else:
        scratch = world.directory / f"checkpoints-{target}"
        flags: Sequence[str] = (
            *("spark", "run", "--changefeed", target, "--target", sink_uri(world, target)),
            *("--endpoint", endpoints),
            *("--checkpoint-dir", str(scratch), "--http-addr", f"{node.room.address}:9400"),
            *("--trigger", "0 seconds", "--compact-every", "16"),
        )
        node.set_command([*_TIDEMARK, *flags])
    node.launch()


def sink_uri(world: World, target: str) -> str:
    """Of a target's lake."""
    return "flight://" if target == MEMORY else f"{target}://{world.lake(target)}"


def _ask(address: str, stub: Any, method: str, request: Any) -> Any:
    """The answer; None where none comes soon."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            return getattr(stub(channel), method)(request, timeout=_ASK_S)
        except grpc.RpcError:
            return None


def _has_leader(world: World) -> bool:
    return any(
        members_of(address).leads for address in world.addresses("coordinator", 2379).split(",")
    )


def _wait(what: str, probe: Callable[..., Any], *arguments: Any) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            if probe(*arguments):
                return
            error = None
        except Exception as err:  # noqa: BLE001 - it is not there yet
            error = err
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} is not there after {_READY_S} s: {error}")
        time.sleep(0.2)
