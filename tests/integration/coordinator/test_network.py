"""A leader that is cut off from etcd, in a network of its own: it stops by its clock,
and somebody else goes on.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.coordinator.clusters import Cluster, in_thread, members_of
from tests.integration.coordinator.load import SEED, load_on
from tests.integration.coordinator.namespaces import Namespace, namespace, run
from tests.integration.coordinator.processes import Coordinator, Etcd
from tests.ports import free_ports

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@dataclass
class Room:
    """A network of its own with two wires: one to clients, one to etcd, which can be cut."""

    space: Namespace
    address: str
    etcd_host: str
    etcd_wire: str

    def cut(self) -> None:
        run("ip", "link", "set", self.etcd_wire, "down")

    def mend(self) -> None:
        run("ip", "link", "set", self.etcd_wire, "up")


async def test_a_leader_cut_off_from_etcd_stops_at_its_deadline_and_follows_when_mended(
    tmp_path: Path,
) -> None:
    with rooms(3) as homes, three(tmp_path, homes) as cluster:
        leader = await in_thread(cluster.leader)
        room = homes[cluster.coordinators.index(leader)]
        async with load_on(cluster.addresses, SEED) as load:
            room.cut()
            await load.goes_on()
            assert (
                members_of(leader.address).leader == ""
            )  # it answers clients: it knows that it does not know
            room.mend()
            await in_thread(wait_until_it_follows, cluster, leader)
            await load.goes_on()
        assert leader.running


def wait_until_it_follows(cluster: Cluster, deposed: Coordinator) -> None:
    deadline = time.monotonic() + 60
    while members_of(deposed.address).leader != cluster.leader(but=deposed).address:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def rooms(count: int) -> Iterator[list[Room]]:
    """Rooms with addresses and wires that no other test has."""
    net = f"10.{193 + os.getpid() % 50}.{os.getpid() % 250}"
    tag = f"tm{os.getpid() % 100_000}"
    with ExitStack() as stack:
        made: list[Room] = []
        for number in range(count):
            at = 8 * number
            space = stack.enter_context(namespace("net"))
            space.run("ip", "link", "set", "lo", "up")
            wire(space, f"{tag}a{number}", f"{net}.{at + 1}", "clients", f"{net}.{at + 2}")
            wire(space, f"{tag}b{number}", f"{net}.{at + 5}", "etcd", f"{net}.{at + 6}")
            made.append(Room(space, f"{net}.{at + 2}", f"{net}.{at + 5}", f"{tag}b{number}"))
        yield made


def wire(space: Namespace, outside: str, outside_ip: str, inside: str, inside_ip: str) -> None:
    try:
        run(
            "ip",
            "link",
            "add",
            outside,
            "type",
            "veth",
            "peer",
            "name",
            inside,
            "netns",
            str(space.pid),
        )
    except subprocess.CalledProcessError as err:
        pytest.skip(f"cannot make wires here: {err.stderr!r}")
    run("ip", "addr", "add", f"{outside_ip}/30", "dev", outside)
    run("ip", "link", "set", outside, "up")
    space.run("ip", "addr", "add", f"{inside_ip}/30", "dev", inside)
    space.run("ip", "link", "set", inside, "up")


@contextmanager
def three(directory: Path, homes: list[Room]) -> Iterator[Cluster]:
    """A coordinator in each room, and one etcd outside."""
    port, peer_port = free_ports(2)
    etcd = Etcd("etcd", (port, peer_port), {"etcd": peer_port}, directory, host="0.0.0.0")
    coordinators = [
        Coordinator(
            f"{room.address}:2379",
            f"etcd://{room.etcd_host}:{port}",
            directory / f"{number}.log",
            inside=room.space.inside,
        )
        for number, room in enumerate(homes)
    ]
    cluster = Cluster([etcd], coordinators)
    try:
        etcd.start()
        cluster.heal()
        yield cluster
    finally:
        for daemon in (*coordinators, etcd):
            daemon.kill()
