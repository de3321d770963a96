"""What a coordinator bench runs against: our own coordinator with a real etcd,
or a peer that already runs.

Our own is started with the engine `--rpc-engine` names; run both, alternately, to compare them.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

import grpc
from kvproto import metapb_pb2, pdpb_pb2, pdpb_pb2_grpc

from server.rpc.config import Engine, chosen
from tests.integration.coordinator.processes import etcd_members
from tests.integration.store.daemons import start

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Target:
    """A PD: where it listens and which processes are its cost, by name."""

    address: str
    pids: dict[str, int] = field(default_factory=dict)
    cluster_id: int = 0

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds used so far, for each process."""
        return {name: _cpu_s(pid) for name, pid in self.pids.items()}

    def rss_mb(self) -> float:
        """Resident memory of all of them."""
        return sum(_rss_kb(pid) for pid in self.pids.values()) / 1024

    @property
    def header(self) -> pdpb_pb2.RequestHeader:
        return pdpb_pb2.RequestHeader(cluster_id=self.cluster_id)

    @contextmanager
    def stub(self) -> Iterator[pdpb_pb2_grpc.PDStub]:
        with grpc.insecure_channel(self.address) as channel:
            yield pdpb_pb2_grpc.PDStub(channel)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose a target."""
    parser.add_argument("--addr", default="", help="of a PD that runs already")
    parser.add_argument("--pid", type=int, default=0, help="of its process, for CPU figures")
    parser.add_argument("--metadata", choices=("etcd", "leveldb"), default="etcd")
    parser.add_argument(
        "--rpc-engine",
        choices=[engine.value for engine in Engine],
        default=chosen(Engine.NATIVE).value,
    )


def server_of(arguments: argparse.Namespace) -> str:
    """What is measured, for the JSON line: `peer`, or the engine of our own."""
    return "peer" if arguments.addr else str(arguments.rpc_engine)


@contextmanager
def target(arguments: argparse.Namespace) -> Iterator[Target]:
    """The peer at `--addr`, or a coordinator of our own over `--metadata`."""
    with ExitStack() as stack:
        address = arguments.addr
        found = Target(address, {"server": arguments.pid}) if address else _own(stack, arguments)
        with found.stub() as stub:
            found.cluster_id = stub.GetMembers(pdpb_pb2.GetMembersRequest()).header.cluster_id
            _wait_for_leader(stub, found.header)
            _bootstrap(stub, found.header)
        yield found


def _own(stack: ExitStack, arguments: argparse.Namespace) -> Target:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    pids: dict[str, int] = {}
    url = f"leveldb:{directory / 'meta'}"
    if arguments.metadata == "etcd":
        (etcd,) = stack.enter_context(etcd_members(directory, 1))
        pids["etcd"] = etcd.pid
        url = f"etcd://{etcd.address}"
    daemon = start(
        "coordinator",
        "--addr",
        "127.0.0.1:0",
        "--metadata",
        url,
        "--rpc-engine",
        arguments.rpc_engine,
    )
    stack.callback(daemon.kill)
    return Target(daemon.addr, {"server": daemon.process.pid, **pids})


def _wait_for_leader(stub: pdpb_pb2_grpc.PDStub, header: pdpb_pb2.RequestHeader) -> None:
    deadline = monotonic() + 20
    while True:
        try:
            stub.IsBootstrapped(pdpb_pb2.IsBootstrappedRequest(header=header))
        except grpc.RpcError:
            if monotonic() > deadline:
                raise
            sleep(0.05)
        else:
            return


def _bootstrap(stub: pdpb_pb2_grpc.PDStub, header: pdpb_pb2.RequestHeader) -> None:
    if stub.IsBootstrapped(pdpb_pb2.IsBootstrappedRequest(header=header)).bootstrapped:
        return
    peer = metapb_pb2.Peer(id=3, store_id=1)
    region = metapb_pb2.Region(
        id=2, region_epoch=metapb_pb2.RegionEpoch(conf_ver=1, version=1), peers=[peer]
    )
    store = metapb_pb2.Store(id=1, address="127.0.0.1:1", version="8.5.0")
    stub.Bootstrap(pdpb_pb2.BootstrapRequest(header=header, store=store, region=region))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _rss_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0
